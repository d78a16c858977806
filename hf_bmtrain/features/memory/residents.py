"""The option keep_frozen: keep frozen parameters unsharded between steps, either all or as many as fit ("auto").

Frozen weights do not change. So a flat buffer of frozen weights needs only one all-gather if it then stays unsharded.
Such a buffer is called resident (`ShardedBuffer.resident`). After a write to its shard it is all-gathered again.
While one of its parameters is trainable, it is resharded like any other buffer. The same buffers must be resident on
every rank, because an all-gather may be a collective operation, which all ranks must call.
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
"""With keep_frozen="auto", frozen parameters can be kept unsharded only if they are at least 1 / _LEAST_SHARE of a
model's parameters, in bytes."""
_TOLERANCE = 64
"""If free memory decreases, the ranks keep their choice of unsharded parameters as long as the decrease is at most the
bytes that the choice left free, plus 1 / _TOLERANCE of the usable memory. This does not exhaust memory, because
`DeviceMemory.usable` excludes a larger reserve. After a larger decrease the ranks choose again."""
_GIB = 2**30


def keep_all(model: torch.nn.Module, world: World) -> None:
    """Keep the flat buffers of frozen parameters of `model` unsharded between steps, and all-gather them now.

    A flat buffer (ShardedBuffer) is frozen while none of its parameters is trainable. A buffer that is frozen later
    stays unsharded from its next all-gather on. Collective: every rank must call it.

    Args:
        model: a sharded model.
        world: the ranks over which it is sharded.
    """
    buffers = buffers_of(model)
    for buffer in buffers:
        buffer.resident = True
        if buffer.is_resident:
            buffer.gather()
    for buffer in buffers:
        buffer.wait()
    # Without this wait, a rank could write to its shard before the first step while another rank still reads it.
    world.schedule.wait_for_readers()


class Residents:
    """keep_frozen="auto" for one model: keeps as many frozen parameters unsharded between steps as memory allows.

    A flat buffer that stays unsharded between steps is called resident. A pass consists of the training forwards
    between two backwards, and of the backward that follows them. In the first passes no buffer is resident, and memory
    is measured.

    After an optimizer's first step, the ranks choose which buffers become resident, the same ones on every rank: as
    many as fit on the rank with the least available memory. Buffers of parameters outside blocks are chosen first, then
    buffers of blocks, in execution order. If blocks have use_checkpoint="auto", the available memory is what remains
    free after the plan for the activations of these blocks. Otherwise, it is what was free at the peak of the measured
    passes.

    Before each training forward, the ranks exchange one message to check that the choice is still valid. If on any rank
    the inputs are larger than all measured ones, or less memory is free than was assumed, all ranks reshard the
    resident buffers, measure, and choose again.

    Forwards without gradients (evaluation, generation) may need any amount of memory. So the resident buffers are
    resharded before such a forward, and become resident again in the next training forward.

    Nothing is measured, exchanged or logged while no buffers are chosen and less than a quarter of the parameters (in
    bytes) is frozen, nor after the ranks have found that no buffer fits into the available memory.

    Args:
        model: the wrapped model. Its blocks and flat buffers are listed now, and referenced weakly.
        planner: the MemoryPlanner of the world. It makes the plan for use_checkpoint="auto", and owns the Residents of
            all models, including this one.
    """

    def __init__(self, model: torch.nn.Module, planner: MemoryPlanner) -> None:
        self._planner, self._world, self._schedule = planner, planner.world, planner.world.schedule
        self._meter = Meter(planner.memory, lambda: planner.gathered_bytes)
        modules: list[Any] = [module for module in model.modules() if isinstance(module, CheckpointBlock)]
        inside = {buffer for block in modules for buffer in block._bmt.buffers}
        # The references are weak, so that a deleted part of the model can be garbage-collected. For blocks, their
        # states are listed instead of their buffers, because a later auto_wrap may add a buffer to a block.
        self._root = [weakref.ref(buffer) for buffer in buffers_of(model) if buffer not in inside]
        self._blocks = [weakref.ref(block._bmt) for block in modules]
        self._chosen: list[weakref.ref[ShardedBuffer]] = []
        self._planned = self._keeping = self._idle = False
        # While the ranks have no valid choice of buffers to keep unsharded, they measure memory. Most of the attributes
        # below belong to this measurement.
        self._forwards = 0  # the number of training forwards in this pass
        # For each measured forward of this pass: its index in the pass, the shapes of its inputs, and how many forwards
        # had failed when it began.
        self._seen: list[tuple[int, Shapes, int]] = []
        self._inputs = MeasuredInputs()
        self._peak: int | None = None  # the peak of allocated bytes since measuring began; None while not measuring
        self._free = 0  # the smallest number of bytes free at the start of a pass, since measuring began
        # The ranks choose the buffers again if fewer than `_free` - `_spare` bytes are free at the start of a pass.
        # `_spare` is the number of bytes that the choice left free, plus usable() / _TOLERANCE.
        self._spare = 0
        self._policies: list[Any] = []  # the recomputation policy of each block when measuring began

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers chosen to stay unsharded between steps, including those not yet all-gathered.

        The method `reshard` frees these buffers. Afterwards they do not count, until a training forward decides to keep
        them unsharded again.
        """
        return sum(buffer.full_nbytes for buffer in self._kept())

    @property
    def gathered(self) -> int:
        """The bytes allocated now for the buffers chosen to stay unsharded between steps."""
        return sum(buffer.full_nbytes for buffer in self._kept() if buffer.is_unsharded)

    def _kept(self) -> list[ShardedBuffer]:
        """Return the buffers that are chosen to stay unsharded between steps.

        The list is empty before the first choice, and from a call of `reshard` until a training forward makes the
        chosen buffers resident (unsharded between steps) again.
        """
        if not self._keeping:
            return []
        return [buffer for buffer in (reference() for reference in self._chosen) if buffer is not None]

    def _units(self) -> list[list[ShardedBuffer]]:
        """Return all flat buffers of the model, in groups that become resident (unsharded between steps) together.

        The buffers of a block form one group; each buffer of parameters outside blocks is a group by itself. A buffer
        or block that has been deleted leaves an empty group.
        """
        outside = [[] if buffer is None else [buffer] for buffer in (reference() for reference in self._root)]
        return outside + [[] if state is None else state.buffers for state in (each() for each in self._blocks)]

    def _buffers(self) -> list[ShardedBuffer]:
        return [buffer for unit in self._units() for buffer in unit]

    # -- a forward ----------------------------------------------------------------------------------------------

    def begin_forward(self, shapes: Shapes) -> None:
        """Prepare a training forward: keep the chosen buffers unsharded, or measure the memory that steps take.

        Collective: every rank must call it. Below, a pass is a backward together with all training forwards since the
        backward before it. The steps are:

        1. Do nothing in this pass if less than a quarter of the parameters (in bytes) is frozen and no buffers have
           been chosen, or if the ranks have found that no buffer fits.
        2. Start over if, on any rank, the inputs are larger than all measured ones. In the first forward of a pass,
           also start over if, on any rank, clearly less memory is free than when the buffers were chosen, or the
           recomputation policy of a block (use_checkpoint) has changed. To start over, reshard the resident buffers
           (those unsharded between steps), drop the choice of buffers, and measure this forward.
        3. Otherwise, if no buffers have been chosen and this is the first forward of a pass, choose them from the
           measurements so far. It is too early to choose before an optimizer's first step, or while a rank does not
           know its available memory.
        4. If buffers have been chosen by now, make them resident. If not, measure this forward.

        shapes: the shapes of the forward's inputs.
        """
        begins = self._meter.enters_pass(self._schedule.backwards + self._schedule.failed_backwards)
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
            self._seen.append((self._forwards, shapes, self._schedule.failed_forwards))
        self._forwards += 1

    def _begin_pass(self) -> None:
        """Prepare a pass: all training forwards up to the next backward, and that backward.

        Called at the first of these forwards. Discards the measurement of the last pass if its backward has failed.
        Also sets `_idle`, which is True if `begin_forward` has nothing to do in this pass: the ranks have found that no
        buffer can stay unsharded, or they have not chosen buffers yet and too few parameters are frozen.
        """
        self._forwards = 0
        if self._seen:  # the backward of the last pass has failed, so `end_backward` has not emptied this list
            self._seen, self._peak = [], None
        if self._planned:
            self._idle = not self._chosen
            return
        units = self._units()
        self._idle = _LEAST_SHARE * _nbytes(_frozen(units)) < _nbytes(units)
        if self._planner.activations.measuring:
            self._peak = None  # discard the measurement, because use_checkpoint="auto" has reset the allocator's peak

    def _is_short(self) -> bool:
        """Return whether the ranks must choose again which buffers to keep unsharded between steps.

        They must if free memory has decreased since the last choice by more than `_TOLERANCE` allows, or if the
        recomputation policy (use_checkpoint) of a block has changed since the last measurement began. In the second
        case, the measured peak is discarded. Called at the first training forward after a backward.
        """
        if self._present_policies() != self._policies:
            self._peak = None
            return True
        return self._planned and self._read_free() < self._free - self._spare

    def _read_free(self) -> int:
        """Return how many bytes would be free now if this model kept no buffers unsharded between steps.

        The buffers that other models keep unsharded take memory as they do now.
        """
        others = self._planner.gathered_bytes - self.gathered
        return self._meter.read_free(self._buffers()) - others

    def _present_policies(self) -> list[Any]:
        return [block.recompute for block in (reference() for reference in self._blocks) if block is not None]

    # -- a measurement ------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Begin to measure the memory that steps take.

        Call it while no buffer of this model is resident (kept unsharded between steps). While use_checkpoint="auto"
        measures memory, this measurement does not begin, because use_checkpoint="auto" resets the allocator's peak.
        """
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
        """Whether any block of the model has use_checkpoint="auto".

        Frozen parameters are then kept unsharded only in the memory that remains after the plan for such blocks.
        """
        return any(isinstance(policy, AutoCheckpoint) for policy in self._policies)

    def end_backward(self) -> None:
        """Update the largest measured peak of allocated bytes, and remember for which input shapes it was measured.

        Does nothing while memory is not measured.

        The largest peak determines how much memory is left for resident buffers (those that stay unsharded between
        steps). The allocator's peak is read at the end of each backward, because the user may reset the allocator's
        peak statistics between steps. It is read once more when the ranks choose the resident buffers.
        """
        self._update_peak()
        for number, shapes, failed in self._seen:
            if failed == self._schedule.failed_forwards:  # neither this forward nor a later one has failed
                self._inputs.add(shapes, number)
        self._seen = []

    def _update_peak(self) -> None:
        if self._peak is not None:
            self._peak = max(self._peak, self._meter.taken())

    def _room(self) -> int | None:
        """Return the total number of bytes that this model may keep unsharded between steps; None if still unknown.

        Called at the start of a pass. Also updates `_free`, the smallest number of bytes that were free at the start of
        a pass since measuring began.
        """
        # No buffer of this model is resident here, so `resident_bytes` contains only buffers of other models.
        free, others = self._read_free(), self._planner.resident_bytes
        self._free = free if self._peak is None else min(self._free, free)
        if self._is_planned:
            left = self._planner.activations.left
            return None if left is None else left - others
        self._update_peak()
        return None if self._peak is None else free + self._planner.gathered_bytes - others - self._peak

    def _agree(self) -> None:
        """Choose the buffers that stay unsharded between steps, the same ones on all ranks.

        The choice is made from the measurements of all ranks. Collective: every rank must call it. Does nothing before
        an optimizer's first step, and while the available memory of a rank is unknown.
        """
        buffers, room = self._buffers(), self._room()
        reading = Reading(self._meter.has_stepped(buffers), None if room is None else (room,))
        self._meter.note_versions(buffers)
        agreed = agree(self._world, reading)
        if agreed is not None:
            self._plan(_frozen(self._units()), agreed.rooms[0])

    # -- a plan -------------------------------------------------------------------------------------------------

    def _plan(self, units: Sequence[Sequence[ShardedBuffer]], room: int) -> None:
        """Choose the flat buffers that stay unsharded between steps: in execution order, each group that still fits.

        Collective: every rank must call it. The first groups matter most, because at the start of a forward there is
        hardly any computation to overlap with their all-gathers.

        units: groups of flat buffers with only frozen parameters: first, for each buffer of parameters outside blocks,
            a group with this buffer; then, for each block in execution order, a group with the block's buffers.
        room: the bytes that the chosen buffers may take in total.
        """
        numbers, left = [], room
        for number, unit in enumerate(units):
            if 0 < _nbytes([unit]) <= left:
                numbers.append(number)
                left -= _nbytes([unit])
        # Rank 0 decides for all: a deleted block may have been garbage-collected on one rank and not yet on another.
        chosen = [units[number] for number in self._world.control.broadcast_object(numbers)]
        units = [unit for unit in units if unit]
        self._chosen = [weakref.ref(buffer) for unit in chosen for buffer in unit]
        self._planned, self._peak = True, None
        self._spare = max(0, left) + self._meter.memory.usable() // _TOLERANCE
        if self._world.rank == 0:
            rows = [
                (len(chosen), "stay unsharded between steps", _nbytes(chosen)),
                (len(units) - len(chosen), "are all-gathered at each use", _nbytes(units) - _nbytes(chosen)),
            ]
            lines = [f"of {len(units)} blocks and parameter groups outside them, with {room / _GIB:.2f} GiB available:"]
            lines += [f"  {count:4d} {what:30} {nbytes / _GIB:8.2f} GiB" for count, what, nbytes in rows]
            _log.info("keep_frozen='auto': %s", "\n".join(lines))

    def _keep(self) -> None:
        """Make the chosen flat buffers resident: from their next all-gather on, they stay unsharded between steps."""
        if not self._keeping:
            self._keeping = True
            for buffer in self._kept():
                buffer.resident = True

    def reshard(self) -> None:
        """Free the full buffers that were kept unsharded between steps, because a forward may need their memory.

        Called at the start of a forward without gradients, and of a training forward whose memory is measured. The next
        training forward may make the same buffers resident (unsharded between steps) again.

        If the forward runs inside the forward of a block of another model, the full buffers are not freed at once. But
        they are no longer resident, so each of them is freed after its next use.
        """
        for buffer in self._kept():
            buffer.resident = False
            if self._schedule.inside.depth <= 1:
                buffer.reshard()
        self._keeping = False


def _frozen(units: Sequence[Sequence[ShardedBuffer]]) -> list[list[ShardedBuffer]]:
    """Return, for each group in `units`, its flat buffers in which no parameter is trainable."""
    return [[buffer for buffer in unit if not buffer.gradient.trainable] for unit in units]


def _nbytes(units: Sequence[Sequence[ShardedBuffer]]) -> int:
    return sum(buffer.full_nbytes for unit in units for buffer in unit)
