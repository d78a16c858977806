"""Select the weights of float8 layers that are all-gathered in float8, and switch their flat buffers to float8.

A flat buffer contains the weights that are sharded and all-gathered together, usually those of one block. After the
ranks have decided which layers keep computing in float8 (`Calibration`), the all-gathers of a buffer are switched to
float8 if all layers with weights in the buffer keep computing in float8 and were called on a rank, and the model has no
adapters. From then on, each rank also stores its shard rounded to float8, which takes one additional byte per element.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.runtime.world import World
from ...engine.sharding.parameter import DistributedParameter
from ...engine.sharding.slots import find_places
from ...engine.wrap.find import adapter_parameters
from .linear import Float8State
from .storage import Float8Requantizer, Float8Storage

_log = logging.getLogger("hf_bmtrain")
WITH_ADAPTERS = "belongs to a model with adapters"
"""The `reason` of a Float8State if adapters may read the weight in its own dtype."""


def choose_gathered(model: torch.nn.Module, layers: Iterable[torch.nn.Module], world: World) -> set[int]:
    """Return the ids of those weights of the float8 `layers` that may be all-gathered in float8.

    A weight that several modules of the model share is left out. The set is empty if a single rank stores the whole
    model. It is also empty for a model with adapters: some adapters (DoRA) read the weights of their base layers, but a
    weight that was all-gathered in float8 cannot be read in its own dtype.

    Args:
        model: the model that is about to be sharded.
        layers: its layers that will compute in float8.
        world: the ranks over which the model will be sharded.
    """
    if world.shard_group.size == 1 or adapter_parameters(model):
        return set()
    places = Counter(id(parameter) for _, _, parameter in find_places(model.modules()))
    weights: list[Any] = [layer.weight for layer in layers]
    return {id(weight) for weight in weights if places[id(weight)] == 1}


def link_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Set `storage` and `index` in each layer's `float8_state`, by which the layer finds its all-gathered weight.

    `auto_wrap` calls this once, after the layers were sharded: the storages do not exist earlier.

    `storage` is the Float8Storage that contains the layer's sharded weight, and `index` the weight's index in it. A
    layer whose weight is never all-gathered in float8 has no Float8Storage, and is skipped.

    Args:
        layers: the float8 layers.
    """
    for layer in layers:
        sharded: Any = layer._parameters.get("weight")
        storage = sharded.buffer.storage if isinstance(sharded, DistributedParameter) else None
        if isinstance(storage, Float8Storage):
            state: Any = layer.float8_state
            state.storage, state.index = storage, sharded.index


def check_adapted_float8(model: torch.nn.Module) -> None:
    """Raise ValueError if adapters were added to `model` while a backward still needs weights all-gathered in float8.

    Adapters need the weights all-gathered in their own dtype (`gather_in_own_dtype`). All-gathers of a block cannot be
    switched between the block's forward and its backward.

    Args:
        model: the model, already wrapped. Nothing is checked if it has no adapters.
    """
    if not adapter_parameters(model):
        return
    blocks = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
    waiting = [block for block in blocks if block._bmt.pending]
    storages = [buffer.storage for block in waiting for buffer in block._bmt.buffers]
    if any(isinstance(storage, Float8Storage) and storage.in_float8 for storage in storages):
        raise ValueError(
            f"auto_wrap: adapters were added to a model with float8, and forwards of {len(waiting)} blocks are still "
            "waiting for their backward, which needs the weights as they were all-gathered, in float8. With adapters, "
            "weights are all-gathered in their own dtype. Run the backward, and then call auto_wrap for the adapters "
            "again. If the loss is gone, run another forward and its backward instead."
        )


def gather_in_own_dtype(states: Iterable[Float8State]) -> None:
    """All-gather the weights of float8 layers in their own dtype again, because adapters were added to their model.

    Adapters may read the weights of their base layers (see `choose_gathered`). The layers still compute in float8.
    Collective: every rank must call it, while no forward is waiting for its backward.

    Args:
        states: the states of all float8 layers of the model, in the same order on every rank.
    """
    for state in states:
        if state.storage is not None and state.storage.in_float8:
            state.storage.switch_back()
        if state.guard is None:
            state.reason = state.reason or WITH_ADAPTERS


def gather_float8(world: World, states: Mapping[str, Float8State]) -> None:
    """All-gather the weights of float8 layers in float8 from now on, and log how many flat buffers this affects.

    Called once it is known which layers keep float8: after their rounding noise was measured, when a checkpoint's
    decision is loaded or, on the meta device, when the model is wrapped. Collective: every rank must call it.

    A flat buffer contains the weights that are all-gathered together, usually those of one block. A buffer is still
    all-gathered in its own dtype if any of its layers has `reason` set in its Float8State, for example because the
    layer has stopped using float8.

    Args:
        world: the ranks over which the layers are sharded.
        states: {path of a layer in the model: its Float8State} for all float8 layers, in the same order on every rank.

    Raises:
        RuntimeError: after an all-gather in float8, a weight is not the full weight rounded to float8.
        RuntimeError: after an all-gather in float8, a norm or bias in the same flat buffer as a weight is wrong.
    """
    layers: dict[Float8Storage, list[str]] = {}
    for path, state in states.items():
        if state.storage is not None:
            layers.setdefault(state.storage, []).append(path)
    left: Counter[str] = Counter()
    requantizer = Float8Requantizer(world.shards.communicator)
    for storage, paths in layers.items():
        found = [f"{path.rpartition('.')[2]} {states[path].reason}" for path in paths if states[path].reason]
        if found:
            left[found[0]] += 1
        else:
            storage.switch(requantizer, [states[path] for path in paths])
    if world.rank == 0 and layers:
        count = sum(left.values())
        reasons = f": {', '.join(f'{number} because {reason}' for reason, number in left.items())}" if left else ""
        _log.info(
            "float8: %d groups of weights (usually one per block) are all-gathered in float8, %d in their own dtype%s",
            len(layers) - count, count, reasons,
        )  # fmt: skip
