"""Slots of memory, mapped by all ranks of a host, through which packed gradients pass in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ops.streams import DONE, Ticket
from .peer_memory import PeerMemory

COUNT = 2
"""Slots: one is packed while the other is pulled out of."""


class Slot:
    """One slot of this rank. memory: (nbytes,) uint8. number: its place among the slots, the same on every rank.
    free: what its next packing waits for."""

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        self.memory, self.number = memory, number
        self.free: Ticket = DONE


class GradientSlots:
    """COUNT slots of equal size on every rank, and the rows into which the other ranks' slots are copied.

    The slots lie in peer memory, beside torch's allocator; the rows are torch's. They are made at the first gradient
    and again for a larger one, and stay until `free`.
    """

    def __init__(self, memory: PeerMemory, exchange: Callable[[Any], list[Any]], rank: int, device: torch.device):
        """exchange: every rank's object on every rank."""
        self._memory, self._exchange, self._rank, self._device = memory, exchange, rank, device
        self._handle: Any = None
        self._sources: list[Any] = []
        self._slots: list[Slot] = []
        self._rows = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0
        self.nbytes = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes that lie outside of torch's allocator, whose statistics do not show them."""
        return len(self._slots) * self.nbytes

    def free(self) -> None:
        """Give the slots back, out of which this rank copies no more. Collective."""
        for source in self._sources:
            if source is not None:
                self._memory.unmap(source)
        self._slots, self._sources = [], []
        self._rows = torch.empty(0, dtype=torch.uint8, device=self._device)
        if self._handle is not None:
            self._exchange(None)  # nobody has them mapped
            self._memory.free(self._handle)
        self._handle, self.nbytes = None, 0

    def make(self, nbytes: int) -> None:
        """Slots of `nbytes`, where there are none. Collective."""
        whole, self._handle, _ = self._memory.allocate(COUNT * nbytes, torch.uint8)
        handles = self._exchange(self._handle)
        for rank, handle in enumerate(handles):
            self._sources.append(None if rank == self._rank else self._memory.map(handle, COUNT * nbytes))
        self._exchange(None)  # all have mapped
        self._memory.unlink(self._handle)
        self._slots = [Slot(part, number) for number, part in enumerate(whole.split(nbytes))]
        size = len(handles)
        self._rows = torch.empty((size - 1) * (nbytes // size), dtype=torch.uint8, device=self._device)
        self._taken, self.nbytes = 0, nbytes

    def take(self) -> Slot:
        """The next slot in turn."""
        self._taken += 1
        return self._slots[self._taken % COUNT]

    def previous(self) -> Slot:
        """The slot that was taken before the last."""
        return self._slots[(self._taken - 1) % COUNT]

    def own(self, slot: Slot, nbytes: int) -> torch.Tensor:
        """This rank's chunk of what it has packed, (nbytes,) uint8."""
        return slot.memory[self._rank * nbytes : (self._rank + 1) * nbytes]

    def rows(self, nbytes: int) -> torch.Tensor:
        """Where the other ranks' chunks come to lie, in the order of ranks: (size - 1, nbytes) uint8."""
        others = len(self._sources) - 1
        return self._rows[: others * nbytes].view(others, nbytes)

    def pairs(self, slot: Slot, nbytes: int) -> list[tuple[torch.Tensor, Any]]:
        """What `PeerMemory.pull` takes to fill the rows; each rank begins with another one."""
        size, rows = len(self._sources), self.rows(nbytes)
        start = slot.number * self.nbytes + self._rank * nbytes
        pairs = []
        for step in range(1, size):
            rank = (self._rank + step) % size
            source = self._memory.part(self._sources[rank], start, start + nbytes)
            pairs.append((rows[rank - (rank > self._rank)], source))
        return pairs
