"""The status that a rank shows to the others: the line of the program it is at, what it waits for, and how it ended."""

from __future__ import annotations

import json
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

from ..engine.comm.collective_log import Excerpt, describe

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", sysconfig.get_paths()["stdlib"], _PACKAGE)
_TORCH_DISTRIBUTED = os.path.join("torch", "distributed")
_WAITS = (os.path.join(_PACKAGE, "engine", "comm"), os.path.join("torch", "distributed", "distributed_c10d.py"))
_TASKS = {
    "in its data loader": (os.path.join("torch", "utils", "data"), f"packages{os.sep}datasets{os.sep}"),
    "reading or writing files": (
        os.path.join("torch", "serialization.py"), f"packages{os.sep}safetensors{os.sep}",
        f"packages{os.sep}huggingface_hub{os.sep}", os.path.join(_PACKAGE, "checkpoint"),
    ),
    "compiling": (  # only these files of torch.compile: others also run when compiled code is called
        os.path.join("torch", "_dynamo", "convert_frame.py"), os.path.join("torch", "_inductor", "compile_fx.py"),
        os.path.join("triton", "compiler"),
    ),
}  # fmt: skip
"""What a rank is doing that may take long, by the files that it is in then."""


@dataclass
class Status:
    """What one rank tells the others about itself. Times are seconds since the epoch.

    Attributes:
        pid: its process id.
        written: the time at which `look` last updated it.
        place: the line of the user's program that it is at, such as "train.py:41 (load)"; "" if there is none.
        since: the time at which it reached `place`.
        waits: the operation with other ranks that it waits for, "" if it waits for none.
        waits_since: the time since which it has waited without issuing another operation.
        task: what it is doing, if that is one of `_TASKS`; otherwise "".
        moved: the time at which `look` last found its thread at another instruction than before.
        ended: how its program ended, such as "raised ValueError: ..."; "" while it runs.
        ended_at: the time at which it ended.
        problem: why every rank must stop, None if nothing is known.
        blamed: the ranks that the others waited for until the timeout.
        occasions: the purpose of each exchange of objects, by the number (as text) that stands for it in the logs.
        excerpts: the last entries of each of its collective logs.
    """

    pid: int = field(default_factory=os.getpid)
    written: float = 0.0
    place: str = ""
    since: float = 0.0
    waits: str = ""
    waits_since: float = 0.0
    task: str = ""
    moved: float = 0.0
    ended: str = ""
    ended_at: float = 0.0
    problem: str | None = None
    blamed: list[int] = field(default_factory=list)
    occasions: dict[str, str] = field(default_factory=dict)
    excerpts: list[Excerpt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._instructions: list[tuple[int, int]] = []  # of each frame of the stack that `look` has seen last

    def to_text(self) -> str:
        """Return the status as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Status:
        """Return the status of which `to_text` returned `text`."""
        status = cls(**json.loads(text))
        status.excerpts = [Excerpt(*values) for values in status.excerpts]
        return status

    def look(self, thread: int) -> None:
        """Update `place`, `waits`, `task` and `moved` from the stack of a thread of this process.

        `place` stays as it is once the program has ended, and while no line of it is on the stack.

        Args:
            thread: the thread's identifier, as from `threading.get_ident()`.
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
                called = "" if _TORCH_DISTRIBUTED in path else f" in {frame.f_code.co_name}"
            task = task or _task_in(path)
            instructions.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        if waits.startswith("torch.distributed."):
            waits += called  # the library's function that the user's line calls
        place = _in_words(lines)
        if (
            place not in ("", self.place) and not self.ended
        ):  # in `sys.excepthook` no line of the program is on the stack
            self.place, self.since = place, now
        if instructions != self._instructions:
            self._instructions, self.moved = instructions, now
        self.waits, self.task, self.written = waits, task, now


def line_now() -> str:
    """Return the user's line that this call comes from: the innermost that is not in a library, "" if there is none."""
    status = Status()
    status.look(threading.get_ident())
    return status.place


def line_of(trace: Any) -> str:
    """Return the user's line in a traceback: the innermost that is not in a library, "" if there is none."""
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_of_library(code.co_filename):
            lines.append((f"{_short(code.co_filename)}:{trace.tb_lineno}", code.co_name))
        trace = trace.tb_next
    return _in_words(lines[::-1])


def condition(pid: int) -> str:
    """Return "gone" or "stopped" if the process `pid` of this host does not run; "" if it runs or /proc is missing."""
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "")


@lru_cache(4096)
def _is_of_library(path: str) -> bool:
    return any(library in path for library in _LIBRARIES)


@lru_cache(4096)
def _task_in(path: str) -> str:
    """Return which of `_TASKS` code in the file `path` does, "" if none."""
    return next((task for task, files in _TASKS.items() if any(file in path for file in files)), "")


def _waited_for(frame: FrameType, path: str) -> str:
    """Return the operation with other ranks that `frame` waits for, "" if none. path: the file of the frame's code."""
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
    return f"torch.distributed.{name}" if "torch" in path else ""


def _in_words(lines: list[tuple[str, str]]) -> str:
    """Return `lines`, (file:line, function) from the innermost, as a text such as "train.py:41 (load, from line 9)"."""
    if not lines:
        return ""
    place, function = lines[0]
    if len(lines) == 1:
        return f"{place} ({function})"
    file, _, line = lines[1][0].rpartition(":")
    caller = f"line {line}" if place.rpartition(":")[0] == file else f"{file}:{line}"
    return f"{place} ({function}, from {caller})"


def _short(path: str) -> str:
    """Return `path` relative to the working directory if it is inside; otherwise as it is."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
