"""`auto_wrap(offload_activations=True)`: the inputs of recomputed blocks are kept in host memory until backward.

With recomputation, only the inputs of the blocks (transformer layers) stay on the GPU from forward to backward: one
tensor of shape (tokens, hidden size) for each block. For long sequences, these make up most of the memory that a step
allocates. With this option they are copied to page-locked host memory while the GPU computes, and copied back one block
before backward needs them. Only the last block's input stays on the GPU. The file `host_inputs` implements the copies.
On the CPU the option changes nothing, because activations are in host memory anyway.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from ...engine.blocks.recompute import InputStore
from ...engine.comm.streams import has_own_memory
from ...engine.runtime.world import World
from ...engine.wrap.extension import Extension, WrapPlan
from ..options import Options
from .host_inputs import HostInputs

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


def input_store(world: World) -> InputStore | None:
    """Return an object that keeps the inputs of one model's blocks (transformer layers) in host memory until backward.

    Returns None on the CPU, where activations are in host memory anyway.

    world: the ranks that train the model. Only the device of this rank is used.
    """
    if has_own_memory(world.device):
        return HostInputs(world.device)
    _log_once("offload_activations=True changes nothing on the CPU, because activations are already in host memory")


class OffloadActivations(Extension):
    """The part of `auto_wrap` that applies the argument `offload_activations`.

    With `offload_activations=True`, the inputs of recomputed blocks (transformer layers) are kept in host memory until
    backward.

    Args:
        options: the arguments that were passed to `auto_wrap`. Only `offload_activations` is used.
    """

    def __init__(self, options: Options) -> None:
        self._on = options.offload_activations

    def connect(self, plan: WrapPlan) -> None:
        if not self._on or plan.late:
            return
        store = input_store(plan.world)
        blocks: Any = plan.layers
        for block in blocks:
            block._bmt.inputs = store
