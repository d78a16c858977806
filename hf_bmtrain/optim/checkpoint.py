"""The state of an optimizer over slices, as it lies on this rank or whole."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from ..runtime.world import World
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter

SlicedState = dict[ShardedBuffer, dict[int, torch.Tensor]]


def sharded_state(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """This rank's own part, copied into host memory; it fits the same rank of an equally large world."""
    state = _own_state(optimizer)
    own = {key: {name: _copy(value) for name, value in values.items()} for key, values in state["state"].items()}
    return {**state, "state": own, "rank": world.rank, "world_size": world.size}


@torch.no_grad()
def whole_state(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Every rank's parts put together, on CPU, on rank 0; elsewhere the groups alone. Collective.

    `sliced` names the tensors that are laid out like the parameters; the others are whole on every rank.
    """
    state = _own_state(optimizer)
    parameters = _by_key(optimizer, state)
    sliced = sorted({
        name for key, values in state["state"].items() for name, value in values.items()
        if _is_slice(parameters[key], value)
    })  # fmt: skip
    whole = _unsliced(parameters, state["state"], sliced, world)
    for name in sliced:
        places: SlicedState = {}
        keys: dict[tuple[ShardedBuffer, int], Any] = {}
        for key, values in state["state"].items():
            parameter = parameters[key]
            if name not in values:
                continue
            if isinstance(parameter, DistributedParameter):
                places.setdefault(parameter.buffer, {})[parameter.index] = values[name]
                keys[parameter.buffer, parameter.index] = key
            else:
                whole[key][name] = _copy(values[name])
        for buffer, pieces in places.items():
            for index, value in _gather(world, buffer, pieces).items():
                whole[keys[buffer, index]][name] = value
    return {**state, "state": whole if world.rank == 0 else {}, "sliced": sliced}


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's slices, also while an Accelerator runs, for which `state_dict` gives whole tensors."""
    gathering = getattr(optimizer, "whole_state", None)
    with nullcontext() if gathering is None else gathering.local():
        return optimizer.state_dict()


def load_sharded(optimizer: torch.optim.Optimizer, state: dict[str, Any], world: World) -> None:
    """The reverse of `sharded_state`. ValueError for another rank's part or another number of ranks."""
    saved = state["rank"], state["world_size"]
    if saved != (world.rank, world.size):
        raise ValueError(
            f"this optimizer state is that of rank {saved[0]} of {saved[1]}, loaded on rank {world.rank} of "
            f"{world.size}: save it with state_dict(gather_opt=True) to load it on another number of ranks."
        )
    optimizer.load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})


def load_whole(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The reverse of `whole_state`: every rank gives the whole state and takes its part."""
    parameters = _by_key(optimizer, state)
    own: dict[Any, dict[str, Any]] = {}
    for key, values in state["state"].items():
        parameter = parameters[key]
        own[key] = {
            name: parameter.take(value) if name in state["sliced"] and _sharded(parameter) else value
            for name, value in values.items()
        }
    optimizer.load_state_dict({"state": own, "param_groups": state["param_groups"]})


def _by_key(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[Any, Any]:
    """The optimizer's parameters by the keys of a state dict. ValueError where they are not as many."""
    mine = [[*group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in mine] != [len(group) for group in theirs]:
        raise ValueError(
            f"the state has parameter groups of {[len(g) for g in theirs]} parameters, the optimizer of "
            f"{[len(g) for g in mine]}: make the optimizer from the same model, with the same groups."
        )
    return {key: p for keys, group in zip(theirs, mine) for key, p in zip(keys, group)}


def _sharded(parameter: torch.nn.Parameter) -> bool:
    return isinstance(parameter, DistributedParameter)


def _unsliced(parameters: dict, state: dict, sliced: list[str], world: World) -> dict[Any, dict[str, Any]]:
    """Counters and the like, from the rank that holds most of each parameter: one that holds nothing need not count."""
    mine = {
        key: (parameters[key].numel(), {n: _copy(v) for n, v in values.items() if n not in sliced})
        for key, values in state.items()
    }
    everyone = world.gather_objects(mine)
    return {key: dict(max((rank[key] for rank in everyone), key=lambda held: held[0])[1]) for key in mine}


def _is_slice(parameter: torch.nn.Parameter, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _gather(world: World, buffer: ShardedBuffer, pieces: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Whole tensors of one name of one buffer by one all-gather, on CPU; empty ones but on rank 0."""
    like = next(iter(pieces.values()))
    flat = torch.zeros(buffer.layout.shard_numel, dtype=like.dtype, device=buffer.shard.device)
    for index, values in pieces.items():
        place = buffer.pieces[index]
        flat[place.shard_start : place.shard_stop] = values
    full = flat.new_empty(buffer.layout.numel)
    world.gather.all_gather(full, flat).wait()
    if world.rank != 0:
        return {index: torch.empty(0) for index in pieces}
    whole = {}
    for index in pieces:
        offset, shape = buffer.layout.offsets[index], buffer.slices[index].full_shape
        whole[index] = full[offset : offset + shape.numel()].view(shape).to("cpu", copy=True)
    return whole
