"""keep_frozen: frozen parameters that stay whole from step to step, all of them or as many as memory allows.

Frozen weights do not change, so a buffer that is gathered once may stay whole (`ShardedBuffer.resident`): nothing is
gathered, waited for or launched for it afterwards. After a write to its shard it is gathered anew, and while one of its
parameters is trainable it is released as others are. What stays whole must be the same on every rank, because a gather
may be a collective.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.blocks.block import CheckpointBlock
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer
from ...engine.sharding.slots import buffers_of
from ..options import KeepFrozen
from .activations import AutoCheckpoint, Shapes, is_within, shapes_of

_log = logging.getLogger("hf_bmtrain")
_log_once = functools.cache(_log.info)
_LEAST_SHARE = 4
"""At least 1 / _LEAST_SHARE of the parameters must be frozen."""
_TOLERANCE = 64
"""By 1 / _TOLERANCE of the usable memory less may be free than when a plan was made; the reserve is larger."""
_GIB = 2**30


def apply_keep_frozen(model: torch.nn.Module, world: World, keep_frozen: KeepFrozen) -> None:
    """Make frozen buffers of `model`, which was just wrapped, stay whole. Collective."""
    if keep_frozen is False or world.size == 1:
        return
    if keep_frozen is True:
        _keep_all(model, world)
        return
    schedule = world.schedule
    if schedule.memory is None and world.device.type not in ("cpu", "meta"):
        schedule.memory = DeviceMemory(world.device)
    if schedule.memory is not None:
        model.register_forward_pre_hook(FrozenPlanner(model, world), prepend=True, with_kwargs=True)
    elif any(not buffer.gradient.trainable for buffer in buffers_of(model)):
        _log_once(
            "keep_frozen='auto' keeps no frozen parameters whole on the CPU: the memory that is left is only known of "
            "GPUs. True keeps all."
        )


def extend_keep_frozen(model: torch.nn.Module, world: World) -> None:
    """Treat parameters that were added to `model`, and those frozen since, like those before. Collective."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if not any(isinstance(hook, FrozenPlanner) for hook in hooks):
        if any(buffer.resident for buffer in buffers_of(model)):
            _keep_all(model, world)


def _keep_all(model: torch.nn.Module, world: World) -> None:
    """Gather every frozen buffer; those that are frozen later stay whole from their next gather on."""
    buffers = buffers_of(model)
    for buffer in buffers:
        buffer.resident = True
        if buffer.is_resident:
            buffer.gather()
    for buffer in buffers:
        buffer.wait()
    world.schedule.wait_for_readers()  # weights may be written before the first step


@dataclass(frozen=True)
class _Reading:
    """One rank's view as a pass begins. stepped: whether its optimizer has. room: bytes to give, None if not known."""

    stepped: bool
    room: int | None


class FrozenPlanner:
    """A forward pre-hook of a wrapped model that keeps as many of its frozen buffers whole as memory allows.

    A pass, from the first training forward after a backward to that of the next, is measured with nothing kept (for
    which it resets the allocator's peak). After the first step of an optimizer the ranks agree on the buffers outside
    blocks, then the blocks, that the rank with the least memory has room for: what a step leaves free of the usable
    memory, which has the reserve of `DeviceMemory`. Where blocks have use_checkpoint="auto", that is what its plan
    leaves (`Planner.left`).

    At each training forward the ranks tell each other, in one message, whether its inputs are within those measured
    and as much memory is free. If not on one rank, all give back what they keep before the forward, and measure and
    plan again. Other forwards, of evaluation and generation, may take anything: all is given back before
    them, which needs no exchange, and kept again by the next training forward. So a step that fits without this fits
    with it.

    Nothing is kept, or said, where less than a quarter of the parameters is frozen, or a plan has found no room.
    """

    def __init__(self, model: torch.nn.Module, world: World) -> None:
        self._world, self._schedule, self._memory = world, world.schedule, world.schedule.memory
        modules: list[Any] = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
        inside = {buffer for block in modules for buffer in block._bmt.buffers}
        # Weak, so that a part of the model that is dropped is freed. A block's list of buffers may grow.
        self._outside = [weakref.ref(buffer) for buffer in buffers_of(model) if buffer not in inside]
        self._blocks = [weakref.ref(block._bmt) for block in modules]
        self._chosen: list[weakref.ref[ShardedBuffer]] = []
        self._planned = self._keeping = self._idle = False
        self._backwards, self._forwards = -1, 0
        self._seen: list[tuple[int, Shapes]] = []  # in this pass: a forward's number in it, and its inputs
        self._measured: list[tuple[int, Shapes]] = []
        # Bytes allocated, without what models keep whole: as a measurement began (None if none has), and at most since.
        self._began: int | None = None
        self._peak = 0
        self._free = 0  # the least bytes free at the beginning of a pass since
        self._spare = 0  # bytes by which less may be free
        self._versions: list[int] = []
        self._policies: list[Any] = []
        self._schedule.frozen_plans.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that stay whole now."""
        return sum(buffer.full_nbytes for buffer in self._buffers_kept())

    @property
    def held(self) -> int:
        """Bytes of those that have been gathered."""
        return sum(buffer.full_nbytes for buffer in self._buffers_kept() if buffer.is_unsharded)

    def _buffers_kept(self) -> list[ShardedBuffer]:
        if not self._keeping:
            return []
        return [buffer for buffer in (reference() for reference in self._chosen) if buffer is not None]

    def _units(self) -> list[list[ShardedBuffer]]:
        """Return the buffers that are decided on together: one outside blocks, or a block's; none of what is gone."""
        outside = [[] if buffer is None else [buffer] for buffer in (reference() for reference in self._outside)]
        return outside + [[] if state is None else state.buffers for state in (each() for each in self._blocks)]

    # -- a forward ----------------------------------------------------------------------------------------------

    def __call__(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._schedule.in_backward:
            return
        if torch.is_grad_enabled():
            self._begin_forward(shapes_of(args, kwargs))
        else:
            self._give_back()

    def _begin_forward(self, shapes: Shapes) -> None:
        begins = self._schedule.backwards != self._backwards
        if begins:
            self._begin_pass()
        if self._idle:
            return
        too_large = not any(self._forwards <= most and is_within(shapes, known) for most, known in self._measured)
        if self._world.control.any(too_large or (begins and self._is_short()), "a step with keep_frozen='auto'"):
            self._give_back()
            self._planned = False
        elif begins and not self._planned:
            self._agree()
        if self._planned:
            self._keep()
        else:
            if self._began is None:
                self._measure()
            self._seen.append((self._forwards, shapes))
        self._forwards += 1

    def _begin_pass(self) -> None:
        self._backwards, self._forwards = self._schedule.backwards, 0
        for number, shapes in self._seen:  # in the pass that ended
            self._measured = [each for each in self._measured if not (each[0] <= number and is_within(each[1], shapes))]
            self._measured.append((number, shapes))
        self._seen = []
        if self._planned:
            self._idle = not self._chosen
            return
        units = self._units()
        self._idle = _LEAST_SHARE * _nbytes(_frozen(units)) < _nbytes(units)
        planner = self._schedule.planner
        if planner is not None and planner.measuring:
            self._began = None  # it has reset the allocator's peak

    def _is_short(self) -> bool:
        """Return whether less memory is free than the plan was made for, or blocks are recomputed otherwise."""
        if self._present_policies() != self._policies:
            self._began = None
            return True
        return self._planned and self._read_free() < self._free - self._spare

    def _read_free(self) -> int:
        """Return the bytes free now, with what is kept."""
        for unit in self._units():
            for buffer in unit:
                buffer.gradient.free_if_unused()
        return self._memory.usable() - self._memory.allocated() + self.held

    def _present_policies(self) -> list[Any]:
        return [block.recompute for block in (reference() for reference in self._blocks) if block is not None]

    # -- a measurement ------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Begin to measure, with nothing kept."""
        self._policies, self._versions = self._present_policies(), _versions(self._units())
        planner = self._schedule.planner
        if planner is not None and planner.measuring:
            return
        self._free = self._read_free()
        self._began, self._peak = self._memory.allocated() - self._held_by_all(), 0
        if not self._is_planned:
            self._memory.reset_peak()

    @property
    def _is_planned(self) -> bool:
        """True if a plan decides which blocks are recomputed."""
        return any(isinstance(policy, AutoCheckpoint) for policy in self._policies)

    def end_backward(self) -> None:
        """Note the peak, which users may reset between two steps."""
        if self._began is not None:
            self._peak = max(self._peak, self._memory.peak() - self._held_by_all())

    def _held_by_all(self) -> int:
        return sum(plan.held for plan in self._schedule.frozen_plans)

    def _room(self) -> int | None:
        """Return the bytes that a step leaves free; None while that is not known."""
        free, others = self._read_free(), self._schedule.kept_bytes or 0  # of other models: this one keeps nothing
        self._free = free if self._began is None else min(self._free, free)
        if self._is_planned:
            left = self._schedule.planner.left
            return None if left is None else left - others
        if self._began is None:
            return None
        self.end_backward()
        return free + self._held_by_all() - others - (self._peak - self._began)

    def _agree(self) -> None:
        """Make a plan, the same on every rank, if an optimizer has stepped: its state is allocated then. Collective."""
        versions = _versions(self._units())
        stepped = not versions or versions != self._versions
        readings: list[_Reading] = self._world.gather_objects(_Reading(stepped, self._room()))
        self._versions = versions
        rooms = [reading.room for reading in readings if reading.room is not None]
        if len(rooms) == len(readings) and any(reading.stepped for reading in readings):
            self._plan(_frozen(self._units()), min(rooms))

    # -- a plan -------------------------------------------------------------------------------------------------

    def _plan(self, units: Sequence[Sequence[ShardedBuffer]], room: int) -> None:
        """Choose the buffers to keep, the first ones first: their gathers have least to run beside. Collective."""
        numbers, left = [], room
        for number, unit in enumerate(units):
            if 0 < _nbytes([unit]) <= left:
                numbers.append(number)
                left -= _nbytes([unit])
        # A part of the model that was dropped may be gone on one rank and not yet on another.
        chosen = [units[number] for number in self._world.control.broadcast_object(numbers)]
        units = [unit for unit in units if unit]
        self._chosen = [weakref.ref(buffer) for unit in chosen for buffer in unit]
        self._planned, self._began = True, None
        self._spare = max(0, left) + self._memory.usable() // _TOLERANCE
        if self._world.rank == 0:
            rows = [
                (len(chosen), "stay whole", _nbytes(chosen)),
                (len(units) - len(chosen), "are gathered at each use", _nbytes(units) - _nbytes(chosen)),
            ]
            lines = [f"of {len(units)} blocks and buffers outside, with {room / _GIB:.2f} GiB to give:"]
            lines += [f"  {count:4d} {what:26} {nbytes / _GIB:8.2f} GiB" for count, what, nbytes in rows]
            _log.info("keep_frozen='auto': %s", "\n".join(lines))

    def _keep(self) -> None:
        if not self._keeping:
            self._keeping = True
            for buffer in self._buffers_kept():
                buffer.resident = True

    def _give_back(self) -> None:
        """Release what is kept. Inside another model's forward, which may be reading it, leave that to its end."""
        for buffer in self._buffers_kept():
            buffer.resident = False
            if self._schedule.inside.depth <= 1:
                buffer.reshard()
        self._keeping = False


def _frozen(units: Sequence[Sequence[ShardedBuffer]]) -> list[list[ShardedBuffer]]:
    """Return what is frozen of each unit."""
    return [[buffer for buffer in unit if not buffer.gradient.trainable] for unit in units]


def _nbytes(units: Sequence[Sequence[ShardedBuffer]]) -> int:
    return sum(buffer.full_nbytes for unit in units for buffer in unit)


def _versions(units: Sequence[Sequence[ShardedBuffer]]) -> list[int]:
    """Return the versions of the shards that an optimizer updates."""
    return [buffer.version for unit in units for buffer in unit if buffer.gradient.trainable]
