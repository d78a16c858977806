"""Optimizers over slices, and what ends a step."""

from . import checks as checks  # its hooks watch every optimizer over slices
from .adam import AdamOptimizer
from .manager import OptimManager
from .offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
