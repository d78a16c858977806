"""Optimizers over slices, and the end of a step.

adam, offload: the optimizers. manager: OptimManager, which drives them, their schedules and the loss scale. A *run*
(runs) is a range of adjacent slices, updated in one launch; state is what AdamW keeps of it; slabs and device_update
hold and move that state where it is in host memory. norm: the gradients' norm over all ranks. delta: what a step moved.
checkpoint: state in files, as slices or whole. checks: which optimizers may step over slices.

Nothing here knows modules, blocks or Hugging Face.
"""

from . import checks as checks  # they watch every optimizer over slices
from .adam import AdamOptimizer
from .manager import OptimManager
from .offload import AdamOffloadOptimizer

__all__ = ["AdamOffloadOptimizer", "AdamOptimizer", "OptimManager"]
