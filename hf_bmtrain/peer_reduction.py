"""Gradients averaged without a collective over them inside one host: every rank pulls its chunk from all others."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .gradient_slots import GradientSlots, Slot
from .layout import Layout
from .ops.peer_sum import peer_mean, serves
from .ops.streams import Ticket, work_stream
from .packing import Packing
from .peer_memory import PeerMemory
from .reduction import CollectiveReduction, Flight, Reducer


class PeerReduction:
    """Reduces the gradients of blocks by pulling; small ones, and what the kernel does not take, go `apart`.

    All ranks send the same gradients in the same order. Gradient k passes through slot k mod S of S >= 2. Two streams
    of this rank work beside the computation, and the copies of `memory` on streams of theirs:
    * `packing` packs gradient k into its slot, after what the current stream had queued at `send` (the gradients), and
      after meeting k-S+1 of this rank (the slot);
    * `pulling` waits for that packing, *meets* the others (an all-reduce of one element on the lane below), copies this
      rank's chunk out of every other rank's slot into rows, and adds them to its own chunk, which it reads in the slot.

    Why that is enough:
    * What is pulled is packed: each rank enters meeting k behind its own packing of k, and pulls behind the meeting.
    * A slot is not packed while it is read: each rank enters meeting k+1 behind its own pulls and its own sum of
      gradient k, because one stream makes them in this order. So behind meeting k+1 nobody reads slot k mod S, and the
      next packing of it, k+S, waits for just that meeting. (With S = 1 it would wait for a meeting it comes before.)
    * The rows are one set: they are filled and read in the order of `pulling`.
    * The gradients that autograd made are kept until `let_go`; the shard and the running sum, made on the current
      stream before `send`, are written behind it and read after `land`.
    * Nothing waits for the host, but for the slots' making. Memory of slots is freed by all ranks together.
    """

    ahead = 2  # they hold no memory but the shards: this bounds how far the ranks may run apart

    def __init__(
        self,
        apart: CollectiveReduction,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
    ) -> None:
        """exchange: every rank's object on every rank. smallest: bytes of a shard from which it is pulled."""
        self._apart, self._memory, self._smallest = apart, memory, smallest
        self._lane = apart.lane
        self._slots = GradientSlots(memory, exchange, apart.lane.rank, device)
        self._packing, self._pulling = (work_stream(device, priority=-1) for _ in range(2))
        self._token = torch.zeros(1, dtype=torch.float32, device=device)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of slots that lie outside of torch's allocator, whose statistics do not show them."""
        return self._slots.mapped_bytes

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        small = layout.shard_numel * like.itemsize < max(self._smallest, 1)
        if small or not serves(like.dtype, like.device):
            return self._apart.reducer(layout, shapes, like, poison)
        return _PeerReducer(self, layout, shapes, like.dtype, poison)

    def take(self, nbytes: int) -> Slot:
        """A slot of at least `nbytes`. Collective; the host waits where they are too small so far."""
        if nbytes > self._slots.nbytes:
            self.free()
            self._slots.make(nbytes)
        return self._slots.take()

    def free(self) -> None:
        self._pulling.mark().synchronize()
        self._slots.free()

    def carry(
        self, slot: Slot, pack: Callable[[], object], shard: torch.Tensor, total: torch.Tensor | None
    ) -> tuple[Ticket, Ticket]:
        """Pack into the slot taken last, average into `shard` and `total`; tickets of the packing and of the end."""
        own = self._slots.own(slot, shard.nbytes).view(shard.dtype)
        rows = self._slots.rows(shard.nbytes).view(shard.dtype)
        pairs = self._slots.pairs(slot, shard.nbytes)
        self._packing.follow()
        self._packing.after(slot.free)
        self._packing.run(pack)
        packed = self._packing.mark()
        self._pulling.after(packed)
        self._pulling.run(self._meet)
        self._slots.previous().free = self._pulling.mark()
        self._pulling.run(lambda: self._memory.pull(pairs).wait())
        self._pulling.run(functools.partial(peer_mean, own, rows, self._lane.rank, shard, total))
        return packed, self._pulling.mark()

    def _meet(self) -> None:
        self._lane.all_reduce(self._token).wait()


class _PeerReducer:
    def __init__(self, peers: PeerReduction, layout: Layout, shapes, dtype: torch.dtype, poison: bool) -> None:
        self._peers, self._layout, self._shapes, self._dtype, self._poison = peers, layout, shapes, dtype, poison
        self._nbytes = layout.numel * dtype.itemsize
        self._packings: weakref.WeakKeyDictionary[Slot, Packing] = weakref.WeakKeyDictionary()

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        slot = self._peers.take(self._nbytes)
        if slot not in self._packings:
            flat = slot.memory[: self._nbytes].view(self._dtype)
            self._packings[slot] = Packing(flat, self._layout, self._shapes)
        packing = self._packings[slot]
        if self._poison and total is None:
            shard.fill_(float("nan"))

        def pack() -> None:
            if self._poison:
                packing.flat.fill_(float("nan"))
            packing.complete(gradients)

        return _PeerFlight(*self._peers.carry(slot, pack, shard, total), gradients)


class _PeerFlight:
    def __init__(self, packed: Ticket, arrived: Ticket, gradients) -> None:
        self._packed, self._arrived, self._gradients = packed, arrived, gradients

    def let_go(self) -> None:
        if self._gradients is not None:
            self._packed.wait()
            self._gradients = None

    def land(self) -> None:
        self.let_go()
        self._arrived.wait()

    cancel = land
