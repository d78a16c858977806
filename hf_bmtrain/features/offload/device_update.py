"""AdamW on the device with state in host memory: copies chunks of state to the device, and back after their update."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...engine.comm.streams import DONE, Event, work_stream
from ...engine.optim.runs import StateTensors
from .slabs import Chunk, Part

_BUFFERS = 3


class DeviceUpdate:
    """Updates chunks of state through three buffers on the device, with a stream each for upload, update and download.

    So, while one chunk is updated, the next one is uploaded and the previous one is downloaded. The host never waits.
    The streams wait as follows:

    * An upload into a buffer waits until the buffer's previous contents are downloaded, and until the previous step's
      download of the same chunk is complete.
    * The update of a buffer waits until its upload is complete, and until the work is complete that the current stream
      had queued when `carry` was called: it computes the gradients and the step's numbers (such as bias corrections),
      and contains everything that reads the old weights.
    * The download of a buffer waits until its update is complete.
    * The caller must wait for the events that `carry` yields, or for `updated`, before it writes gradients, the step's
      numbers or weights again.

    Attributes:
        updated: the event of the last chunk's update.
        downloaded: the event of the last chunk's download.
    """

    def __init__(self, chunks: Sequence[Chunk], exp_avg_dtype: torch.dtype, device: torch.device) -> None:
        """Allocate device buffers that have room for the largest of `chunks`."""
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
        self._upload.follow()  # work that the current stream has queued may still use the buffers' memory
        self._emptied: list[Event] = [DONE] * _BUFFERS
        self._returned: dict[Chunk, Event] = {}
        self._turns = itertools.cycle(range(_BUFFERS))
        self.updated: Event = DONE
        self.downloaded: Event = DONE

    def carry(self, chunks: Sequence[Chunk], update: Callable[[Part, StateTensors], object]) -> Iterator[Event]:
        """Queue the update of every chunk, and yield an event for each. Keep its gradients until the event completes.

        Args:
            chunks: the chunks to update, in this order.
            update: called as `update(part, state)` with the update stream current, for each part of a chunk; `state` is
                the chunk's state in a device buffer, which it updates in place.

        Returns:
            An iterator over one event per chunk, which completes when the chunk's weights are updated.
        """
        self._update.follow()
        for chunk in chunks:
            yield self._pass(next(self._turns), chunk, update)

    def _pass(self, number: int, chunk: Chunk, update: Callable[[Part, StateTensors], object]) -> Event:
        """Queue upload, update and download of a chunk in device buffer `number`. Returns the event of its update."""
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
    """Queue copies of state tensors from `sources` to `targets`, between host and device, on the current stream."""
    for target, source in zip(targets, sources):
        if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
            target.copy_(source, non_blocking=True)
