"""What goes wrong, where and when: read from the environment by the jobs in this folder."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

NAME = os.environ.get("FAULT", "none")
CULPRIT = int(os.environ.get("FAULT_RANK", "1"))
STEP = int(os.environ.get("FAULT_STEP", "6"))
FOLDER = Path(os.environ.get("FAULT_LOGS", "."))
GATHER = os.environ.get("FAULT_GATHER", "auto")
TIMEOUT = float(os.environ.get("FAULT_TIMEOUT", "25"))
SCALE = float(os.environ.get("FAULT_SCALE", "1"))
"""Seconds that sleeps last are multiplied by it."""


def strikes(name: str, step: int = STEP) -> bool:
    """Whether fault `name` happens on this rank, now. The first time is noted for the harness."""
    if name != NAME or step != STEP or int(os.environ["RANK"]) != CULPRIT:
        return False
    noted = FOLDER / "fault.json"
    if not noted.exists():
        noted.write_text(json.dumps(time.time()), "utf-8")
    return True


def other(name: str, usual: Value, unusual: Value) -> Value:
    """`unusual` on the rank where fault `name` happens, otherwise `usual`."""
    return unusual if strikes(name) else usual


def act(place: str, step: int = STEP) -> None:
    """Do what is to happen at `place`: faults are named `what_place`, such as "sigkill_forward"."""
    for what, do in ACTS.items():
        if strikes(f"{what}_{place}", step):
            do()


def fail() -> None:
    raise ValueError("row 17 of the data is damaged")


def report(key: str, value: Any) -> None:
    """Tell the harness something of this rank."""
    with open(FOLDER / f"report-{os.environ['RANK']}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps([key, value]) + "\n")


ACTS = {
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigint": lambda: os.kill(os.getpid(), signal.SIGINT),
    "segfault": lambda: ctypes.string_at(0),
    "raise": fail,
    "exit0": lambda: sys.exit(0),
    "exit3": lambda: sys.exit(3),
    "osexit0": lambda: os._exit(0),
    "stuck": lambda: time.sleep(1e6),
    "stuckinc": lambda: re.match(r"(a|a)+$", "a" * 60 + "b"),  # for ever, with the interpreter's lock
    "slow": lambda: time.sleep(2.5 * SCALE),
    "slower": lambda: time.sleep(8 * SCALE),
}
