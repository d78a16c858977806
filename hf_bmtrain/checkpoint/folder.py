"""A folder of checkpoints: staging, publication, and which one is the newest."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
from pathlib import Path
from typing import IO, NamedTuple

from .header import Damaged
from .manifest import NAME, Manifest
from .ranges import flush_folder

_log = logging.getLogger("hf_bmtrain")
_STAGING = "tmp-"
_LOCK = ".lock"


class Found(NamedTuple):
    """A checkpoint whose manifest and file sizes are right."""

    folder: Path
    manifest: Manifest


def lock(root: Path) -> IO[str] | None:
    """Keep other jobs from saving to `root` until the returned file is closed or this process has ended.

    Returns None, with a line in the log, where the file system has no locks. Raises RuntimeError if another holds it.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = open(root / _LOCK, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RuntimeError(f"{holder} saves to {root} as well: give each job a folder of its own") from error
    except OSError as error:
        _log.warning("%s: no lock (%s), so another job that saves there is not noticed", root, error.strerror)
        file.close()
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def stage(root: Path, step: int) -> Path:
    """Make an empty folder for the files of a checkpoint, and remove what killed jobs have left. Needs the lock."""
    for left in root.glob(f"{_STAGING}*"):
        shutil.rmtree(left)
    staging = root / f"{_STAGING}checkpoint-{step}"
    staging.mkdir()
    return staging


def publish(staging: Path) -> Path:
    """Rename a complete staging folder to its final name, and return that. The files are on disk already."""
    flush_folder(staging)
    final = staging.with_name(staging.name.removeprefix(_STAGING))
    if final.exists():  # until it is pruned it remains a checkpoint, of a lower number
        aside = 1
        while (replaced := final.with_name(f"{final.name}.replaced-{aside}")).exists():
            aside += 1
        os.rename(final, replaced)
    os.rename(staging, final)
    flush_folder(final.parent)
    return final


def prune(root: Path, keep: int | None) -> None:
    """Delete replaced checkpoints and, unless `keep` is None, all but the newest `keep` that are whole."""
    found, _ = find(root)
    for number, each in enumerate(found):
        if ".replaced-" in each.folder.name or (keep is not None and number >= keep):
            remove(each.folder)


def remove(folder: Path) -> None:
    """Delete a folder so that a part of it is never taken for a checkpoint."""
    doomed = folder.with_name(f"{_STAGING}removed-{folder.name}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def find(path: Path, without: tuple[str, ...] = ()) -> tuple[list[Found], list[tuple[Path, str]]]:
    """Return the checkpoints in a folder, newest first, or the one that `path` itself is; and why others are not whole.

    The newest is that which was saved last. Reads manifests and sizes, not contents. without: see `Manifest.without`.
    """
    found: list[Found] = []
    damaged: list[tuple[Path, str]] = []
    folders = [path] if (path / NAME).exists() else []
    if not folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith((_STAGING, "."))]
    for folder in folders:
        if folder != path and not (folder / NAME).exists() and not folder.name.startswith("checkpoint-"):
            continue
        try:
            manifest = Manifest.read(folder).without(without)
            manifest.check_sizes(folder)
        except Damaged as error:
            damaged.append((folder, str(error)))
        else:
            found.append(Found(folder, manifest))
    found.sort(key=lambda each: each.manifest.number, reverse=True)
    return found, sorted(damaged)
