"""Write files and folders atomically: other processes see them complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger("hf_bmtrain")
_LOCK = "lock"
_SECONDS_TO_LOCK = 600.0
"""A temporary folder that has no lock file and is older than this, in seconds, counts as abandoned by a killed
process."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary path, and on exit renames the file written there to `path`.

    A previous file at `path` is replaced. If the body of the `with` statement raises, `path` is not changed. The new
    file is flushed to disk before it is renamed. If the process is killed, `path` is therefore either the previous file
    or the new one, never a partial file.
    """
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        yield temporary
        # Some libraries create files that only their owner may read. So copy the permissions of the lock file, which
        # was created with the default permissions (umask).
        shutil.copymode(folder / _LOCK, temporary)
        flush(temporary)
        os.replace(temporary, path)
    flush_name(path)


@contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields an empty temporary folder, and renames it to `path` on exit.

    If the body of the `with` statement raises, the temporary folder is deleted and `path` does not change. The body
    must call `flush` for every file that it writes into the folder. Otherwise, the contents of the file could be lost
    if the machine crashes, because the context manager itself flushes only the folder's list of files. If `path` exists
    and is not an empty folder, the context manager raises OSError on exit.
    """
    with _temporary_folder(path) as folder:
        temporary = folder / path.name
        temporary.mkdir()
        yield temporary
        flush(temporary)
        os.rename(temporary, path)
    flush_name(path)


def flush_name(path: Path) -> bool:
    """Flush the parent folder of `path` to disk, after a complete file or folder was renamed to `path`.

    Without this, a crash of the machine could undo the renaming. If the parent folder cannot be flushed, a warning is
    logged and no error is raised, because `path` is complete and can be read.

    Args:
        path: the new name of the file or folder.

    Returns:
        Whether the parent folder was flushed.
    """
    try:
        flush(path.parent)
    except OSError as error:
        _log.warning(
            "%s is complete, but its folder could not be flushed to disk, so it may be lost if the machine fails soon. "
            "Check the disk. The error was: %s: %s", path, type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def delete_abandoned(path: Path) -> None:
    """Delete the temporary folders of processes that were killed while they wrote the file or folder `path`.

    To write `path`, a process first writes into a temporary folder next to `path`. The folder has the name of `path`,
    with a random ending and `.tmp`. Then the process renames the result to `path`, and deletes the temporary folder. If
    it is killed before that, the temporary folder remains. A temporary folder is not deleted if its process still runs,
    or if this is unknown because the file system does not support locks.

    Args:
        path: the file or folder that was to be written. It need not exist, and it is not deleted.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
        if re.fullmatch(r"[0-9a-f]{8}", left.name[len(path.name) + 1 : -len(".tmp")]) and _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields a new folder next to `path`, and deletes the folder on exit.

    The folder has the name of `path`, with a random ending and `.tmp`. Before it is created, the temporary folders of
    processes that were killed while they wrote `path` are deleted.

    The process that uses the folder holds a lock on the file `lock` in the folder. The system releases the lock when
    the process ends. So if another process can lock the file, the folder is no longer in use, and can be deleted.
    """
    delete_abandoned(path)
    folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        unlocked = folder / f"{_LOCK}.new"
        with open(unlocked, "w") as held:
            with contextlib.suppress(OSError):  # a file system without locks: `_is_abandoned` then returns False
                fcntl.flock(held, fcntl.LOCK_EX)
            # Give the file its final name only after it is locked. Another process that finds an unlocked file of this
            # name assumes that this process was killed, and deletes the folder.
            unlocked.rename(folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether the process that created the temporary folder `folder` has ended. False if this is unknown.

    While it runs, that process holds a lock on the file `lock` in the folder. If the folder contains no such file, the
    process counts as ended if the folder was last changed more than _SECONDS_TO_LOCK (600) seconds ago.
    """
    try:
        with open(folder / _LOCK, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:  # the process was killed before it created the lock file, or is about to create it
        with contextlib.suppress(OSError):
            return time.time() - folder.stat().st_mtime > _SECONDS_TO_LOCK
        return False
    except OSError:
        return False
    return True


def flush(path: Path) -> None:
    """Flush the contents of the file `path`, or the entries of the folder `path`, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
