"""Exchange Python objects between ranks over a separate gloo group, and texts through torch's key-value store."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.torch_internals import default_store
from .collective_log import CollectiveLog, code
from .communicator import PATIENCE, end_group, explained_by, keep_group, wait_for

_LATER = timedelta(seconds=60)  # added to gloo's own timeout, so that this package's error is raised first


class ObjectComm:
    """Collectives over picklable Python objects, and texts in a key-value store that all ranks can read.

    `gather`, `broadcast_object`, `barrier`, `any` and `smallest` are collective; the other methods are not. With one
    rank, every method returns at once.

    Attributes:
        size: the number of ranks.
        timeout: the number of seconds that a collective waits for the other ranks.
        collective_log: the log of the collectives, which is compared with other ranks' logs.
        occasions: {number: text}, the texts that error messages show for numbers in `collective_log`. A text is the
            purpose of a collective, or a decision that was passed to `note_decision`.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        """Create a gloo group of all ranks, unless there is only one. Collective: every rank must call it.

        Args:
            size: the number of ranks. If there are several, torch's default process group must be initialized.
            timeout: the time that a collective waits for the other ranks.
        """
        self.size, self.timeout = size, timeout.total_seconds()
        self.collective_log = CollectiveLog("control")
        self.occasions: dict[int, str] = {}
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout + _LATER) if size > 1 else None
        self._store: Any = default_store() if size > 1 else None
        self._last: Any = None  # the last operation of `any` or `smallest`; while it runs, `close` keeps the group

    def gather(self, value: Any, occasion: str = "an exchange of objects") -> list[Any]:
        """Return the values that all ranks pass, in rank order. Collective: every rank must call it.

        Args:
            value: any object that can be pickled.
            occasion: the purpose of the exchange, for messages. It must be the same on every rank.

        Raises:
            RuntimeError: not all ranks called it in time, or a problem was found meanwhile, such as an error of another
                rank.
        """
        values = [value]
        if self._group is not None:
            self.barrier(occasion)
            values = [None] * self.size
            with explained_by(self.collective_log):
                dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Return the value that rank 0 passes. The values of other ranks are ignored.

        Collective: every rank must call it. Raises RuntimeError if not all ranks call it in time, or if a problem is
        found meanwhile, such as an error of another rank.
        """
        values = [value]
        if self._group is not None:
            self.barrier("a broadcast of rank 0's object")
            with explained_by(self.collective_log):
                dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self, occasion: str, seconds: float | None = None) -> None:
        """Wait until every rank has called this with the same occasion. Collective: every rank must call it.

        Args:
            occasion: the purpose of the barrier, for messages.
            seconds: the maximum time to wait for the other ranks. None uses the attribute `timeout`.

        Raises:
            RuntimeError: not all ranks called it in time, or a problem was found meanwhile, such as an error of another
                rank. Do not use this object for collectives afterwards, because the barrier is still pending.
        """
        self.any(False, occasion, seconds)

    def any(self, flag: bool, occasion: str, seconds: float | None = None) -> bool:
        """Return whether any rank passes True. This is faster than `gather`, because it takes only one all-reduce.

        Collective: every rank must call it.

        Args:
            flag: this rank's value.
            occasion: the purpose of the exchange, for messages. It must be the same on every rank.
            seconds: the maximum time to wait for the other ranks. None uses the attribute `timeout`.

        Raises:
            RuntimeError: not all ranks called it in time, or a problem was found meanwhile, such as an error of another
                rank.
        """
        if self._group is None:
            return flag
        return not self._smallest(not flag, code("exchange", self._number(occasion)), seconds)

    def smallest(self, number: int, entry: int) -> int:
        """Return the smallest of the numbers that the ranks pass. Collective: every rank must call it.

        Used if ranks may enter different blocks, and so need different collectives next. Each rank passes the number of
        the collective that it needs. All ranks then issue the collective whose number is returned.

        Args:
            number: this rank's number, a signed integer of 64 bits.
            entry: the number that stands for this operation in the collective log (the list of operations that the
                ranks compare), from `collective_log.code`.

        Raises:
            RuntimeError: not all ranks called it in time, or a problem was found meanwhile, such as an error of another
                rank.
        """
        return number if self._group is None else self._smallest(number, entry, None)

    def _smallest(self, number: int, entry: int, seconds: float | None) -> int:
        self.collective_log.note(entry)
        least = torch.tensor([number], dtype=torch.int64, device="cpu")
        self._last = dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group, async_op=True)
        wait_for(self._last, self.collective_log, self.timeout + PATIENCE if seconds is None else seconds)
        return int(least.item())

    def note_decision(self, text: str) -> None:
        """Add a decision of this rank to the collective log, which is compared with the other ranks' logs.

        Call this for decisions that must be the same on all ranks, such as whether to save at this step. Every rank
        must call this method at the same point, but the call does not wait for the other ranks. It takes about a
        microsecond.

        Args:
            text: a description of the decision, which messages show. There should be few different texts, because each
                is kept in memory until the process ends.

        Raises:
            RuntimeError: another rank of this host has made a different decision, or a problem was found before. If the
                other rank decides later, or is on another host, a later operation of this rank raises the error.
        """
        if self._group is not None:
            self.collective_log.note(code("decision for", self._number(text)))

    def _number(self, text: str) -> int:
        """Return the number that stands for `text` in the collective log, and store the text for messages.

        The collective log is the list of operations that the ranks compare. It contains only numbers.
        """
        number = zlib.crc32(text.encode())
        self.occasions[number] = text
        return number

    # -- posts, which are not collective ------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Append a text to a list in a key-value store, where all ranks can read the list with `read_posts`.

        Not collective. So a rank can inform the others of something that concerns only some ranks, such as the
        parameters that it did not use in a backward. With one rank, nothing is stored.

        Args:
            key: the key of the list. All ranks may append to the same list.
            text: any text without ";", which separates the texts of the list.
        """
        if self._store is not None:
            self._store.append(key, f"{text};")

    def read_posts(self, key: str) -> list[str]:
        """Return the texts that ranks, including this one, have appended to the list `key` so far with `post`.

        Not collective. Waits until there is at least one text, but not for further texts. With one rank, `post` stores
        nothing, and the result is [].

        key: the key of the list.
        """
        return [] if self._store is None else self._store.get(key).decode().split(";")[:-1]

    def delete_posts(self, key: str) -> None:
        """Delete the list `key`, to which ranks have appended texts with `post`, from the key-value store.

        Not collective. Call this when all ranks have read the list. Several ranks may call it.

        key: the key of the list.
        """
        if self._store is not None:
            self._store.delete_key(key)

    def show(self, key: str, text: str) -> None:
        """Store `text` under `key`, where every rank can read it with `look`. It replaces any previous text there.

        Not collective. So a background thread, for example one that writes a checkpoint, can exchange texts with the
        other ranks while the main thread runs collectives. With one rank, nothing is stored.
        """
        if self._store is not None:
            self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """Return the text that any rank has set for `key` with `show`, or None if there is none. Does not wait."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def close(self) -> None:
        """Destroy the gloo group. Called before the process ends, or if the ranks disagree in `init_distributed`.

        If the last operation timed out, and its threads still wait for other ranks, the group is kept until the process
        ends, because its destructor would wait for these threads.
        """
        given_up = self._last is not None and not self._last.is_completed()
        # The operation refers to the group, whose threads end only when nothing refers to the group any longer.
        self._last = None
        if given_up:
            keep_group(self._group)
        elif self._group is not None:
            end_group(self._group)
        self._group = None
