"""Fused cross-entropy losses of logits or, in `linear_cross_entropy`, of hidden states without storing all logits."""

from .features.loss.fused import FusedCrossEntropy, cross_entropy
from .features.loss.linear import linear_cross_entropy

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]
