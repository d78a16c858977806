"""Agreement between the ranks' Python: objects that pickle, over a gloo group of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


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

    def share(self, value: Any) -> Any:
        """Rank 0's `value`."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def meet(self, seconds: float) -> None:
        """Wait for every rank. RuntimeError that names the ranks which did not come in time."""
        if self._group is not None:
            dist.monitored_barrier(self._group, timedelta(seconds=seconds), wait_all_ranks=True)

    def close(self) -> None:
        """End the group's threads; every rank has come here."""
        end_group(self._group)
        self._group = None


def end_group(group: Any) -> None:
    """Destroy a process group; its threads end when the caller drops its own reference as well.

    They must before the interpreter does: a gloo thread that drops the tensors of its last operation during the
    interpreter's end takes the whole process down ("terminate called without an active exception").
    """
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)
