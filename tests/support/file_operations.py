"""Counts what a process does to files, and acts at one of these operations."""

from __future__ import annotations

import builtins
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_OS = (
    "open", "write", "pwrite", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "ftruncate",
)  # fmt: skip
PLACES = [*((os, name) for name in _OS), (fcntl, "flock"), (fcntl, "lockf"), (builtins, "open")]
"""What is counted: (module, name). builtins.open for writing only; pwrite twice, before it and after half of it."""


@contextmanager
def counting(act: Callable[[int, str, Any], None]) -> Iterator[None]:
    """Call `act(number, operation, path or handle)` before every operation of any thread, numbered from 1."""
    lock, count = threading.Lock(), 0
    pwrite = os.pwrite

    def note(name: str, where: Any) -> None:
        nonlocal count
        with lock:
            count += 1
            act(count, name, where)

    def counted(original: Callable, name: str) -> Callable:
        def call(*arguments, **options):
            if original is not builtins_open or set("wxa+") & set(str(options.get("mode", (*arguments, "r")[1]))):
                note(name, arguments[0])
            if name == "pwrite":
                handle, data, start = arguments
                half = memoryview(data)[: len(data) // 2]
                pwrite(handle, half, start)
                note("half of pwrite", handle)
            return original(*arguments, **options)

        return call

    builtins_open = builtins.open
    with ExitStack() as stack:
        for module, name in PLACES:
            stack.enter_context(mock.patch.object(module, name, counted(getattr(module, name), name)))
        yield


def die() -> None:
    """End this process at once, as an exhausted host or a scheduler does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
