"""Optimizers over slices, and the end of a training step.

It knows slices, buffers, gradients and communicators, and nothing of modules, blocks or Hugging Face.
"""

from . import checks as checks  # registers the checks of every optimizer over slices
from .adam import AdamOptimizer
from .manager import OptimManager
from .offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
