"""Processes that tests start: their environment, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment for a process without GPUs that finds the same modules, and `variables`."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables


def kill_all(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started, which may be in sessions of their own, as torchrun's ranks are."""
    found = [process.pid]
    for pid in found:  # grows
        with suppress(OSError):
            children = [path.read_text("ascii") for path in Path(f"/proc/{pid}/task").glob("*/children")]
            found += [int(child) for child in " ".join(children).split()]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
