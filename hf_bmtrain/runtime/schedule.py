"""What is open in the current forward and backward, and the lanes they travel on."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ..comm.collectives import Communicator
from ..comm.reduce import Reduction
from .forward_pass import Passage


class Member(Protocol):
    """Something that takes part in a backward and is closed at its end, in the same order on every rank."""

    def flush_backward(self) -> None:
        """Issue what is still to be reduced; free what is whole."""

    def abandon_backward(self) -> None:
        """The backward raised midway: drop partial gradients, free what is whole."""


class Releasable(Protocol):
    """What is whole and can be released: a buffer read outside blocks, a block that is left whole."""

    def release(self) -> None: ...
    def check_unwritten(self) -> None: ...


class Travelling(Protocol):
    """A flat gradient: sent by a reduction, received later. under_way: between the two."""

    @property
    def under_way(self) -> bool: ...
    def send(self, reduction: Reduction) -> None: ...
    def receive(self) -> None: ...
    def discard(self) -> None: ...


class _Inside:
    """Counts how deep the present code is inside layers' forwards."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exception) -> None:
        self.depth -= 1


class Step:
    """Shared by all buffers and blocks of a world; given to them when they are made.

    gather, reduce: the two lanes. blocks, apart: how the gradients of blocks, and of what lies outside, are averaged.
    poison: the debug switch that fills unfilled and released memory with NaN.
    inspector: what notes activations at present, see `inspect`. planner: of blocks with
    use_checkpoint="auto". buffers_made, backwards: how many there were so far.
    """

    def __init__(
        self, gather: Communicator, reduce: Communicator, blocks: Reduction, apart: Reduction, poison: bool = False
    ) -> None:
        self.gather, self.reduce, self.poison = gather, reduce, poison
        self._blocks, self._apart = blocks, apart
        self.inspector: Any = None
        self.planner: Any = None
        self.buffers_made = self.backwards = 0
        self._inside = _Inside()
        self._passage: Passage | None = None
        self._members: dict[int, dict[Member, None]] = {}
        self._lingering: weakref.ref[Releasable] | None = None  # weak: a model that is dropped goes
        self._prefetched: weakref.ref[Releasable] | None = None
        self._travelling: deque[list[Travelling]] = deque()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of shards and gradient slots that lie outside of torch's allocator, whose statistics miss them."""
        return sum(getattr(owner, "mapped_bytes", 0) for owner in (self.gather, self._blocks))

    def free_dropped(self) -> None:
        """Give back what models that every rank has dropped have left mapped. Collective."""
        self.gather.free_dropped()
        if not getattr(self.gather, "mapped_bytes", 0):
            self._blocks.free()

    # -- forward ------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a read of a parameter outside blocks means its whole tensor."""
        return self._inside.depth > 0

    @property
    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def forget_failed_backward(self) -> None:
        """Members that are still enlisted while no backward runs belong to one that raised."""
        if self._members and not self.in_backward:
            self.abandon_backward()

    @contextmanager
    def forward(self) -> Iterator[Passage]:
        """Open the outermost forward."""
        self.forget_failed_backward()
        outer, self._passage = self._passage, Passage(self.enlist)
        try:
            with self.inside():
                yield self._passage
        finally:
            self._passage = outer

    def inside(self) -> AbstractContextManager[None]:
        """Within a layer's own forward, be it the first or a recomputation."""
        return self._inside

    def meet(self, reader: Releasable) -> None:
        if self._passage is not None:
            self._passage.readers[reader] = None

    def record(self, block: Member) -> None:
        """Autograd has recorded a forward of `block`."""
        if self._passage is not None:
            self._passage.blocks.add(block)

    def open_block(self, block: Releasable, neighbour: Releasable | None) -> None:
        """`block` begins and `neighbour` is gathered ahead; others left whole, or gathered in vain, are released."""
        self._release_kept(block, neighbour)
        if neighbour is not None:
            self._prefetched = weakref.ref(neighbour)

    def linger(self, block: Releasable) -> None:
        """Leave `block` whole until another block opens: it may be needed next."""
        if self._lingering is not None:
            kept = self._lingering()
            if kept is not None and kept is not block:
                kept.release()
        self._lingering = weakref.ref(block)

    # -- backward -----------------------------------------------------------------------------------------------

    def enlist(self, member: Member) -> None:
        """`member` takes part in the running backward; the first one queues the callback that closes it.

        Kept by graph task, because a backward inside a backward (a reentrant checkpoint) ends before the outer.
        """
        task = torch._C._current_graph_task_id()
        assert task != -1, "enlist outside a backward"
        members = self._members.get(task)
        if members is None:
            members = self._members[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        members[member] = None

    def was_recorded(self, block: Member) -> bool | None:
        """Whether `block` was recorded in an outermost forward that is being gone back through.

        None where that is not known: a block was called outside of any, or backward did not pass the model's outputs.
        """
        passages = [each for members in self._members.values() for each in members if isinstance(each, Passage)]
        return any(block in passage.blocks for passage in passages) if passages else None

    def takes_part(self, member: Member) -> bool:
        """Whether a backward that is not over yet, around the one that ends, has `member`."""
        return any(member in members for members in self._members.values())

    @torch.no_grad()
    def _end_backward(self, task: int) -> None:
        """Everything is reduced and the compute stream waits for it: whoever reads `grad` next is safe."""
        self._release_kept()
        members = self._members.pop(task)
        try:
            for member in members:
                member.flush_backward()
            self._receive(ahead=0)
        except BaseException:
            self._members[task] = members  # of a backward that raised, see forget_failed_backward
            raise
        self.gather.quiesce()  # the optimizer may write
        self.backwards += 1

    def abandon_backward(self) -> None:
        """Close a backward that raised before its end; what was under way does not reach any `.grad`."""
        members = [member for task in self._members.values() for member in task]
        self._members.clear()
        self._release_kept()
        for gradients in self._travelling:
            for gradient in gradients:
                gradient.discard()
        self._travelling.clear()
        for member in members:
            member.abandon_backward()

    def _release_kept(self, block: Releasable | None = None, neighbour: Releasable | None = None) -> None:
        """All that is kept but these two."""
        for reference in (self._lingering, self._prefetched):
            kept = reference() if reference is not None else None
            if kept is not None and kept is not block and kept is not neighbour:
                kept.release()
        self._lingering = self._prefetched = None

    # -- gradients under way ------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """The backward of a block is about to make gradients: those of one other block are still there at most.

        Gathers that are to run beside that backward are issued before, so that they do not wait as well.
        """
        self._receive(self._blocks.ahead)

    def send_block(self, gradients: list[Travelling]) -> None:
        """Start averaging the gradients of one block."""
        self._send(gradients, self._blocks)

    def send_apart(self, gradient: Travelling) -> None:
        """Start averaging a gradient of what lies outside of blocks."""
        self._send([gradient], self._apart)

    def _send(self, gradients: list[Travelling], reduction: Reduction) -> None:
        self.make_room()
        for gradient in gradients:
            while gradient.under_way:
                self._receive_one()
        for gradient in gradients:
            gradient.send(reduction)
        if gradients:
            self._travelling.append(gradients)

    def _receive(self, ahead: int) -> None:
        """All gradients but those of the last `ahead` blocks arrive."""
        while len(self._travelling) > ahead:
            self._receive_one()

    def _receive_one(self) -> None:
        for gradient in self._travelling[0]:
            gradient.receive()
        self._travelling.popleft()
