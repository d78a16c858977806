"""Optimizers over slices, and the end of a training step.

It knows slices, buffers, gradients and communicators, and nothing of modules, blocks or Hugging Face.

* *run*: adjacent slices of one shard, updated in one launch, or one ordinary parameter.
* *state*: the masters, moments and step count of a run. *master*: the float32 value of a half-precision weight.
* *slab*: the state of several runs in one piece of host memory. *chunk*: a part of a slab, copied at once.
* *early update*: the update of a block's run during the backward.
* *sharded*, *gathered* state: this rank's slices of the state, or whole tensors for any number of ranks.
"""

from . import checks as checks  # registers the checks of every optimizer over slices
from .adam import AdamOptimizer
from .manager import OptimManager
from .offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
