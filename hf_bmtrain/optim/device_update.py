"""AdamW where the state lies in host memory: its chunks pass through the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..comm.streams import DONE, Ticket, work_stream
from .chunk_update import ChunkUpdate
from .slabs import Chunk

_BUFFERS = 3


class Conveyor:
    """Carries chunks of state through three buffers on the device: upload the next, update this, download the last.

    Who waits for whom, and why that is enough (the host waits for nothing):
    * a buffer is filled after its last contents have been downloaded;
    * it is updated after it has been filled, and after what the current stream had queued at `begin`: the
      gradients, the step's numbers, whoever read the weights before;
    * it is downloaded after it has been updated;
    * a chunk is uploaded after it has been downloaded the last time;
    * the current stream may write gradients, numbers and weights again after the tickets, or `updated`.
    """

    def __init__(self, numel: int, master_bytes: int, exp_avg_dtype: torch.dtype, device: torch.device) -> None:
        """Buffers for chunks of up to `numel` elements, whose masters have up to `master_bytes` bytes."""
        self._buffers = [
            (
                torch.empty(numel * master_bytes, device=device, dtype=torch.uint8),
                torch.empty(numel, device=device, dtype=exp_avg_dtype),
                torch.empty(numel, device=device),
            )
            for _ in range(_BUFFERS)
        ]
        self._upload, self._update, self._download = (work_stream(device) for _ in range(3))
        self._upload.follow()  # the buffers' memory may have been someone else's until here
        self._emptied: list[Ticket] = [DONE] * _BUFFERS
        self._at_home: dict[Chunk, Ticket] = {}
        self._turn = 0
        self.updated: Ticket = DONE
        self.downloaded: Ticket = DONE

    def carry(self, update: ChunkUpdate) -> Iterator[Ticket]:
        """Update every chunk, and yield its ticket once that is queued. Gradients are kept until then by the caller."""
        self._update.follow()
        for chunk in update.chunks:
            number, self._turn = self._turn, (self._turn + 1) % _BUFFERS
            yield self._pass(number, chunk, update)

    def _pass(self, number: int, chunk: Chunk, update: ChunkUpdate) -> Ticket:
        home = chunk.slab.part(chunk.start, chunk.stop)
        here = tuple(
            None if at_home is None else buffer.view(at_home.dtype)[: chunk.stop - chunk.start]
            for buffer, at_home in zip(self._buffers[number], home)
        )

        def update_parts() -> None:
            for part in chunk.parts:
                update.apply(part, update.gradient(part), here, update.weight(part))

        self._upload.after(self._emptied[number])
        self._upload.after(self._at_home.get(chunk, DONE))
        self._upload.run(lambda: _copy(here, home))
        self._update.after(self._upload.mark())
        self._update.run(update_parts)
        self.updated = self._update.mark()
        self._download.after(self.updated)
        self._download.run(lambda: _copy(home, here))
        self._emptied[number] = self._at_home[chunk] = self.downloaded = self._download.mark()
        return self.updated


def _copy(targets, sources) -> None:
    for target, source in zip(targets, sources):
        if target is not None:
            target.copy_(source, non_blocking=True)
