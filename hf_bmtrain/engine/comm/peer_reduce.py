"""Averages gradients by copies within one host: every rank pushes to each other rank that rank's part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.torch_internals import foreach_zero_
from ..ops.grad_norm import add_squares
from ..ops.peer_sum import peer_mean, serves
from .layout import Layout, Range
from .peer_memory import PeerMemory
from .reduce import CollectingReducer, CollectiveReduction, PendingReduce, Reducer, Reduction
from .streams import DONE, Ticket, work_stream

MAILBOXES = 2
"""Mailboxes per rank: one is filled while the other is read."""


@dataclass(eq=False)
class Mailbox:
    """Memory of this rank into which every other rank copies its part of one gradient.

    memory: (nbytes,) uint8. number: position among the mailboxes, the same on every rank. free: a ticket for which the
    next filling waits; behind it no rank reads its own mailbox of this number.
    """

    memory: torch.Tensor
    number: int
    free: Ticket = DONE


class Mailboxes:
    """MAILBOXES mailboxes of equal size on every rank, with one row for each other rank, in the order of ranks.

    They are peer memory, outside torch's allocator. They are allocated for the first gradient, again for a larger one,
    and kept until `free`.
    """

    def __init__(self, memory: PeerMemory, exchange: Callable[[Any], list[Any]], rank: int) -> None:
        """exchange: all-gathers a Python object."""
        self._memory, self._exchange, self._rank = memory, exchange, rank
        self._handle: Any = None
        self._mapped: list[Any] = []
        self.boxes: list[Mailbox] = []
        self._taken = 0
        self.nbytes = 0

    def free(self) -> None:
        """Free the mailboxes, which this rank must neither fill nor read any more. Collective."""
        if self._handle is None:
            return
        for mapped in self._mapped:
            if mapped is not None:
                self._memory.unmap(mapped)
        self._exchange(None)  # no rank has them mapped
        self._memory.free(self._handle)
        self.boxes, self._mapped, self._handle, self.nbytes = [], [], None, 0

    def make(self, nbytes: int) -> None:
        """Allocate mailboxes of `nbytes`; there must be none. Collective."""
        full, self._handle, _ = self._memory.allocate(MAILBOXES * nbytes, torch.uint8)
        for rank, handle in enumerate(self._exchange(self._handle)):
            self._mapped.append(None if rank == self._rank else self._memory.map(handle, MAILBOXES * nbytes))
        self._exchange(None)  # all have mapped
        self._memory.unlink(self._handle)
        self.boxes = [Mailbox(part, number) for number, part in enumerate(full.split(nbytes))]
        self._taken, self.nbytes = 0, nbytes

    def take(self) -> Mailbox:
        """Return the next mailbox in turn."""
        self._taken += 1
        return self.boxes[self._taken % MAILBOXES]

    def before(self, box: Mailbox) -> Mailbox:
        """Return the mailbox whose turn is before that of `box`."""
        return self.boxes[(box.number - 1) % MAILBOXES]

    def part(self, box: Mailbox, rank: int, start: int, stop: int) -> Any:
        """Return bytes start:stop of another rank's mailbox of this number, for `PeerMemory.copy`."""
        begin = box.number * self.nbytes
        return self._memory.part(self._mapped[rank], begin + start, begin + stop)


class PeerReduction(Reduction):
    """Reduces the gradients of blocks by copies between the GPUs; `collective` reduces small ones and other dtypes.

    Nothing is packed: a rank pushes, straight from the tensors that autograd made, each other rank's pieces into that
    rank's mailbox, where they are stored as in its shard; its own pieces stay where they are. All ranks send the same
    gradients in the same order. Gradient k passes through mailbox k mod S of S >= 2. Two streams of this rank work
    alongside the computation, and the copies on streams of the peer memory:
    * `pushing` pushes gradient k, after what the current stream had queued at `send` (the gradients), and after meeting
      k-S+1 of this rank (the mailboxes);
    * `adding` waits for those pushes, *meets* the others (an all-reduce of one element) and adds its own pieces and the
      rows that have come into this rank's mailbox.

    Why that is enough:
    * What is added has come: each rank enters meeting k behind its own pushes of k, and adds behind the meeting.
    * A mailbox is not filled while it is read: each rank enters meeting k+1 behind its own sum of gradient k, because
      one stream makes them in this order. So behind meeting k+1 no rank reads its mailbox k mod S, and the next pushes
      into it, of gradient k+S, wait for just that meeting. (With S = 1 they would wait for one that they come before.)
    * The gradients that autograd made are kept until `wait`; the shard and the running sum, made on the current
      stream before `send`, are written behind it and read after `wait`.
    * Nothing waits for the host, but for the mailboxes' making. Their memory is freed by all ranks together.
    """

    def __init__(
        self,
        collective: CollectiveReduction,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
    ) -> None:
        """exchange: all-gathers a Python object. smallest: the least bytes of a shard whose gradient is pushed."""
        self.collective, self._communicator, self._smallest = collective, collective.communicator, smallest
        self.rank, self._memory = self._communicator.rank, memory
        self.boxes = Mailboxes(memory, exchange, self.rank)
        self._pushing, self._adding = (work_stream(device, priority=-1) for _ in range(2))
        self._token = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def mapped_bytes(self) -> int:
        return MAILBOXES * self.boxes.nbytes

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        small = layout.shard_numel * like.itemsize < max(self._smallest, 1)
        if small or not serves(like.dtype, like.device):
            return self.collective.reducer(layout, shapes, like, poison)
        return _PeerReducer(self, layout, like.dtype, poison)

    def take(self, nbytes: int) -> Mailbox:
        """Return a mailbox of at least `nbytes`. Collective. Blocks the host if the present ones are too small."""
        if nbytes > self.boxes.nbytes:
            self.free()
            self.boxes.make(nbytes)
        return self.boxes.take()

    def free(self) -> None:
        self._adding.record_event().synchronize()
        self.boxes.free()

    def carry(
        self, box: Mailbox, pushed: Sequence[Sequence[tuple[Any, torch.Tensor]]], add: Callable[[], object]
    ) -> Ticket:
        """Fill the other ranks' mailboxes that have the number of `box`, taken last, then add. Return a ticket.

        pushed: for each other rank, (part of its mailbox, tensor) pairs. add: reads `box`.
        """
        self._pushing.follow()
        self._pushing.after(box.free)
        self._pushing.run(lambda: self._memory.copy(pushed).wait())
        self._adding.after(self._pushing.record_event())
        self._adding.run(lambda: self._communicator.all_reduce(self._token).wait())  # the meeting
        self.boxes.before(box).free = self._adding.record_event()
        self._adding.run(add)
        return self._adding.record_event()


class _PeerReducer(CollectingReducer):
    """Reduces one flat buffer's gradients through the mailboxes.

    _pieces: for each other rank, in the order in which they are pushed, the pieces of its shard. _own: the pieces of
    this rank's shard. Each with the index of its gradient, without empty ones.
    """

    def __init__(self, peers: PeerReduction, layout: Layout, dtype: torch.dtype, poison: bool) -> None:
        super().__init__()
        self._peers, self._rank, self._layout, self._dtype, self._poison = peers, peers.rank, layout, dtype, poison
        self._others = layout.world_size - 1
        ring = [(self._rank + distance) % layout.world_size for distance in range(1, layout.world_size)]
        self._local_ranges = [
            (other, self._ranges_of(other)) for other in ring
        ]  # the ranks do not all push to one at once
        self._own = self._ranges_of(self._rank)
        self._sizes = layout.shard_sizes(self._rank)

    def _ranges_of(self, rank: int) -> list[tuple[int, Range]]:
        local_ranges = [(index, self._layout.range_of(index, rank)) for index in range(len(self._layout.numels))]
        return [(index, local_range) for index, local_range in local_ranges if local_range.length]

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        gradients = self.with_collected(gradients)
        box = self._peers.take(self._others * shard.nbytes)
        sources = [self._source(gradient, numel, shard) for gradient, numel in zip(gradients, self._layout.numels)]
        rows = box.memory[: self._others * shard.nbytes].view(self._dtype).view(self._others, -1)
        if self._poison and total is None:
            shard.fill_(float("nan"))
        pushed = [
            [(self._target(box, other, p), sources[index][p.tensor_start : p.tensor_stop]) for index, p in local_ranges]
            for other, local_ranges in self._local_ranges
        ]
        squares = torch.empty(len(sources), dtype=torch.float64, device=shard.device)
        ticket = self._peers.carry(box, pushed, functools.partial(self._add, rows, sources, shard, total, squares))
        return PendingReduce(ticket, sources, squares=squares)

    def _source(self, gradient: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return the gradient as (numel,) in the buffer's dtype; zeros for None."""
        return like.new_zeros(numel) if gradient is None else gradient.to(self._dtype).contiguous().view(-1)

    def _target(self, box: Mailbox, other: int, local_range: Range) -> Any:
        """Return the part of `other`'s mailbox, in this rank's row, for a piece of its shard."""
        row, itemsize = self._rank - (self._rank > other), self._dtype.itemsize  # `other` has no row for itself
        start = (row * self._layout.shard_numel + local_range.shard_start) * itemsize
        return self._peers.boxes.part(box, other, start, start + local_range.length * itemsize)

    def _add(self, rows: torch.Tensor, sources, shard: torch.Tensor, total: torch.Tensor | None, squares) -> None:
        """Write the mean and its squares, and zero the shard's padding, which no rank fills."""
        parts = [squares.new_empty(0)] * len(sources)
        for index, local_range in self._own:
            there = slice(local_range.shard_start, local_range.shard_stop)
            mine = sources[index][local_range.tensor_start : local_range.tensor_stop]
            summed = None if total is None else total[there]
            parts[index] = peer_mean(rows[:, there], mine, self._rank, shard[there], summed)
        add_squares(parts, squares)
        sums = [shard] if total is None or total is shard else [shard, total]
        gaps = [gap for each in sums for gap in each.split_with_sizes(self._sizes)[::2] if gap.numel()]
        if gaps:
            foreach_zero_(gaps)
        if self._poison:
            rows.fill_(float("nan"))
