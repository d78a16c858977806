"""Cross-entropy losses: of logits, with fused kernels, and of hidden states, in chunks without storing the logits."""
