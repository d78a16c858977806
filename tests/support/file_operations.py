"""Counts what a process does to files, and acts at one of these operations.

Seen are calls of Python's `os`, of `open` for writing, and what `torch.save` and safetensors write: they are made to
write through `open`. A file that `open` has opened to be written ("w", "x") is empty until it is closed, and then half
of it and the rest are written, as by a large buffer. Not seen is what other C++ or Rust code opens by itself, and what
is written to files opened for appending ("a") or updating ("+").
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import safetensors.torch
import torch

_OS = (
    "open", "write", "pwrite", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link", "symlink",
    "ftruncate", "truncate",
)  # fmt: skip
PLACES = [*((os, name) for name in _OS), (fcntl, "flock"), (fcntl, "lockf"), (builtins, "open"), (io, "open")]
"""What is counted: (module, name). `open` for writing only; pwrite and files twice, before and after half of it."""
Note = Callable[[str, Any], None]
_open, _unlink = builtins.open, os.unlink


@contextmanager
def counting(act: Callable[[int, str, Any], None]) -> Iterator[None]:
    """Call `act(number, operation, path or handle)` before every operation of any thread, numbered from 1."""
    lock, count = threading.Lock(), 0

    def note(name: str, where: Any) -> None:
        nonlocal count
        with lock:
            count += 1
            act(count, name, where)

    originals = {place: getattr(*place) for place in PLACES}
    with ExitStack() as stack:
        for (module, name), original in originals.items():
            counted = _counted_open(original, note) if original is _open else _counted(original, name, note)
            stack.enter_context(mock.patch.object(module, name, counted))
        stack.enter_context(mock.patch.object(torch, "save", _save_through_open(torch.save)))
        serialize = _serialize_through_open(safetensors.torch.serialize_file)
        stack.enter_context(mock.patch.object(safetensors.torch, "serialize_file", serialize))
        yield


def _counted(original: Callable, name: str, note: Note) -> Callable:
    def call(*arguments: Any, **options: Any) -> Any:
        note(name, arguments[0])
        if name == "pwrite":
            handle, data, start = arguments
            half = memoryview(data)[: len(data) // 2]
            original(handle, half, start)
            note("half of pwrite", handle)
        return original(*arguments, **options)

    return call


def _counted_open(original: Callable, note: Note) -> Callable:
    def call(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set("wxa+") & set(mode):
            return original(file, mode, *arguments, **options)
        note("open", file)
        opened = original(file, mode, *arguments, **options)
        return opened if set("a+") & set(mode) else _Deferred(opened, note)

    return call


class _Deferred:
    """A file that is written when it is closed."""

    def __init__(self, file: Any, note: Note) -> None:
        self._file, self._note, self._parts = file, note, []

    def write(self, data: Any) -> int:
        self._parts.append(data if isinstance(data, str) else bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if self._file.closed:
            return
        whole = self._parts[0][:0].join(self._parts) if self._parts else ""
        if whole:
            self._note("write", self._file.name)
            self._file.write(whole[: len(whole) // 2])
            self._file.flush()
            self._note("half of write", self._file.name)
            self._file.write(whole[len(whole) // 2 :])
        self._file.close()

    def __enter__(self) -> _Deferred:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _save_through_open(original: Callable) -> Callable:
    def save(values: Any, file: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(file, (str, os.PathLike)):
            return original(values, file, *arguments, **options)
        with open(file, "wb") as opened:
            return original(values, opened, *arguments, **options)

    return save


def _serialize_through_open(original: Callable) -> Callable:
    def serialize(tensors: Any, file: Any, *arguments: Any, **options: Any) -> None:
        scratch = f"{tempfile.gettempdir()}/serialized-{os.getpid()}-{threading.get_ident()}"
        original(tensors, scratch, *arguments, **options)
        with open(scratch, "rb") as whole, open(file, "wb") as opened:
            opened.write(whole.read())
        _unlink(scratch)

    return serialize


def die() -> None:
    """End this process at once, as an exhausted host or a scheduler does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
