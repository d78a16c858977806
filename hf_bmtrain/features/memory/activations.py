"""use_checkpoint="auto": keep activations, and keep blocks whole, within the memory of the device."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import pytree, top_saved_tensors_hooks
from ...engine.blocks.recompute import Recompute
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer
from .meter import SavedBytes
from .plan import make_plan

_log = logging.getLogger("hf_bmtrain")
Shapes = tuple[torch.Size, ...]


class Block(Protocol):
    """The attributes of a block's state that a plan reads and sets."""

    buffers: list[ShardedBuffer]
    zero_level: int


@dataclass(frozen=True)
class Measurement:
    """A forward of one block: the shapes of its inputs, the bytes it saved, the number of forwards pending then."""

    shapes: Shapes
    nbytes: int
    calls: int


class AutoCheckpoint(Recompute):
    """Recomputes a block or keeps its activations, according to the plan of `planner`.

    kept: whether the plan keeps the block's activations. calls: the most forwards measured ahead of one backward.

    A plan is valid for inputs that are in no dimension larger than those of one measured forward, since they need no
    more memory. Larger inputs start a measurement.
    """

    def __init__(self, planner: Planner, block: Block) -> None:
        self.planner, self.block = planner, weakref.proxy(block)  # the block owns this object
        self.kept = False
        self.calls = self._most = 0
        self._measured: list[Shapes] = []
        self._fitting: set[Shapes] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the block's activations: the most of one measured forward, times `calls`."""
        return self._most * self.calls

    @property
    def parameters(self) -> int:
        """Bytes of the whole parameters; 0 if they are not released between forward and backward.

        Also 0 if most of them are frozen and a later plan may keep them: that takes as much, and saves one more gather.
        """
        if self.block.zero_level == 2:
            return 0
        released = [b for b in self.block.buffers if not b.is_resident]
        trained = sum(b.full_nbytes for b in released if b.gradient.trainable)
        total = sum(b.full_nbytes for b in released)
        return 0 if self.planner.keeps_frozen and total > 2 * trained else total

    @property
    def keeps_activations(self) -> bool:
        return self.kept

    def first_forward(self, args: tuple, kwargs: dict[str, Any], pending: int) -> AbstractContextManager[None] | None:
        return self._count_saved(args, kwargs, pending) if self.planner.measuring else None

    def backward_begins(self, recomputed: bool) -> None:
        if self.planner.measuring:
            self.planner.mark(recomputed)

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the training forward that is about to begin is recomputed in backward.

        Call it before the block is gathered. Collective in the first forward of a pass, until there is a plan.
        pending: the number of the block's forwards whose backward has not run.

        It is also True under saved-tensor hooks (of a checkpoint or of offloading around the block), which determine
        themselves which tensors are kept.
        """
        self.planner.begin_forward()
        if self.planner.in_backward or top_saved_tensors_hooks(True) is not None:
            return True
        if not self._fits(shapes_of(args, kwargs)):
            self.planner.measure()
        return self.planner.measuring or not self.kept or pending >= self.calls

    def _fits(self, shapes: Shapes) -> bool:
        if shapes not in self._fitting and any(is_within(shapes, measured) for measured in self._measured):
            self._fitting.add(shapes)
        return shapes in self._fitting

    @contextmanager
    def _count_saved(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Iterator[None]:
        """Count, inside the context, the bytes that autograd saves in the block's first forward."""
        if self.planner.in_backward:
            yield
            return
        held = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        held += [view for buffer in self.block.buffers for view in buffer.storage.memory().gathered]
        saved = SavedBytes(held)
        with saved.counting():
            yield
        self.planner.add(self, Measurement(shapes_of(args, kwargs), saved.nbytes, pending + 1))

    def learn(self, measurement: Measurement) -> None:
        """Add a measurement whose backward has ended."""
        self._most, self.calls = max(self._most, measurement.nbytes), max(self.calls, measurement.calls)
        self._measured = [shapes for shapes in self._measured if not is_within(shapes, measurement.shapes)]
        self._measured.append(measurement.shapes)
        self._fitting.add(measurement.shapes)


def shapes_of(args: tuple, kwargs: dict[str, Any]) -> Shapes:
    """Return the shapes of the tensors among the arguments or, if there are none, of those nested in them."""
    shapes = tuple(value.shape for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    if shapes:
        return shapes
    return tuple(leaf.shape for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


def is_within(shapes: Shapes, measured: Shapes) -> bool:
    """Return whether no tensor is larger in any dimension than the measured one at its position."""
    return [len(shape) for shape in shapes] == [len(shape) for shape in measured] and all(
        size <= most for shape, other in zip(shapes, measured) for size, most in zip(shape, other)
    )


@dataclass(frozen=True)
class _Reading:
    """One rank's memory when a plan is made. stepped: whether the optimizer has its state. rooms: see `make_plan`."""

    stepped: bool
    forward_room: int
    backward_room: int
    activations: list[int]


class Planner:
    """Measures a pass and makes the plan of all blocks with use_checkpoint="auto" of a world, repeatedly if needed.

    A pass runs from the end of one backward to the end of the next. A measured pass recomputes every block, counts the
    bytes autograd saves per block, and records two memory peaks (for which it resets the allocator's): one while a
    block's recomputed activations are alive, from its recomputation to the next block's backward, one for the rest of
    the pass. After the first step of an optimizer the ranks agree on a plan, by the largest activations and the least
    memory of any rank.

    A forward on inputs larger than measured is recomputed, and measured with the rest of its pass. After that, and
    when less memory is free at the beginning of a pass than the plan was made for, a rank plans again by itself: the
    choice of blocks that are recomputed changes no collective. The choice of blocks that stay whole does, and is kept.

    left: the bytes that the last plan left to frozen buffers, those that stay whole already included; None before a
    plan, and while a measurement is not used yet. Recomputation comes first, because a block that is not recomputed
    saves a forward's computation, while a frozen block that stays whole saves two gathers, which run beside it.
    """

    def __init__(self, world: World, memory: DeviceMemory) -> None:
        self._world, self.memory = world, memory
        self._blocks: list[weakref.ref[AutoCheckpoint]] = []  # in the order of their first forwards
        self._fresh: list[tuple[AutoCheckpoint, Measurement]] = []
        self._backwards = -1
        self._began = 0  # bytes allocated at the beginning of the pass
        self._free: int | None = None  # the least bytes free at the beginning of a planned pass; None before a plan
        self._forward = self._backward = 0  # the two peaks, above `_began`
        self._recomputed = False  # whether a block's recomputed activations are alive
        self._whole = 0  # bytes of the blocks that stay whole
        self._versions: list[int] = []
        self._stale = True
        self._left = 0
        self.measuring = False

    @property
    def left(self) -> int | None:
        return None if self._stale or self._free is None else self._left

    @property
    def keeps_frozen(self) -> bool:
        """True if frozen buffers may be chosen to stay whole from step to step."""
        return self._world.schedule.kept_bytes is not None

    @property
    def _kept_bytes(self) -> int:
        return self._world.schedule.kept_bytes or 0

    @property
    def in_backward(self) -> bool:
        return self._world.schedule.in_backward

    @property
    def outlived(self) -> bool:
        """True if all blocks of the plan have been freed."""
        return bool(self._blocks) and not self.present()

    def present(self) -> list[AutoCheckpoint]:
        """Return the policies of the blocks that exist, in the order of their first forwards."""
        return [block for block in (reference() for reference in self._blocks) if block is not None]

    # -- a pass -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Begin a pass if this training forward of a block is the first since the last backward."""
        if self._world.schedule.backwards != self._backwards and not self.in_backward:
            self._backwards = self._world.schedule.backwards
            self._begin_pass(self.present())

    def _begin_pass(self, blocks: list[AutoCheckpoint]) -> None:
        for block in blocks:
            for buffer in block.block.buffers:
                buffer.gradient.free_if_unused()
        self._began = self.memory.allocated()
        self._fresh, self.measuring = [], False
        if self._free is None:
            if not blocks or not self._agree(blocks):
                self.measure()
            return
        free = self._read_free()
        if self._stale or free < self._free:
            self._free = min(self._free, free)  # memory that is free between two micro-batches may be needed later
            self._plan_alone(blocks, self._free)

    def measure(self) -> None:
        """Recompute and measure all blocks from here to the end of the pass."""
        if not self.measuring:
            self.measuring, self._stale, self._recomputed = True, True, False
            self.memory.reset_peak()

    def add(self, block: AutoCheckpoint, measurement: Measurement) -> None:
        """Add the measurement of a forward, which is used after its backward has ended."""
        self._fresh.append((block, measurement))

    def mark(self, recomputed: bool) -> None:
        """Attribute the peak since the last mark. recomputed: True before a recomputation, False before a backward."""
        self._take_peak(recomputed)
        self._world.schedule.join_backward(self)

    def _take_peak(self, recomputed: bool) -> None:
        taken = self.memory.peak() - self._began
        if self._recomputed:
            self._backward = max(self._backward, taken)
        else:
            self._forward = max(self._forward, taken)
        self._recomputed = recomputed
        self.memory.reset_peak()

    def finish_backward(self) -> None:
        """Use the measurements of the pass at the end of a measured backward."""
        self._take_peak(recomputed=False)
        known = self.present()
        for block, measurement in self._fresh:
            block.learn(measurement)
            if block not in known:
                known.append(block)
        self._blocks, self._fresh = [weakref.ref(block) for block in known], []
        self._versions = _versions(known)

    def abandon_backward(self) -> None:
        self._fresh = []

    # -- a plan -------------------------------------------------------------------------------------------------

    def _read_free(self) -> int:
        """Return the bytes free at the beginning of the pass, without the frozen buffers that stay whole."""
        return self.memory.usable() - self._began + self._kept_bytes

    def _read(self, blocks: Sequence[AutoCheckpoint], free: int) -> _Reading:
        """Return the reading with `free` bytes, those of frozen buffers that stay whole included."""
        versions, free = _versions(blocks), free - self._kept_bytes
        stepped = not versions or versions != self._versions
        return _Reading(stepped, free - self._forward, free - self._backward, [block.nbytes for block in blocks])

    def _agree(self, blocks: Sequence[AutoCheckpoint]) -> bool:
        """Make the first plan, the same on every rank. Collective.

        Return False, without a plan, if no rank has stepped its optimizer, whose state is not allocated then.
        """
        free = self._read_free()
        readings = self._world.gather_objects(self._read(blocks, free))
        if not any(reading.stepped for reading in readings):
            return False
        activations = [max(sizes) for sizes in zip(*(reading.activations for reading in readings), strict=True)]
        parameters = [block.parameters for block in blocks]
        forward_room = min(reading.forward_room for reading in readings)
        backward_room = min(reading.backward_room for reading in readings)
        plan = make_plan(activations, parameters, forward_room, backward_room)
        for block, kept, whole in zip(blocks, plan.kept, plan.whole):
            block.kept = kept
            block.block.zero_level = 2 if whole else block.block.zero_level
        self._free, self._stale, self._left = free, False, plan.left + self._kept_bytes
        self._whole = sum(size for size, whole in zip(parameters, plan.whole) if whole)
        if self._world.rank == 0:
            _log.info("use_checkpoint='auto': %s", plan.table(activations, parameters, forward_room))
        return True

    def _plan_alone(self, blocks: Sequence[AutoCheckpoint], free: int) -> None:
        """Make a new choice of the blocks that this rank recomputes."""
        reading = self._read(blocks, free - self._whole)
        no_parameters = [0] * len(blocks)
        plan = make_plan(reading.activations, no_parameters, reading.forward_room, reading.backward_room)
        if [block.kept for block in blocks] != list(plan.kept):
            table = plan.table(reading.activations, no_parameters, reading.forward_room)
            _log.info("rank %d: use_checkpoint='auto', again: %s", self._world.rank, table)
        for block, kept in zip(blocks, plan.kept):
            block.kept = kept
        self._stale, self._left = False, plan.left + self._kept_bytes


def _versions(blocks: Sequence[AutoCheckpoint]) -> list[int]:
    """Return the versions of the shards that an optimizer updates."""
    return [buffer.version for block in blocks for buffer in block.block.buffers if buffer.gradient.trainable]
