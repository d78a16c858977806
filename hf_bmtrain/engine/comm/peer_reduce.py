"""Average gradients inside one host with peer copies: each rank writes directly to the memory of the other ranks."""

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
"""The number of mailboxes (memory into which other ranks copy gradients) per rank. The other ranks can fill one while
this rank reads the other."""


@dataclass(eq=False)
class Mailbox:
    """Memory of this rank into which the other ranks copy their gradients for this rank's shard of a flat buffer.

    Attributes:
        memory: (nbytes,) uint8.
        number: the index of this mailbox. In each reduction, all ranks use their mailboxes with the same index.
        free: a ticket (handle to wait for) that completes when all ranks have finished reading their mailboxes with
            this index. The next copies into these mailboxes wait for it.
    """

    memory: torch.Tensor
    number: int
    free: Ticket = DONE


class Mailboxes:
    """Allocates this rank's mailboxes, and maps those of the other ranks into this process.

    A mailbox is memory into which the other ranks copy gradients. It has one row for each other rank, in rank order.
    All mailboxes have the same size. Their memory is outside torch's allocator. It stays allocated until `free`, or
    until larger mailboxes are needed.

    Args:
        memory: allocates and maps the mailboxes.
        exchange: a collective function that takes a Python object, and returns the objects of the ranks that reduce
            together, in rank order.
        rank: this rank's index in the result of `exchange`.
    """

    def __init__(self, memory: PeerMemory, exchange: Callable[[Any], list[Any]], rank: int) -> None:
        self._memory, self._exchange, self._rank = memory, exchange, rank
        self._handle: Any = None
        self._mapped: list[Any] = []
        self.boxes: list[Mailbox] = []
        self._taken = 0
        self.nbytes = 0

    def free(self) -> None:
        """Free this rank's mailboxes: the memory into which the other ranks copy gradients.

        Before the call, this rank must have finished copying into other ranks' mailboxes and reading its own mailboxes.
        Collective: every rank must call it.
        """
        if self._handle is None:
            return
        for mapped in self._mapped:
            if mapped is not None:
                self._memory.unmap(mapped)
        self._exchange(None)  # a barrier: afterwards no rank has the mailboxes mapped
        self._memory.free(self._handle)
        self.boxes, self._mapped, self._handle, self.nbytes = [], [], None, 0

    def make(self, nbytes: int) -> None:
        """Allocate this rank's mailboxes, of `nbytes` bytes each, and map those of the other ranks into this process.

        A mailbox is memory into which the other ranks copy gradients. `PeerReduction.take` calls this before the first
        reduction, and when a reduction needs larger mailboxes. If mailboxes already exist, call `free` first.
        Collective: every rank must call it.
        """
        full, self._handle, _ = self._memory.allocate(MAILBOXES * nbytes, torch.uint8)
        for rank, handle in enumerate(self._exchange(self._handle)):
            self._mapped.append(None if rank == self._rank else self._memory.map(handle, MAILBOXES * nbytes))
        self._exchange(None)  # a barrier: afterwards every rank has mapped the mailboxes
        self._memory.unlink(self._handle)
        self.boxes = [Mailbox(part, number) for number, part in enumerate(full.split(nbytes))]
        self._taken, self.nbytes = 0, nbytes

    def take(self) -> Mailbox:
        """Return this rank's mailbox for the next reduction. Call this method once for each reduction, on all ranks.

        A mailbox is memory into which the other ranks copy gradients. Each rank has two, and this method returns them
        alternately. In one reduction, all ranks must use mailboxes with the same index: a rank that uses its mailbox 1
        copies gradients to mailbox 1 of each other rank (see `part`). The indices agree if all ranks have called `take`
        equally often. The call does not communicate.
        """
        self._taken += 1
        return self.boxes[self._taken % MAILBOXES]

    def before(self, box: Mailbox) -> Mailbox:
        """Return the mailbox that this rank used in the reduction just before the one that uses `box`.

        A mailbox is memory into which the other ranks copy gradients. Each reduction contains an all-reduce, which a
        rank enters only after it has read the mailbox that it used in the previous reduction. So when the all-reduce is
        complete, all mailboxes of the previous reduction may be filled again. `PeerReduction.carry` therefore sets
        `free` of the returned mailbox to an event that is recorded after the all-reduce.

        box: this rank's mailbox for the later reduction.
        """
        return self.boxes[(box.number - 1) % MAILBOXES]

    def part(self, box: Mailbox, rank: int, start: int, stop: int) -> Any:
        """Return bytes start:stop of a mailbox of another rank, as a target for copies.

        A mailbox is memory into which the other ranks copy gradients.

        Args:
            box: this rank's mailbox for the same reduction. The other rank's mailbox has the same index.
            rank: the other rank.
            start: the position of the first byte in the mailbox.
            stop: the position after the last byte.
        """
        begin = box.number * self.nbytes
        return self._memory.part(self._mapped[rank], begin + start, begin + stop)


class PeerReduction(Reduction):
    """Averages the gradients of blocks with peer copies: each rank writes directly to the memory of the other ranks.

    Each rank has two mailboxes, which it uses in turn. A mailbox is memory with one row for each other rank. Each row
    is laid out like the owner's shard. In a reduction, each rank fills its row in the mailbox of every other rank: it
    copies there, directly from autograd's tensors, its gradients of the elements in the other rank's shard. Then each
    rank averages the rows of its mailbox and its own gradients of the elements in its shard. Small shards and
    unsupported dtypes are reduced by collectives. All ranks must reduce the same flat buffers in the same order. The
    host waits only when mailboxes are allocated or freed.

    Args:
        collective: the reduction for small shards and unsupported dtypes. Its communicator is also used to wait until
            all ranks have made their copies.
        memory: allocates and maps the memory that receives gradients, and copies into it.
        exchange: a collective function that takes a Python object, and returns the objects of the ranks of
            `collective.communicator`, in rank order. All ranks must call it, also those outside this communicator.
        smallest: the minimum size in bytes of a shard whose gradients are reduced with peer copies.
        device: this rank's device.
    """

    # [Note: meetings of reductions]
    # A meeting is an all-reduce of one element. It completes on no rank before the streams of all ranks have reached
    # it. A mailbox is memory of a rank into which the other ranks copy their gradients. Each rank has S >= 2 of them,
    # and reduction k uses mailbox k mod S. Two streams put the work in order:
    # * `_pushing` starts the copies of reduction k. It first waits for the work that was queued on the current stream
    #   when `send` was called, which includes the computation of the gradients. It also waits for meeting k-S+1, after
    #   which no rank reads the mailboxes k mod S any longer.
    # * `_adding` waits until these copies are complete, enters meeting k, and then sums the values.
    # No other synchronization is needed, for these reasons:
    # * All values have arrived before they are summed, because each rank enters meeting k after its own copies of
    #   reduction k are complete, and sums after the meeting.
    # * No mailbox is filled while it is read. Each rank enters meeting k+1 after it has summed reduction k, because
    #   both are on the stream `_adding`, in this order. So after meeting k+1 no rank reads its mailbox k mod S. The
    #   next copies into it belong to reduction k+S and wait for that meeting. (With S = 1 they would wait for their own
    #   meeting, which waits for them.)
    # * No memory is reused while a stream still needs it. Autograd's gradients, which `_pushing` copies, are not freed
    #   before `PendingReduce.wait`. The results (the shard of the mean, and the running sum of several backwards) are
    #   allocated on the current stream before `send`. `_adding` writes them, and they are read after `wait`.

    def __init__(
        self,
        collective: CollectiveReduction,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
    ) -> None:
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
        """Return this rank's mailbox for the next reduction, with at least `nbytes` bytes.

        A mailbox is memory into which the other ranks copy gradients. If the mailboxes are too small, the host waits
        until all reductions are complete, and allocates larger mailboxes. Collective: every rank must call it.
        """
        if nbytes > self.boxes.nbytes:
            self.free()
            self.boxes.make(nbytes)
        return self.boxes.take()

    def free(self) -> None:
        self._adding.record_event().synchronize()
        self.boxes.free()

    def carry(self, box: Mailbox, pushed: Sequence[tuple[Any, torch.Tensor]], add: Callable[[], object]) -> Ticket:
        """Queue a reduction: copy gradients to the other ranks' mailboxes, then sum those in this rank's mailbox.

        A mailbox is memory into which the other ranks copy gradients. The copies and the summation are queued on two
        separate streams. The summation waits until all ranks have made their copies. Collective: every rank must call
        it.

        Args:
            box: this rank's mailbox that `take` returned last.
            pushed: (part of another rank's mailbox, tensor to copy there) pairs, copied one after another.
            add: a function that queues the summation, which reads `box`.

        Returns:
            A ticket (handle to wait for) that completes with the work queued by `add`.
        """
        self._pushing.follow()
        self._pushing.after(box.free)
        self._pushing.run(lambda: self._memory.copy([pushed]).wait())
        self._adding.after(self._pushing.record_event())
        # This all-reduce (see [Note: meetings of reductions]) completes when every rank has made its copies.
        self._adding.run(lambda: self._communicator.all_reduce(self._token).wait())
        self.boxes.before(box).free = self._adding.record_event()
        self._adding.run(add)
        return self._adding.record_event()


class _PeerReducer(CollectingReducer):
    """Averages the gradients of one flat buffer over the ranks, with peer copies.

    Each rank copies its gradients into the mailboxes of the other ranks (memory into which other ranks copy gradients).
    Then it averages what it has received and its own gradients.

    Attributes:
        _local_ranges: [(rank, ranges), …] for the other ranks, in the order in which gradients are copied to them.
            `ranges` is [(index, range), …]: for each tensor, its index and the range of it that the rank stores.
            Empty ranges are left out.
        _own: the list `ranges` of this rank itself.
    """

    def __init__(self, peers: PeerReduction, layout: Layout, dtype: torch.dtype, poison: bool) -> None:
        super().__init__()
        self._peers, self._rank, self._layout, self._dtype, self._poison = peers, peers.rank, layout, dtype, poison
        self._others = layout.world_size - 1
        ring = [(self._rank + distance) % layout.world_size for distance in range(1, layout.world_size)]
        # Each rank starts with the next rank, so that not all ranks copy to the same rank at once.
        self._local_ranges = [(other, self._ranges_of(other)) for other in ring]
        self._own = self._ranges_of(self._rank)
        self._sizes = layout.shard_sizes(self._rank)

    def _ranges_of(self, rank: int) -> list[tuple[int, Range]]:
        return [(index, each) for index, each in enumerate(self._layout.ranges(rank)) if each.length]

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
            (self._target(box, other, p), sources[index][p.tensor_start : p.tensor_stop])
            for other, local_ranges in self._local_ranges
            for index, p in local_ranges
        ]
        squares = torch.empty(len(sources), dtype=torch.float64, device=shard.device)
        ticket = self._peers.carry(box, pushed, functools.partial(self._add, rows, sources, shard, total, squares))
        return PendingReduce(ticket, sources, squares=squares)

    def _source(self, gradient: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a full gradient as a contiguous tensor (numel,) in the flat buffer's dtype, for copies to other ranks.

        gradient: the full gradient, or None, for which the result is zeros.
        numel: the number of elements of the full gradient.
        like: a tensor with the dtype and device of the zeros.
        """
        return like.new_zeros(numel) if gradient is None else gradient.to(self._dtype).contiguous().view(-1)

    def _target(self, box: Mailbox, other: int, local_range: Range) -> Any:
        """Return the part of rank `other`'s mailbox into which this rank copies its gradient of `local_range`.

        A rank's mailbox is memory into which the other ranks copy gradients.

        box: this rank's mailbox for this reduction. The result is a part of the mailbox of `other` with the same index.
        other: the rank that stores the elements of `local_range`.
        local_range: the elements of one tensor that `other` stores.
        """
        row, itemsize = self._rank - (self._rank > other), self._dtype.itemsize  # a mailbox has no row for its owner
        start = (row * self._layout.shard_numel + local_range.shard_start) * itemsize
        return self._peers.boxes.part(box, other, start, start + local_range.length * itemsize)

    def _add(self, rows: torch.Tensor, sources, shard: torch.Tensor, total: torch.Tensor | None, squares) -> None:
        """Average the gradients of this rank's shard over all ranks, and write the mean to `shard`.

        If `total` is not None, the mean is added to `total` in place, and the sum is written to `shard` instead of the
        mean. The padding of both tensors is zeroed.

        rows: (ranks - 1, n), the other ranks' gradients of this rank's shard, which they have copied here.
        sources: this rank's own gradients: for each tensor of the flat buffer, its full gradient as a 1-D tensor.
        shard: (n,), overwritten.
        total: (n,), the running sum over micro-batches. It may be `shard` itself. None if there is no sum.
        squares: (number of tensors,), overwritten with the sum of squares of each tensor's elements in `shard`.
        """
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
