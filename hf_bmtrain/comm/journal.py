"""What this rank has issued to a communicator, for a comparison with the other ranks."""

from __future__ import annotations

import time
from array import array
from itertools import pairwise
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
        # After each entry, at its number modulo 2 * KEPT. torch.compile, which may trace `note`, leaves arrays alone.
        self._digests = array("Q", bytes(8 * 2 * KEPT))

    def note(self, entry: int) -> None:
        """Add an entry, see `code`. Raises RuntimeError if the ranks have been found to differ."""
        if self.problem is not None:
            raise RuntimeError(self.problem)
        self.digest = (self.digest * _FACTOR + entry) & _MASK
        self._digests[(self.count + 1) % (2 * KEPT)] = self.digest
        self.count += 1

    def check(self, seconds: float = 0) -> None:
        """Raise RuntimeError if the ranks are, within `seconds`, found to differ."""
        end = time.monotonic() + seconds
        while self.problem is None and time.monotonic() < end:
            time.sleep(0.1)
        if self.problem is not None:
            raise RuntimeError(self.problem)

    def excerpt(self) -> Excerpt:
        """Return the last entries."""
        first, digests = self._kept()
        start = max(0, len(digests) - 1 - SENT)
        return Excerpt(first + start, digests[start], _entries(digests[start:]))

    def compare(self, theirs: Excerpt) -> Difference | None:
        """Return the first difference that is known, or None."""
        first, digests = self._kept()
        mine = dict(enumerate(digests, first))
        digest, equal = theirs.digest, mine.get(theirs.count) == theirs.digest
        for number, entry in enumerate(theirs.entries, theirs.count + 1):
            digest = (digest * _FACTOR + entry) & _MASK
            if number - 1 in mine and number in mine:
                if mine[number] != digest:
                    (own,) = _entries([mine[number - 1], mine[number]])
                    return Difference(number, own, entry, equal)
                equal = True
        return None

    def entry(self, number: int) -> int | None:
        """Return an entry by its number, None if it is not kept."""
        first, digests = self._kept()
        known = first < number < first + len(digests)
        return _entries(digests[number - first - 1 : number - first + 1])[0] if known else None

    def _kept(self) -> tuple[int, list[int]]:
        """Return a number of entries and the digests after as many and after each later one.

        Half of what the array holds, so that what another thread adds meanwhile is not among them.
        """
        count = self.count
        first = max(0, count - KEPT)
        return first, [self._digests[number % (2 * KEPT)] for number in range(first, count + 1)]


def _entries(digests: list[int]) -> list[int]:
    """Return the entries that lead from each digest to the next."""
    return [(after - before * _FACTOR) & _MASK for before, after in pairwise(digests)]
