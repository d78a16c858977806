"""use_checkpoint="auto": activations are kept, and blocks left whole, as far as memory allows."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.world import World
from .auto import Block, Measure, Shapes, Share
from .memory import DeviceMemory, Memory
from .plan import make_plan
from .policy import Fixed, Recomputation, UseCheckpoint
from .random_state import RandomState

_log = logging.getLogger("hf_bmtrain")


@dataclass(frozen=True)
class _Reading:
    """One rank's memory when a plan is made. stepped: the optimizer has its state. rooms: see `make_plan`."""

    stepped: bool
    forward_room: int
    backward_room: int
    activations: list[int]


class Planner:
    """Of all blocks of a world with use_checkpoint="auto": measures a step, plans, and measures again.

    A pass is what lies between the ends of two backwards. In a pass that is measured all blocks are recomputed; what
    autograd saves in them is counted; and the most that is allocated is read (for which the allocator's peak is
    reset), apart for the stretches from a block's recomputation to the next block's backward, where a block's
    activations are there in any case, and for all others. Once the optimizer has made its first step, the ranks agree
    on a plan: by the largest activations and the least memory of any. A plan holds for inputs up to those measured; a
    forward on larger ones, and the rest of its pass, is recomputed and measured, and before the next pass that rank
    plans again. So it does when more is allocated than before as a pass begins. Which blocks are recomputed is a
    rank's own matter, since it changes no collective; which stay whole is not, and stays as agreed.
    """

    def __init__(self, world: World, memory: Memory) -> None:
        self._world, self.memory = world, memory
        self._shares: list[weakref.ref[Share]] = []  # in the order of their first forwards
        self._fresh: dict[tuple[Share, Shapes], Measure] = {}
        self._backwards = -1
        self._began = self._forward = self._backward = self._whole = self._lost = 0
        self._versions: list[int] = []
        self._planned_for: int | None = None
        self._recomputed = False
        self._stale = True
        self.measuring = False

    @property
    def in_backward(self) -> bool:
        return self._world.schedule.in_backward

    @property
    def outlived(self) -> bool:
        """Whether the blocks that were planned for are all gone."""
        return bool(self._shares) and not self._present()

    def _present(self) -> list[Share]:
        return [share for share in (reference() for reference in self._shares) if share is not None]

    # -- a pass -------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """A training forward of some block begins."""
        if self._world.schedule.backwards != self._backwards and not self.in_backward:
            self._backwards = self._world.schedule.backwards
            self._begin_pass(self._present())

    def _begin_pass(self, shares: list[Share]) -> None:
        for share in shares:
            for buffer in share.block.buffers:
                buffer.gradient.free_if_unused()
        self._began = self.memory.allocated()
        self._fresh, self.measuring = {}, False
        if self._planned_for is None:
            if not shares or not self._agree(shares):
                self.measure()
        elif self._stale or self._began > self._planned_for:
            self._plan_alone(shares)

    def measure(self) -> None:
        """From here on all blocks of this pass are recomputed and measured."""
        if not self.measuring:
            self.measuring, self._stale, self._recomputed = True, True, False
            self.memory.reset_peak()

    def note(self, share: Share, measure: Measure) -> None:
        key = share, measure.shapes
        self._fresh[key] = measure.or_more(self._fresh.get(key, measure))

    def before_backward(self) -> None:
        self._turn(recomputed=False)
        self._world.schedule.join_backward(self)

    def before_recomputation(self) -> None:
        self._turn(recomputed=True)

    def _turn(self, recomputed: bool) -> None:
        """A stretch of the pass is over. recomputed: in the next one a block's activations are there."""
        taken = self.memory.peak() - self._began
        if self._recomputed:
            self._backward = max(self._backward, taken)
        else:
            self._forward = max(self._forward, taken)
        self._recomputed = recomputed
        self.memory.reset_peak()

    def flush_backward(self) -> None:
        """The end of a backward that was measured: what the forward has counted holds now."""
        self._turn(recomputed=False)
        known = self._present()
        for (share, _), measure in self._fresh.items():
            share.learn(measure)
            if share not in known:
                known.append(share)
        self._shares, self._fresh = [weakref.ref(share) for share in known], {}
        self._versions = _versions(known)

    def abandon_backward(self) -> None:
        self._fresh = {}

    # -- out of memory ------------------------------------------------------------------------------------------

    def remember_draws(self) -> RandomState:
        return RandomState(self._world.device)

    def take_back(self, share: Share) -> None:
        """The plan was wrong: `share` and those after it recompute, and so much less is given from now on."""
        shares = self._present()
        later = [other for other in shares[shares.index(share) :] if other.kept]
        self._lost += sum(other.nbytes for other in later)
        for other in later:
            other.kept = False
        self._stale = True
        _log.warning(
            "rank %d: out of memory in a block that was to keep its activations; it and %d later blocks recompute, and "
            "%.2f GiB less are planned with from now on",
            self._world.rank, len(later) - 1, self._lost / 2**30,
        )  # fmt: skip

    # -- a plan -------------------------------------------------------------------------------------------------

    def _read(self, shares: Sequence[Share]) -> _Reading:
        versions = _versions(shares)
        free = self.memory.usable() - max(self._began, self._planned_for or 0) - self._lost
        activations = [share.nbytes for share in shares]
        stepped = not versions or versions != self._versions
        return _Reading(stepped, free - self._forward, free - self._backward, activations)

    def _agree(self, shares: Sequence[Share]) -> bool:
        """The first plan, the same on every rank, once one has stepped its optimizer. Collective."""
        readings = self._world.gather_objects(self._read(shares))
        if not any(reading.stepped for reading in readings):
            return False
        activations = [max(sizes) for sizes in zip(*(reading.activations for reading in readings), strict=True)]
        parameters = [share.parameters for share in shares]
        forward_room = min(reading.forward_room for reading in readings)
        backward_room = min(reading.backward_room for reading in readings)
        plan = make_plan(activations, parameters, forward_room, backward_room)
        for share, kept, whole in zip(shares, plan.kept, plan.whole):
            share.kept = kept
            share.block.zero_level = 2 if whole else share.block.zero_level
        self._planned_for, self._stale = self._began, False
        self._whole = sum(size for size, whole in zip(parameters, plan.whole) if whole)
        if self._world.rank == 0:
            _log.info("use_checkpoint='auto': %s", plan.table(activations, parameters, forward_room))
        return True

    def _plan_alone(self, shares: Sequence[Share]) -> None:
        """This rank's own plan for what is recomputed."""
        reading = self._read(shares)
        forward_room, backward_room = reading.forward_room - self._whole, reading.backward_room - self._whole
        plan = make_plan(reading.activations, [0] * len(shares), forward_room, backward_room)
        if [share.kept for share in shares] != list(plan.kept):
            told = plan.table(reading.activations, [0] * len(shares), forward_room)
            _log.info("rank %d: use_checkpoint='auto', again: %s", self._world.rank, told)
        for share, kept in zip(shares, plan.kept):
            share.kept = kept
        self._planned_for, self._stale = max(self._began, self._planned_for or 0), False


def _versions(shares: Sequence[Share]) -> list[int]:
    """Of the weights that an optimizer changes."""
    return [buffer.version for share in shares for buffer in share.block.buffers if buffer.gradient.trainable]


def choose(use_checkpoint: UseCheckpoint, block: Block, world: World) -> Recomputation:
    """What `use_checkpoint` means for `block`. ValueError for what means nothing."""
    if use_checkpoint is True or use_checkpoint is False:
        return Fixed(use_checkpoint)
    if use_checkpoint != "auto":
        raise ValueError(f"use_checkpoint must be True, False or 'auto', not {use_checkpoint!r}")
    step = world.schedule
    if step.planner is None and world.device.type == "cpu":
        _say_unknown()
        return Fixed(False)
    if step.planner is None:
        step.planner = Planner(world, DeviceMemory(world.device))
    elif step.planner.outlived:
        step.planner = Planner(world, step.planner.memory)
    return Share(step.planner, block)


@functools.cache
def _say_unknown() -> None:
    _log.info("use_checkpoint='auto' recomputes nothing on the CPU: the memory that is left is only known of GPUs")
