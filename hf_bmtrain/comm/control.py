"""Exchange of picklable Python objects between the ranks, over a separate gloo group, and of posts in a store."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..ops.torch_internals import default_store

_LATER = 5.0  # seconds that the other ranks wait longer than rank 0, which finds out which ranks are missing


class Control:
    """Collectives over Python objects, and posts. With one process all methods return at once.

    `gather`, `broadcast_object` and `barrier` are collective.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        """Make a group of all ranks of torch's default process group, if there are several. Collective."""
        self.size = size
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if size > 1 else None
        self._store: Any = default_store() if size > 1 else None

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        values = [value]
        if self._group is not None:
            values = [None] * self.size
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self, seconds: float) -> None:
        """Wait at most `seconds` for every rank.

        Raise RuntimeError on the ranks that arrived if others did not; the group is unusable then. Rank 0 receives a
        message from each rank and names the missing ones. (torch's monitored_barrier limits the wait on rank 0 only.)
        """
        if self._group is None:
            return
        if dist.get_rank() != 0:
            sent = dist.isend(torch.zeros(1), 0, group=self._group)  # cancelled when it is dropped
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

    # -- posts, which are not collective ------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Add `text` (without ";") to the posts of all ranks under `key`. One message to the launcher's store."""
        if self._store is not None:
            self._store.append(key, f"{text};")

    def read_posts(self, key: str) -> list[str]:
        """Return the posts under `key`, of which there is one at least; none with one process."""
        return [] if self._store is None else self._store.get(key).decode().split(";")[:-1]

    def delete_posts(self, key: str) -> None:
        """Delete the posts under `key`."""
        if self._store is not None:
            self._store.delete_key(key)

    def show(self, key: str, text: str) -> None:
        """Replace what is shown under `key`."""
        if self._store is not None:
            self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """Return what is shown under `key`, None if nothing is."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def close(self) -> None:
        """End the group's threads. None waits for another rank, since every collective here is synchronous."""
        if self._group is not None:
            end_group(self._group)
        self._group = None


def comes(work: Any, seconds: float) -> bool:
    """Return whether an operation succeeds within `seconds`."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        return False
    return True


def end_group(group: Any) -> None:
    """Destroy a process group. Its threads end when the caller drops its own reference as well.

    They must end before the interpreter: a gloo thread that frees the tensors of its last operation while the
    interpreter shuts down aborts the process ("terminate called without an active exception").
    """
    with contextlib.suppress(ValueError):  # already destroyed with the default group
        dist.destroy_process_group(group)
