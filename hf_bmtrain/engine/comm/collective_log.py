"""A log of the operations that this rank has issued to a communicator. Ranks compare their logs to find errors.

Ranks that issue different operations would deadlock or exchange the wrong data. Each operation is one entry of the log,
and an entry is a number. The log does not store the entries themselves. For each entry, it stores a digest of this
entry and all earlier ones: the previous digest times a constant, plus the entry, modulo a power of two. If two ranks
have the same digest at one position, all their entries up to this position are equal. An entry can be computed from the
digests before and after it.
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

KEPT = 8192
"""The number of recent operations that ranks can compare. A large model needs several training steps to issue
this many operations, so a rank can still be compared with another rank that is some steps ahead."""
SENT = 64
"""The number of recent entries of its log that a rank sends to the other ranks."""
_RING = 2 * KEPT
WORDS = 1 + _RING
"""The size of a log in words of 8 bytes: one for the number of entries, the others for a ring buffer of digests. Each
digest is a hash of all entries up to one position. Digests are stored instead of the entries themselves."""
UNKNOWN = "an exchange between the ranks"
"""The text that messages show in place of the description of an exchange or a decision, if this rank does not know the
description."""
_OF_ELEMENTS = ("all-gather", "reduce-scatter", "all-reduce", "broadcast")
_OF_PARTS = ("all-to-all",)
"""Collectives whose number of elements may differ between ranks. Their log entries therefore contain no number of
elements."""
_OF_BUFFERS = (
    "gather of", "gather without gradients of", "preparing the all-gather of", "reduction of the gradient of",
    "change of requires_grad in",
)  # fmt: skip
_OF_VALUES = (
    "step with learning rate", "step with weight_decay", "step with momentum", "step with betas",
    "step with another option", "clipping to the norm", "clipping by the norm of order",
)  # fmt: skip
_OF_PASSES = (
    "next operation of a forward", "next operation of a forward without gradients", "next operation of a backward",
)  # fmt: skip
_KINDS = (*_OF_ELEMENTS, *_OF_PARTS, *_OF_BUFFERS, *_OF_VALUES, *_OF_PASSES, "exchange", "decision for")
_POSITIONS = {kind: position for position, kind in enumerate(_KINDS)}
_FACTOR, _MASK = 1000003, (1 << 48) - 1
_FLOAT, _BITS = struct.Struct("f").pack, struct.Struct("I").unpack


def code(kind: str, number: int) -> int:
    """Encode an operation as a number, for the log of the operations that this rank has issued.

    Args:
        kind: the kind of the operation, one of `_KINDS` except those in `_OF_VALUES` (for these, use `value_code`).
        number: what distinguishes operations of this kind. It depends on `kind`:

            * "all-gather" or "reduce-scatter": the number of elements of the full tensor.
            * "all-reduce" or "broadcast": the number of elements of the tensor.
            * a kind in `_OF_BUFFERS`, such as "gather of": the number of the flat buffer.
            * "exchange" (a barrier, or an exchange of flags or Python objects): a hash of the text that states its
              purpose.
            * "decision for" (a decision that all ranks must make in the same way, such as whether to save at this
              step): a hash of the text that describes the decision.
            * "all-to-all": 0.
            * a kind that begins with "next operation of": 0. Ranks that may enter different blocks log such an entry
              whenever they agree on the next collective.
    """
    return number * len(_KINDS) + _POSITIONS[kind]


def value_code(kind: str, value: float) -> int:
    """Encode a value, such as a learning rate, as a number, for the log of the operations that this rank has issued.

    Ranks compare their logs. So this is used for values that must be equal on all ranks.

    Args:
        kind: the use of the value, one of `_OF_VALUES`, such as "step with learning rate".
        value: any number. The result contains this number rounded to float32, or +inf if its magnitude is too large for
            float32.
    """
    try:
        (bits,) = _BITS(_FLOAT(value))
    except OverflowError:
        (bits,) = _BITS(_FLOAT(float("inf")))
    return bits * len(_KINDS) + _POSITIONS[kind]


def option_kind(option: str) -> str:
    """Return the kind of log entry for an optimizer's option: for "lr", for example, "step with learning rate".

    Pass the result as `kind` to `value_code`, which encodes the option's value for the collective log (the list of
    operations that ranks compare).

    option: the key in the optimizer's parameter groups, such as "lr" or "weight_decay".
    """
    kind = "step with learning rate" if option == "lr" else f"step with {option}"
    return kind if kind in _OF_VALUES else "step with another option"


def describe(entry: int, names: Mapping[int, str], occasions: Mapping[int, str]) -> str:
    """Describe an entry of the collective log for messages, such as "all-gather of 1024 elements".

    Args:
        entry: the number that encodes the operation, from `code` or `value_code`.
        names: {number of a flat buffer: its name}. An entry contains only the number.
        occasions: {hash: text} for exchanges and decisions. An entry contains only the hash of the text that describes
            the exchange or decision. If the hash is not in `occasions`, the result is UNKNOWN.
    """
    # Separate the number and the position of the kind, which `code` has combined. In an entry from `value_code`, the
    # number is the bit pattern of a float32 value.
    number, position = divmod(entry, len(_KINDS))
    kind = _KINDS[position]
    if kind in _OF_ELEMENTS:
        return f"{kind} of {number} elements"
    if kind in _OF_PARTS:
        return kind
    if kind in _OF_BUFFERS:
        return f"{kind} {names.get(number, f'buffer {number}')}"
    if kind in _OF_PASSES:
        return f"the {kind}"
    if kind in _OF_VALUES:
        return f"{kind} {np.uint32(number).view(np.float32)}"
    if number not in occasions:
        return UNKNOWN
    return repr(occasions[number]) if kind == "exchange" else f"{kind} {occasions[number]}"


class Excerpt(NamedTuple):
    """The last entries of a collective log (a rank's list of operations), as the rank sends them to other ranks.

    Attributes:
        count: the number of entries in the log before `entries`.
        digest: a hash of all entries before `entries`.
        entries: the last entries, oldest first.
    """

    count: int
    digest: int
    entries: list[int]

    @property
    def stop(self) -> int:
        """The total number of entries in the log at the time of the excerpt."""
        return self.count + len(self.entries)


class Difference(NamedTuple):
    """The result of `CollectiveLog.compare` if the collective logs of two ranks differ.

    A collective log lists the operations that a rank has issued. Each entry is a number that encodes an operation.
    `compare` looks only at recent positions in the logs. At each of these positions, it compares hashes of all entries
    up to the position. So `compare` also notices differences in older entries, but cannot tell where they are.

    Attributes:
        number: the first position at which `compare` found that the hashes differ, counted from 1.
        mine: this rank's entry at position `number`.
        theirs: the other rank's entry at position `number`.
        first: True if all entries before `number` are equal. `mine` and `theirs` are then the first entries that
            differ. False if entries before `number` may already differ. `mine` and `theirs` may then even be equal.
    """

    number: int
    mine: int
    theirs: int
    first: bool


class CollectiveLog:
    """The log of the operations that this rank has issued to one communicator. Each operation is one entry, a number.

    Every rank must issue the same operations in the same order, so the logs of all ranks must be equal. They are
    compared in two ways:

    * A rank sends `excerpt`, the last SENT (64) entries of its log, to other ranks, which pass it to `compare`.
    * After a call of `publish`, the log is in shared memory. `note`, which adds an entry, then compares each new entry
      with the logs of other ranks of this host, before the operation is issued.

    Only one thread at a time may add entries; any thread may read them.

    Attributes:
        name: the communicator's name.
        ranks: the ranks whose logs must be equal. None means all ranks.
        count: the number of entries.
        digest: a hash of all entries, 48 bits.
        problem: None, or the reason why this rank must stop, such as a difference from another rank. Once it is set,
            operations raise RuntimeError with this message.
        told: whether this rank's program has raised the RuntimeError with the message `problem`. If the program does
            not raise it in time, the monitor (the thread that watches the other ranks) ends the process.
        explain: a function that `note` calls if it finds that another rank's log differs. Its arguments are this log,
            the other rank, and the excerpt of that rank's log. It returns a message, which becomes `problem`. If the
            excerpt shows no difference, or if the other rank is not in `ranks`, it returns None, and `note` raises no
            error. The default function always returns None; the monitor replaces it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.ranks: Sequence[int] | None = None
        self.count = self.digest = 0
        self.problem: str | None = None
        self.told = False
        self.explain: Callable[[CollectiveLog, int, Excerpt], str | None] = lambda collective_log, rank, theirs: None
        # Word 0 is the number of entries, and word 1 + i % _RING the digest of entries 1 to i. The words are in an
        # array, not a list, because torch.compile may trace `note`. It would trace such a long list slowly, but skips
        # an array or a memoryview.
        self._memory: Any = array("Q", bytes(8 * WORDS))
        self._others: list[tuple[int, Any]] = []

    def publish(self, memory: memoryview, others: Mapping[int, memoryview]) -> None:
        """Move this log to shared memory. From then on, `note` compares each new entry with the logs of other ranks.

        If another rank in `others` has already issued a different operation, `note` then raises an error before this
        rank's operation can deadlock or exchange wrong data. Called once for each log.

        Args:
            memory: the shared memory to which this log is moved. It has room for WORDS (the size of a log) unsigned
                integers of 8 bytes, and the other ranks of this host can read it.
            others: the logs with which `note` compares: for other ranks of this host, {rank: the shared memory to which
                that rank moves its own log}.
        """
        memory[:] = memoryview(self._memory)
        self._memory, self._others = memory, list(others.items())

    def note(self, entry: int) -> None:
        """Add an entry for an operation to the log. Call this before issuing the operation.

        If an error is raised, do not start the operation.

        Args:
            entry: the number that encodes the operation, from `code` or `value_code`.

        Raises:
            RuntimeError: `problem`, the reason why this rank must stop, was set before this call.
            RuntimeError: the log of another rank (one of `others` in `publish`) differs at this position or before it.
        """
        if self.problem is not None:
            self.refuse()
        number = self.count + 1
        digest = self.digest = (self.digest * _FACTOR + entry) & _MASK
        memory = self._memory
        memory[1 + number % _RING] = digest
        memory[0] = self.count = number  # written last: a rank that sees the new count must find the digest stored
        for rank, theirs in self._others:
            if 0 <= theirs[0] - number < KEPT and theirs[1 + number % _RING] != digest:
                self.problem = self.problem or self.explain(self, rank, _excerpt(theirs))
                self.refuse()

    def refuse(self) -> None:
        """Raise RuntimeError with the message `problem` if it is set, so that this rank issues no more operations.

        `problem` is the reason why this rank must stop. To give another thread time to set it, use `check`.
        """
        if self.problem is not None:
            self.told = True
            raise RuntimeError(self.problem)

    def check(self, seconds: float = 0) -> None:
        """Raise RuntimeError with the message `problem` if it is set, or if another thread sets it within `seconds`.

        `problem` is the reason why this rank must stop. When an operation has failed, wait some seconds, so that the
        monitor (the thread that watches the other ranks) can find the cause.

        seconds: the maximum time to wait. 0 does not wait.
        """
        end = time.monotonic() + seconds
        while self.problem is None and time.monotonic() < end:
            time.sleep(0.1)
        self.refuse()

    def excerpt(self) -> Excerpt:
        """Return the last SENT (64) entries of this log, or all if there are fewer, for `compare` on other ranks."""
        return _excerpt(self._memory)

    def compare(self, theirs: Excerpt) -> Difference | None:
        """Compare this log with the last entries of another rank's log. Return the first difference found, or None.

        The monitor (the thread that watches the other ranks) and `World.barrier` use this to find ranks that have
        issued different operations.

        The comparison covers the positions of the entries in `theirs`. It skips a position if this log has no entry
        there yet, or has KEPT (8192) or more entries after it. At each position, it compares hashes of all entries up
        to the position. So it also notices differences before the compared positions, but cannot tell where they are.
        If there may be such a difference, the attribute `first` of the result is False.

        theirs: the result of the other rank's `excerpt`.
        """
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
        """Return one entry of this log, a number that encodes an operation. `describe` turns the entry into words.

        Args:
            number: the position of the entry, counted from 1.

        Returns:
            The entry. None if the log has no entry at this position yet, or if KEPT (8192) or more entries have
            followed it, so that it is no longer available.
        """
        digests = [self._digest(number - 1), self._digest(number)]
        return None if None in digests else _entries(digests)[0]  # pyright: ignore[reportArgumentType]

    def _digest(self, number: int) -> int | None:
        """Return the digest (a hash) of entries 1 to `number` of this log, or None if it is not available.

        It is not available if the log has fewer than `number` entries, or more than KEPT entries after entry `number`.
        """
        count = self._memory[0]
        # Another thread may add entries now. They do not overwrite the result, because the ring buffer has room for
        # twice KEPT digests.
        return self._memory[1 + number % _RING] if max(0, count - KEPT) <= number <= count else None


def _excerpt(memory: Any) -> Excerpt:
    count = memory[0]
    start = max(0, count - SENT)
    digests = [memory[1 + number % _RING] for number in range(start, count + 1)]
    return Excerpt(start, digests[0], _entries(digests))


def _entries(digests: list[int]) -> list[int]:
    """Return the n entries of a collective log that lie between n + 1 successive digests.

    An entry is a number that encodes an operation. A digest covers all entries up to a position: it is the previous
    digest times `_FACTOR`, plus the entry, modulo a power of two. So each entry can be computed from the digests before
    and after it.

    digests: the digests at n + 1 adjacent positions, in order.
    """
    return [(after - before * _FACTOR) & _MASK for before, after in pairwise(digests)]
