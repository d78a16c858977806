"""keep_frozen: frozen parameters that are resident from step to step, all of them or as many as memory allows.

Frozen weights do not change, so a buffer that is gathered once may stay unsharded (`ShardedBuffer.resident`): nothing
is gathered, waited for or launched for it afterwards. After a write to its shard it is gathered anew, and while one of
its parameters is trainable it is resharded as others are. What is resident must be the same on every rank, because an
all-gather may be a collective.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...engine.blocks.block import CheckpointBlock
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer
from ...engine.sharding.slots import buffers_of
from .activations import AutoCheckpoint
from .meter import MeasuredInputs, Meter, Reading, Shapes, agree

if TYPE_CHECKING:
    from . import MemoryPlanner

_log = logging.getLogger("hf_bmtrain")
_LEAST_SHARE = 4
"""At least 1 / _LEAST_SHARE of the parameters must be frozen."""
_TOLERANCE = 64
"""By 1 / _TOLERANCE of the usable memory less may be free than when a plan was made; the reserve is larger."""
_GIB = 2**30


def keep_all(model: torch.nn.Module, world: World) -> None:
    """Gather every frozen buffer of `model`, to be resident. Collective.

    Those that are frozen later are resident from their next all-gather on.
    """
    buffers = buffers_of(model)
    for buffer in buffers:
        buffer.resident = True
        if buffer.is_resident:
            buffer.gather()
    for buffer in buffers:
        buffer.wait()
    world.schedule.wait_for_readers()  # weights may be written before the first step


class Residents:
    """Keeps as many frozen buffers of a wrapped model resident as memory allows.

    A pass, from the first training forward after a backward to that of the next, is measured with nothing resident (for
    which it resets the allocator's peak). After the first step of an optimizer the ranks agree on the buffers outside
    blocks, then the blocks, that the rank with the least memory has room for: what a step leaves free of the usable
    memory, which has the reserve of `DeviceMemory`. Where blocks have use_checkpoint="auto", that is what its plan
    leaves (`Activations.left`).

    At each training forward the ranks tell each other, in one message, whether its inputs are within those measured
    and as much memory is free. If not on one rank, all reshard what is resident before the forward, and measure and
    plan again. Other forwards, of evaluation and generation, may take anything: all is resharded before them, which
    needs no exchange, and resident again from the next training forward on. So a step that fits without this fits with
    it.

    Nothing is resident, or said, where less than a quarter of the parameters is frozen, or a plan has found no room.
    """

    def __init__(self, model: torch.nn.Module, planner: MemoryPlanner) -> None:
        self._planner, self._world, self._schedule = planner, planner.world, planner.world.schedule
        self._meter = Meter(planner.memory, lambda: planner.gathered_bytes)
        modules: list[Any] = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
        inside = {buffer for block in modules for buffer in block._bmt.buffers}
        # Weak, so that a part of the model that is dropped is freed. A block's list of buffers may grow.
        self._root = [weakref.ref(buffer) for buffer in buffers_of(model) if buffer not in inside]
        self._blocks = [weakref.ref(block._bmt) for block in modules]
        self._chosen: list[weakref.ref[ShardedBuffer]] = []
        self._planned = self._keeping = self._idle = False
        self._forwards = 0  # of this pass
        self._seen: list[tuple[int, Shapes]] = []  # in this pass: a forward's number in it, and its inputs
        self._inputs = MeasuredInputs()
        self._peak: int | None = None  # the most bytes taken since a measurement began, None if none has
        self._free = 0  # the least bytes free at the beginning of a pass since
        self._spare = 0  # bytes by which less may be free
        self._policies: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that are resident by the plan."""
        return sum(buffer.full_nbytes for buffer in self._kept())

    @property
    def gathered(self) -> int:
        """Bytes of those that have been gathered."""
        return sum(buffer.full_nbytes for buffer in self._kept() if buffer.is_unsharded)

    def _kept(self) -> list[ShardedBuffer]:
        if not self._keeping:
            return []
        return [buffer for buffer in (reference() for reference in self._chosen) if buffer is not None]

    def _units(self) -> list[list[ShardedBuffer]]:
        """Return the buffers that are decided on together: one outside blocks, or a block's; none of what is gone."""
        outside = [[] if buffer is None else [buffer] for buffer in (reference() for reference in self._root)]
        return outside + [[] if state is None else state.buffers for state in (each() for each in self._blocks)]

    def _buffers(self) -> list[ShardedBuffer]:
        return [buffer for unit in self._units() for buffer in unit]

    # -- a forward ----------------------------------------------------------------------------------------------

    def begin_forward(self, shapes: Shapes) -> None:
        """Decide, as a training forward on inputs of these shapes begins, what is resident in it. Collective."""
        begins = self._meter.enters_pass(self._schedule.backwards)
        if begins:
            self._begin_pass()
        if self._idle:
            return
        too_large = not self._inputs.cover(shapes, self._forwards)
        if self._world.control.any(too_large or (begins and self._is_short()), "a step with keep_frozen='auto'"):
            self.reshard()
            self._planned = False
        elif begins and not self._planned:
            self._agree()
        if self._planned:
            self._keep()
        else:
            if self._peak is None:
                self._measure()
            self._seen.append((self._forwards, shapes))
        self._forwards += 1

    def _begin_pass(self) -> None:
        self._forwards = 0
        for number, shapes in self._seen:  # in the pass that ended
            self._inputs.add(shapes, number)
        self._seen = []
        if self._planned:
            self._idle = not self._chosen
            return
        units = self._units()
        self._idle = _LEAST_SHARE * _nbytes(_frozen(units)) < _nbytes(units)
        if self._planner.activations.measuring:
            self._peak = None  # it has reset the allocator's

    def _is_short(self) -> bool:
        """Return whether less memory is free than the plan was made for, or blocks are recomputed otherwise."""
        if self._present_policies() != self._policies:
            self._peak = None
            return True
        return self._planned and self._read_free() < self._free - self._spare

    def _read_free(self) -> int:
        """Return the bytes free now, with what is resident of this model, and without what is of others."""
        others = self._planner.gathered_bytes - self.gathered
        return self._meter.read_free(self._buffers()) - others

    def _present_policies(self) -> list[Any]:
        return [block.recompute for block in (reference() for reference in self._blocks) if block is not None]

    # -- a measurement ------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Begin to measure, with nothing resident."""
        self._policies = self._present_policies()
        self._meter.note_versions(self._buffers())
        if self._planner.activations.measuring:
            return
        self._free, self._peak = self._read_free(), 0
        self._meter.begin(self._buffers())
        if not self._is_planned:
            self._meter.memory.reset_peak()

    @property
    def _is_planned(self) -> bool:
        """True if a plan decides which blocks are recomputed."""
        return any(isinstance(policy, AutoCheckpoint) for policy in self._policies)

    def end_backward(self) -> None:
        """Note the peak, which users may reset between two steps."""
        if self._peak is not None:
            self._peak = max(self._peak, self._meter.taken())

    def _room(self) -> int | None:
        """Return the bytes that a step leaves free; None while that is not known."""
        free, others = self._read_free(), self._planner.resident_bytes  # of other models: of this one none is
        self._free = free if self._peak is None else min(self._free, free)
        if self._is_planned:
            left = self._planner.activations.left
            return None if left is None else left - others
        self.end_backward()
        return None if self._peak is None else free + self._planner.gathered_bytes - others - self._peak

    def _agree(self) -> None:
        """Make a plan, the same on every rank, if an optimizer has stepped: its state is allocated then. Collective."""
        buffers, room = self._buffers(), self._room()
        reading = Reading(self._meter.has_stepped(buffers), None if room is None else (room,))
        self._meter.note_versions(buffers)
        agreed = agree(self._world, reading)
        if agreed is not None:
            (least,), _ = agreed
            self._plan(_frozen(self._units()), least)

    # -- a plan -------------------------------------------------------------------------------------------------

    def _plan(self, units: Sequence[Sequence[ShardedBuffer]], room: int) -> None:
        """Choose the resident buffers, the first ones first: their all-gathers have least to run beside. Collective."""
        numbers, left = [], room
        for number, unit in enumerate(units):
            if 0 < _nbytes([unit]) <= left:
                numbers.append(number)
                left -= _nbytes([unit])
        # A part of the model that was dropped may be gone on one rank and not yet on another.
        chosen = [units[number] for number in self._world.control.broadcast_object(numbers)]
        units = [unit for unit in units if unit]
        self._chosen = [weakref.ref(buffer) for unit in chosen for buffer in unit]
        self._planned, self._peak = True, None
        self._spare = max(0, left) + self._meter.memory.usable() // _TOLERANCE
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
            for buffer in self._kept():
                buffer.resident = True

    def reshard(self) -> None:
        """Reshard what is resident. Inside another model's forward, which may be reading it, leave that to its end."""
        for buffer in self._kept():
            buffer.resident = False
            if self._schedule.inside.depth <= 1:
                buffer.reshard()
        self._keeping = False


def _frozen(units: Sequence[Sequence[ShardedBuffer]]) -> list[list[ShardedBuffer]]:
    """Return what is frozen of each unit."""
    return [[buffer for buffer in unit if not buffer.gradient.trainable] for unit in units]


def _nbytes(units: Sequence[Sequence[ShardedBuffer]]) -> int:
    return sum(buffer.full_nbytes for unit in units for buffer in unit)
