"""Update optimizer state in host memory by chunks (ranges): copy a chunk to the device, update it, copy it back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from ...engine.comm.streams import DONE, Event, work_stream
from ...engine.optim.runs import StateTensors
from .slabs import Chunk, Part

_BUFFERS = 3


class DeviceUpdate:
    """Updates optimizer state that is kept in host memory, chunk by chunk, on the device.

    A chunk (a range of the state) is uploaded to a buffer on the device, updated there and downloaded. Uploads, updates
    and downloads have a stream each. While one chunk is updated, the next is uploaded and the previous one is
    downloaded, so there are three buffers. The methods only queue work, so the host never waits. The streams wait:

    * An upload waits until its buffer is free (its previous contents have been downloaded), and until the download of
      the same chunk in the previous step is complete.
    * An update waits for the upload of its chunk. It also waits for all work that the caller has queued on its current
      stream before the first `next` of the iterator that `carry` returns. This work computes the gradients and the
      step's scalars (such as bias corrections), and may still read the old weights.
    * A download waits for the update of its chunk.

    The updates read gradients and the step's scalars, and write weights. The caller's current stream does not wait for
    these updates by itself. The caller must therefore call `wait()` of the events that `carry` yields, or of `updated`,
    before it queues work that uses the weights, or that overwrites gradients or scalars.

    Attributes:
        updated: the event that completes when the last queued update is complete.
        downloaded: the event that completes when the last queued download is complete.
    """

    def __init__(self, chunks: Sequence[Chunk], exp_avg_dtype: torch.dtype, device: torch.device) -> None:
        """Allocate device buffers that are large enough for the largest of `chunks`.

        chunks: all chunks (ranges of the optimizer state in host memory) that `carry` will be called with.
        exp_avg_dtype: the dtype of the first moment.
        device: the device that runs the updates.
        """
        numel = max((chunk.stop - chunk.start for chunk in chunks), default=0)
        master_bytes = max((c.slab.master.itemsize for c in chunks if c.slab.master is not None), default=0)
        self._buffers = [
            (
                torch.empty(numel * master_bytes, device=device, dtype=torch.uint8),
                torch.empty(numel, device=device, dtype=exp_avg_dtype),
                torch.empty(numel, device=device, dtype=torch.float32),
            )
            for _ in range(_BUFFERS)
        ]
        self._upload, self._update, self._download = (work_stream(device) for _ in range(3))
        # The new buffers may be in memory that was freed, but that queued work still uses. So wait for that work.
        self._upload.follow()
        self._emptied: list[Event] = [DONE] * _BUFFERS
        self._returned: dict[Chunk, Event] = {}
        self._turns = itertools.cycle(range(_BUFFERS))
        self.updated: Event = DONE
        self.downloaded: Event = DONE

    def carry(self, chunks: Sequence[Chunk], update: Callable[[Part, StateTensors], object]) -> Iterator[Event]:
        """Queue the updates of chunks (ranges of the optimizer state): a generator that queues one chunk per `next`.

        Args:
            chunks: the chunks to update, in this order.
            update: a function that updates one Part of a chunk (the elements of parameters that are updated together).
                It is called as `update(part, state)` for each Part, with the update stream as the current stream.
                `state` is the state of the whole chunk, in a device buffer. The function must update, in place, the
                part's weights and the part's elements of `state`.

        Returns:
            An iterator over one event per chunk. The event completes when the chunk's weights are updated. Until then,
            do not free or write the chunk's gradients.
        """
        self._update.follow()
        for chunk in chunks:
            yield self._pass(next(self._turns), chunk, update)

    def _pass(self, number: int, chunk: Chunk, update: Callable[[Part, StateTensors], object]) -> Event:
        """Queue the upload, update and download of one chunk (a range of the optimizer state).

        number: the index of the device buffer to use.
        update: called for each Part of the chunk, as `carry` describes.

        Returns the event that completes with the update.
        """
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
    """Queue copies of optimizer state from `sources` to `targets`, between host and device, on the current stream."""
    for target, source in zip(targets, sources):
        if isinstance(target, torch.Tensor) and isinstance(source, torch.Tensor):
            target.copy_(source, non_blocking=True)
