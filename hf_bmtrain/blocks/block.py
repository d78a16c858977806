"""A transformer layer whose class is extended in place, so that it is sharded and still itself."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..recompute.planner import choose
from ..recompute.policy import UseCheckpoint
from ..recompute.replay import Replay
from ..runtime.world import World, check_zero_level, current_world
from ..sharding.buffer import ShardedBuffer
from ..sharding.slots import Slot, StateDict, copy_wholes, find_places, hidden, shard_places, slice_loads
from .block_state import BlockState
from .guard import SelfReducing


class CheckpointBlock(SelfReducing, torch.nn.Module):
    """`CheckpointBlock(layer)` returns `layer` itself, sharded in place, its class extended by this one.

    Names, isinstance, hooks, attributes and state_dict keys of the layer stay true. use_checkpoint: recompute the
    forward in backward instead of keeping its activations, "auto" as `auto_wrap` has it. zero_level: 3 frees the
    parameters between forward and backward, 2 keeps them; None takes the world's. Layers that hold
    DistributedParameters are accepted. Collective.
    """

    _bmt: BlockState

    def __new__(cls, layer: torch.nn.Module, use_checkpoint: UseCheckpoint = True, zero_level: int | None = None):
        if isinstance(layer, CheckpointBlock):
            return layer
        world = current_world()
        level = world.zero_level if zero_level is None else zero_level
        check_zero_level(level)
        sharded = shard_places(world.step, find_places(layer.modules()), world.device)
        extend(layer, sharded, world, use_checkpoint, level)
        return layer

    def __init__(self, *args, **kwargs) -> None:
        """Nothing: Python calls it on the layer that `__new__` returned."""

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False):
        """The whole tensors, on CPU, under the layer's own keys. Collective: every rank calls it."""
        collect = functools.partial(super().state_dict, prefix=prefix, keep_vars=True)
        if destination is not None:
            copy_wholes(destination, self._bmt.slots, lambda: collect(destination=destination))
            return destination
        current_world().assemble("state_dict")
        result = StateDict()
        copy_wholes(result, self._bmt.slots, lambda: collect(destination=result))
        return result.plain()

    def compile(self, *args, **kwargs) -> None:
        """`torch.compile` the layer's own forward; what gathers and reduces around it stays as it is."""
        own: Any = self._bmt.own_forward or super(type(self), self).forward
        self._bmt.own_forward, self._bmt.compiled = torch.compile(own, *args, **kwargs), True

    def _apply(self, fn, recurse: bool = True):
        with hidden(self._bmt.slots, fn):
            return super()._apply(fn, recurse)

    def __deepcopy__(self, memo):
        raise RuntimeError("A sharded block cannot be deep-copied: copy the model before it is wrapped.")


def extend(
    layer: torch.nn.Module,
    sharded: tuple[list[ShardedBuffer], list[Slot]],
    world: World,
    use_checkpoint: UseCheckpoint,
    zero_level: int,
) -> None:
    """Make `layer` a CheckpointBlock over parameters that `shard_places` has sharded."""
    buffers, slots = sharded
    state = BlockState(world.step, buffers, slots, Replay(layer), zero_level)
    state.recomputation = choose(use_checkpoint, state, world)
    layer._bmt = state  # pyright: ignore[reportArgumentType]
    # A forward set on the instance (a patch) would hide the block's: it becomes the layer's own.
    layer._bmt.own_forward = layer.__dict__.pop("forward", None)  # pyright: ignore
    layer.__class__ = _extended_class(type(layer))
    slice_loads(slots)


@functools.cache
def _extended_class(cls: Any) -> type[torch.nn.Module]:
    """One class for all layers of `cls`, with its name, so that nothing tells them apart (or recompiles)."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args, **kwargs):
        return self._bmt.forward(super(extended, self).forward, args, kwargs)

    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    extended = type(cls)(cls.__name__, (CheckpointBlock, cls), names)
    return extended
