"""Cross-entropy losses: from logits in fused kernels, or from hidden states without storing the logits."""

from .features.loss.fused import FusedCrossEntropy, cross_entropy
from .features.loss.linear import linear_cross_entropy

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]
