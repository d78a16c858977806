"""Cross-entropy losses: with fused kernels, and computed in chunks without storing the logits."""
