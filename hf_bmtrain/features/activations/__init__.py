"""auto_wrap(offload_activations=True): the inputs of recomputed blocks are kept in host memory until backward.

With recomputation, the activations that stay on the GPU from forward to backward are the inputs of the blocks: one
tensor of tokens times hidden size for each block. For long rows they are most of what a step allocates. They are copied
to page-locked host memory behind the computation, and back one block ahead of the backward.

`host_inputs` copies them. A CPU has no other memory to copy to, so that there the option changes nothing.
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
    """Return a store of block inputs for one model of `world`; None on the CPU, where there is nothing to gain."""
    if has_own_memory(world.device):
        return HostInputs(world.device)
    _log_once("offload_activations=True changes nothing on the CPU, whose activations are in host memory already")


class OffloadActivations(Extension):
    """The extension that applies `auto_wrap(offload_activations=)`."""

    def __init__(self, options: Options) -> None:
        self._on = options.offload_activations

    def connect(self, plan: WrapPlan) -> None:
        if not self._on or plan.late:
            return
        store = input_store(plan.world)
        blocks: Any = plan.layers
        for block in blocks:
            block._bmt.inputs = store
