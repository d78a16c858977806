"""Change how this process ends, so that the other ranks learn of its failure or exit.

`install` makes these changes:

* `sys.excepthook` is replaced. The first rank that raises an exception prints its full traceback. Every other rank
  prints one line: its own line in the program, and the rank whose output to read. If the ranks issued different
  operations, or a timeout has expired, the error message already names ranks and lines. It is then printed in place of
  the traceback. If KeyboardInterrupt ends several ranks, the first of them prints one line, and the others nothing.
* `sys.exit`, `exit` and `quit` record the calling line and the exit code, because an exit handler cannot find them out.
* An exit handler waits for the other ranks, and closes the communicators.

If `init_distributed` fails, `destroy_at_exit` registers an exit handler that destroys torch's process group.

Other files also change the process or torch:

* `watch.py`: when every rank must stop, for example after the timeout of `init_distributed`, it kills suspended and
  blocked processes of this host (`os.kill`), and ends this process (`os._exit`) if its program cannot raise the error.
* `bmtrain/init.py` adds a hook to torch's optimizers, which checks that they can update sharded parameters, and enables
  `foreach` for sharded parameters. If there are several ranks, it also replaces `orthogonal_` and `sparse_` of
  torch.nn.init, so that all ranks draw the same matrix. For plain tensors, the new functions do the same as before.
* `checkpoint/host_copy.py` adds a hook to torch's optimizers while a thread saves a checkpoint. Steps wait in this hook
  until the values have been copied.
* `engine/wrap/accelerator.py`: if several ranks share the rows of a batch, it changes Accelerate's state and replaces a
  method of its class Accelerator. While no ranks share rows, the new method does the same as the original.
* `engine/tensors`: when it is imported, it replaces `torch.autograd.backward` (before torch 2.11) and functions of
  torch.distributed (before torch 2.12), so that they handle sharded tensors correctly or refuse them.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ..engine.comm.communicator import Communicator
from ..engine.comm.nccl import abort_all
from ..engine.runtime.monitor import EXIT
from ..engine.runtime.world import World, wait_loader
from .status import INTERRUPTED, OWN_COLLECTIVES, TORCH_DISTRIBUTED, line_now, line_of
from .watch import Watch

_log = logging.getLogger("hf_bmtrain")
_CAUSE_SECONDS = 5.0
"""Maximum time in seconds that a rank waits to learn why its collective has failed. Usually, another rank has ended."""
_TORCH_COLLECTIVES = tuple(
    f"{TORCH_DISTRIBUTED}{file}" for file in ("distributed_c10d.py", "_functional_collectives.py")
)
_OWN_COLLECTIVES = (OWN_COLLECTIVES,)
_FIRST_SECONDS = 5.0
"""Maximum time in seconds that a failing rank waits until the rank that failed first has ended. The launcher reports
the rank whose process ends first as the one that failed."""
_INTERRUPTED_SECONDS = 3.0
"""Maximum time in seconds that an interrupted rank waits until the programs of all others have ended, to know which of
them were interrupted too."""


def install(world: World, watch: Watch, opened: Sequence[Communicator], joined: bool) -> Callable[[], None]:
    """Make this process report exceptions to the other ranks, and close its communicators when the program ends.

    Called by `init_distributed`. It replaces `sys.excepthook`, `sys.exit`, `exit` and `quit`, and registers an
    exit handler.

    Args:
        world: the ranks that train together, with this process's rank, device and communicators.
        watch: the monitor that tells the other ranks how this rank ended.
        opened: the communicators that the exit handler closes.
        joined: whether torch's process group existed before `init_distributed`. If so, the exit handler does not
            destroy the process group.

    Returns:
        A function that restores the replaced functions and removes the exit handler. The exit handler itself begins by
        calling this function.
    """
    exits, pid = Exits(), os.getpid()
    undo = [_report_exceptions(watch, world.rank), exits.install()]

    def restore() -> None:
        atexit.unregister(leave)
        while undo:
            undo.pop()()

    def leave() -> None:
        restore()
        if os.getpid() == pid:  # not in a forked child, which inherits this exit handler, but is not this rank
            _leave(world, watch, opened, joined, exits)

    atexit.register(leave)
    return restore


def destroy_at_exit() -> None:
    """Destroy torch's default process group when the program ends without an exception.

    Called if `init_distributed` has created the group and then failed. The group is not destroyed at once, because the
    program may call `init_distributed` again, and the ranks could then not connect anew: torchrun's key-value store
    still contains the addresses of the first connection. So the second call uses the same group.
    """
    # Keep only a weak reference, because a strong one would keep the group's threads running even if the program itself
    # destroys the group.
    group, pid = weakref.ref(dist.group.WORLD), os.getpid()

    def destroy() -> None:
        failed = getattr(sys, "last_value", None) is not None
        if os.getpid() == pid and not failed and dist.is_initialized() and dist.group.WORLD is group():
            dist.destroy_process_group()

    atexit.register(destroy)


def _report_exceptions(watch: Watch, rank: int) -> Callable[[], None]:
    """Replace `sys.excepthook`, so that other ranks learn of uncaught exceptions. Return a function that restores it.

    watch: the monitor that tells the other ranks how this rank ended, and finds out which rank failed first.
    rank: this rank.
    """
    print_exception, pid = sys.excepthook, os.getpid()

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != pid:  # in a forked child, whose exceptions do not end this rank
            print_exception(kind, error, trace)
            return
        line, interrupted = line_of(trace), isinstance(error, KeyboardInterrupt)
        at = f" at {line}" if line else ""
        if interrupted and not watch.has_failed:
            # Ctrl-C interrupts every rank at any line. This is no failure, so print one message with the line instead
            # of a traceback from every rank.
            _log.debug("rank %d: %s", rank, "".join(traceback.format_exception(kind, error, trace)))
            watch.end(f"{INTERRUPTED}{at}")
            if _hides_error(error):
                print_exception(kind, error, trace)
            if text := watch.explain_interruption(line, _INTERRUPTED_SECONDS):
                sys.stderr.write(f"hf_bmtrain: {text}\n")
                sys.stderr.flush()
            return
        problem = watch.problem
        # If every rank must stop, `problem` is the reason. Report `problem` if `error` quotes it, because `error` was
        # then raised for this reason. Also report `problem` for KeyboardInterrupt: the user has pressed Ctrl-C to end a
        # wait that `problem` has caused. Any other error is a separate failure, and is reported instead of `problem`.
        if problem is not None and not interrupted and problem not in str(error):
            problem = None
        if problem is None and isinstance(error, RuntimeError):
            if _is_raised_in(_TORCH_COLLECTIVES, trace):
                problem = watch.find_cause(_CAUSE_SECONDS)
            elif _is_raised_in(_OWN_COLLECTIVES, trace) and not isinstance(error, torch.OutOfMemoryError):
                # Do not wait here: this package's collectives already wait for the cause before they raise an error.
                problem = watch.find_cause(0.0)
            elif "CUDA error" in str(error):  # for example, because this GPU accessed memory of a rank that has ended
                problem = watch.wait_for_problem(_CAUSE_SECONDS)
        first = watch.raised_before()
        # The rank that ended first may itself have ended because of a third rank, which is the true cause. `problem` in
        # its status then names the third rank.
        if first is not None and first[1].ended.startswith("ended"):
            cause = problem or first[1].problem or ""
            if cause.startswith("rank "):
                first, problem = None, cause
        if first is not None and first[1].interrupted:
            problem = f"rank {first[0]} {first[1].ended}."
        raised = traceback.format_exception_only(kind, error)[0].strip()
        if isinstance(error, SyntaxError):  # its first formatted line is the place, not the error
            raised = f"{kind.__name__}: {error}"
        summary = problem or raised
        watch.end(f"raised {summary}{at}" if problem is None else f"ended{at}: {summary}")
        if first is not None or problem is not None:
            _log.debug("rank %d: %s", rank, "".join(traceback.format_exception(kind, error, trace)))
        if first is not None and not first[1].interrupted:
            other, status = first
            reason = "" if problem is not None or summary in status.ended else f" ({summary.splitlines()[0]})"
            sys.stderr.write(f"rank {rank} ends{at}{reason}, because rank {other} failed first: see its output.\n")
        elif problem is not None:  # the problem already names ranks and lines, so the traceback is left out
            reason = "" if problem in raised else f" ({raised.splitlines()[0]:.200})"
            sys.stderr.write(f"rank {rank} ends{at}{reason}: {problem}\n")
        else:
            sys.stderr.write(f"rank {rank} raised the following exception; the other ranks end because of it:\n")
            print_exception(kind, error, trace)
        sys.stderr.flush()
        for culprit in watch.status.blamed if first is None else [first[0], *watch.status.blamed]:
            watch.wait_for_end(culprit, _FIRST_SECONDS)

    sys.excepthook = report
    return lambda: _put_back(sys, "excepthook", report, print_exception)


def _is_raised_in(files: Sequence[str], trace: TracebackType | None) -> bool:
    """Return whether code in `files` raised an exception, or called the function that raised it.

    This is used to recognize errors of collectives. A collective fails if another rank has ended or calls a different
    collective, but its error does not name that rank.

    files: paths of files or folders.
    trace: the traceback of the exception.
    """
    frames = traceback.walk_tb(trace)
    return any(file in frame.f_code.co_filename for frame, _ in frames for file in files)


def _hides_error(interruption: BaseException) -> bool:
    """Return whether a KeyboardInterrupt was raised while another error was handled. Both must then be printed.

    An error that a collective has raised does not count, because it may only show that another rank was interrupted.

    interruption: the KeyboardInterrupt.
    """
    error = interruption.__context__
    while error is not None:
        if isinstance(error, Exception) and not _is_raised_in(
            (*_TORCH_COLLECTIVES, *_OWN_COLLECTIVES), error.__traceback__
        ):
            return True
        error = error.__context__
    return False


class Exits:
    """Records the last call of `sys.exit`, `exit` or `quit` on the main thread, for the exit handler of this process.

    A call is recorded even if the program catches its SystemExit.

    Attributes:
        code: the exit code of that call, or 0 without a call.
        last: the call and its line, such as "sys.exit(3) at train.py:41 (main)", or "" without a call.
    """

    def __init__(self) -> None:
        self.code, self.last = 0, ""
        self._pid = os.getpid()

    def install(self) -> Callable[[], None]:
        """Make `sys.exit`, `exit` and `quit` record each call in `code` and `last`.

        The exit handler cannot find out the exit code, or the line that called `sys.exit`, in any other way. It tells
        the line to the other ranks, and needs the exit code if it must end the process with `os._exit`.

        Returns:
            A function that restores the original `sys.exit`, `exit` and `quit`.
        """
        places = [(sys, "exit"), *((builtins, name) for name in ("exit", "quit") if hasattr(builtins, name))]
        undo = contextlib.ExitStack()
        for place, name in places:
            leave = getattr(place, name)
            noted = self._noted(leave, "sys.exit" if place is sys else name)
            setattr(place, name, noted)
            undo.callback(_put_back, place, name, noted, leave)
        return undo.close

    def _noted(self, leave: Callable[[Any], Any], name: str) -> Callable[..., Any]:
        @functools.wraps(leave)
        def noted(code: Any = None) -> None:  # the parameter has this name because `exit` and `quit` accept code=
            # Do not record sys.exit in a forked child or in another thread, because it does not end this rank.
            if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
                shown = "" if code is None else f"{code!r:.60}"
                self.last = f"{name}({shown}) at {line_now()}".removesuffix(" at ")
                self.code = code & 0xFF if isinstance(code, int) else int(code is not None)
            leave(code)

        return noted


def _put_back(place: Any, name: str, ours: Any, before: Any) -> None:
    """Set the attribute `name` of `place` back to `before`, if its value is still `ours`, which this module has set."""
    if getattr(place, name) is ours:
        setattr(place, name, before)


def _leave(world: World, watch: Watch, opened: Sequence[Communicator], joined: bool, exits: Exits) -> None:
    """Run this process's exit handler: wait until all ranks have arrived here, and close the communicators.

    The wait ends early if another rank fails or is missing, or at Ctrl-C. There is no wait if this rank has failed, or
    if torch's process group has been destroyed. If other ranks still waited for this one in an operation, or if NCCL
    cannot abort its operations, the process ends with a nonzero exit code.

    watch: the monitor that tells the other ranks how this rank ended. This function stops the monitor.
    opened: the communicators to close.
    joined: whether torch's process group existed before `init_distributed`. If so, it is not destroyed here.
    exits: the recorded last call of `sys.exit`, which gives the message and the exit code.
    """
    # Do not wait if the process group was destroyed, as by accelerator.end_training(): waiting needs the group.
    failed = getattr(sys, "last_value", None) is not None or not dist.is_initialized()
    problem = None
    watch.end(f"has left the program; its last exit call was {exits.last}" if exits.last else "has left the program")
    if not failed:
        try:
            wait_loader()  # completes the collectives queued on this rank's device, for which other ranks may wait
            world.barrier(EXIT)
        except (RuntimeError, ValueError):  # ValueError: the program has replaced the default process group
            failed, problem = True, watch.problem
        except KeyboardInterrupt:
            # Ctrl-C was pressed while this rank, which has finished, waited for the others. Exit at once, without a
            # message: the ranks whose programs were still running report the interruption.
            failed = True
    watch.stop()
    if problem is not None and repr(EXIT) not in problem:
        _log.warning(
            "rank %d has finished, but a problem stopped other ranks before they finished, so this rank exits without "
            "waiting for them. Fix the problem and restart the job. The problem is: %s",
            world.rank,
            problem,
        )
        problem = None
    if problem is not None:
        print(f"rank {world.rank} exited while other ranks waited for it: {problem}", file=sys.stderr, flush=True)
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
        print(
            f"rank {world.rank} ends its process now, because NCCL could not abort operations that wait for other "
            "ranks",
            file=sys.stderr,
            flush=True,
        )
    if problem is not None or not aborted:
        logging.shutdown()
        sys.stdout.flush()
        # In an exit handler, only os._exit can set the exit code. If it were 0, the launcher would report another rank
        # as the one that failed.
        os._exit(exits.code or 1)
