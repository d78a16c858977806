"""AdamW on the host's cores, for weights on a device whose state lies in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..comm.streams import DONE, Ticket, work_stream
from ..ops.pinned import pinned_bytes
from .chunk_update import ChunkUpdate
from .slabs import Chunk, Part

_BUFFERS = 3
_WIDEST = 4  # bytes an element


class HostUpdate:
    """Brings gradients to the host, updates there, and sends the weights back, three chunks under way at a time.

    The host waits for each gradient; the next ones travel meanwhile, as do the weights of the last. A buffer is used
    again when the host has updated what it held and its weights have left.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        """Buffers for chunks of up to `numel` elements."""
        self._buffers = [
            pinned_bytes(2 * _WIDEST * numel, device, "gradients and weights on their way").view(2, -1)
            for _ in range(_BUFFERS)
        ]
        self._download, self._upload = work_stream(device), work_stream(device)
        self._left: list[Ticket] = [DONE] * _BUFFERS
        self.updated: Ticket = DONE
        self.downloaded: Ticket = DONE  # the host has written the state itself

    def carry(self, update: ChunkUpdate) -> Iterator[Ticket]:
        """Update every chunk, and yield the ticket of its weights."""
        self._download.follow()
        self._upload.follow()
        arrivals: list[Ticket] = []
        for number, chunk in enumerate(update.chunks):
            for ahead in range(len(arrivals), min(number + _BUFFERS, len(update.chunks))):
                arrivals.append(self._fetch(ahead % _BUFFERS, update.chunks[ahead], update))
            arrivals[number].synchronize()
            yield self._finish(number % _BUFFERS, chunk, update)

    def _fetch(self, number: int, chunk: Chunk, update: ChunkUpdate) -> Ticket:
        def copy() -> None:
            for part in chunk.parts:
                gradient = update.gradient(part)
                self._staged(number, 0, part, gradient.dtype).copy_(gradient, non_blocking=True)

        self._download.run(copy)
        return self._download.mark()

    def _finish(self, number: int, chunk: Chunk, update: ChunkUpdate) -> Ticket:
        self._left[number].synchronize()
        state = chunk.slab.part(chunk.start, chunk.stop)
        assert state[0] is not None, "on the host every run has a master"
        staged = []
        for part in chunk.parts:
            gradient = self._staged(number, 0, part, update.gradient(part).dtype)
            staged.append(self._staged(number, 1, part, update.weight(part).dtype))
            update.apply(part, gradient, state, staged[-1])

        def send() -> None:
            for part, weight in zip(chunk.parts, staged):
                update.weight(part).copy_(weight, non_blocking=True)

        self._upload.run(send)
        self.updated = self._left[number] = self._upload.mark()
        return self.updated

    def _staged(self, number: int, which: int, part: Part, dtype: torch.dtype) -> torch.Tensor:
        """The place of a part's gradients (0) or weights (1) in buffer `number`."""
        start, stop = part.of_chunk.start, part.of_chunk.stop
        place = self._buffers[number][which][_WIDEST * start : _WIDEST * stop]
        return place[: (stop - start) * dtype.itemsize].view(dtype)
