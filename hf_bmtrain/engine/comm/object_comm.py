"""Exchange Python objects between ranks over a separate gloo group, and strings through torch's key-value store."""

from __future__ import annotations

import pickle
import zlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.torch_internals import default_store
from .collective_log import CollectiveLog, code
from .communicator import LATER, PATIENCE, end_group, explained_by, keep_group, wait_for


class ObjectComm:
    """Lets all ranks exchange Python objects by collectives, and strings through a key-value store.

    `gather`, `broadcast_object`, `barrier`, `any` and `smallest` are collective: every rank must call them, in the same
    order. They use a separate gloo group.

    The other methods are not collective. `post`, `read_posts` and `delete_posts` write, read and delete lists of
    strings in the key-value store. `show` and `look` write and read single strings there. A rank can call these five
    methods on its own. `note_decision` sends nothing, but every rank must call it at the same point.

    With one rank, every method returns at once.

    Attributes:
        size: the number of ranks.
        timeout: the timeout that was passed to the constructor, in seconds (a float, not a timedelta). A collective
            that is called without its own time limit waits 5 s (PATIENCE) longer than `timeout` for the other ranks.
        collective_log: the log of the collectives, which is compared with other ranks' logs.
        occasions: {number: description}, for error messages. The description states the purpose of a collective, or is
            a decision that was passed to `note_decision`. Entries in `collective_log` contain only the number, a hash
            of the description.
    """

    def __init__(self, size: int, timeout: timedelta) -> None:
        """Create a gloo group of all ranks, unless there is only one. Collective: every rank must call it.

        Args:
            size: the number of ranks. If there are several, torch's default process group must be initialized.
            timeout: how long the other ranks may take to join a collective. The collective itself waits 5 s (PATIENCE)
                longer, so that the monitor (the thread that watches the other ranks) reports the timeout first.
        """
        self.size, self.timeout = size, timeout.total_seconds()
        self.collective_log = CollectiveLog("control")
        self.occasions: dict[int, str] = {}
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout + LATER) if size > 1 else None
        self._store: Any = default_store() if size > 1 else None
        # The last all-reduce that the method `any` or `smallest` of this class has started. If it is still running,
        # `close` does not destroy the process group.
        self._last: Any = None

    def gather(self, value: Any, occasion: str = "an exchange of objects") -> list[Any]:
        """Return the values that all ranks pass, in rank order. Collective: every rank must call it.

        Args:
            value: any object that can be pickled.
            occasion: the purpose of the exchange, for messages. It must be the same on every rank.

        Raises:
            RuntimeError: a rank's value cannot be pickled. Every rank then raises this error.
            RuntimeError: not all ranks called this method in time.
            RuntimeError: a problem was found meanwhile, such as an error on another rank.
        """
        if self._group is None:
            return [value]
        mine = _pickled(value)
        self.barrier(occasion)
        everyone: list[Any] = [None] * self.size
        with explained_by(self.collective_log):
            dist.all_gather_object(everyone, mine, group=self._group)
        return _unpickled(occasion, everyone)

    def broadcast_object(self, value: Any) -> Any:
        """Return the value that rank 0 passes. The values of other ranks are ignored.

        Collective: every rank must call it.

        Raises:
            RuntimeError: rank 0's value cannot be pickled. Every rank then raises this error.
            RuntimeError: not all ranks called this method in time.
            RuntimeError: a problem was found meanwhile, such as an error on another rank.
        """
        if self._group is None:
            return value
        occasion, first = "a broadcast of rank 0's object", [_pickled(value) if dist.get_rank() == 0 else None]
        self.barrier(occasion)
        with explained_by(self.collective_log):
            dist.broadcast_object_list(first, src=0, group=self._group)
        return _unpickled(occasion, first)[0]

    def barrier(self, occasion: str, seconds: float | None = None) -> None:
        """Wait until every rank has called this with the same occasion. Collective: every rank must call it.

        After an error, do not use this object for collectives, because the barrier is still pending.

        Args:
            occasion: the purpose of the barrier, for messages.
            seconds: the maximum time to wait for the other ranks. None: 5 s (PATIENCE) more than the attribute
                `timeout`.

        Raises:
            RuntimeError: not all ranks called it in time.
            RuntimeError: a problem was found meanwhile, such as an error on another rank.
        """
        self.any(False, occasion, seconds)

    def any(self, flag: bool, occasion: str, seconds: float | None = None) -> bool:
        """Return whether any rank passes True. This is faster than `gather`, because it takes only one all-reduce.

        Collective: every rank must call it.

        Args:
            flag: this rank's value.
            occasion: the purpose of the exchange, for messages. It must be the same on every rank.
            seconds: the maximum time to wait for the other ranks. None: 5 s (PATIENCE) more than the attribute
                `timeout`.

        Raises:
            RuntimeError: not all ranks called it in time.
            RuntimeError: a problem was found meanwhile, such as an error on another rank.
        """
        if self._group is None:
            return flag
        return not self._smallest(not flag, code("exchange", self._number(occasion)), seconds)

    def smallest(self, number: int, entry: int) -> int:
        """Return the smallest of the numbers that the ranks pass. Collective: every rank must call it.

        Used if ranks may run different blocks (transformer layers), and so need different collectives next. Each rank
        passes the number of the collective that it needs. All ranks then issue the collective whose number is returned.

        Args:
            number: this rank's number, a signed integer of 64 bits.
            entry: the number that encodes this operation in the collective log (the list of operations that the ranks
                compare), from `collective_log.code`.

        Raises:
            RuntimeError: not all ranks called it in time.
            RuntimeError: a problem was found meanwhile, such as an error on another rank.
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
            text: a description of the decision, for messages. There should be few different descriptions, because each
                is kept in memory until the process ends.

        Raises:
            RuntimeError: a problem was found before this call, such as an error on another rank.
            RuntimeError: another rank of this host, whose log is in shared memory (see `CollectiveLog.publish`), has
                already made a different decision. If the difference is found only later, a later operation raises the
                error.
        """
        if self._group is not None:
            self.collective_log.note(code("decision for", self._number(text)))

    def _number(self, text: str) -> int:
        """Return the number by which the collective log refers to `text`, and store `text` for messages.

        The collective log is the list of operations that the ranks compare. It contains only numbers, not texts.
        """
        number = zlib.crc32(text.encode())
        self.occasions[number] = text
        return number

    # -- posts, which are not collective ------------------------------------------------------------------------

    def post(self, key: str, text: str) -> None:
        """Append a string to a list in a key-value store, where all ranks can read the list with `read_posts`.

        Not collective, so only those ranks need call it that have something to post, such as the parameters that they
        did not use in a backward. With one rank, nothing is stored.

        Args:
            key: the key of the list. All ranks may append to the same list.
            text: any string without ";", which separates the strings of the list.
        """
        if self._store is not None:
            # Prefix the string with the rank, because a FileStore ignores a string that equals the stored value.
            self._store.append(key, f"{dist.get_rank(self._group)}:{text};")

    def read_posts(self, key: str) -> list[str]:
        """Return the strings that all ranks, including this one, have appended to the list `key` so far with `post`.

        Not collective. If no rank has appended a string yet, this waits for the first one, and torch raises an error if
        none comes within the timeout of the store. It does not wait for further strings. With one rank, `post` stores
        nothing, and the result is [].

        key: the key of the list.
        """
        posts = [] if self._store is None else self._store.get(key).decode().split(";")[:-1]
        return [post.partition(":")[2] for post in posts]

    def delete_posts(self, key: str) -> None:
        """Delete the list `key` from the key-value store. Ranks have appended strings to the list with `post`.

        Not collective. Call this when all ranks have read the list. Several ranks may call it.

        key: the key of the list.
        """
        if self._store is not None:
            self._store.delete_key(key)

    def show(self, key: str, text: str) -> None:
        """Store `text` under `key`, where every rank can read it with `look`. A string stored there before is replaced.

        Not collective. So a background thread, for example one that writes a checkpoint, can exchange strings with the
        other ranks while the main thread runs collectives. With one rank, nothing is stored.
        """
        if self._store is not None:
            self._store.set(key, text)

    def look(self, key: str) -> str | None:
        """Return the string that a rank has stored under `key` with `show`, or None if there is none. Does not wait."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    def close(self) -> None:
        """Destroy the gloo group. Called before the process ends, and after an error in `init_distributed`.

        If the last all-reduce has timed out and still waits for other ranks, the group is kept until the process ends,
        because the group's destructor would wait for the threads of this all-reduce.
        """
        given_up = self._last is not None and not self._last.is_completed()
        # The operation refers to the group, whose threads end only when nothing refers to the group any longer.
        self._last = None
        if given_up:
            keep_group(self._group)
        elif self._group is not None:
            end_group(self._group)
        self._group = None


def _pickled(value: Any) -> tuple[bytes, str | None]:
    """Pickle `value`. Return (the bytes, None), or (b"", a description of the error) if it cannot be pickled.

    The caller sends the description to the other ranks, which would otherwise wait for the value.
    """
    try:
        return pickle.dumps(value), None
    except Exception as error:
        return b"", f"{type(error).__name__}: {error}"


def _unpickled(occasion: str, pickled: list[Any]) -> list[Any]:
    """Return the values that ranks have pickled with `_pickled`. Raises RuntimeError if one could not be pickled.

    occasion: the purpose of the exchange, for the message.
    pickled: the results of `_pickled`, in rank order, beginning with rank 0.
    """
    problems = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(pickled) if text is not None]
    if problems:
        raise RuntimeError(
            f"{occasion} failed, because an object cannot be pickled. {'; '.join(problems)}. Pass tensors, numbers, "
            "strings, lists and dicts."
        )
    return [pickle.loads(data) for data, _ in pickled]
