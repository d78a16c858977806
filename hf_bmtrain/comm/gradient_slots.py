"""Slots of memory, mapped by all ranks of a host, to which every rank brings its part of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .peer_memory import PeerMemory
from .streams import DONE, Ticket

COUNT = 2
"""Slots: one is filled while the other is read."""


class Slot:
    """One slot of this rank. memory: (nbytes,) uint8. number: its place among the slots, the same on every rank.
    free: what its next filling waits for; no rank reads its own slot of this number then."""

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        self.memory, self.number = memory, number
        self.free: Ticket = DONE


class GradientSlots:
    """COUNT slots of equal size on every rank. A slot holds a row for each other rank, that rank's part of
    one gradient's chunk for the slot's owner, in the order of ranks.

    They lie in peer memory, beside torch's allocator; they are made at the first gradient and again for a larger one,
    and stay until `free`.
    """

    def __init__(self, memory: PeerMemory, exchange: Callable[[Any], list[Any]], rank: int) -> None:
        """exchange: every rank's object on every rank."""
        self._memory, self._exchange, self._rank = memory, exchange, rank
        self._handle: Any = None
        self._mapped: list[Any] = []
        self._slots: list[Slot] = []
        self._taken = 0
        self.nbytes = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes that lie outside of torch's allocator, whose statistics do not show them."""
        return len(self._slots) * self.nbytes

    def free(self) -> None:
        """Give the slots back, which this rank neither fills nor reads any more. Collective."""
        for mapped in self._mapped:
            if mapped is not None:
                self._memory.unmap(mapped)
        self._slots, self._mapped = [], []
        if self._handle is not None:
            self._exchange(None)  # nobody has them mapped
            self._memory.free(self._handle)
        self._handle, self.nbytes = None, 0

    def make(self, nbytes: int) -> None:
        """Slots of `nbytes`, where there are none. Collective."""
        whole, self._handle, _ = self._memory.allocate(COUNT * nbytes, torch.uint8)
        for rank, handle in enumerate(self._exchange(self._handle)):
            self._mapped.append(None if rank == self._rank else self._memory.map(handle, COUNT * nbytes))
        self._exchange(None)  # all have mapped
        self._memory.unlink(self._handle)
        self._slots = [Slot(part, number) for number, part in enumerate(whole.split(nbytes))]
        self._taken, self.nbytes = 0, nbytes

    def take(self) -> Slot:
        """The next slot in turn."""
        self._taken += 1
        return self._slots[self._taken % COUNT]

    def current(self) -> Slot:
        """The slot that was taken last."""
        return self._slots[self._taken % COUNT]

    def previous(self) -> Slot:
        """The slot that was taken before the last."""
        return self._slots[(self._taken - 1) % COUNT]

    def part(self, slot: Slot, rank: int, start: int, stop: int) -> Any:
        """Bytes start:stop of the slot of this number that another rank has, for `PeerMemory.push`."""
        begin = slot.number * self.nbytes
        return self._memory.part(self._mapped[rank], begin + start, begin + stop)
