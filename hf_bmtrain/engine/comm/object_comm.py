"""Exchange of picklable Python objects between the ranks, over a separate gloo group, and of posts in a store."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.torch_internals import default_store
from .collective_log import CollectiveLog, code
from .communicator import PATIENCE, end_group, explained_by, keep_group, wait_for

_LATER = timedelta(seconds=60)  # for which gloo waits longer, so that the reason comes from here


class ObjectComm:
    """Collectives over Python objects, and posts. With one process all methods return at once.

    `gather`, `broadcast_object`, `barrier` and `any` are collective. journal: of these. timeout: seconds that they wait
    for the other ranks. occasions: what they were for, by the numbers in the journal.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        """Make a group of all ranks of torch's default process group, if there are several. Collective."""
        self.size, self.timeout = size, timeout.total_seconds()
        self.collective_log = CollectiveLog("control")
        self.occasions: dict[int, str] = {}
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout + _LATER) if size > 1 else None
        self._store: Any = default_store() if size > 1 else None
        self._last: Any = None  # the last barrier

    def gather(self, value: Any, occasion: str = "an exchange of objects") -> list[Any]:
        """Return every rank's `value`, in rank order."""
        values = [value]
        if self._group is not None:
            self.barrier(occasion)
            values = [None] * self.size
            with explained_by(self.collective_log):
                dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`."""
        values = [value]
        if self._group is not None:
            self.barrier("a broadcast of rank 0's object")
            with explained_by(self.collective_log):
                dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self, occasion: str, seconds: float | None = None) -> None:
        """Wait at most `seconds`, by default the timeout, for every rank to come to the same occasion.

        Raises RuntimeError if others did not come; no exchange is possible then.
        """
        self.any(False, occasion, seconds)

    def any(self, flag: bool, occasion: str, seconds: float | None = None) -> bool:
        """Return whether a rank passes True. A barrier, in one message where `gather` takes several."""
        if self._group is None:
            return flag
        number = zlib.crc32(occasion.encode())
        self.occasions[number] = occasion
        self.collective_log.note(code("exchange", number))
        flags = torch.tensor([float(flag)], device="cpu")
        self._last = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
        wait_for(self._last, self.collective_log, self.timeout + PATIENCE if seconds is None else seconds)
        return bool(flags.item())

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
        """End the group's threads, unless they wait for another rank in a barrier that was given up."""
        given_up = self._last is not None and not self._last.is_completed()
        self._last = None  # it refers to the group
        if given_up:
            keep_group(self._group)
        elif self._group is not None:
            end_group(self._group)
        self._group = None
