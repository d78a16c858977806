"""Run a wrapped model as in plain torch: with full weights, and with the original classes of its modules."""

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
    """Return {local parameter: full copy} of the sharded parameters of `model`. Collective: every rank must call it.

    The copies are assembled from the ranks' local parameters, and not by the all-gathers of a forward, because
    `check_parity` tests these all-gathers.
    """
    full_params: Wholes = {}
    for sharded in model.parameters():
        if isinstance(sharded, DistributedParameter):
            full: Any = torch.nn.Parameter(sharded.placement.gather(sharded.part), sharded.requires_grad)
            full.is_unsharded = True  # a forward refuses parameters that are neither sharded nor marked in this way
            full_params[sharded] = full
    return full_params


@contextmanager
def shown_plain(model: torch.nn.Module, full_params: Wholes) -> Iterator[None]:
    """Return a context manager that makes `model` run its original code with `full_params` as its weights.

    `check_parity` uses it to compute the results of plain torch, and compares the sharded model's results with them. In
    the context, the model performs no all-gathers, reductions or recomputations, and compiled blocks run without
    compilation. The context is also used when Trainer saves full weights, so that `save_pretrained` finds full
    parameters in all modules.

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
