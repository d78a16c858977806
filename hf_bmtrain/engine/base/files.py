"""Files and folders that other processes see complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield where to write the file that replaces `path` at the end, unless the body raises.

    It is flushed to disk before it is renamed, so that a kill at any moment leaves the previous file or the new one.
    """
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        yield temporary
        shutil.copymode(folder / _LOCK, temporary)  # some writers create files that only their owner may read
        flush(temporary)
        os.replace(temporary, path)
    flush(path.parent)


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `path` at the end, unless the body raises.

    Files in it are to be flushed by the caller. `path` must not exist, or be an empty folder.
    """
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        yield temporary
        flush(temporary)
        os.rename(temporary, path)
    flush(path.parent)


def delete_abandoned(path: Path) -> None:
    """Delete what killed processes have left of their temporary folders for `path`."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        if re.fullmatch(r"[0-9a-f]{8}", left.name[len(path.name) + 1 : -len(".tmp")]) and _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder `path`.*.tmp, which is locked while this process lives, and delete it at the end."""
    delete_abandoned(path)
    folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        with open(folder / _LOCK, "w") as held:
            with contextlib.suppress(OSError):  # without locks on this file system nothing is deleted later
                fcntl.flock(held, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether no process holds the lock of a temporary folder."""
    try:
        with open(folder / _LOCK, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
