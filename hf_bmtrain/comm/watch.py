"""Finds out within seconds that the ranks do different things, while each waits for the others."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence

from .control import Control
from .journal import Excerpt, Journal, describe

_log = logging.getLogger("hf_bmtrain")
SECONDS = 1.0
"""Between two comparisons."""
CROSSED_SECONDS = 5.0
"""For which two ranks have each waited for an operation of the other."""
_GRACE_SECONDS = 5.0
_KEY, _ALARM = "journal/{}", "journal/alarm"


class Watch:
    """A thread that compares this rank's journals with those of its neighbours, through the launcher's store.

    If they differ, every rank gets the reason as `problem` of its journals: the next operation raises it, and an
    operation on CPU that waits. An operation on GPUs that waits is ended by `interrupt`, and the reason is logged.

    names: the buffers' names by number, for messages. journals: of all communicators, in the order of their opening.
    """

    def __init__(self, control: Control, rank: int, journals: Sequence[Journal], interrupt: Callable[[], None]) -> None:
        self.names: dict[int, str] = {}
        self._control, self._rank, self._journals, self._interrupt = control, rank, journals, interrupt
        self._stopped = threading.Event()
        self._since = time.monotonic()  # no rank of the two has issued anything since
        self._seen: tuple[list[int], list[int]] = [], []
        self._thread = threading.Thread(target=self._run, name="hf_bmtrain watch", daemon=True)
        if control.size > 1:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * SECONDS)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(SECONDS):
                problem = self._look()
                if problem is not None:
                    self._tell(problem)
                    return
        except Exception as error:  # the store is gone, and with it the launcher or rank 0
            _log.debug("rank %d: the ranks are no longer compared: %s", self._rank, error)

    def _look(self) -> str | None:
        """Show this rank's journals, and return what is wrong, if anything is known to be."""
        self._control.show(_KEY.format(self._rank), json.dumps(self.excerpts()))
        # Of two ranks, the one that is ahead still has the entries that the other one shows.
        after, before = ((self._rank + step) % self._control.size for step in (1, -1))
        for other in {after, before}:
            shown = self._control.look(_KEY.format(other))
            if shown is not None:
                theirs = [Excerpt(*values) for values in json.loads(shown)]
                problem = self.compare(other, theirs) or (self._crossed(other, theirs) if other == after else None)
                if problem is not None and self._control.look(_ALARM) is None:
                    self._control.show(_ALARM, problem)
        return self._control.look(_ALARM)

    def _tell(self, problem: str) -> None:
        for journal in self._journals:
            journal.problem = problem
        if not self._stopped.wait(_GRACE_SECONDS):
            _log.error("rank %d: %s", self._rank, problem)
            self._interrupt()

    # -- comparisons --------------------------------------------------------------------------------------------

    def excerpts(self) -> list[Excerpt]:
        """Return the last entries of each journal, for `compare` on another rank."""
        return [journal.excerpt() for journal in self._journals]

    def compare(self, other: int, theirs: Sequence[Excerpt]) -> str | None:
        """Return how this rank's journals differ from those of rank `other`, or None."""
        for journal, shown in zip(list(self._journals), theirs):
            found = journal.compare(shown)
            if found is not None:
                when = f"Operation {found.number}" if found.first else f"An operation before number {found.number}"
                places = {self._rank: self._describe(found.mine), other: self._describe(found.theirs)}
                return self._explain(places, f"{when} of communicator '{journal.name}' differs")
        return None

    def _crossed(self, other: int, theirs: Sequence[Excerpt]) -> str | None:
        """Return why two ranks wait for each other: each has issued an operation to which the other does not come."""
        mine = [journal.count for journal in self._journals]
        counts = mine, [shown.stop for shown in theirs]
        if counts != self._seen:
            self._seen, self._since = counts, time.monotonic()
        pairs = list(zip(*counts))
        if time.monotonic() - self._since < CROSSED_SECONDS or not (
            any(own > their for own, their in pairs) and any(own < their for own, their in pairs)
        ):
            return None
        ahead = next(number for number, (own, their) in enumerate(pairs) if own > their)
        behind = next(number for number, (own, their) in enumerate(pairs) if own < their)
        entry = self._journals[ahead].entry(pairs[ahead][1] + 1)
        last = theirs[behind].entries[max(pairs[behind][0] - theirs[behind].count, 0)]
        places = {self._rank: "?" if entry is None else self._describe(entry), other: self._describe(last)}
        return self._explain(places, "Each waits for the other")

    def _describe(self, entry: int) -> str:
        return describe(entry, self.names)

    def _explain(self, places: dict[int, str], what: str) -> str:
        doing = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(places.items()))
        return (
            f"the ranks do different things, and would wait for each other for ever or mix up their data. {what}. "
            f"{doing}. Every rank must call the same modules in the same order, as many times, also where its data do "
            "not need them (no image, fewer tiles, a skipped layer): pass it some input there, and add its output "
            "times 0 to the loss."
        )
