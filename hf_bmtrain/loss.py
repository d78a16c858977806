"""Fused cross-entropy losses. `linear_cross_entropy` takes hidden states, and never stores all logits at once."""

from .features.loss.fused import FusedCrossEntropy, cross_entropy
from .features.loss.linear import linear_cross_entropy

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]
