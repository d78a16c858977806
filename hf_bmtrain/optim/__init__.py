"""Optimizers over slices, and what ends a step."""

from .adam import AdamOptimizer
from .manager import OptimManager
from .offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
