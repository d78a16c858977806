"""The option use_checkpoint="auto": recompute only as many blocks as memory requires.

If no block has to be recomputed and memory is left, some blocks stay unsharded from their forward to their backward.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...engine.base.torch_internals import inside_hooks, modes_see_compiled, pytree
from ...engine.blocks.recompute import InputStore, Keeps, Recompute, keep_nothing
from ...engine.sharding.buffer import ShardedBuffer
from .attention import AttentionMeter, Contexts, is_kept, keep_attention
from .meter import (
    MeasuredInputs,
    Meter,
    Reading,
    SavedBytes,
    Shapes,
    Stopwatch,
    agree,
    combine,
    shapes_of,
)  # fmt: skip
from .plan import Sizes, make_plan

if TYPE_CHECKING:
    from . import MemoryPlanner

_log = logging.getLogger("hf_bmtrain")
_OCCASION = "a step with use_checkpoint='auto'"


class Block(Protocol):
    """The attributes of `BlockState` (the state of one block, a transformer layer) that this file uses.

    Attributes:
        buffers: the flat buffers of the block's parameters.
        zero_level: 3 reshards the block between its forward and its backward; 2 keeps it unsharded between them.
        inputs: the store that keeps the inputs of the block in host memory until backward; None if they stay on the
            device.
    """

    buffers: list[ShardedBuffer]
    zero_level: int
    inputs: InputStore | None


@dataclass(frozen=True)
class Measurement:
    """The measurements of one forward of one block.

    Attributes:
        shapes: the shapes of the forward's inputs.
        nbytes: the bytes that autograd saved in the forward for backward.
        calls: how many forwards of the block were waiting for their backward when this forward ended, including this
            one.
        attention: the bytes of the outputs of attention in the forward.
        watch: the stopwatch that has measured the time of the forward.
        meter: the meter that has measured the time of attention in the forward.
    """

    shapes: Shapes
    nbytes: int
    calls: int
    attention: int
    watch: Stopwatch
    meter: AttentionMeter


class AutoCheckpoint(Recompute):
    """Decides whether a block with use_checkpoint="auto" is recomputed, according to the plan in `activations`.

    For a block that is recomputed, the plan may still keep the outputs of attention, so that attention is not
    recomputed.

    The plan is valid for inputs that are, in every dimension, at most as large as the inputs of a measured forward,
    because such inputs need no more memory. Larger inputs start a new measurement.

    Args:
        activations: the plan for all blocks, to which the block's measurements are added.
        block: the `BlockState` of the block.
        number: the index of this block among all blocks of the plan, in order of creation; the same on every rank.

    Attributes:
        kept: whether the block keeps its activations instead of being recomputed.
        attention: whether the block is recomputed but keeps the outputs of attention.
        calls: the largest number of the block's measured forwards that were waiting for their backward at once.
    """

    def __init__(self, activations: Activations, block: Block, number: int = 0) -> None:
        self.activations, self.block = activations, weakref.proxy(block)  # weak, because the block owns this object
        self.number = number
        self.kept = self.attention = False
        self.calls = self._most = self._attention = 0
        self._measured: Measurement | None = None  # the last measurement of a forward of this block
        self._inputs = MeasuredInputs()

    @property
    def nbytes(self) -> int:
        """The bytes of the block's activations when backward begins.

        Computed as the largest number of bytes that autograd has saved in one measured forward of the block, times the
        largest number of the block's forwards that were waiting for their backward at once (`calls`).
        """
        return self._most * self.calls

    @property
    def attention_nbytes(self) -> int:
        """The bytes that the outputs of attention take among the block's activations when backward begins.

        It is 0 if these outputs cannot be kept without the other activations.
        """
        return self._attention * self.calls

    def prefers_attention(self) -> bool:
        """Return whether keeping only the outputs of attention saves more time per byte than keeping all activations.

        Called when a plan is made, for each block with `attention_nbytes` above 0. On each rank, the majority of these
        blocks decides for all blocks. The host waits for the GPU, to read the measured times.

        Returns False if no attention was measured, and on the CPU and the meta device, where no times are measured.
        """
        last = self._measured
        if last is None or not last.attention:
            return False
        return last.meter.milliseconds() * last.nbytes > last.watch.milliseconds() * last.attention

    @property
    def parameters(self) -> int:
        """The bytes that the block's full parameters take if it stays unsharded from its forward to its backward.

        Parameters that are kept unsharded between steps do not count. The result is 0 if the plan must not choose this
        block to stay unsharded, for one of two reasons:

        * The block's ZeRO level is 2, so the block stays unsharded anyway.
        * More than half of the bytes are frozen parameters, and at least one model has keep_frozen="auto". That
          setting may use the memory better (see `Activations.beside_residents`).
        """
        if self.block.zero_level == 2:
            return 0
        released = [b for b in self.block.buffers if not b.is_resident]
        trained = sum(b.full_nbytes for b in released if b.gradient.trainable)
        total = sum(b.full_nbytes for b in released)
        return 0 if self.activations.beside_residents and total > 2 * trained else total

    @property
    def keeps_activations(self) -> bool:
        return self.kept

    def contexts(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Contexts | None:
        if self.activations.measuring:
            return self._measure(args, kwargs, pending), nullcontext()
        return keep_attention() if self._keeps_attention(pending) else None

    def kept_in_graph(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Keeps | None:
        if self.activations.measuring:
            return None  # use torch's checkpoint: in a compiled graph that recomputes, saved bytes cannot be counted
        return is_kept if self._keeps_attention(pending) else keep_nothing

    def _keeps_attention(self, pending: int) -> bool:
        """Return whether the forward that is starting keeps the outputs of attention for its recomputation in backward.

        pending: the number of earlier forwards of the block that are waiting for their backward.
        """
        return self.attention and pending < self.calls and not (self.activations.in_backward or inside_hooks())

    def backward_begins(self, recomputed: bool) -> None:
        if self.activations.measuring:
            self.activations.mark(recomputed)

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the block's training forward that is about to begin is recomputed in backward.

        The plan `activations` determines the result. Call this method before the block's all-gather.

        Returns True inside saved-tensor hooks (such as those of torch's checkpoint, or of offloading, around the
        block), because these hooks decide which tensors are kept. Also returns True inside a backward.

        The first call after each backward, whatever its block, may make a new plan, unless
        `MemoryPlanner.before_forward` has already made it. This first call is collective (every rank must make it) if
        the ranks exchange measurements for the plan:

        * Before the first plan, the ranks exchange measurements if a backward with measured blocks has ended.
        * After the first plan, they exchange measurements only if they make every plan together
          (`Activations.together`).
        * The ranks of an uneven model, which may enter different blocks, never exchange measurements. Each rank plans
          alone.

        Args:
            args: the positional arguments of the forward.
            kwargs: the keyword arguments of the forward.
            pending: the number of earlier forwards of the block that are waiting for their backward.
        """
        self.activations.begin_forward()
        if self.activations.in_backward or inside_hooks():
            return True
        if not self.activations.together and not self._inputs.cover(shapes_of(args, kwargs)):
            self.activations.measure()
        return self.activations.measuring or not self.kept or pending >= self.calls

    @contextmanager
    def _measure(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Iterator[None]:
        """Return a context that measures the block's forward, and adds the Measurement to `activations`.

        A forward inside a backward is not measured, because it is a recomputation by torch's checkpoint around the
        block.

        args, kwargs: the arguments of the forward.
        pending: the number of earlier forwards of the block that are waiting for their backward.
        """
        if self.activations.in_backward:
            yield
            return
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        views = [view for buffer in self.block.buffers for view in buffer.storage.memory().gathered]
        # SavedBytes counts the bytes that the device needs only because the block keeps its activations. Inputs
        # (`held`) and full parameters (`views`) do not count, because a recomputed block needs them, too. There is one
        # exception: with offload_activations (`block.inputs` is not None), a recomputed block keeps the inputs that
        # require a gradient (usually the hidden states) in host memory. So these inputs count.
        held = [tensor for tensor in given if self.block.inputs is None or not tensor.requires_grad]
        saved, meter = SavedBytes([*held, *views]), AttentionMeter()
        device = next((tensor.device for tensor in (*given, *views)), torch.device("cpu"))
        with saved.counting(), Stopwatch(device) as watch, meter if modes_see_compiled else nullcontext():
            yield
        shapes = shapes_of(args, kwargs)
        self.activations.add(self, Measurement(shapes, saved.nbytes, pending + 1, meter.nbytes, watch, meter))

    def learn(self, measurement: Measurement) -> None:
        """Store the measurement of one forward of the block, for the next plan of which blocks are recomputed.

        Called at the end of the backward that follows the forward. Updates three maxima over all measured forwards: the
        bytes of the block's activations, the bytes of its outputs of attention, and the number of forwards that wait
        for their backward (`calls`). Also updates the inputs for which the plan is valid.
        """
        self._most, self.calls = max(self._most, measurement.nbytes), max(self.calls, measurement.calls)
        self._attention, self._measured = max(self._attention, measurement.attention), measurement
        self._inputs.add(measurement.shapes)


class Activations:
    """The plan for all blocks with use_checkpoint="auto": which of them are recomputed, and which stay unsharded.

    A pass lasts from the first training forward (of a model, or of a block outside a model) after a backward to the end
    of the next backward. All passes before the first plan are measured. Later, a forward with larger inputs than all
    measured ones starts a measurement, which lasts until the end of its pass. While memory is measured, every block is
    recomputed, and two peaks of allocated memory are recorded:

    * the backward's: the peak while recomputed activations of a block are alive;
    * the forward's: the peak in the rest of the pass, which includes the remaining parts of the backward.

    The ranks make the first plan together, after an optimizer's first step, in which it allocates its state. They
    assume the largest activations and the least free memory of any rank. Each rank makes later plans by itself, if its
    inputs have grown, or if less memory is free than before. Later plans change only which blocks are recomputed, not
    which stay unsharded. The ranks may then recompute different blocks: usually, the backward of a block calls the same
    collectives with and without recomputation.

    There are two exceptions:

    * In an uneven model, whose ranks may enter different blocks, each rank makes even the first plan by itself.
    * If layers call collectives in their forwards (`together`), all ranks make every plan together.

    Args:
        planner: the owner of this plan and of those for keep_frozen="auto". Its attribute `memory` reads the device's
            memory.

    Attributes:
        measuring: whether the rest of this pass is measured.
        left: how many bytes the parameters that keep_frozen="auto" keeps unsharded between steps may take in total,
            according to the last plan. None before the first plan, and from the start of a measurement to the next
            plan.
        numbers: an iterator over 0, 1, 2 and so on, from which each new block takes its `AutoCheckpoint.number`.
    """

    def __init__(self, planner: MemoryPlanner) -> None:
        self._planner, self._schedule = planner, planner.world.schedule
        self._meter = Meter(planner.memory, lambda: planner.gathered_bytes)
        self._blocks: list[weakref.ref[AutoCheckpoint]] = []  # all measured blocks, in the order of first forwards
        # A pass lasts from the first training forward after a backward to the end of the next backward.
        self._fresh: list[tuple[AutoCheckpoint, Measurement]] = []  # the measurements of blocks in this pass
        self._inputs = MeasuredInputs()  # the model inputs of all measured passes; used only if `together` is True
        self._seen: list[Shapes] = []  # the shapes of the model inputs in this pass; used only if `together` is True
        # The smallest number of bytes that were free at the start of a pass, over all passes since the first plan. None
        # before the first plan.
        self._free: int | None = None
        # The memory that a pass takes at its two peaks, in the forward and in the backward: the bytes allocated at the
        # peak minus those allocated at the start of the pass. These are the maxima over all measured passes.
        self._forward = self._backward = 0
        self._recomputed = False  # whether the recomputed activations of a block are in memory now
        self._unsharded = 0  # bytes of the full parameters of blocks that the plan keeps unsharded until their backward
        self._stale = True  # whether there is no plan yet, or something was measured after the last plan
        self._left = 0  # the bytes for keep_frozen="auto" in the last plan (see `left` in the class docstring)
        self.measuring = False
        self.numbers = itertools.count()

    @property
    def left(self) -> int | None:
        # Return None while the plan is out of date, because it is then not known how much memory remains. Otherwise
        # return the memory that remains after the activations are planned. Activations come first, because keeping them
        # saves more time: a forward need not be recomputed. Keeping a frozen block unsharded between steps saves only
        # two all-gathers, which overlap with computation anyway.
        return None if self._stale or self._free is None else self._left

    @property
    def beside_residents(self) -> bool:
        """True if any model has keep_frozen="auto", so that its frozen parameters may stay unsharded between steps.

        If so, the plan for use_checkpoint="auto" does not choose blocks whose parameters are mostly frozen to stay
        unsharded from their forward to their backward. keep_frozen="auto" can use this memory better: keeping frozen
        parameters unsharded between steps takes the same memory, and saves two all-gathers per step instead of one.
        """
        return bool(self._planner.residents)

    @property
    def together(self) -> bool:
        """True if all ranks choose together, for every plan, which blocks are recomputed.

        This is the case if layers call collectives in their own forwards, because all ranks must then recompute the
        same layers. Otherwise, the ranks choose together only for the first plan, and each rank makes later plans by
        itself. (Each rank of an uneven model makes even the first plan by itself.)
        """
        return self._schedule.collective_layers

    @property
    def in_backward(self) -> bool:
        return self._schedule.in_backward

    @property
    def has_measured(self) -> bool:
        """Whether the memory of any block has been measured so far, even if the block has been deleted since."""
        return bool(self._blocks)

    @property
    def outlived(self) -> bool:
        """True if all blocks that were measured for this plan have been deleted, so that the plan is no longer needed.

        False before any block has been measured.
        """
        return bool(self._blocks) and not self._present()

    def _present(self) -> list[AutoCheckpoint]:
        """Return the AutoCheckpoint of each measured block that has not been deleted, in order of first forwards."""
        return [block for block in (reference() for reference in self._blocks) if block is not None]

    # -- a pass -------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Plan which blocks are recomputed, if this is the first training forward since the last backward.

        Call it at the start of each training forward. A plan that is still valid is kept. The first plan needs measured
        blocks, and an optimizer that has stepped. While one of these is missing, begin to measure memory instead.

        The ranks may exchange measurements. `AutoCheckpoint.recomputes` says when this call is collective.
        """
        if not self.in_backward and self._meter.enters_pass(self._schedule.backwards):
            self._begin_pass(self._present())

    def begin_together(self, shapes: Shapes) -> None:
        """Do what `begin_forward` does. Also begin a measurement if the model's inputs on any rank have become larger.

        Called before each training forward of a model, instead of `begin_forward`, if the ranks decide together which
        blocks are recomputed (`together`). If the inputs on any rank are larger than those of all measured forwards,
        all ranks begin the measurement (`measure`). Does nothing inside a backward.

        Collective: every rank must call it.

        shapes: the shapes of the model's inputs.
        """
        if self.in_backward:
            return
        self.begin_forward()
        self._seen.append(shapes)
        if self._planner.world.control.any(not self._inputs.cover(shapes), _OCCASION):
            self.measure()

    def _begin_pass(self, blocks: list[AutoCheckpoint]) -> None:
        """Begin a pass, which ends with the next backward. If necessary, plan which blocks are recomputed in this pass.

        While it is too early for the first plan, the memory that the pass takes is measured instead.

        blocks: the blocks measured so far.
        """
        self._meter.begin(_buffers(blocks))
        self._fresh, self._seen, self.measuring = [], [], False
        if self._free is None:
            # Test `_blocks` instead of `blocks`, from which deleted blocks are missing. The ranks may delete a model at
            # different times, but `_agree` is collective: all ranks must call it, or none.
            if not self._blocks or not self._agree(blocks):
                self.measure()
            return
        free = self._read_free()
        replan = self._stale or free < self._free
        if self.together:  # the ranks may have different `free`, but if one rank plans again, all ranks must
            replan = self._planner.world.control.any(replan, _OCCASION)
        self._free = min(self._free, free)  # memory that is free in this micro-batch may be needed in another one
        if replan:
            self._plan_again(blocks, self._free)

    def measure(self) -> None:
        """Begin a measurement: until the end of the next backward, recompute every block and measure peaks of memory.

        Called in a training forward if there is no plan yet of which blocks to recompute, or if the inputs are larger
        than all measured ones. The call itself is not collective.
        """
        if not self.measuring:
            self.measuring, self._stale, self._recomputed = True, True, False
            self._meter.memory.reset_peak()

    def add(self, block: AutoCheckpoint, measurement: Measurement) -> None:
        """Keep the measurement of a block's forward until the end of the next backward.

        `finish_backward` then passes it to `block` (`AutoCheckpoint.learn`), for the next plan of which blocks are
        recomputed.

        Args:
            block: the policy of the block whose forward was measured.
            measurement: the bytes that autograd saved in the forward, its time, and similar numbers.
        """
        self._fresh.append((block, measurement))

    def mark(self, recomputed: bool) -> None:
        """Record the peak of allocated memory since the previous call (or since the measurement began), and reset it.

        While memory is measured, this is called twice for each block: first with `recomputed=False`, when the backward
        of the block begins, and then with `recomputed=True`, when the recomputation of the block's forward begins.

        * After a call with `recomputed=True`, the recomputed activations of a block are in memory until the next call
          or the end of the backward. The peak of this time is recorded as a peak of the backward.
        * At other times, no recomputed activations are in memory, as in the forward. The peak of such a time is
          recorded as a peak of the forward, even if the time is part of the backward.

        This method also makes the schedule call `MemoryPlanner.finish_backward` at the end of this backward.

        recomputed: True if a recomputation of a block begins now, False if the backward of a block begins.
        """
        self._take_peak(recomputed)
        self._schedule.join_backward(self._planner)

    def _take_peak(self, recomputed: bool) -> None:
        """Record the allocator's peak since the last call, and reset it.

        The peak is recorded as the backward's if a block's recomputed activations were alive since the last call, and
        otherwise as the forward's.

        recomputed: whether a block's recomputed activations are alive from now on.
        """
        taken = self._meter.taken()
        if self._recomputed:
            self._backward = max(self._backward, taken)
        else:
            self._forward = max(self._forward, taken)
        self._recomputed = recomputed
        self._meter.memory.reset_peak()

    def finish_backward(self) -> None:
        """Store the memory measurements of this backward, and of the forwards before it.

        The next plan of which blocks are recomputed uses them. Called at the end of the backward.
        """
        self._take_peak(recomputed=False)
        known = self._present()
        for block, measurement in self._fresh:
            block.learn(measurement)
            if block not in known:
                known.append(block)
        for shapes in self._seen:
            self._inputs.add(shapes)
        self._blocks, self._fresh = [weakref.ref(block) for block in known], []
        self._meter.note_versions(_buffers(known))

    def abandon_backward(self) -> None:
        """Discard the measurements of the blocks' forwards since the last backward that ended without an error.

        Called instead of `finish_backward` after a backward has raised an error. The inputs of these forwards then do
        not count as measured, because the peak of the complete backward is not known. Peaks that `mark` recorded before
        the error are kept: this much memory was needed, and a plan uses only the largest peak.
        """
        self._fresh, self._seen = [], []

    # -- a plan -------------------------------------------------------------------------------------------------

    def _read_free(self) -> int:
        """Return how many bytes were free at the first training forward after the last backward.

        Buffers that stay unsharded between steps count as free, because they can be resharded.
        """
        return self._meter.memory.usable() - self._meter.began

    def _reading(self, stepped: bool, free: int, blocks: Sequence[AutoCheckpoint]) -> Reading:
        """Return this rank's memory measurements, from which the ranks plan together which blocks are recomputed.

        The `rooms` of the returned Reading are two numbers: the bytes of activations that can be kept at the forward's
        peak, and at the backward's peak. Each number is `free`, minus the bytes of the buffers that keep_frozen="auto"
        keeps unsharded between steps, minus the bytes that are allocated from the start of the pass to the peak if
        every block is recomputed.

        stepped: whether an optimizer has stepped.
        free: the bytes that are free at the start of a pass, according to this rank's measurements.
        blocks: the measured blocks.
        """
        free -= self._planner.resident_bytes
        return Reading(
            stepped, (free - self._forward, free - self._backward), tuple(block.nbytes for block in blocks),
            tuple(block.attention_nbytes for block in blocks), _attention_first(blocks),
            tuple(block.number for block in blocks),
        )  # fmt: skip

    def _agree(self, blocks: Sequence[AutoCheckpoint]) -> bool:
        """Make the first plan of which blocks are recomputed, if an optimizer has stepped. Return whether it was made.

        Until an optimizer has stepped on at least one rank, it is too early for a plan, because the optimizer's state
        is not allocated yet. No plan is made either if there is no block that all ranks have measured.

        Collective: every rank must call it, and the plan is the same on every rank. Exception: in an uneven model, each
        rank calls this method and plans independently, because the ranks may enter different blocks.

        blocks: the measured blocks.
        """
        world, free = self._planner.world, self._read_free()
        mine = self._reading(self._meter.has_stepped(_buffers(blocks)), free, blocks)
        # Each rank of an uneven model plans alone, because the ranks may have entered and measured different blocks.
        agreed = agree(world, mine) if self._schedule.negotiated is None else combine([mine])
        if agreed is None or not agreed.blocks:
            return False
        blocks = _numbered(blocks, agreed.blocks)
        parameters = [block.parameters for block in blocks]
        sizes = Sizes(agreed.activations, agreed.attention, parameters, agreed.attention_first)
        plan = make_plan(sizes, *agreed.rooms)
        for block, kept, attention, full in zip(blocks, plan.kept, plan.attention, plan.full):
            block.kept, block.attention = kept, attention
            block.block.zero_level = 2 if full else block.block.zero_level
        self._free, self._stale, self._left = free, False, plan.left + self._planner.resident_bytes
        self._unsharded = sum(size for size, full in zip(parameters, plan.full) if full)
        if world.rank == 0:
            _log.info("use_checkpoint='auto': %s", plan.table(sizes, agreed.rooms[0]))
        return True

    def _plan_again(self, blocks: Sequence[AutoCheckpoint], free: int) -> None:
        """Choose again which blocks are recomputed: on this rank alone, or on all ranks if they plan together.

        blocks: the measured blocks.
        free: the number of bytes to plan with. It is the smallest number of bytes that were free when a pass began,
            over all passes since the first plan. A pass begins with the first training forward after a backward.
        """
        world = self._planner.world
        mine = self._reading(True, free - self._unsharded, blocks)
        agreed = agree(world, mine) if self.together else combine([mine])
        # `agreed` cannot be None here: every rank's Reading has stepped=True, and its `rooms` are not None.
        assert agreed is not None
        blocks = _numbered(blocks, agreed.blocks)
        sizes = Sizes(agreed.activations, agreed.attention, [0] * len(blocks), agreed.attention_first)
        plan = make_plan(sizes, *agreed.rooms)
        chosen = list(zip(plan.kept, plan.attention))
        if [(block.kept, block.attention) for block in blocks] != chosen and not (self.together and world.rank):
            _log.info(
                "rank %d: use_checkpoint='auto' has changed which blocks are recomputed, because inputs have "
                "become larger, or less memory is free: %s",
                world.rank, plan.table(sizes, agreed.rooms[0]),
            )  # fmt: skip
        for block, (kept, attention) in zip(blocks, chosen):
            block.kept, block.attention = kept, attention
        self._stale, self._left = False, plan.left + self._planner.resident_bytes


def _attention_first(blocks: Sequence[AutoCheckpoint]) -> bool:
    """Return whether keeping only attention's outputs saves more time per byte than keeping all activations.

    The majority of the blocks with measured attention decides, because some measured times are wrong. For example, the
    time of the first block often includes compilation.
    """
    votes = [block.prefers_attention() for block in blocks if block.attention_nbytes]
    return 2 * sum(votes) > len(votes)


def _numbered(blocks: Sequence[AutoCheckpoint], numbers: Sequence[int]) -> list[AutoCheckpoint]:
    """Return those of `blocks` whose `number` is in `numbers`, in the order of `numbers`."""
    by_number = {block.number: block for block in blocks}
    return [by_number[number] for number in numbers]


def _buffers(blocks: Sequence[AutoCheckpoint]) -> list[ShardedBuffer]:
    return [buffer for block in blocks for buffer in block.block.buffers]
