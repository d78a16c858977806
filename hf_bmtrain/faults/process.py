"""The end of a program that fails: the first exception is printed whole and first, the others in one line each.

A program that leaves early by `sys.exit`, `exit` or `quit` tells the line and the code.
"""

from __future__ import annotations

import builtins
import functools
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .status import line_now, line_of
from .watch import Watch

_log = logging.getLogger("hf_bmtrain")
_FIRST_SECONDS = 5.0
"""For which a rank waits for the end of the one that raised first, so that a launcher finds that one first."""


def report_exceptions(watch: Watch, rank: int) -> None:
    """Extend `sys.excepthook`, so that the other ranks learn of an exception and of its rank."""
    print_exception = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = watch.raised_before()
        problem = watch.problem if watch.problem is not None and watch.problem in str(error) else None
        summary = problem or traceback.format_exception_only(kind, error)[0].strip()
        at = f" at {line}" if (line := line_of(trace)) else ""
        watch.end(f"raised {summary}{at}" if problem is None else f"ended{at}: {summary}")
        if first is not None:
            _log.debug("rank %d: %s", rank, "".join(traceback.format_exception(kind, error, trace)))
            other, status = first
            reason = "" if problem is not None or summary in status.ended else f" ({summary.splitlines()[0]})"
            sys.stderr.write(f"rank {rank} ends{at}{reason}: see what rank {other} printed.\n")
        elif problem is not None:  # it is about the ranks, and not about this one's stack
            sys.stderr.write(f"rank {rank} ends{at}: {problem}\n")
        else:
            sys.stderr.write(f"rank {rank} raised this exception first; the others end because of it:\n")
            print_exception(kind, error, trace)
        sys.stderr.flush()
        for culprit in watch.status.blamed if first is None else [first[0], *watch.status.blamed]:
            watch.wait_for_end(culprit, _FIRST_SECONDS)

    sys.excepthook = report


class Departure:
    """How the program leaves, if by `sys.exit`, `exit` or `quit`, which are extended. code: its exit code, or 0.

    Exit handlers are told neither the exception nor its code.
    """

    def __init__(self, watch: Watch) -> None:
        self.code, self._watch = 0, watch
        sys.exit = self._extended(sys.exit, "sys.exit")
        for name in "exit", "quit":
            if hasattr(builtins, name):  # not under python -S
                setattr(builtins, name, self._extended(getattr(builtins, name), name))

    def _extended(self, leave: Callable[[Any], Any], name: str) -> Callable[..., Any]:
        @functools.wraps(leave)
        def noted(status: Any = None) -> None:
            try:
                leave(status)
            except SystemExit as error:
                shown = "" if status is None else f"{status!r:.60}"
                error.left = _Left(self, f"{name}({shown})", status)  # pyright: ignore[reportAttributeAccessIssue]
                raise

        return noted

    def note(self, call: str, status: Any, line: str) -> None:
        """Note that the program ends by a call at a user's line."""
        mine = self._watch.status
        if mine.pid == os.getpid() and not mine.ended:  # a fork's end is not this rank's
            self.code = status & 0xFF if isinstance(status, int) else int(status is not None)
            mine.place = f"{line}, in {call}" if line else call
            self._watch.end("has left the program")


class _Left:
    """Belongs to the exception of an exit. If nothing catches that, it is freed below all functions."""

    def __init__(self, departure: Departure, call: str, status: Any) -> None:
        self._departure, self._call, self._status, self._line = departure, call, status, line_now()

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            self._departure.note(self._call, self._status, self._line)
