"""What a rank says of itself to the others: where its program is, what it waits for, and how it ended."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from ..engine.comm.collective_log import Excerpt

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = ("site-packages", "dist-packages", "<frozen", sysconfig.get_paths()["stdlib"], _PACKAGE)
_WAITS = (os.path.join(_PACKAGE, "engine", "comm"), os.path.join("torch", "distributed", "distributed_c10d.py"))
_LOADING = os.path.join("torch", "utils", "data")


@dataclass
class Status:
    """One rank's words about itself. Times are seconds since the epoch.

    place: the line of the user's program where it is, "" if it is at none. since: it has been there since.
    waits: what it waits for, of the other ranks, "" for nothing. waits_since: without an operation since. loading:
    whether it loads data. ended: how its program ended, "" while it runs. problem: why every rank must stop. blamed:
    the ranks for which the others waited in vain. occasions: by number, of the exchanges in `excerpts`. excerpts: of
    its journals.
    """

    pid: int = field(default_factory=os.getpid)
    written: float = 0.0
    place: str = ""
    since: float = 0.0
    waits: str = ""
    waits_since: float = 0.0
    loading: bool = False
    ended: str = ""
    ended_at: float = 0.0
    problem: str | None = None
    blamed: list[int] = field(default_factory=list)
    occasions: dict[str, str] = field(default_factory=dict)
    excerpts: list[Excerpt] = field(default_factory=list)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Status:
        status = cls(**json.loads(text))
        status.excerpts = [Excerpt(*values) for values in status.excerpts]
        return status

    def look(self, thread: int) -> None:
        """Look where a thread of this process is, by its identifier, and what it waits for.

        A program that has ended stays where it was last seen, or left.
        """
        frame = sys._current_frames().get(thread)
        lines, waits, loading, now = [], "", False, time.time()
        while frame is not None and len(lines) < 2:
            path = frame.f_code.co_filename
            if frame.f_lineno and not any(library in path for library in _LIBRARIES):
                lines.append((f"{_short(path)}:{frame.f_lineno}", frame.f_code.co_name))
            elif not lines:
                waits = waits or _waited_for(frame, path)
                loading = loading or _LOADING in path
            frame = frame.f_back
        place = _in_words(lines)
        if place != self.place and not self.ended:
            self.place, self.since = place, now
        self.waits, self.loading, self.written = waits, loading, now


def line_now() -> str:
    """Return the user's line that this is called from, the innermost outside libraries; "" if there is none."""
    status = Status()
    status.look(threading.get_ident())
    return status.place


def line_of(trace: Any) -> str:
    """Return the user's line in a traceback, the innermost outside libraries; "" if there is none."""
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if not any(library in code.co_filename for library in _LIBRARIES):
            lines.append((f"{_short(code.co_filename)}:{trace.tb_lineno}", code.co_name))
        trace = trace.tb_next
    return _in_words(lines[::-1])


def condition(pid: int) -> str:
    """Return "gone" or "stopped" for a process of this host that is not running, else "", also if it is not known."""
    if not os.path.isdir("/proc/self"):
        return ""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "")


def _waited_for(frame: FrameType, path: str) -> str:
    """Return what `frame` waits for of the other ranks, "" if it does not."""
    if not any(each in path for each in _WAITS):
        return ""
    name = frame.f_code.co_name
    if name == "barrier" and "occasion" in frame.f_code.co_varnames:
        return repr(frame.f_locals.get("occasion"))
    label = getattr(frame.f_locals.get("self"), "label", None) if name == "wait" else None
    if label is not None:
        return str(label).partition(": ")[2]
    return f"torch.distributed.{name}" if "torch" in path else ""


def _in_words(lines: list[tuple[str, str]]) -> str:
    """Return the place of the innermost of `lines`, (file:line, function), and where that function was called."""
    if not lines:
        return ""
    place, function = lines[0]
    if len(lines) == 1:
        return f"{place} ({function})"
    file, _, line = lines[1][0].rpartition(":")
    caller = f"line {line}" if place.rpartition(":")[0] == file else f"{file}:{line}"
    return f"{place} ({function}, from {caller})"


def _short(path: str) -> str:
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
