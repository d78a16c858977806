"""Monitor the other ranks in a thread, and report which rank failed, hangs or issued different operations, and why."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..engine.comm.collective_log import UNKNOWN, CollectiveLog, Excerpt, describe
from ..engine.comm.communicator import Communicator
from ..engine.comm.object_comm import ObjectComm
from ..engine.runtime.monitor import EXIT, Monitor
from .meeting import REPEAT_SECONDS, hang_seconds, meet
from .shared_status import LONGEST_TEXT, SharedStatus
from .status import Status, condition

_log = logging.getLogger("hf_bmtrain")
SECONDS = 1.0
"""The interval, in seconds, at which the monitor's thread updates this rank's status and checks the other ranks."""
CROSSED_SECONDS = 5.0
"""Seconds without progress after which two ranks that wait for each other, in different operations, are reported."""
_SILENT_SECONDS = 5.0
"""A rank's process counts as blocked if the rank has not updated its status for this many seconds."""
_GRACE_SECONDS = 5.0
"""If every rank must stop, the time in seconds that this rank's program has to raise the error that says why. As soon
as it has raised the error, nothing more is done.

* If the program waits in an operation, its GPU operations are aborted after this time. If it has still not raised the
  error after the same time again, its process is ended.
* If the program does not wait, its GPU operations are aborted only after the timeout of `init_distributed`. Its process
  is ended _GRACE_SECONDS later.
* If other ranks waited for the program until this timeout, its GPU operations are aborted at once. Its process is ended
  after SECONDS.
"""
_DEVICE = "its device"
"""The value of `Status.waits` for a rank whose program makes no progress while its device has unfinished work. This
work may be the rank's own, or a collective of torch.distributed that waits for another rank."""
_LONGEST = 4000
"""The maximum length, in characters, of an exception's message that other ranks see."""


class Watch(Monitor):
    """Finds ranks that fail, hang, or issue different operations: a thread reads other ranks' status every second.

    * If two ranks have issued different operations (their collective logs differ), all ranks are stopped: the next
      operation of every rank raises an error that names the difference. Operations that are already waiting on the CPU
      raise this error too, and operations that are waiting on GPUs are aborted.
    * If a rank has raised an exception, was interrupted, or has exited while other ranks wait for it, all ranks are
      stopped in the same way, by an error that names this rank.
    * If ranks have waited for another rank for HF_BMTRAIN_HANG_SECONDS (8 by default), one of them logs a warning that
      names the other rank, its line in the program, and the likely cause. The warning is repeated at growing intervals.
      The rank may only be slow, so nothing else happens until the timeout of `init_distributed` has expired. Then all
      ranks are stopped in the same way, by an error that names the missing ranks.

    Attributes:
        status: the status that this rank publishes.
    """

    _control: ObjectComm
    _board: SharedStatus

    def __init__(self) -> None:
        super().__init__()
        self.status = Status()
        self._rank = 0
        self._communicators: list[Communicator] = []
        self._interrupt: Callable[[], None] = lambda: None
        self._busy: Callable[[], bool] = lambda: False  # whether this rank's device has unfinished work
        self._delay = self._next = hang_seconds()  # seconds of waiting before the first and before the next warning
        # The last warning since this rank began to wait: the status that each missing rank had then, and the text.
        self._reported: dict[int, Status] = {}
        self._warning: str | None = None
        self._stopped = threading.Event()
        self._since = time.monotonic()  # the time of the last change of `_seen`
        # (own, theirs): how many operations this rank and the next rank, (rank + 1) % size, had issued on each
        # communicator when `_crossed` was last called.
        self._seen: tuple[list[int], list[int]] = [], []
        # How many operations this rank had issued on each communicator when `_observe` was last called.
        self._own_counts: list[int] = []
        self._program = threading.get_ident()  # the thread that trains, which need not be the main one
        self._thread = threading.Thread(target=self._run, name="hf_bmtrain watch", daemon=True)

    def meet(self, rank: int, size: int, timeout: timedelta, init_method: str) -> object:
        return meet(rank, size, timeout, init_method)

    def open(self, control: ObjectComm, rank: int, interrupt: Callable[[], None], busy: Callable[[], bool]) -> None:
        self._control, self._rank, self._interrupt, self._busy = control, rank, interrupt, busy
        self._board = SharedStatus(control, rank)
        self._compare(control.collective_log)
        self._observe()
        self._show()  # publish now: the thread first does so after a second, and the process may be suspended earlier
        self._thread.start()

    def add(self, communicator: Communicator) -> None:
        self._communicators.append(communicator)
        self._compare(communicator.collective_log)

    def _compare(self, collective_log: CollectiveLog) -> None:
        """From now on, compare each new operation in `collective_log` with the logs of other ranks of this host.

        A collective log lists the operations that a rank has issued on one communicator. An operation that differs from
        the other ranks' operation raises an error that explains the difference.
        """
        self._board.add(collective_log)
        collective_log.explain = self.difference

    @property
    def _collective_logs(self) -> list[CollectiveLog]:
        return [
            self._control.collective_log,
            *(communicator.collective_log for communicator in list(self._communicators)),
        ]

    def stop(self) -> None:
        """Stop monitoring the other ranks: end the thread. Called when the process exits."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * SECONDS)

    def end(self, how: str) -> None:
        """Tell the other ranks at once that this rank's program has ended, and how. Later calls do nothing.

        Called after an uncaught exception, and when the process exits.

        how: a description of the end, such as "raised ValueError: ...".
        """
        if not self.status.ended:
            self.status.ended, self.status.ended_at = how[:_LONGEST], time.time()
            self._show()

    def raised_before(self) -> tuple[int, Status] | None:
        """Return which rank, other than this one, was the first to end with an exception (KeyboardInterrupt included).

        That rank has probably caused the errors on this rank, so the messages of this rank blame that rank.

        Returns:
            (the rank, its last `Status`), or None if no other rank has ended with an exception.
        """
        others = [(rank, status) for rank, status in self._read_all().items() if rank != self._rank]
        raised = [each for each in others if each[1].interrupted or each[1].ended.startswith(("raised", "ended"))]
        return min(raised, key=lambda each: each[1].ended_at, default=None)

    @property
    def has_failed(self) -> bool:
        """Whether every rank must stop because of a failure, and not because ranks were interrupted (Ctrl-C).

        If an interrupted rank finds that this is True, it reports the failure instead of the interruption.
        """
        first = self.raised_before()
        return self.problem is not None if first is None else not first[1].interrupted

    def explain_interruption(self, line: str, seconds: float) -> str:
        """Return a message for the user that says which ranks Ctrl-C has interrupted. Only one rank gets a message.

        Call it on each interrupted rank, after `end` has told the other ranks that this rank was interrupted. Ctrl-C
        interrupts all ranks, but not at the same moment, so this method first waits until the programs of all ranks
        have ended, at most `seconds`. Pressing Ctrl-C again ends this wait.

        Args:
            line: the line of the program at which this rank was interrupted, or "" if it is unknown.
            seconds: the maximum time to wait.

        Returns:
            The message on the rank that was interrupted first, and "" on all others, so that only one rank prints it.
        """
        end, ranks = time.monotonic() + seconds, {self._rank: self.status}
        with contextlib.suppress(KeyboardInterrupt):
            while sum(status.ended != "" for status in ranks.values()) < self._control.size:
                if time.monotonic() > end or self._rank != _first_interrupted(ranks):
                    break
                time.sleep(0.1)
                ranks.update(self._read_all())
        if self._rank != _first_interrupted(ranks):
            return ""
        size, found = self._control.size, [str(rank) for rank, status in sorted(ranks.items()) if status.interrupted]
        which, others = f"rank{'s' * (len(found) > 1)} {', '.join(found)} of {size}", ""
        if len(found) == size:
            which = f"all {size} ranks"
        elif sum(status.ended != "" for status in ranks.values()) == size:
            others = " The other ranks end too."
        else:  # the others may be in native code; Python raises KeyboardInterrupt only after that code has returned
            others = " It is not known yet whether the others were interrupted too; if not, their next operation fails."
        at = f"; rank {self._rank} was at {line}" if line else ""
        return (
            f"interrupted (Ctrl-C or SIGINT) on {which}{at}.{others} hf_bmtrain saves no checkpoint when it is "
            "interrupted."
        )

    @property
    def problem(self) -> str | None:
        """The reason why every rank must stop, such as an error of another rank; None if there is none so far."""
        return next(
            (collective_log.problem for collective_log in self._collective_logs if collective_log.problem is not None),
            None,
        )

    def wait_for_problem(self, seconds: float) -> str | None:
        """Wait until the reason why every rank must stop (the property `problem`) is known, and return it.

        Waits at most `seconds`, and stops early if the program of another rank has ended with an exception. Returns
        None if the reason is still unknown then.
        """
        end = time.monotonic() + seconds
        while self.problem is None and self.raised_before() is None and time.monotonic() < end:
            time.sleep(0.1)
        return self.problem

    def find_cause(self, seconds: float) -> str | None:
        """Return a message that says why an operation with other ranks has failed on this rank, or None.

        This waits at most `seconds` until `problem`, the reason why every rank must stop, is known. The result is the
        first of these that applies:

        * `problem`, if it is known;
        * None, if another rank has ended with an exception. That rank is the cause, and `raised_before` returns it;
        * a message that names the ranks that can no longer join operations, for example because their processes have
          ended;
        * the last warning about missing ranks, if this rank had waited long enough for a warning before the operation
          failed (every waiting rank stores the text of the warning, but only one of them logs it);
        * None, if the cause is unknown.
        """
        warning = self._warning
        if self.wait_for_problem(seconds) is not None or self.raised_before() is not None:
            return self.problem
        others = {rank: status for rank, status in self._read_all().items() if rank != self._rank}
        absent = [self._last_seen(rank, status) for rank, status in others.items() if self._why_absent(rank, status)]
        if absent:
            self.status.problem = f"{'; '.join(absent)}."  # errors on other ranks then name these ranks too
        return self.status.problem or warning

    def wait_for_end(self, rank: int, seconds: float) -> None:
        """Wait at most `seconds` until the process of `rank` has ended or is suspended.

        Called before this rank ends its own process after an error that `rank` has caused. The launcher reports the
        process that ends first as the cause, and that should be the process of `rank`. Returns at once if `rank` is on
        another host.
        """
        status, end = self._read(rank), time.monotonic() + seconds
        while status is not None and rank in self._board.neighbours and time.monotonic() < end:
            if condition(status.pid):
                return
            time.sleep(0.1)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(SECONDS):
                problem = self._look()
                if problem is not None:
                    self._tell(problem)
                    return
        except Exception as error:
            _log.log(
                logging.DEBUG if self._stopped.is_set() or self.status.ended else logging.WARNING,
                "rank %d no longer watches the other ranks, because of an error in the watching thread. Training is "
                "not affected, but this rank will not name ranks that fail or hang. The error was: %s: %s",
                self._rank, type(error).__name__, error, exc_info=True,
            )  # fmt: skip

    def _look(self) -> str | None:
        """Publish this rank's status, and read the other ranks' status. The monitor's thread calls this every second.

        Returns the reason why every rank must stop, or None if there is none.
        """
        self._observe()
        self._show()
        if self.problem is not None:  # an operation of this rank has already found a problem
            return self.problem
        # Compare this rank's logs with those of the previous rank, the next rank, and the other ranks of this host.
        # Both ranks of each pair must compare, because each publishes only the last 64 entries of its logs. For
        # example, rank 0 has issued 10 operations, and rank 1 has issued 90, of which it publishes numbers 27 to 90.
        # Rank 0 has no operations with these numbers to compare. But rank 1 can compare its own operations 1 to 10 with
        # those of rank 0.
        after, before = ((self._rank + step) % self._control.size for step in (1, -1))
        for other in sorted({after, before, *self._board.neighbours}):
            theirs = self._read(other)
            if theirs is not None:
                problem = theirs.problem or self._of_one(other, theirs)
                if problem is not None:
                    self.status.blamed = theirs.blamed
                    return problem
        # It is a failure if the launcher's store cannot be reached while the program runs and the process group exists.
        # Afterwards it is no failure: rank 0 may exit before this rank, and its store ends with it.
        if self._board.lost and not self.status.ended and dist.is_initialized():
            served = "'s launcher" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else ""
            return (
                f"rank 0{served} has probably ended, or its host or network is down: the store that it serves cannot "
                "be reached."
            )
        return self._of_all()

    def _of_one(self, other: int, theirs: Status) -> str | None:
        """Return a problem of rank `other` for which every rank must stop, such as an exception, or None.

        theirs: the status of rank `other`.
        """
        if theirs.ended.startswith("raised"):
            return f"rank {other} {theirs.ended}; see the traceback in its output."
        if theirs.interrupted:
            return f"rank {other} {theirs.ended}."
        if not theirs.ended and other in self._board.neighbours and condition(theirs.pid) == "gone":
            return f"{self._last_seen(other, theirs)}."
        crossed = self._crossed(other, theirs) if other == (self._rank + 1) % self._control.size else None
        return self.compare(other, theirs.excerpts) or crossed

    def _observe(self) -> None:
        """Update this rank's status: its line in the program, the operation for which it waits, and since when."""
        counts = [collective_log.count for collective_log in self._collective_logs]
        seen = self.status.written
        self.status.look(self._program)
        if self.status.written - seen > 2 * SECONDS:
            self.status.watched_since = self.status.written
        if not self.status.waits and any(each.unfinished() for each in list(self._communicators)):
            collective_log = max(self._collective_logs[1:], key=lambda collective_log: collective_log.count)
            self.status.waits = self._describe(collective_log.entry(collective_log.count) or 0)
        if not self.status.waits and time.time() - self.status.moved > _SILENT_SECONDS and self._busy():
            self.status.waits = _DEVICE
        if not self.status.waits or counts != self._own_counts or not self.status.waits_since:
            self.status.waits_since = time.time()
            self._next = self._delay
            self._reported, self._warning = {}, None
        if self.status.waits == _DEVICE:
            self.status.waits_since = self.status.moved
        self._own_counts = counts

    def _show(self) -> None:
        """Publish this rank's status to the other ranks."""
        self.status.excerpts = self.excerpts()
        self.status.occasions = {str(number): text for number, text in list(self._control.occasions.items())[-32:]}
        self._board.show(self.status.to_text(LONGEST_TEXT))

    def _read(self, rank: int) -> Status | None:
        text = self._board.read(rank)
        return None if text is None else Status.from_text(text)

    def _read_all(self) -> dict[int, Status]:
        found = {rank: self._read(rank) for rank in range(self._control.size)}
        return {rank: status for rank, status in found.items() if status is not None}

    # -- making this rank's program stop ------------------------------------------------------------------------

    def _tell(self, problem: str) -> None:
        """Make this rank's program raise `problem` as an error. End this process if the program does not do so in time.

        First, kill the processes of this host that would never end by themselves. A process is killed if it is
        suspended, or if the other ranks waited for it until the timeout and it no longer updates its status.
        """
        for rank in self._board.neighbours:
            theirs = self._read(rank)
            state = condition(theirs.pid) if theirs is not None else "gone"
            if theirs is None or state == "gone":
                continue
            silent = time.time() - theirs.written
            if state == "stopped":
                why = "is stopped (by SIGSTOP or a debugger)"
            elif rank in self.status.blamed and silent > _SILENT_SECONDS:
                why = f"was silent for {silent:.0f} s"
            else:
                continue
            # Log this before killing the process: as soon as it is gone, the launcher may end this rank too.
            _log.error(
                "rank %d ends process %d of rank %d by SIGKILL, because it %s and would not end by itself. Every rank "
                "must stop: %s", self._rank, theirs.pid, rank, why, problem,
            )  # fmt: skip
            # The launcher would wait forever for the process of `rank`. Kill it before this rank ends, so that the
            # launcher reports `rank` as the one that failed first. Another rank may already have killed that process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(theirs.pid, signal.SIGKILL)
            self.wait_for_end(rank, SECONDS)
        self.status.problem = problem
        for collective_log in self._collective_logs:
            collective_log.problem = collective_log.problem or problem
        self._show()
        blamed, end = self._rank in self.status.blamed, time.monotonic() + self._control.timeout
        while not blamed and time.monotonic() < end:
            if self._is_told(_GRACE_SECONDS):
                return
            self._observe()
            self._show()
            if self.status.waits:
                # The program waits in an operation that has not raised `problem` within _GRACE_SECONDS, such as a
                # collective on the GPU. So leave the loop and interrupt the operation.
                break
        first = self.raised_before()
        # If another rank was interrupted first, by Ctrl-C, it reports the interruption. This rank was probably
        # interrupted too, but cannot raise KeyboardInterrupt while it waits in native code. So do not log an error.
        level = logging.DEBUG if first is not None and first[1].interrupted else logging.ERROR
        _log.log(level, "rank %d: %s", self._rank, problem)
        self._interrupt()
        if self._is_told(SECONDS if blamed else _GRACE_SECONDS):
            return
        frame = sys._current_frames().get(self._program)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        sys.stderr.write(
            f"rank {self._rank} ends its process now, because its program has not raised this error in time: {problem} "
            f"The program is at:\n{stack}"
        )
        sys.stderr.flush()
        os._exit(1)

    def _is_told(self, seconds: float) -> bool:
        """Wait at most `seconds` for this rank's program to raise the error that stops all ranks.

        Returns True if, in this time, the program raises the error, ends, or calls `stop`. Otherwise returns False.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (
                self.status.ended
                or any(collective_log.told for collective_log in self._collective_logs)
                or self._stopped.wait(0.1)
            ):
                return True
        return False

    # -- missing ranks ------------------------------------------------------------------------------------------

    def _of_all(self) -> str | None:
        """Check how long this rank has waited for other ranks. Return the reason why every rank must stop, or None.

        Every rank must stop if the timeout has expired, or if this rank waits for a collective of torch.distributed
        although all other ranks have left the program. Until then, the lowest waiting rank logs which ranks are
        missing, first when it has waited for HF_BMTRAIN_HANG_SECONDS, and then at growing intervals.
        """
        waited = time.time() - self.status.waits_since if self.status.waits else 0.0
        # The timeout does not apply while this rank waits for its device, whose work may be slow. Nor does it apply
        # after the program has ended: the rank then waits in the barrier at exit, which itself ends after the timeout.
        over = waited >= self._control.timeout and self.status.waits != _DEVICE and not self.status.ended
        if waited < self._next and not over:
            return None
        ranks = self._read_all()
        waiting = [rank for rank, status in ranks.items() if self._is_waiting(rank, status)]
        # Ranks that wait for their devices may still be computing, so they count as waiting only if no rank waits for
        # other ranks.
        if not waiting:
            waiting = [r for r, status in ranks.items() if status.waits and not self._why_absent(r, status)]
            if len(waiting) == self._control.size:
                return None
        if len(waiting) == self._control.size and not over and not self._all_waited(ranks):
            return None
        text = self._explain_wait(ranks, waiting)
        if over:
            self.status.blamed = sorted(set(range(self._control.size)) - set(waiting))
            return f"{text} The timeout of init_distributed, {self._control.timeout:.0f} s, has expired."
        others = [status for rank, status in ranks.items() if rank != self._rank]
        # Collective logs do not contain operations of torch.distributed, so they do not show whether other ranks will
        # join this operation. A rank whose program still runs may join it. So stop all ranks only if the programs of
        # all other ranks have ended.
        if self.status.waits.startswith("torch.distributed.") and all(
            status.ended and status.waits == repr(EXIT) for status in others
        ):
            return f"{text} No other rank can join this operation any more. {_advice([repr(EXIT)])}"
        self._next = max(2 * self._next, REPEAT_SECONDS)
        if self._rank == min(waiting, default=self._rank):
            _log.warning("%s", text)
        self._reported, self._warning = {rank: ranks[rank] for rank in ranks if rank not in waiting}, text
        return None

    def _all_waited(self, ranks: dict[int, Status]) -> bool:
        """Return whether all ranks were waiting at the same time for several seconds, and so are deadlocked.

        ranks: the status of every rank.
        """
        # A rank may have continued since it last wrote its status, so only the time before the oldest status counts.
        oldest = min(status.written for status in ranks.values())
        # A rank whose status was not updated for a while may have done something else in this gap, so only the time
        # after the gap (`watched_since`) counts.
        latest = max(max(status.waits_since, status.watched_since) for status in ranks.values())
        return oldest - latest >= max(self._delay / 2, 2 * SECONDS)

    def _is_waiting(self, rank: int, status: Status) -> bool:
        """Return whether a rank waits for other ranks, and is itself able to join operations.

        status: what the rank last reported about itself.
        """
        return status.waits not in ("", _DEVICE) and not self._why_absent(rank, status)

    def _why_absent(self, rank: int, status: Status) -> str:
        """Return why a rank cannot join operations with other ranks, for example because it has ended.

        Returns "" if the rank can probably join operations.

        status: what the rank last reported about itself.
        """
        state = condition(status.pid) if rank in self._board.neighbours else ""
        if state == "stopped":
            return f"its process {status.pid} is stopped (by SIGSTOP or a debugger); kill -CONT resumes it"
        if state == "gone" and not status.ended:
            return (
                "its process has ended without an exception (killed by a signal, by the kernel when memory ran out, or "
                "by os._exit)"
            )
        if status.ended:
            return f"it {status.ended}"
        silent = time.time() - status.written
        if silent > _SILENT_SECONDS:
            return (
                f"it has been silent for {silent:.0f} s: native code holds Python's interpreter lock, or its host or "
                "network is down"
            )
        return ""

    def why_gone(self, rank: int) -> str:
        """Return a message that says how a rank's process has ended, or "" if it still runs or is on another host.

        If the rank has reported how its program ended, the message says so: "rank 1 raised ValueError: ...".
        Otherwise, the message gives the line of the program at which the rank was last seen: "rank 1 was last seen at
        train.py:41 (load); its process has ended without an exception ...". Any thread may call this method.
        """
        status = self._read(rank) if rank in self._board.neighbours else None
        return self._last_seen(rank, status) if status is not None and condition(status.pid) == "gone" else ""

    def _last_seen(self, rank: int, status: Status) -> str:
        """Return a clause about a rank that issues no more collectives: where it was last seen, and why it issues none.

        "Where" is a line of the program. If the rank's program has ended, the clause says only how it ended: the line
        in the status may be a second old, and `Status.ended` already names the line that raised an error.
        """
        if status.ended:
            return f"rank {rank} {status.ended}"
        return f"rank {rank} was last seen at {status.place or 'an unknown line'}; {self._why_absent(rank, status)}"

    def missing(self) -> str:
        """Return a message about the ranks for which other ranks are waiting, for an error message after a timeout.

        For each missing rank, the message gives the line of the user's program at which that rank is or was last seen,
        and the likely reason why it has not joined. The message also says how long the other ranks have waited, and in
        which operations: "No progress for 60 s: rank 1 is at train.py:41 (load), ... rank 0 waits for ...".

        The message is never empty. If all ranks wait, it says that their operations do not match.
        """
        self._observe()
        ranks = {**self._read_all(), self._rank: self.status}
        return self._explain_wait(ranks, [rank for rank, status in ranks.items() if self._is_waiting(rank, status)])

    def _explain_wait(self, ranks: dict[int, Status], waiting: Sequence[int]) -> str:
        """Return a message that says how long ranks have waited, and which ranks are missing, at which line and why.

        The message also names the operations in which the first four waiting ranks wait.

        ranks: the status of each rank that has published its status.
        waiting: the ranks that wait; all other ranks are missing.
        """
        now = time.time()
        lines = []
        for rank in sorted(set(range(self._control.size)) - set(waiting)):
            status = ranks.get(rank)
            if status is None:
                lines.append(f"rank {rank} has not reported its status yet")
                continue
            if self._why_absent(rank, status):
                lines.append(self._last_seen(rank, status))
            else:
                at = f" at {status.place}, for {now - status.since:.0f} s" if status.place else " at an unknown line"
                lines.append(f"rank {rank} is{at}, {_guess(status, self._reported.get(rank))}")
        missing = "; ".join(lines) or "every rank waits for others, in operations that do not match"
        waits = "; ".join(
            f"rank {rank} waits for {ranks[rank].waits} at {ranks[rank].place}" for rank in sorted(waiting)[:4]
        )
        more = f"; {len(waiting) - 4} more wait" if len(waiting) > 4 else ""
        seconds = max([now - ranks[rank].waits_since for rank in waiting], default=0.0)
        return f"No progress for {seconds:.0f} s: {missing}. {waits}{more}."

    # -- comparisons --------------------------------------------------------------------------------------------

    def excerpts(self) -> list[Excerpt]:
        """Return the last operations that this rank has issued, as one `Excerpt` for each communicator.

        This rank sends the list to the other ranks, with its status. They pass it to `compare`, to find out whether
        this rank's operations differ from theirs.
        """
        return [collective_log.excerpt() for collective_log in self._collective_logs]

    def compare(self, other: int, theirs: Sequence[Excerpt]) -> str | None:
        """Compare the operations that this rank and another have issued, on all communicators.

        Returns a description of the first difference, or None if no difference is known. `difference` does this for a
        single communicator.

        Args:
            other: the other rank.
            theirs: the result of `excerpts` on the other rank.
        """
        for collective_log, shown in zip(self._collective_logs, theirs):
            text = self.difference(collective_log, other, shown)
            if text is not None:
                return text
        return None

    def difference(self, collective_log: CollectiveLog, other: int, theirs: Excerpt) -> str | None:
        """Compare the operations that this rank and another have issued, on one communicator.

        Returns a description of the first difference. Returns None if no difference is known, or if the other rank does
        not belong to the communicator. `compare` calls this for each communicator.

        Args:
            collective_log: this rank's log of the communicator, the list of operations that it has issued there.
            other: the other rank.
            theirs: the last entries of the other rank's log of the same communicator, from `excerpts` on that rank.
        """
        alike = collective_log.ranks is None or other in collective_log.ranks
        found = collective_log.compare(theirs) if alike else None
        if found is None:
            return None
        when = f"Operation {found.number}" if found.first else f"An operation at or before number {found.number}"
        places = {self._rank: self._describe(found.mine), other: self._describe(found.theirs, other)}
        return self._explain(places, f"{when} of communicator '{collective_log.name}' differs")

    def _crossed(self, other: int, theirs: Status) -> str | None:
        """Return an explanation if this rank and `other` wait for each other on two communicators, otherwise None.

        They wait for each other if this rank has issued more operations than `other` on one communicator, but fewer on
        another, and neither rank has issued an operation for CROSSED_SECONDS.

        theirs: the status of the other rank.
        """
        mine = [collective_log.count for collective_log in self._collective_logs]
        counts = mine, [shown.stop for shown in theirs.excerpts]
        if counts != self._seen:
            self._seen, self._since = counts, time.monotonic()
        pairs = list(zip(*counts))
        if time.monotonic() - self._since < CROSSED_SECONDS or not (
            any(own > their for own, their in pairs) and any(own < their for own, their in pairs)
        ):
            return None
        ahead = next(number for number, (own, their) in enumerate(pairs) if own > their)
        behind = next(number for number, (own, their) in enumerate(pairs) if own < their)
        entry = self._collective_logs[ahead].entry(pairs[ahead][1] + 1)
        shown = theirs.excerpts[behind]
        last = shown.entries[max(pairs[behind][0] - shown.count, 0)]
        places = {self._rank: "?" if entry is None else self._describe(entry), other: self._describe(last, other)}
        return self._explain(places, "Each waits for the other")

    def _describe(self, entry: int, other: int | None = None) -> str:
        """Return a description of an operation, for messages.

        entry: the number that encodes the operation in a collective log (the list of a rank's operations).
        other: the rank whose log contains the entry, or None for this rank.
        """
        occasions = dict(self._control.occasions)
        end = time.monotonic() + 2.5 * SECONDS
        # For an exchange of objects or a decision, `entry` contains only a hash of the description. If this rank does
        # not know the description, wait up to 2.5 seconds until the other rank publishes it.
        while True:
            status = None if other is None else self._read(other)
            if status is not None:
                occasions.update({int(number): text for number, text in status.occasions.items()})
            text = describe(entry, self.names, occasions)
            if other is None or not text.startswith(UNKNOWN) or time.monotonic() > end:
                return text
            time.sleep(0.1)

    def _explain(self, places: dict[int, str], what: str) -> str:
        """Return the error message for ranks that issued different operations.

        places: a description of each rank's operation, by rank.
        what: a sentence that says how the operations differ, such as "Each waits for the other".
        """
        self.status.look(self._program)
        self._show()
        begun, end = time.time(), time.monotonic() + 1.5 * SECONDS
        ranks = {rank: self._read(rank) for rank in places if rank != self._rank}
        while any(status and status.written < begun for status in ranks.values()) and time.monotonic() < end:
            time.sleep(0.1)  # wait until the other ranks have published their present lines of the program
            ranks = {rank: self._read(rank) for rank in ranks}
        found = {rank: self.status if status is None else status for rank, status in ranks.items()}
        found[self._rank] = self.status
        doing = "; ".join(f"rank {rank}: {place}{_seen(place, found[rank])}" for rank, place in sorted(places.items()))
        summary = "the ranks issued different operations, which would deadlock or exchange the wrong data"
        if all(map(_is_decision, places.values())):
            summary = "the ranks differ in a decision, after which they would wait for each other forever"
        return f"{summary}. {what}. {doing}. {_advice(list(places.values()))}"


def _first_interrupted(ranks: dict[int, Status]) -> int:
    """Return the rank that was interrupted first.

    ranks: the status of each rank. At least one rank must have been interrupted.
    """
    return min((status.ended_at, rank) for rank, status in ranks.items() if status.interrupted)[1]


def _seen(place: str, status: Status) -> str:
    """Return words such as " at train.py:41 (load)", which say where a rank was last seen, or "" if it is unknown.

    place: the description of the rank's operation, to which the words are appended.
    status: the status that the rank last reported.
    """
    if place != repr(EXIT):
        return f" at {status.place}" if status.place else ""
    line = f", last seen at {status.place}" if status.place else ""
    return f"{line} (it {status.ended})" if status.ended else line


def _is_decision(place: str) -> bool:
    """Return whether `place` describes a decision of a rank, such as whether to save at this step.

    Decisions must be equal on all ranks, so a rank's collective log contains them too, in addition to the operations
    that the rank has issued.

    place: the description of an entry in a collective log.
    """
    return place.startswith("decision for")


def _advice(places: Sequence[str]) -> str:
    """Return advice for users whose ranks have issued different operations.

    places: a description of each operation.
    """
    if repr(EXIT) in places:
        trainer = (
            "Trainer's save_model() before train() saves on rank 0 alone: call it after train(), or use "
            "bmt.hf.Trainer. "
        )
        return (
            "If the call is inside `if rank == 0:`, take it out, because every rank must make it. "
            f"{trainer if repr('state_dict') in places else ''}Otherwise one rank made fewer steps, or ended by "
            "sys.exit(): give every rank the same number of batches (drop_last, or a sampler that repeats rows), and "
            "exit on all ranks together."
        )
    if any(place.startswith("'") for place in places):
        return (
            "The function named in quotes needs all ranks: call it on every rank, in the same order, and not on one "
            "rank alone."
        )
    if any(place.startswith(("step with", "clipping", "change of requires_grad")) for place in places):
        return (
            "Every rank must make the same steps with the same learning rate, optimizer options, clipping and frozen "
            "parameters: none of them may depend on the rank or on its data."
        )
    if all(map(_is_decision, places)):
        return (
            "All ranks must make the same decision at the same step: it must not depend on the rank, its data or its "
            "clock. To stop all ranks when any rank wants to, exchange the decision first: "
            "stop = bmt.sum_loss(torch.tensor(float(stop))) > 0."
        )
    return (
        "Every rank must call the same modules in the same order and the same number of times, in backward too. Do not "
        "evaluate on one rank alone. If a rank's data do not need a module (no image, fewer tiles, a skipped layer), "
        "call the module there with some input, and add its output times 0 to the loss."
    )


def _guess(status: Status, before: Status | None) -> str:
    """Guess why a rank keeps others waiting, although its process runs and waits for no other rank.

    Returns words that complete the sentence "rank 1 is at train.py:41, for 32 s, ...".

    status: the rank's status.
    before: the rank's status at the last warning about it, or None.
    """
    task = "running code that only this rank executes, or slow work"
    if status.task:
        task = f"{status.task}, which is slow or stuck"
    if status.waits == _DEVICE:
        task = "waiting for its device: slow work, or a collective of torch.distributed that other ranks did not call"
    if before is None:
        return task
    seconds = f"{status.written - before.written:.0f} s"
    if status.place != before.place:
        return f"{task}; {seconds} ago it was at {before.place or 'an unknown line'}"
    if status.moved > before.written:
        return f"{task}; it has run other code in the last {seconds}, so it may only be slow"
    return f"{task}; it has not moved in the last {seconds}"
