"""The status that a rank reports to the other ranks: its line in the program, what it waits for, and how it ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..engine.comm.collective_log import Excerpt, describe

# These paths end with a separator, so that a comparison matches only whole names of folders. Otherwise a program in a
# folder such as ".../hf_bmtrain_experiments" would be taken for a part of this package.
_PACKAGE, _TORCH = (os.path.join(folder, "") for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
_INSTALLED = f"-packages{os.sep}"  # the common end of "site-packages/" and "dist-packages/"
_LIBRARIES = (
    f"{os.sep}site{_INSTALLED}", f"{os.sep}dist{_INSTALLED}", "<frozen",
    os.path.join(sysconfig.get_paths()["stdlib"], ""), _PACKAGE,
)  # fmt: skip
TORCH_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
OWN_COLLECTIVES = os.path.join(_PACKAGE, "engine", "comm", "")
_WAITS = (OWN_COLLECTIVES, f"{TORCH_DISTRIBUTED}distributed_c10d.py")
_TASKS = {
    "in its data loader": (os.path.join(_TORCH, "utils", "data", ""), f"{_INSTALLED}datasets{os.sep}"),
    "reading or writing files": (
        f"{_TORCH}serialization.py", f"{_INSTALLED}safetensors{os.sep}", f"{_INSTALLED}huggingface_hub{os.sep}",
        os.path.join(_PACKAGE, "checkpoint", ""),
    ),
    "compiling": (  # only these files, because other files of the compilers also run in calls of compiled code
        os.path.join(_TORCH, "_dynamo", "convert_frame.py"), os.path.join(_TORCH, "_inductor", "compile_fx.py"),
        os.path.join(f"{_INSTALLED}triton", "compiler", ""),
    ),
}  # fmt: skip
"""Tasks that may take long, as {task: parts of paths of source files}. A rank is doing the task while code of one of
these files is on its call stack."""
_EXITING = 0x4
"""The bit PF_EXITING in the flags of /proc/PID/stat. The Linux kernel sets it when a process begins to end."""
INTERRUPTED = "was interrupted (Ctrl-C or SIGINT)"
"""The beginning of `Status.ended` if KeyboardInterrupt has ended the program."""


@dataclass
class Status:
    """The status that a rank reports to the other ranks. Times are seconds since the epoch.

    Attributes:
        pid: the rank's process id.
        written: the time at which `look` last updated this status.
        place: the current line of the user's program, such as "train.py:41 (load)"; "" if it is unknown.
        since: the time at which the program reached `place`.
        waits: what the rank waits for: an operation with other ranks, such as a collective, or "its device". "" if it
            does not wait.
        waits_since: the time since which the rank has made no progress. While it waits for other ranks: the time at
            which it began to wait, or at which it last issued an operation, whichever is later. While it waits for its
            device: the same as `moved`. While it does not wait: the time of the last update.
        watched_since: the time from which this status has been updated without a gap. In a gap, the process was
            suspended, or native code held the GIL, so it is unknown what the rank waited for.
        task: what the rank is doing, if it is one of the slow tasks in `_TASKS`, or "".
        moved: the time of the last call of `look` in which the stack of the program's thread (code and instruction of
            each frame) differed from that in the previous call.
        ended: how the program ended, such as "raised ValueError: ...", or "" while it runs.
        ended_at: the time at which the program ended.
        problem: the reason why every rank must stop, or None.
        blamed: the ranks that did not reach an operation, so that the other ranks waited for them until the timeout.
        occasions: descriptions of recent exchanges of Python objects between the ranks and of recent decisions, as
            {number, as a string: description}. The number identifies the exchange or decision in the collective logs.
        excerpts: one item for each of the rank's collective logs (lists of the operations that the rank has issued),
            with the last entries of this log.
    """

    pid: int = field(default_factory=os.getpid)
    written: float = 0.0
    place: str = ""
    since: float = 0.0
    waits: str = ""
    waits_since: float = 0.0
    watched_since: float = 0.0
    task: str = ""
    moved: float = 0.0
    ended: str = ""
    ended_at: float = 0.0
    problem: str | None = None
    blamed: list[int] = field(default_factory=list)
    occasions: dict[str, str] = field(default_factory=dict)
    excerpts: list[Excerpt] = field(default_factory=list)

    def __post_init__(self) -> None:
        # The stack of the program's thread at the last call of `look`, to find out whether it has moved since then. For
        # each frame: (id of its code object, index of its instruction).
        self._instructions: list[tuple[int, int]] = []

    @property
    def interrupted(self) -> bool:
        """Whether KeyboardInterrupt has ended the rank's program."""
        return self.ended.startswith(INTERRUPTED)

    def to_text(self, limit: float = math.inf) -> str:
        """Return this status of a rank as JSON in ASCII, shortened if it has more than `limit` characters.

        The JSON can become long, because an error may quote a page of the user's data, and a character that is not
        ASCII takes up to 12 characters of JSON. To shorten it, each string is cut to 1000 characters or, if that is not
        enough, to 250, and then to 50. If the JSON is still too long, `occasions` and `excerpts` are left empty too.
        The length is not checked again, so with a very long `blamed`, the JSON may still exceed `limit`.
        """
        values = asdict(self)
        for length in (None, 1000, 250, 50):
            short = {name: value[:length] if isinstance(value, str) else value for name, value in values.items()}
            short["occasions"] = {number: text[:length] for number, text in self.occasions.items()}
            text = json.dumps(short)
            if len(text) <= limit:
                return text
        return json.dumps({**short, "occasions": {}, "excerpts": []})

    @classmethod
    def from_text(cls, text: str) -> Status:
        """Return the status that `text`, a result of `to_text`, describes."""
        status = cls(**json.loads(text))
        status.excerpts = [Excerpt(*values) for values in status.excerpts]
        return status

    def look(self, thread: int) -> None:
        """Update this status from the call stack of a thread. The monitor calls it once a second.

        This sets `place` (the line of the user's program), `since` (when the program reached this line), `waits` (the
        operation in which the program waits), `task` (a slow task, such as "compiling"), `moved` (when the program
        last made progress) and `written` (the time of this call). After the program has ended, and while no line of the
        program is on the stack, `place` and `since` do not change.

        Args:
            thread: the identifier of a thread of this process, as from `threading.get_ident()`.
        """
        frame = sys._current_frames().get(thread)
        lines, waits, called, task, instructions, now = [], "", "", "", [], time.time()
        while frame is not None:
            path = frame.f_code.co_filename
            if frame.f_lineno and not _is_of_library(path):
                if len(lines) < 2:
                    lines.append((f"{_short(path)}:{frame.f_lineno}", frame.f_code.co_name))
            elif not lines:
                waits = waits or _waited_for(frame, path)
                called = "" if TORCH_DISTRIBUTED in path else f" in {frame.f_code.co_name}"
            task = task or _task_in(path)
            instructions.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        if waits.startswith("torch.distributed."):
            waits += called  # `called` is, for example, " in clip_grad_norm_": the function that the user's line called
        place = _in_words(lines)
        # While no frame belongs to the program, as in `sys.excepthook`, `place` is "". The last place is then kept.
        if place not in ("", self.place) and not self.ended:
            self.place, self.since = place, now
        if instructions != self._instructions:
            self._instructions, self.moved = instructions, now
        self.waits, self.task, self.written = waits, task, now


def line_now() -> str:
    """Return the line of the user's program that led to this call, such as "train.py:41 (load)".

    This is the innermost line on the calling thread's stack that is not in a library. Returns "" if there is none.
    """
    status = Status()
    status.look(threading.get_ident())
    return status.place


def line_of(trace: Any) -> str:
    """Return the line of the user's program in a traceback, such as "train.py:41 (load)".

    This is the innermost line in the traceback that is not in a library. Returns "" if there is none.

    trace: a traceback object, such as an exception's `__traceback__`, or None.
    """
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_of_library(code.co_filename):
            lines.append((f"{_short(code.co_filename)}:{trace.tb_lineno}", code.co_name))
        trace = trace.tb_next
    return _in_words(lines[::-1])


def condition(pid: int) -> str:
    """Return whether process `pid` of this host has ended ("gone"), is suspended ("stopped"), or is running ("").

    The monitor calls this for ranks on the same host: a rank that was killed or suspended cannot report this itself.

    A killed process counts as gone even while the kernel still frees its memory, because its connections to other ranks
    may already be closed. (Freeing pinned host memory and GPU memory takes seconds.) On a system without /proc, the
    result is always "".
    """
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    if int(fields[5]) & _EXITING:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "")


@lru_cache(4096)
def _is_of_library(path: str) -> bool:
    return any(library in path for library in _LIBRARIES)


@lru_cache(4096)
def _task_in(path: str) -> str:
    """Return the slow task in `_TASKS`, such as "compiling", to which the source file `path` belongs, or ""."""
    return next((task for task, files in _TASKS.items() if any(file in path for file in files)), "")


def _waited_for(frame: FrameType, path: str) -> str:
    """Return a description of the operation, such as a collective, in which a frame of the stack waits for other ranks.

    Returns "" if the frame is not in such an operation.

    path: the source file of the frame's code.
    """
    if not any(each in path for each in _WAITS):
        return ""
    name = frame.f_code.co_name
    if name == "barrier" and "occasion" in frame.f_code.co_varnames:
        return repr(frame.f_locals.get("occasion"))
    if name == "smallest" and "entry" in frame.f_locals:
        return describe(frame.f_locals["entry"], {}, {})
    label = getattr(frame.f_locals.get("self"), "label", None) if name == "wait" else None
    if label is not None:
        return str(label).partition(": ")[2]
    return f"torch.distributed.{name}" if TORCH_DISTRIBUTED in path else ""


def _in_words(lines: list[tuple[str, str]]) -> str:
    """Return a string such as "train.py:41 (load, from line 9)", which names a line of the program and its caller.

    lines: the line, and after it its caller if there is one, each as a pair ("train.py:41", name of the function). If
        the list is empty, the result is "".
    """
    if not lines:
        return ""
    place, function = lines[0]
    if len(lines) == 1:
        return f"{place} ({function})"
    file, _, line = lines[1][0].rpartition(":")
    caller = f"line {line}" if place.rpartition(":")[0] == file else f"{file}:{line}"
    return f"{place} ({function}, from {caller})"


def _short(path: str) -> str:
    """Return `path` as a relative path if it is inside the working directory, and otherwise unchanged."""
    with contextlib.suppress(OSError):  # the working directory may be deleted, or on a file system that fails
        if path.startswith(os.getcwd() + os.sep):
            return os.path.relpath(path)
    return path
