"""Cross-entropy losses with fused kernels: of logits, or of hidden states without storing their logits."""
