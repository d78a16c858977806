"""Optimizers over slices, and what ends a step."""

from .adam import AdamOptimizer
from .manager import OptimManager

__all__ = ["AdamOptimizer", "OptimManager"]
