"""Cross-entropy losses: fused, and without storing the logits."""
