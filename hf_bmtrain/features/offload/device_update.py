"""AdamW on the device with state in host memory: chunks of state are copied to the device and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...engine.comm.streams import DONE, Event, work_stream
from ...engine.optim.runs import StateTensors
from .slabs import Chunk, Part

_BUFFERS = 3


class DeviceUpdate:
    """Carries chunks of state through three buffers on the device: upload the next, update this, download the last.

    updated, downloaded: the tickets of the last chunk's update and of its download.

    Who waits for whom, and why that is enough (the host waits for nothing):
    * a buffer is filled after its last contents have been downloaded;
    * it is updated after it has been filled, and after what the current stream had queued at `carry`: the
      gradients, the step's numbers, and all that reads the weights as they were;
    * it is downloaded after it has been updated;
    * a chunk is uploaded after it has been downloaded the last time;
    * the current stream may write gradients, numbers and weights again after the tickets, or `updated`.
    """

    def __init__(self, chunks: Sequence[Chunk], exp_avg_dtype: torch.dtype, device: torch.device) -> None:
        """Allocate buffers for the largest of `chunks`."""
        numel = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        master_bytes = max((c.slab.master.itemsize for c in chunks if c.slab.master is not None), default=0)
        self._buffers = [
            (
                torch.empty(numel * master_bytes, device=device, dtype=torch.uint8),
                torch.empty(numel, device=device, dtype=exp_avg_dtype),
                torch.empty(numel, device=device),
            )
            for _ in range(_BUFFERS)
        ]
        self._upload, self._update, self._download = (work_stream(device) for _ in range(3))
        self._upload.follow()  # work queued so far may still use the buffers' memory
        self._emptied: list[Event] = [DONE] * _BUFFERS
        self._returned: dict[Chunk, Event] = {}
        self._turns = itertools.cycle(range(_BUFFERS))
        self.updated: Event = DONE
        self.downloaded: Event = DONE

    def carry(self, chunks: Sequence[Chunk], update: Callable[[Part, StateTensors], object]) -> Iterator[Event]:
        """Queue the update of every chunk, and yield the ticket of each. The caller keeps the gradients until then.

        update(part, state): updates one part of a chunk, whose `state` is on the device.
        """
        self._update.follow()
        for chunk in chunks:
            yield self._pass(next(self._turns), chunk, update)

    def _pass(self, number: int, chunk: Chunk, update: Callable[[Part, StateTensors], object]) -> Event:
        home = chunk.slab.part(chunk.start, chunk.stop)
        masters, exp_avg, exp_avg_sq = self._buffers[number]
        master = None if home.master is None else masters.view(home.master.dtype)
        here = StateTensors(master, exp_avg, exp_avg_sq).part(0, chunk.stop - chunk.start)

        def update_parts() -> None:
            for part in chunk.parts:
                update(part, here)

        self._upload.after(self._emptied[number])
        self._upload.after(self._returned.get(chunk, DONE))
        self._upload.run(lambda: _copy(here, home))
        self._update.after(self._upload.record_event())
        self._update.run(update_parts)
        self.updated = self._update.record_event()
        self._download.after(self.updated)
        self._download.run(lambda: _copy(home, here))
        self._emptied[number] = self._returned[chunk] = self.downloaded = self._download.record_event()
        return self.updated


def _copy(targets: StateTensors, sources: StateTensors) -> None:
    for target, source in zip(targets, sources):
        if target is not None and source is not None:
            target.copy_(source, non_blocking=True)
