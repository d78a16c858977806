"""Run a wrapped model as plain torch would: with full weights in its modules, which get their original classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.blocks.sharded_module import own_class
from ...engine.sharding.parameter import DistributedParameter
from ...engine.sharding.slots import find_slots

Wholes = dict[DistributedParameter, torch.nn.Parameter]
"""{local parameter: full parameter}."""


@torch.no_grad()
def gather_full_params(model: torch.nn.Module) -> Wholes:
    """Return a full copy of each sharded parameter of `model`. Collective: every rank must call it.

    The copies are assembled from the local parameters, independently of a forward's all-gathers, which are under test.
    """
    full_params: Wholes = {}
    for sharded in model.parameters():
        if isinstance(sharded, DistributedParameter):
            full: Any = torch.nn.Parameter(sharded.placement.gather(sharded.part), sharded.requires_grad)
            full.is_unsharded = True  # otherwise a forward would refuse this parameter, which is not sharded
            full_params[sharded] = full
    return full_params


@contextmanager
def shown_plain(model: torch.nn.Module, full_params: Wholes) -> Iterator[None]:
    """Under `with`, `model` runs its own code on `full_params`, without all-gathers, reductions or recomputation.

    Compiled blocks run their forward without compilation.

    Args:
        model: the wrapped model.
        full_params: {local parameter: full parameter}, for all sharded parameters of the model.
    """
    slots = find_slots(model.modules())
    extended = [(module, type(module)) for module in model.modules() if own_class(module) is not type(module)]
    replaced: list[dict[str, Any]] = []
    try:
        for slot in slots:
            slot.show(full_params[slot.sharded])
        for module, _ in extended:
            state = module._bmt if isinstance(module, CheckpointBlock) else None
            own = state and (state.eager_forward if state.compiled else state.own_forward)
            module.__class__ = own_class(module)
            if own is not None:
                vars(module)["forward"] = own
                replaced.append(vars(module))
        yield
    finally:
        for attributes in replaced:
            del attributes["forward"]
        for module, cls in extended:
            module.__class__ = cls
        for slot in slots:
            slot.show(slot.sharded)
