"""What this rank has issued to a communicator, for a comparison with the other ranks."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

KEPT = 8192
"""Entries that a journal keeps: several steps of a large model."""
SENT = 64
"""Entries that a rank shows to the others."""
_RING = 2 * KEPT
WORDS = 1 + _RING
"""The words of 8 bytes in which a journal keeps its entries."""
UNKNOWN = "an exchange between the ranks"
_OF_ELEMENTS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
_OF_BUFFERS = (
    "gather of", "gather without gradients of", "rounding to float8 of", "reduction of the gradient of",
    "change of requires_grad in",
)  # fmt: skip
_OF_VALUES = (
    "step with learning rate", "step with weight_decay", "step with momentum", "step with betas",
    "step with another option", "clipping to the norm", "clipping by the norm of order",
)  # fmt: skip
_KINDS = (*_OF_ELEMENTS, *_OF_BUFFERS, *_OF_VALUES, "exchange")
_POSITIONS = {kind: position for position, kind in enumerate(_KINDS)}
_FACTOR, _MASK = 1000003, (1 << 48) - 1
_FLOAT, _BITS = struct.Struct("f").pack, struct.Struct("I").unpack


def code(kind: str, number: int) -> int:
    """Return the entry for an operation on `number` elements, or of the buffer or at the occasion of that number."""
    return number * len(_KINDS) + _POSITIONS[kind]


def value_code(kind: str, value: float) -> int:
    """Return the entry for a number that every rank is about to use, such as a learning rate, rounded to float32."""
    try:
        (bits,) = _BITS(_FLOAT(value))
    except OverflowError:
        (bits,) = _BITS(_FLOAT(float("inf")))
    return bits * len(_KINDS) + _POSITIONS[kind]


def option_kind(option: str) -> str:
    """Return the kind of entries, for `value_code`, for an option of an optimizer."""
    kind = "step with learning rate" if option == "lr" else f"step with {option}"
    return kind if kind in _OF_VALUES else "step with another option"


def kind_and_number(entry: int) -> tuple[str, int]:
    """Return the arguments of `code` for an entry; for one of `value_code`, the kind and the bits of the float32."""
    number, position = divmod(entry, len(_KINDS))
    return _KINDS[position], number


def describe(entry: int, names: Mapping[int, str], occasions: Mapping[int, str]) -> str:
    """Return an entry in words. names, occasions: of the buffers and of exchanges of objects, by number."""
    kind, number = kind_and_number(entry)
    if kind in _OF_ELEMENTS:
        return f"{kind} of {number} elements"
    if kind in _OF_BUFFERS:
        return f"{kind} {names.get(number, f'buffer {number}')}"
    if kind in _OF_VALUES:
        return f"{kind} {np.uint32(number).view(np.float32)}"
    return repr(occasions[number]) if number in occasions else UNKNOWN


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


class CollectiveLog:
    """The entries of one communicator, which are the same on every rank, since every rank issues the same operations.

    One thread at a time adds entries; any may read them.

    count: the number of entries. digest: a number that depends on all of them. problem: why this rank must stop.
    told: whether that has been raised. explain: returns the words for a difference from another rank, or None.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.digest = 0
        self.problem: str | None = None
        self.told = False
        self.explain: Callable[[CollectiveLog, int, Excerpt], str | None] = lambda collective_log, rank, theirs: None
        # The count, and the digest after each entry, at its number modulo 2 * KEPT. torch.compile, which may trace
        # `note`, leaves arrays and memory views alone.
        self._memory: Any = array("Q", bytes(8 * WORDS))
        self._others: list[tuple[int, Any]] = []

    def publish(self, memory: memoryview, others: Mapping[int, memoryview]) -> None:
        """Keep the entries in `memory`, (WORDS,) of 8 bytes, which other ranks read, and compare with `others`'."""
        memory[:] = memoryview(self._memory)
        self._memory, self._others = memory, list(others.items())

    def note(self, entry: int) -> None:
        """Add an entry, see `code`, before the operation is issued.

        Raises RuntimeError if the ranks have been found to differ, or another rank of this host has another entry here.
        """
        if self.problem is not None:
            self.refuse()
        number = self.count + 1
        digest = self.digest = (self.digest * _FACTOR + entry) & _MASK
        memory = self._memory
        memory[1 + number % _RING] = digest
        memory[0] = self.count = number  # after the digest: another rank that sees the count may read it
        for rank, theirs in self._others:
            if 0 <= theirs[0] - number < KEPT and theirs[1 + number % _RING] != digest:
                self.problem = self.problem or self.explain(self, rank, _excerpt(theirs))
                self.refuse()

    def refuse(self) -> None:
        """Raise the problem, if there is one."""
        if self.problem is not None:
            self.told = True
            raise RuntimeError(self.problem)

    def check(self, seconds: float = 0) -> None:
        """Raise RuntimeError if the ranks are, within `seconds`, found to differ."""
        end = time.monotonic() + seconds
        while self.problem is None and time.monotonic() < end:
            time.sleep(0.1)
        self.refuse()

    def excerpt(self) -> Excerpt:
        """Return the last entries."""
        return _excerpt(self._memory)

    def compare(self, theirs: Excerpt) -> Difference | None:
        """Return the first difference that is known, or None."""
        digest, before = theirs.digest, self._digest(theirs.count)
        equal = before == digest
        for number, entry in enumerate(theirs.entries, theirs.count + 1):
            digest = (digest * _FACTOR + entry) & _MASK
            mine = self._digest(number)
            if before is not None and mine is not None:
                if mine != digest:
                    return Difference(number, _entries([before, mine])[0], entry, equal)
                equal = True
            before = mine
        return None

    def entry(self, number: int) -> int | None:
        """Return an entry by its number, None if it is not kept."""
        digests = [self._digest(number - 1), self._digest(number)]
        return None if None in digests else _entries(digests)[0]  # pyright: ignore[reportArgumentType]

    def _digest(self, number: int) -> int | None:
        """Return the digest after `number` entries, None if it is not kept.

        Half of what the memory holds, so that what another thread adds meanwhile is not among them.
        """
        count = self._memory[0]
        return self._memory[1 + number % _RING] if max(0, count - KEPT) <= number <= count else None


def _excerpt(memory: Any) -> Excerpt:
    count = memory[0]
    start = max(0, count - SENT)
    digests = [memory[1 + number % _RING] for number in range(start, count + 1)]
    return Excerpt(start, digests[0], _entries(digests))


def _entries(digests: list[int]) -> list[int]:
    """Return the entries that lead from each digest to the next."""
    return [(after - before * _FACTOR) & _MASK for before, after in pairwise(digests)]
