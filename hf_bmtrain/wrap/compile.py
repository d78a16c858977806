"""torch.compile for sharded blocks, once per layer class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..blocks.block import CheckpointBlock


def compile_blocks(blocks: Iterable[CheckpointBlock], backend: str) -> None:
    """Compile the blocks' own forwards with torch.compile. Gathers and reductions stay outside the graphs.

    The forward of the class is compiled, not the bound one of each layer: torch takes the parameters as inputs, so
    layers that differ in nothing else share a graph. A forward that was set on an instance is compiled separately.
    """
    for block in blocks:
        state = block._bmt
        state.compiled = True
        if state.own_forward is not None:
            state.own_forward = torch.compile(state.own_forward, backend=backend)
        else:
            _, layer_class = type(block).__bases__
            state.own_forward = functools.partial(_compiled_forward(layer_class, backend), block)


@functools.cache
def _compiled_forward(layer_class: Any, backend: str) -> Callable:
    return torch.compile(layer_class.forward, backend=backend)
