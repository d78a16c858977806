"""Cross-entropy losses of logits, computed by fused kernels, or of hidden states, without storing the full logits."""

from .features.loss.fused import FusedCrossEntropy, cross_entropy
from .features.loss.linear import linear_cross_entropy

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]
