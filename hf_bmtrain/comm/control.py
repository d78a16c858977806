"""Agreement between the ranks' Python: objects that pickle, over a gloo group of its own."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LATER = 5.0  # seconds that the others give rank 0 to find out who is missing


class Control:
    """What all ranks know together. Every method but `close` is collective; with one process all are at once."""

    def __init__(self, size: int, timeout: timedelta) -> None:
        """A new group over all ranks of torch's default process group, unless there is one process. Collective."""
        self.size = size
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order."""
        values = [value]
        if self._group is not None:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's `value`."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self, seconds: float) -> None:
        """Wait for every rank. RuntimeError on all that came where others did not in time; the group is lost then.

        Rank 0 hears of all and names those that are missing. (torch's monitored_barrier has a limit on rank 0 alone.)
        """
        if self._group is None:
            return
        if dist.get_rank() != 0:
            sent = dist.isend(torch.zeros(1), 0, group=self._group)  # ends where it is dropped
            answer = dist.irecv(torch.zeros(1), 0, group=self._group)
            if not (comes(sent, seconds) and comes(answer, seconds + _LATER)):
                raise RuntimeError("Rank 0 did not come, or says which rank did not.")
            return
        others = range(1, self.size)
        arriving = [dist.irecv(torch.zeros(1), rank, group=self._group) for rank in others]
        end = time.monotonic() + seconds
        missing = [rank for rank, work in zip(others, arriving) if not comes(work, end - time.monotonic())]
        if missing:
            raise RuntimeError(f"Missing: rank {', '.join(map(str, missing))}.")
        for work in [dist.isend(torch.zeros(1), rank, group=self._group) for rank in others]:
            comes(work, _LATER)

    def close(self) -> None:
        """End the group's threads: none waits for another rank, as its collectives were waited for when they came."""
        if self._group is not None:
            end_group(self._group)
        self._group = None


def comes(work: Any, seconds: float) -> bool:
    """Whether an operation ends in time, and well."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        return False
    return True


def end_group(group: Any) -> None:
    """Destroy a process group; its threads end when the caller drops its own reference as well.

    They must before the interpreter does: a gloo thread that drops the tensors of its last operation during the
    interpreter's end takes the whole process down ("terminate called without an active exception").
    """
    with contextlib.suppress(ValueError):  # it was destroyed with the default group; only our reference keeps it
        dist.destroy_process_group(group)
