"""What training on several ranks changes in this process. `install` does all of it, and what it returns undoes it.

* `sys.excepthook`: the first exception is printed whole, with its rank; each other rank says in one line where it was.
* `sys.exit`, `exit` and `quit` note their line and exit code, which exit handlers are not told.
* An exit handler closes the communicators, on all ranks together.

Beyond that `watch.py` kills a stopped rank of this host (`os.kill`) and ends a rank that does not reach its error
(`os._exit`), each after the timeout of `init_distributed`; and `bmtrain/init.py` registers the check of optimizers.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..engine.comm.communicator import Communicator
from ..engine.comm.nccl import abort_all
from ..engine.runtime.monitor import EXIT
from ..engine.runtime.world import World, wait_loader
from .status import line_now, line_of
from .watch import Watch

_log = logging.getLogger("hf_bmtrain")
_FIRST_SECONDS = 5.0
"""For which a rank waits for the end of the one that raised first, so that a launcher finds that one first."""


def install(world: World, watch: Watch, opened: Sequence[Communicator], joined: bool) -> Callable[[], None]:
    """Report exceptions, note exits, and close the communicators when the program ends.

    Args:
        opened: the communicators to close.
        joined: whether the process group existed before `init_distributed`: its creator destroys it.

    Returns:
        A function that undoes it. It is called when the program ends.
    """
    exits = Exits()
    undo = [_report_exceptions(watch, world.rank), exits.install()]

    def restore() -> None:
        atexit.unregister(leave)
        while undo:
            undo.pop()()

    def leave() -> None:
        restore()
        _leave(world, watch, opened, joined, exits)

    atexit.register(leave)
    return restore


def _report_exceptions(watch: Watch, rank: int) -> Callable[[], None]:
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
    return lambda: _put_back(sys, "excepthook", report, print_exception)


class Exits:
    """Notes the last call of `sys.exit`, `exit` or `quit` on the main thread of this process, also if it was caught.

    code: its exit code, 0 if there was none. last: the call and its line, "" if there was none.
    """

    def __init__(self) -> None:
        self.code, self.last = 0, ""
        self._pid = os.getpid()

    def install(self) -> Callable[[], None]:
        """Extend the three functions. Returns a function that restores them."""
        places = [(sys, "exit"), *((builtins, name) for name in ("exit", "quit") if hasattr(builtins, name))]
        undo = []
        for place, name in places:
            leave = getattr(place, name)
            noted = self._noted(leave, "sys.exit" if place is sys else name)
            setattr(place, name, noted)
            undo.append(functools.partial(_put_back, place, name, noted, leave))

        def restore() -> None:
            for each in undo:
                each()

        return restore

    def _noted(self, leave: Callable[[Any], Any], name: str) -> Callable[..., Any]:
        @functools.wraps(leave)
        def noted(status: Any = None) -> None:
            # A fork's end is not this rank's, nor is a thread's.
            if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
                shown = "" if status is None else f"{status!r:.60}"
                self.last = f"{name}({shown}) at {line_now()}".removesuffix(" at ")
                self.code = status & 0xFF if isinstance(status, int) else int(status is not None)
            leave(status)

        return noted


def _put_back(place: Any, name: str, ours: Any, before: Any) -> None:
    """Restore what `install` replaced, unless it has been replaced again since."""
    if getattr(place, name) is ours:
        setattr(place, name, before)


def _leave(world: World, watch: Watch, opened: Sequence[Communicator], joined: bool, exits: Exits) -> None:
    """Close the communicators at exit: on all ranks together, or alone if another rank does not come."""
    # Without a process group (accelerator.end_training() destroys it) the ranks cannot agree.
    failed = getattr(sys, "last_value", None) is not None or not dist.is_initialized()
    problem = None
    watch.end(f"has left the program; its last exit call was {exits.last}" if exits.last else "has left the program")
    if not failed:
        try:
            wait_loader()  # what another rank waits for may be queued
            world.barrier(EXIT)
        except (RuntimeError, ValueError):  # ValueError: the present process group is another one
            failed, problem = True, watch.problem
    watch.stop()
    if problem is not None and repr(EXIT) not in problem:
        _log.warning("rank %d leaves alone: %s", world.rank, problem)
        problem = None
    if problem is not None:
        print(f"rank {world.rank} left while others waited for it: {problem}", file=sys.stderr, flush=True)
    aborted = True
    if failed and world.device.type == "cuda":
        aborted = abort_all(opened)
    else:
        for communicator in opened:
            communicator.close(abort=failed)
    world.control.close()
    if not failed and not joined and dist.is_initialized():
        dist.destroy_process_group()
    if not aborted:
        print(f"rank {world.rank} ends at once: NCCL does not abort its communicators", file=sys.stderr, flush=True)
    if problem is not None or not aborted:
        logging.shutdown()
        sys.stdout.flush()
        # An exit handler cannot set the status otherwise, and a launcher would blame another rank.
        os._exit(exits.code or 1)
