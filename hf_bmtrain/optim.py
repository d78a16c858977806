"""Optimizers for sharded parameters, and OptimManager, which scales the loss, clips gradients and steps optimizers."""

from .engine.optim.adam import AdamOptimizer
from .engine.optim.manager import OptimManager
from .features.muon.optimizer import MuonOptimizer
from .features.offload.optimizer import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "MuonOptimizer", "OptimManager"]
