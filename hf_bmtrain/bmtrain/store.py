"""BMTrain's module `store`: checkpoints, and exchange of Python objects between ranks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..checkpoint.store import load, save
from ..engine.base.arguments import expect_kind, expect_number
from ..engine.blocks.sharded_module import ShardedModule
from ..engine.runtime.world import World, current_world
from ..engine.sharding.state_dict import StateDict, copy_full_params

__all__ = [
    "DistributedStateDictWrapper", "allgather_object", "allgather_objects", "broadcast_object", "load", "save",
]  # fmt: skip


def allgather_objects(obj: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order. Collective: every rank must call it.

    Args:
        obj: any object that can be pickled.
    """
    return current_world().gather_objects(obj)


def allgather_object(obj: Any, comm: World | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order, as `allgather_objects` does. Collective: every rank must call it.

    Args:
        obj: any object that can be pickled.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.
    """
    current_world().check_comm(comm)
    return allgather_objects(obj)


def broadcast_object(obj: Any, comm: World | None = None, src: int = 0) -> Any:
    """Return one rank's object on every rank. Collective: every rank must call it.

    Args:
        obj: any object that can be pickled. Only the object of rank `src` is used.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.
        src: the rank whose object is returned.
    """
    world = current_world()
    world.check_comm(comm)
    size = world.size
    expect_number("src", src, f"a rank (ranks are 0 to {size - 1})", lambda rank: 0 <= rank < size, integer=True)
    if src == 0:
        return world.control.broadcast_object(obj)
    return world.gather_objects(obj if world.rank == src else None)[src]


class DistributedStateDictWrapper(Mapping):
    """Mapping that gives every rank the entries of rank 0's state dict, for `load_state_dict`.

    Collective: every rank must create it, and all ranks must read the same entries in the same order, because reading
    an entry broadcasts its tensor. Ranks other than 0 receive this tensor on the CPU. `load_state_dict` reads all
    entries, so every rank then needs host memory for all tensors. Prefer `bmt.load`, with which each rank reads only
    its own part of a file.

    Args:
        state_dict: the state dict on rank 0; an empty dict on other ranks.

    Example::

        state = torch.load(file) if bmt.rank() == 0 else {}
        model.load_state_dict(bmt.store.DistributedStateDictWrapper(state))
    """

    def __init__(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        expect_kind("state_dict", state_dict, Mapping, "a state dict (an empty dict on ranks other than 0)")
        for value in state_dict.values():
            expect_kind("state_dict", value, torch.Tensor, "a state dict with tensors as values")
        self._state_dict = state_dict
        mine = (list(state_dict), getattr(state_dict, "_metadata", None))
        self._keys, self._metadata = current_world().control.broadcast_object(mine)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self:
            raise KeyError(key)
        world = current_world()
        value = self._state_dict[key] if world.rank == 0 else None
        kind = world.control.broadcast_object(None if value is None else (value.shape, value.dtype))
        values = value if value is not None else torch.empty(kind[0], dtype=kind[1], device="cpu")
        if world.size > 1 and values.numel():
            moved = values.detach().to(world.device).contiguous()
            world.gather.broadcast(moved, 0).wait()
            return values if world.rank == 0 else moved.to("cpu")
        return values

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def copy(self) -> DistributedStateDictWrapper:
        """Return this mapping itself, not a copy.

        Code that loads a state dict may call `state_dict.copy()` before it reads entries. A real copy would have to
        read all entries, and reading an entry broadcasts its tensor.
        """
        return self


def _save_to_rank0(model: torch.nn.Module, destination: dict | None = None, prefix: str = "") -> dict:
    """Return the full state dict of `model` on rank 0, with tensors on the CPU, and {} on other ranks.

    Collective: every rank must call it. Some models, such as ModelCenter's, call this function in their `state_dict`
    method. This function therefore calls `torch.nn.Module.state_dict`, because the model's own `state_dict` would call
    this function again.

    destination: a state dict. Every rank then adds all entries to its `destination`, and returns it. Tensors that are
        not sharded are added without a copy to the CPU. If None, rank 0 returns a new state dict.
    prefix: a string to put before each key.
    """
    if destination is not None:
        _fill(model, destination, prefix)
        return destination
    world = current_world()
    world.barrier("state_dict")
    state = StateDict(keep=world.rank == 0)
    _fill(model, state, prefix)
    return state.on_cpu() if world.rank == 0 else OrderedDict()


def _fill(model: torch.nn.Module, destination: dict, prefix: str) -> None:
    """Add the full parameters and the buffers of `model` to the dict `destination`, with `prefix` before each key.

    Collective: every rank must call it.
    """
    read = functools.partial(torch.nn.Module.state_dict, model, destination=destination, prefix=prefix, keep_vars=True)
    copy_full_params(destination, model._slots() if isinstance(model, ShardedModule) else [], read)
