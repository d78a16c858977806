"""Detect models in which ranks may run different modules in the same step, and make the ranks agree on collectives.

For example, each rank may drop different layers at random. Before each collective, the ranks then agree on which
collective is next.
"""

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
    """Make the ranks agree on each collective before it starts, if they may run different parts of the model in a step.

    For example, each rank may drop different layers at random, or only some ranks may have an image for the image
    encoder. Without an agreement, a rank could then wait in an all-gather that other ranks never issue. To agree, each
    rank tells the others which collective it needs next. All ranks then issue the same collective.

    Called when the model is wrapped for the first time. It does nothing if there is only one rank, or if the model has
    no sign that ranks may run different parts of it. Examples of such signs are layers that are dropped at random, and
    encoders for different inputs.

    Args:
        plan: the model, and its division into blocks and other modules.
        chains: the model's lists of blocks, each in execution order.
    """
    reason = _why_uneven(plan, chains)
    if reason is None or plan.world.size == 1:
        return
    _register(plan)
    _log.info(
        "rank %d: the ranks may enter different parts of %s in the same step, because %s. Before each collective of a "
        "forward or backward, the ranks therefore agree on which collective is next.",
        plan.world.rank, type(plan.model).__name__, reason,
    )  # fmt: skip


def follow_additions(plan: WrapPlan) -> None:
    """Assign numbers to the collectives of parameters, such as adapters, that were added to a model and sharded.

    Does nothing unless `negotiate_if_uneven` found, when the model was first wrapped, that ranks may run different
    parts of the model. In such a model, the ranks agree on each collective before it starts: each rank sends the others
    the number of the collective that it needs next. So the all-gathers and reductions of the added parameters need
    numbers, too. The model's other collectives get new numbers.

    plan: the model, which was wrapped before, and its division into blocks and other modules.
    """
    if any(getattr(module, "_uneven", False) for module in plan.root):
        _register(plan)


def _register(plan: WrapPlan) -> None:
    """Mark the model of `plan` as uneven (ranks may run different parts of it), and assign numbers to its collectives.

    Later, before each collective, each rank sends the others the number of the collective that it needs next, and the
    ranks agree on one number (see `Negotiation`).
    """
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
    """Return why ranks may run different parts of the model in one step, for the log; None if nothing suggests it.

    plan: the model, and its division into blocks and other modules.
    chains: the model's lists of blocks, each in execution order.
    """
    dropping = [type(module).__name__ for module in plan.root if drops_layers(module)]
    if dropping:
        return f"{dropping[0]} drops layers at random"
    # Ignore a `config` that is a dict. PEFT adds such a dict to models without `config`, so it is no sign that parts of
    # the model have different configurations.
    found = (each for module in plan.root if not isinstance(each := getattr(module, "config", None), dict))
    configs = dict.fromkeys(type(config).__name__ for config in found if config is not None)
    if len(configs) > 1:
        return f"its modules have several configurations ({', '.join(configs)})"
    if len(chains) > 1 and not configs:
        return f"it has {len(chains)} lists of blocks"
    for module in plan.root:
        encoders = {name: each for name, each in module.named_children() if name.endswith("encoder")}
        inputs = {name: each.main_input_name for name, each in encoders.items() if hasattr(each, "main_input_name")}
        if len({*inputs.values()}) > 1:
            return f"{type(module).__name__} has encoders of different inputs ({', '.join(inputs)})"
        if isinstance(module, torch.nn.ModuleDict):
            held = [name for name, each in module.items() if any(True for _ in each.parameters())]
            if len(held) > 1:
                return f"it has an nn.ModuleDict outside the blocks ({', '.join(held[:4])})"
    return None
