"""What this rank has issued to a communicator, for a comparison with the other ranks."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

KEPT = 8192
"""Entries that a journal keeps: several steps of a large model."""
SENT = 64
"""Entries that a rank shows to the others."""
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast", "gather of", "reduction of the gradient of")
_FACTOR, _MASK = 1000003, (1 << 48) - 1


def code(kind: str, number: int) -> int:
    """Return the entry for an operation on `number` elements, or for what buffer `number` is about to do."""
    return number * len(_KINDS) + _KINDS.index(kind)


def describe(entry: int, names: dict[int, str]) -> str:
    """Return an entry in words. names: of the buffers, by number."""
    number, kind = divmod(entry, len(_KINDS))
    if kind < 4:
        return f"{_KINDS[kind]} of {number} elements"
    return f"{_KINDS[kind]} {names.get(number, f'buffer {number}')}"


class Excerpt(NamedTuple):
    """The last entries of a journal. count, digest: before the first of them."""

    count: int
    digest: int
    entries: list[int]

    @property
    def stop(self) -> int:
        """The number of entries of the journal."""
        return self.count + len(self.entries)


class Difference(NamedTuple):
    """The first known entry in which two journals differ. first: all before it are equal."""

    number: int
    mine: int
    theirs: int
    first: bool


class Journal:
    """The entries of one communicator, which are the same on every rank, since every rank issues the same operations.

    One thread at a time adds entries; any may read them.

    count: the number of entries. digest: a number that depends on all of them. problem: why this rank must stop.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.digest = 0
        self.problem: str | None = None
        self._last: deque[tuple[int, int, int]] = deque([(0, 0, 0)], KEPT)  # a list would be slow under torch.compile

    def note(self, entry: int) -> None:
        """Add an entry, see `code`. Raises RuntimeError if the ranks have been found to differ."""
        if self.problem is not None:
            raise RuntimeError(self.problem)
        self.count += 1
        self.digest = (self.digest * _FACTOR + entry) & _MASK
        self._last.append((self.count, entry, self.digest))

    def check(self, seconds: float = 0) -> None:
        """Raise RuntimeError if the ranks are, within `seconds`, found to differ."""
        end = time.monotonic() + seconds
        while self.problem is None and time.monotonic() < end:
            time.sleep(0.1)
        if self.problem is not None:
            raise RuntimeError(self.problem)

    def excerpt(self) -> Excerpt:
        """Return the last entries."""
        last = self._kept()[-SENT - 1 :]
        return Excerpt(last[0][0], last[0][2], [entry for _, entry, _ in last[1:]])

    def compare(self, theirs: Excerpt) -> Difference | None:
        """Return the first difference that is known, or None."""
        mine = {count: (entry, digest) for count, entry, digest in self._kept()}
        digest, equal = theirs.digest, theirs.count in mine and mine[theirs.count][1] == theirs.digest
        for number, entry in enumerate(theirs.entries, theirs.count + 1):
            digest = (digest * _FACTOR + entry) & _MASK
            if number in mine:
                own, own_digest = mine[number]
                if own_digest != digest:
                    return Difference(number, own, entry, equal)
                equal = True
        return None

    def entry(self, number: int) -> int | None:
        """Return an entry by its number, None if it is not kept."""
        return next((entry for count, entry, _ in self._kept() if count == number), None)

    def _kept(self) -> list[tuple[int, int, int]]:
        while True:
            try:
                return list(self._last)
            except RuntimeError:  # another thread has just added an entry
                continue
