"""Uneven models: in one step, ranks may enter different blocks of them, or read different root parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..blocks.block import CheckpointBlock
from ..blocks.block_state import BlockState
from ..blocks.distributed_module import DistributedModule
from ..sharding.slots import buffers_of
from .extension import WrapPlan
from .find import Chain
from .patches import drops_layers

_log = logging.getLogger("hf_bmtrain")


def negotiate_if_uneven(plan: WrapPlan, chains: Sequence[Chain]) -> None:
    """Make the ranks agree on each collective of the model, if it may be uneven and there are several ranks.

    chains: the blocks of a model that is wrapped for the first time, as chains in execution order.
    """
    reason = _why_uneven(plan, chains)
    if reason is None or plan.world.size == 1:
        return
    _register(plan)
    _log.info(
        "rank %d: ranks may enter different parts of %s, because %s: they agree before each collective of its forward "
        "and backward",
        plan.world.rank, type(plan.model).__name__, reason,
    )  # fmt: skip


def follow_additions(plan: WrapPlan) -> None:
    """Add what was added to an uneven model after it was wrapped."""
    if any(getattr(module, "_uneven", False) for module in plan.root):
        _register(plan)


def _register(plan: WrapPlan) -> None:
    """Mark the model, and give its buffers and blocks to the negotiation."""
    for module in plan.root:
        if isinstance(module, DistributedModule):
            module.__dict__["_uneven"] = True
    lists: dict[str, list[BlockState]] = {}
    for name, module in plan.model.named_modules():
        if isinstance(module, CheckpointBlock):
            lists.setdefault(name.rpartition(".")[0], []).append(module._bmt)
    longest = max(lists.values(), key=_numel, default=[])
    states = [state for held in lists.values() for state in held]
    plan.world.schedule.negotiation.register(buffers_of(plan.model), states, set(longest))


def _numel(states: Sequence[BlockState]) -> int:
    return sum(buffer.layout.numel for state in states for buffer in state.buffers)


def _why_uneven(plan: WrapPlan, chains: Sequence[Chain]) -> str | None:
    """Return why ranks may enter different parts of the model, in words; None if they are expected not to."""
    dropping = [type(module).__name__ for module in plan.root if drops_layers(module)]
    if dropping:
        return f"{dropping[0]} drops layers at random"
    # PEFT gives a model without a configuration a dict.
    found = (each for module in plan.root if not isinstance(each := getattr(module, "config", None), dict))
    configs = dict.fromkeys(type(config).__name__ for config in found if config is not None)
    if len(configs) > 1:
        return f"its modules have several configurations ({', '.join(configs)})"
    if len(chains) > 1 and not configs:
        return f"it has {len(chains)} lists of blocks"
    for module in plan.root:
        if isinstance(module, torch.nn.ModuleDict):
            held = [name for name, each in module.items() if any(True for _ in each.parameters())]
            if len(held) > 1:
                return f"it has an nn.ModuleDict outside the blocks ({', '.join(held[:4])})"
    return None
