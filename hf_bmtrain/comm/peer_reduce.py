"""Gradients averaged without a collective over them inside one host: every rank brings each other rank its part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops.grad_norm import add_squares
from ..ops.peer_sum import peer_mean, serves
from ..ops.torch_internals import foreach_zero_
from .gradient_slots import GradientSlots, Slot
from .layout import Layout
from .peer_memory import PeerMemory
from .reduce import CollectiveReduction, Flight, Reducer
from .streams import Ticket, work_stream


class PeerReduction:
    """Reduces the gradients of blocks by copies between the GPUs; small ones, and those of other dtypes, go `apart`.

    Nothing is packed: a rank pushes, straight out of what autograd made, each other rank's pieces into that rank's
    slot, where they come to lie as in its shard; its own pieces stay where they are. All ranks send the same gradients
    in the same order. Gradient k passes through slot k mod S of S >= 2. Two streams of this rank work beside the
    computation, and the copies on streams of the peer memory:
    * `pushing` pushes gradient k, after what the current stream had queued at `send` (the gradients), and after meeting
      k-S+1 of this rank (the slots);
    * `adding` waits for those pushes, *meets* the others (an all-reduce of one element on the lane below) and adds its
      own pieces and the rows that have come into this rank's slot.

    Why that is enough:
    * What is added has come: each rank enters meeting k behind its own pushes of k, and adds behind the meeting.
    * A slot is not filled while it is read: each rank enters meeting k+1 behind its own sum of gradient k, because one
      stream makes them in this order. So behind meeting k+1 no rank reads its slot k mod S, and the next pushes into
      it, of gradient k+S, wait for just that meeting. (With S = 1 they would wait for one that they come before.)
    * The gradients that autograd made are kept until `land`; the shard and the running sum, made on the current
      stream before `send`, are written behind it and read after `land`.
    * Nothing waits for the host, but for the slots' making. Memory of slots is freed by all ranks together.
    """

    ahead = 1

    def __init__(
        self,
        apart: CollectiveReduction,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
    ) -> None:
        """exchange: every rank's object on every rank. smallest: bytes of a shard from which it is pushed."""
        self._apart, self._lane, self._memory, self._smallest = apart, apart.lane, memory, smallest
        self._slots = GradientSlots(memory, exchange, apart.lane.rank)
        self._pushing, self._adding = (work_stream(device, priority=-1) for _ in range(2))
        self._token = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of slots that lie outside of torch's allocator, whose statistics do not show them."""
        return self._slots.mapped_bytes

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        small = layout.shard_numel * like.itemsize < max(self._smallest, 1)
        if small or not serves(like.dtype, like.device):
            return self._apart.reducer(layout, shapes, like, poison)
        return _PeerReducer(self, self._lane.rank, layout, like.dtype, poison)

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`. Collective; the host waits where they are too small so far."""
        if nbytes > self._slots.nbytes:
            self.free()
            self._slots.make(nbytes)
        return self._slots.take()

    def free(self) -> None:
        self._adding.mark().synchronize()
        self._slots.free()

    def part(self, slot: Slot, rank: int, start: int, stop: int) -> Any:
        """Bytes of another rank's slot, for `carry`."""
        return self._slots.part(slot, rank, start, stop)

    def carry(self, pushed: Sequence[Sequence[tuple[Any, torch.Tensor]]], add: Callable[[], object]) -> Ticket:
        """Fill the slots of the other ranks that have the number of the one taken last, then add; a ticket of the end.

        pushed: for each other rank, parts of its slot and what goes there. add: reads this rank's slot.
        """
        slot = self._slots.current()
        self._pushing.follow()
        self._pushing.after(slot.free)
        self._pushing.run(lambda: self._memory.push(pushed).wait())
        self._adding.after(self._pushing.mark())
        self._adding.run(self._meet)
        self._slots.previous().free = self._adding.mark()
        self._adding.run(add)
        return self._adding.mark()

    def _meet(self) -> None:
        self._lane.all_reduce(self._token).wait()


class _PeerReducer:
    """_pieces: for each other rank, in the order in which this one serves them, and _own: for itself, the pieces of the
    shard: number of the gradient, first element and end there, first element in the shard."""

    def __init__(self, peers: PeerReduction, rank: int, layout: Layout, dtype: torch.dtype, poison: bool) -> None:
        self._peers, self._rank, self._layout, self._dtype, self._poison = peers, rank, layout, dtype, poison
        self._others = layout.world_size - 1
        order = [(rank + step) % layout.world_size for step in range(1, layout.world_size)]  # not all to one at once
        self._pieces = [(other, self._pieces_of(other)) for other in order]
        self._own = self._pieces_of(rank)
        self._gaps = layout.shard_sizes(rank)

    def _pieces_of(self, rank: int) -> list[tuple[int, int, int, int]]:
        pieces = [(index, self._layout.piece(index, rank)) for index in range(len(self._layout.numels))]
        return [(index, p.tensor_start, p.tensor_stop, p.shard_start) for index, p in pieces if p.length]

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        slot = self._peers.take(self._others * shard.nbytes)
        sources = [self._source(gradient, numel, shard) for gradient, numel in zip(gradients, self._layout.numels)]
        rows = slot.memory[: self._others * shard.nbytes].view(self._dtype).view(self._others, -1)
        if self._poison and total is None:
            shard.fill_(float("nan"))
        pushed = [
            [
                (self._target(slot, other, at, stop - start), sources[index][start:stop])
                for index, start, stop, at in own
            ]
            for other, own in self._pieces
        ]
        squares = torch.empty(len(sources), dtype=torch.float64, device=shard.device)
        ticket = self._peers.carry(pushed, functools.partial(self._add, rows, sources, shard, total, squares))
        return _PeerFlight(ticket, sources, squares)

    def _source(self, gradient: torch.Tensor | None, numel: int, like: torch.Tensor) -> torch.Tensor:
        """The gradient as it lies in memory, (numel,)."""
        return like.new_zeros(numel) if gradient is None else gradient.to(self._dtype).contiguous().view(-1)

    def _target(self, slot: Slot, other: int, at: int, length: int) -> Any:
        """Where elements of `other`'s shard go: into this rank's row of its slot, which has none for `other` itself."""
        row, itemsize = self._rank - (self._rank > other), self._dtype.itemsize
        start = (row * self._layout.shard_numel + at) * itemsize
        return self._peers.part(slot, other, start, start + length * itemsize)

    def _add(self, rows: torch.Tensor, sources, shard: torch.Tensor, total: torch.Tensor | None, squares) -> None:
        """Padding, to which nobody brings anything, becomes zero."""
        parts = [squares.new_empty(0)] * len(sources)
        for index, start, stop, at in self._own:
            there = slice(at, at + stop - start)
            summed = None if total is None else total[there]
            parts[index] = peer_mean(rows[:, there], sources[index][start:stop], self._rank, shard[there], summed)
        add_squares(parts, squares)
        sums = [shard] if total is None or total is shard else [shard, total]
        gaps = [gap for each in sums for gap in each.split_with_sizes(self._gaps)[::2] if gap.numel()]
        if gaps:
            foreach_zero_(gaps)
        if self._poison:
            rows.fill_(float("nan"))


class _PeerFlight:
    def __init__(self, arrived: Ticket, gradients: Sequence[torch.Tensor], squares: torch.Tensor) -> None:
        self._arrived, self.squares = arrived, squares
        self._gradients: Sequence[torch.Tensor] | None = gradients

    def land(self) -> None:
        self._arrived.wait()
        self._gradients = None

    cancel = land
