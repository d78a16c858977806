"""Optimizers over sharded parameters, and the end of a training step."""

from .engine.optim.adam import AdamOptimizer
from .engine.optim.manager import OptimManager
from .features.offload.optimizer import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
