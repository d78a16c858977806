"""Gradients averaged without a collective over them inside one host: every rank brings each other rank its part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .gradient_chunks import Chunk, Piece, cut
from .gradient_slots import GradientSlots
from .layout import ALIGNMENT_BYTES, Layout
from .ops.grad_norm import add_squares
from .ops.peer_sum import peer_mean, serves
from .ops.streams import Ticket, work_stream
from .peer_memory import PeerMemory
from .reduction import CollectiveReduction, Flight, Reducer

SLOT_BYTES = 64 << 20
"""Of a slot at most, for all other ranks together: a larger gradient comes in chunks, added while others come."""


class PeerReduction:
    """Reduces gradients by copies between the GPUs; small ones, and those of other dtypes, by a collective.

    Nothing is packed: a rank pushes, straight out of what autograd made, each other rank's pieces into that rank's
    slot, where they come to lie as in its shard; its own pieces stay where they are. A gradient that is larger than a
    slot comes in chunks. All ranks send the same gradients in the same order. Chunk k passes through slot k mod S of
    S >= 2. Two streams of this rank work beside the computation, and the copies on streams of the peer memory:
    * `pushing` pushes chunk k, after what the current stream had queued at `send` (the gradients), and after meeting
      k-S+1 of this rank (the slots);
    * `adding` waits for those pushes, *meets* the others (an all-reduce of one element on the lane below) and adds its
      own pieces and the rows that have come into this rank's slot.

    Why that is enough:
    * What is added has come: each rank enters meeting k behind its own pushes of k, and adds behind the meeting.
    * A slot is not filled while it is read: each rank enters meeting k+1 behind its own sum of chunk k, because one
      stream makes them in this order. So behind meeting k+1 no rank reads its slot k mod S, and the next pushes into
      it, of chunk k+S, wait for just that meeting. (With S = 1 they would wait for one that they come before; with
      S = 2 for one right behind the pushes before them; with S = 3 the copies need not pause.)
    * The gradients that autograd made are kept until `land`; the shard and the running sum, made on the current
      stream before `send`, are written behind it and read after `land`.
    * Nothing waits for the host, but for the slots' making. Memory of slots is freed by all ranks together.
    """

    ahead = 1

    def __init__(
        self,
        collective: CollectiveReduction,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """exchange: every rank's object on every rank. smallest: bytes of a shard from which it is pushed."""
        self.collective, self.slot_bytes = collective, slot_bytes
        self._lane, self._memory, self._smallest = collective.lane, memory, smallest
        self._slots = GradientSlots(memory, exchange, self._lane.rank)
        self._pushing, self._adding = (work_stream(device, priority=-1) for _ in range(2))
        self._token = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of slots that lie outside of torch's allocator, whose statistics do not show them."""
        return self._slots.mapped_bytes

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        small = layout.shard_numel * like.itemsize < max(self._smallest, 1)
        if small or not serves(like.dtype, like.device):
            return self.collective.reducer(layout, shapes, like, poison)
        return _PeerReducer(self, self._lane.rank, layout, like.dtype, poison)

    def free(self) -> None:
        self._adding.mark().synchronize()
        self._slots.free()

    def begin(self, nbytes: int) -> None:
        """What is pushed from now on comes after the current stream's work, in chunks of up to `nbytes`.

        Collective; the host waits where slots are too small so far.
        """
        if nbytes > self._slots.nbytes:
            self.free()
            self._slots.make(nbytes)
        self._pushing.follow()

    def carry(self, parts: Sequence[Sequence[Part]], add: Callable[[torch.Tensor], object]) -> None:
        """Fill the next slot of each other rank, then add.

        parts: for each other rank what goes into its slot. add: reads this rank's slot, which it is given, (n,) uint8.
        """
        slot = self._slots.take()
        pushed = [
            [(self._slots.part(slot, part.rank, part.at, part.at + part.source.nbytes), part.source) for part in own]
            for own in parts
        ]
        self._pushing.after(slot.free)
        self._pushing.run(lambda: self._memory.push(pushed).wait())
        self._adding.after(self._pushing.mark())
        self._adding.run(self._meet)
        self._slots.previous().free = self._adding.mark()
        self._adding.run(lambda: add(slot.memory))

    def end(self, finish: Callable[[], object]) -> Ticket:
        """Behind all that was added: `finish`, and the ticket."""
        self._adding.run(finish)
        return self._adding.mark()

    def _meet(self) -> None:
        self._lane.all_reduce(self._token).wait()


class Part(NamedTuple):
    """What goes to one rank: where in its slot, in bytes, and from which contiguous tensor."""

    rank: int
    at: int
    source: torch.Tensor


class _PeerReducer:
    """_order: the other ranks, as this one serves them. _length: of a chunk, in elements of every shard."""

    def __init__(self, peers: PeerReduction, rank: int, layout: Layout, dtype: torch.dtype, poison: bool) -> None:
        self._peers, self._rank, self._layout, self._dtype, self._poison = peers, rank, layout, dtype, poison
        self._order = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]  # not all to one
        most = max(1, peers.slot_bytes // (len(self._order) * ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        self._length = min(most // dtype.itemsize, layout.shard_numel)
        self._slot_bytes = len(self._order) * self._length * dtype.itemsize
        self._chunks = cut(layout, self._length)
        self._gaps = layout.shard_sizes(rank)

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        sources = [self._source(gradient, numel, shard) for gradient, numel in zip(gradients, self._layout.numels)]
        if self._poison and total is None:
            shard.fill_(float("nan"))
        self._peers.begin(self._slot_bytes)
        sums = _Sums(sources, self._rank, shard, total)
        for chunk in self._chunks:
            parts = [[self._part(other, piece, sources) for piece in chunk.pieces[other]] for other in self._order]
            self._peers.carry(parts, functools.partial(self._add, chunk, sums))
        arrived = self._peers.end(functools.partial(sums.finish, self._gaps))
        return _PeerFlight(arrived, sources, sums.squares)

    def _source(self, gradient: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
        """The gradient as it lies in memory, (numel,)."""
        return like.new_zeros(numel) if gradient is None else gradient.to(self._dtype).contiguous().view(-1)

    def _part(self, other: int, piece: Piece, sources: Sequence[torch.Tensor]) -> Part:
        """For this rank's row of the slot of `other`, which has none for itself."""
        row = self._rank - (self._rank > other)
        at = (row * self._length + piece.at) * self._dtype.itemsize
        return Part(other, at, sources[piece.index][piece.start : piece.stop])

    def _add(self, chunk: Chunk, sums: _Sums, memory: torch.Tensor) -> None:
        rows = memory[: self._slot_bytes].view(self._dtype).view(len(self._order), -1)
        for piece in chunk.pieces[self._rank]:
            sums.add(piece, rows[:, piece.at : piece.at + piece.stop - piece.start], chunk.begin)
        if self._poison:
            rows.fill_(float("nan"))


class _Sums:
    """The means of one flat gradient, or their sums with what was there, a piece at a time.

    squares: of what is written, (k,) float64, there behind `finish`.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], rank: int, shard: torch.Tensor, total: torch.Tensor | None
    ) -> None:
        self._sources, self._rank, self._shard, self._total = sources, rank, shard, total
        self._parts: list[list[torch.Tensor]] = [[] for _ in sources]
        self.squares = torch.empty(len(sources), dtype=torch.float64, device=shard.device)

    def add(self, piece: Piece, rows: torch.Tensor, begin: int) -> None:
        """This rank's `piece`, to which the others' `rows` belong, of a chunk that begins there in the shard."""
        mine = self._sources[piece.index][piece.start : piece.stop]
        there = slice(begin + piece.at, begin + piece.at + len(mine))
        total = None if self._total is None else self._total[there]
        self._parts[piece.index].append(peer_mean(rows, mine, self._rank, self._shard[there], total))

    def finish(self, gaps: Sequence[int]) -> None:
        """All pieces are there; padding, to which nobody brings anything, becomes zero. gaps: the shard as gap, piece,
        gap, …, gap: elements of each."""
        add_squares([_joined(parts, self.squares) for parts in self._parts], self.squares)
        sums = [self._shard] if self._total is None or self._total is self._shard else [self._shard, self._total]
        unfilled = [gap for each in sums for gap in each.split_with_sizes(list(gaps))[::2] if gap.numel()]
        if unfilled:
            torch._foreach_zero_(unfilled)


def _joined(parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else like.new_empty(0)


class _PeerFlight:
    def __init__(self, arrived: Ticket, gradients: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
        self._arrived, self.squares = arrived, squares
        self._gradients: Sequence[torch.Tensor] | None = gradients

    def land(self) -> None:
        self._arrived.wait()
        self._gradients = None

    cancel = land
