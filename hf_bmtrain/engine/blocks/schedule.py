"""The schedule: which blocks are whole, and which gradients are in flight, in the current forward and backward."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..base.torch_internals import call_after_backward, current_graph_task
from ..comm.communicator import Gather
from ..comm.reduce import Reduction
from ..sharding.gradient import GradientBuffer
from ..sharding.on_demand import OnDemandGather
from .observer import Kind, Observer, ObserverHandle, Observers

if TYPE_CHECKING:
    from .block_state import BlockState

_log = logging.getLogger("hf_bmtrain")


class BackwardParticipant(Protocol):
    """Takes part in a backward and is closed at its end, in the same order on every rank."""

    def finish_backward(self) -> None:
        """Send the gradients that are still to be reduced, and release what is whole."""

    def abandon_backward(self) -> None:
        """Drop partial gradients and release what is whole, after a backward that raised."""


class ForwardPass:
    """A call of the outermost sharded module. It owns the boundary at the outputs, where its backward begins.

    readers: the buffers outside blocks that it read, each with its `unwatched` as it is at the `end`. blocks: those
    that autograd recorded in it.

    While its backward runs, a call of a recorded block is a recomputation by a checkpoint around it; a call of any
    other block is a forward of its own, recorded for a backward inside the backward.
    """

    def __init__(self, enter: Callable[[ForwardPass], None]) -> None:
        """enter: notes that the running backward goes through this pass."""
        self._enter = enter
        self.readers: dict[OnDemandGather, bool] = {}
        self.blocks: set[Any] = set()

    # -- forward ------------------------------------------------------------------------------------------------

    def end(self) -> list[int]:
        """End the forward. Returns the versions of the buffers it read, for `before_backward`."""
        self.readers = {reader: reader.unwatched for reader in self.readers}
        return [reader.version for reader in self.readers]

    def check_unwritten(self) -> None:
        """Raise RuntimeError if the forward modified a parameter that it read."""
        for reader in self.readers:
            reader.check_unwritten()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of a parameter that the forward read, but for watched reads."""
        return any(reader.unwatched and reader.holds(tensor) for reader in self.readers)

    def reshard(self) -> None:
        """Release what was read; no backward will follow."""
        for reader in self.readers:
            reader.reshard()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        """Start the gathers that backward needs. token: the result of `end`."""
        if token != [reader.version for reader in self.readers]:
            raise RuntimeError(
                "Weights outside the blocks changed between the forward and its backward (an optimizer step or a "
                "load came between them); the gradients would be wrong. Run forward again."
            )
        self._enter(self)
        for reader, unwatched in self.readers.items():
            reader.prepare_backward(unwatched)


class ForwardDepth:
    """Counts how deep the running code is inside layers' forwards: a context of each of them."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception) -> None:
        self.depth -= 1


class Schedule:
    """Decides when blocks are released and gradients received; shared by all buffers and blocks of a world.

    shards: allocates and gathers shards. blocks, outside: the reductions of gradients of blocks, and of what is outside
    them. inside: the context of a layer's own forward, the first one or a recomputation. observers: what sees the steps
    of this world. backwards: the number of backwards since the start.
    """

    def __init__(self, shards: Gather, blocks: Reduction, outside: Reduction, inside: ForwardDepth) -> None:
        self.shards, self.blocks, self.outside, self.inside = shards, blocks, outside, inside
        self.observers = Observers()
        self.backwards = 0
        self._pass: ForwardPass | None = None
        self._calibrates = False
        self._members: dict[int, dict[BackwardParticipant, None]] = {}  # by graph task
        self._passes: dict[int, list[ForwardPass]] = {}  # by graph task, those that its backward runs through
        self._left_unsharded: weakref.ref[BlockState] | None = None  # weak, so that a dropped model is freed
        self._prefetched: weakref.ref[BlockState] | None = None
        self._pending: deque[list[GradientBuffer]] = deque()
        self._undecided: list[GradientBuffer] = []

    # -- observers ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer, owner: object | None = None) -> ObserverHandle:
        """Let `observer` see the steps of this world, until its handle removes it or `owner`, say a model, is freed."""
        self.observers.add(observer)
        return ObserverHandle(self.observers, observer, owner)

    def observer(self, kind: type[Kind]) -> Kind | None:
        """Return the first observer of class `kind`, None if there is none."""
        return next((observer for observer in self.observers if isinstance(observer, kind)), None)

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Tell the observers that a wrapped model's forward begins."""
        if not self.repeats:
            for observer in self.observers.before_forward:
                observer.before_forward(model, args, kwargs)

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def mapped_bytes(self) -> int:
        """Bytes of shards and mailboxes outside torch's allocator, whose statistics do not include them."""
        return self.shards.mapped_bytes + self.blocks.mapped_bytes

    def explain_shortage(self, error: BaseException) -> None:
        """Add to an error by which the device's memory ran out what takes it, and what would take less."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        lines = [text for observer in self.observers.out_of_memory if (text := observer.out_of_memory()) is not None]
        if not lines:
            return
        add_note = getattr(error, "add_note", None)  # from Python 3.11 on
        if add_note is None:
            _log.error("%s", "\n".join(lines))
        else:
            add_note("\n".join(lines))

    def free_dropped(self) -> None:
        """Free the mapped memory of models that every rank has dropped. Collective."""
        self.shards.free_dropped()
        if not self.shards.mapped_bytes:
            self.blocks.free()

    def wait_for_readers(self) -> None:
        """Make the current stream wait until no rank is gathering, so that shards may be written. Collective."""
        self.shards.wait_for_readers()

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """True inside a forward, where a read of a parameter outside blocks gathers it."""
        return self.inside.depth > 0

    @property
    def in_backward(self) -> bool:
        """True while autograd's engine runs."""
        return current_graph_task() != -1

    @property
    def repeats(self) -> bool:
        """True while a forward runs another time: a recomputation in backward, or a calibration ahead of it."""
        return self._calibrates or self.in_backward

    @contextmanager
    def forward(self) -> Iterator[ForwardPass]:
        """Open an outermost forward of a model."""
        self.discard_failed_backward()
        outer, self._pass = self._pass, ForwardPass(self._enter_pass)
        try:
            with self.inside:
                yield self._pass
        finally:
            self._pass = outer

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """Open a forward without a backward ahead of the open one. What it alone reads is released at its end."""
        outer = {} if self._pass is None else self._pass.readers
        with self.forward() as own:
            self._calibrates = True
            try:
                yield
            finally:
                self._calibrates = False
                for reader in own.readers.keys() - outer.keys():
                    reader.reshard()

    def add_reader(self, reader: OnDemandGather) -> None:
        """Note that the open forward pass reads a buffer outside blocks."""
        if self._pass is not None:
            self._pass.readers[reader] = True

    def record(self, block: BackwardParticipant) -> None:
        """Note that autograd has recorded a forward of `block` in the open forward pass."""
        if self._pass is not None:
            self._pass.blocks.add(block)

    def open_block(self, block: BlockState | None, prefetched: BlockState | None) -> None:
        """Release the blocks that are whole, except `block`, which begins, and the one that is gathered ahead."""
        for reference in (self._left_unsharded, self._prefetched):
            kept = reference() if reference is not None else None
            if kept is not None and kept is not block and kept is not prefetched:
                kept.reshard()
        self._left_unsharded, self._prefetched = None, None if prefetched is None else weakref.ref(prefetched)

    def leave_unsharded(self, block: BlockState) -> None:
        """Keep `block` whole until another block opens, because it may be needed next."""
        if self._left_unsharded is not None:
            kept = self._left_unsharded()
            if kept is not None and kept is not block:
                kept.reshard()
        self._left_unsharded = weakref.ref(block)

    # -- backward -----------------------------------------------------------------------------------------------

    def join_backward(self, member: BackwardParticipant) -> None:
        """Add `member` to the running backward. The first one queues the callback that ends it.

        Members are kept by graph task, because a backward inside a backward (a reentrant checkpoint) ends first.
        """
        self._members_of(current_graph_task())[member] = None

    def _enter_pass(self, forward_pass: ForwardPass) -> None:
        """Note that the running backward goes through the outputs of `forward_pass`."""
        task = current_graph_task()
        self._members_of(task)
        self._passes.setdefault(task, []).append(forward_pass)

    def _members_of(self, task: int) -> dict[BackwardParticipant, None]:
        assert task != -1, "outside a backward"
        members = self._members.get(task)
        if members is None:
            members = self._members[task] = {}
            call_after_backward(lambda: self._end_backward(task))
        return members

    def was_recorded(self, block: BackwardParticipant) -> bool | None:
        """Return whether `block` was recorded in a forward pass that a running backward goes through.

        None if that is unknown: a block was called outside a forward pass, or backward bypassed the model's outputs.
        """
        passes = [each for passes in self._passes.values() for each in passes]
        return any(block in each.blocks for each in passes) if passes else None

    def is_member(self, member: BackwardParticipant) -> bool:
        """Return whether `member` takes part in a backward that encloses the one that is ending."""
        return any(member in members for members in self._members.values())

    @torch.no_grad()
    def _end_backward(self, task: int) -> None:
        """Reduce what is left and make the current stream wait for it, so that every `.grad` may be read."""
        self.open_block(None, None)
        members, passes = self._members.pop(task), self._passes.pop(task, [])
        try:
            for member in members:
                member.finish_backward()
            self._receive(ahead=0)
            self._decide()
        except BaseException:
            self._members[task], self._passes[task] = members, passes  # for discard_failed_backward
            raise
        self.wait_for_readers()  # the optimizer may write
        self.backwards += 1
        for observer in self.observers.end_backward:
            observer.end_backward()

    def discard_failed_backward(self) -> None:
        """Close a backward that raised before its end; what was in flight does not reach any `.grad`.

        Its members are still there while no backward runs.
        """
        if not self._members or self.in_backward:
            return
        members = [member for task in self._members.values() for member in task]
        self._members.clear()
        self._passes.clear()
        self.open_block(None, None)
        for gradients in self._pending:
            for gradient in gradients:
                gradient.discard()
        self._pending.clear()
        self._undecided.clear()
        for member in members:
            member.abandon_backward()

    # -- gradients in flight ------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Receive gradients until at most one other block's are in flight, before a block's backward makes its own.

        Issue gathers that are to run alongside that backward first, so that they do not wait as well.
        """
        self._receive(self.blocks.ahead)

    def receive_all(self) -> None:
        """Receive all gradients that are in flight."""
        self._receive(ahead=0)

    def send(self, gradients: list[GradientBuffer]) -> None:
        """Start averaging `gradients` over the ranks. They are received together."""
        self._receive(self.blocks.ahead)
        for gradient in gradients:
            if gradient.is_pending:
                self._receive(ahead=0)
            for observer in self.observers.before_reduce:
                for index, values in gradient.own():
                    observer.before_reduce(gradient, index, values)
            gradient.send()
        if gradients:
            self._pending.append(gradients)

    def _receive(self, ahead: int) -> None:
        """Receive all gradients except the last `ahead` groups."""
        while len(self._pending) > ahead:
            for gradient in self._pending[0]:
                if gradient.receive():
                    self._undecided.append(gradient)
            self._pending.popleft()

    def _decide(self) -> None:
        """Find out which parameters no rank used, where this rank did not use all."""
        undecided, self._undecided = self._undecided, []
        for gradient in undecided:
            gradient.decide()
