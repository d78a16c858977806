"""A folder of checkpoints: staging, publishing, and finding the newest one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Sequence, Set
from pathlib import Path
from typing import IO, NamedTuple

from ..engine.base.files import atomic_file, flush
from .header import Damaged
from .manifest import NAME, Manifest
from .ranges import check_file

_log = logging.getLogger("hf_bmtrain")
_STAGING = "tmp-"
ADDED = "complete.json"
"""The checksums of files that others have added to a published checkpoint."""
_LOCK = ".lock"
_REPLACED = ".replaced-"
_PREFIXES = ("checkpoint-", "checkpoint_")  # `save_state`'s and Accelerate's names


class Found(NamedTuple):
    """A checkpoint whose manifest and file sizes are right."""

    folder: Path
    manifest: Manifest


def lock(root: Path, held: IO[str] | None = None) -> IO[str] | None:
    """Keep other jobs from saving to a folder until the returned file is closed or this process ends.

    Args:
        root: the folder, which is created.
        held: what an earlier call returned. It is returned again unless the folder has been removed since.

    Returns:
        The locked file, or None, with a warning in the log, if the file system has no locks.

    Raises:
        RuntimeError: another process holds the lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    if held is not None and _is_in_place(held, root / _LOCK):
        return held
    file = open(root / _LOCK, "a+")
    try:
        # Not flock: workers that were forked would hold that after this process was killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
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


def _is_in_place(file: IO[str], path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    return False


def is_reserved(name: str) -> bool:
    """Return whether a checkpoint of this name would not be found, or be deleted as left by an interrupted save."""
    return name.startswith((_STAGING, ".")) or _REPLACED in name


def stage(root: Path, step: int, nbytes: int) -> Path:
    """Create an empty folder for `nbytes` of files, and delete what killed jobs have left. Needs the lock.

    Its name is new each time, since another rank of a killed job may live a while, and write. Raises OSError if there
    is too little space. No space is reserved: some file systems would write zeros for that.
    """
    for kind in ("checkpoint", "removed"):
        for left in root.glob(f"{_STAGING}{kind}-*"):
            _delete(left)
    check_space(root, nbytes)
    staging = root / f"{_STAGING}checkpoint-{step}-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OSError, with the numbers, if `nbytes` do not fit on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        sizes = f"the checkpoint takes {nbytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))


def publish(staging: Path, final: Path) -> None:
    """Rename a complete staging folder to its final name. The files are on disk already."""
    flush(staging)
    if os.path.lexists(final):  # until it is pruned it remains a checkpoint, of a lower number
        aside = 1
        while os.path.lexists(replaced := final.with_name(f"{final.name}{_REPLACED}{aside}")):
            aside += 1
        os.rename(final, replaced)
    os.rename(staging, final)
    flush(final.parent)


def prune(root: Path, keep: int | None) -> None:
    """Delete replaced checkpoints and, unless `keep` is None, all but the newest `keep` intact ones.

    Links to checkpoints remain, unless they were replaced, and do not count.
    """
    for link in root.glob(f"*{_REPLACED}*"):
        if link.is_symlink():
            link.unlink()
    found = [each for each in find(root)[0] if not each.folder.is_symlink()]
    for number, each in enumerate(found):
        if _REPLACED in each.folder.name or (keep is not None and number >= keep):
            remove(each.folder)


def remove(folder: Path) -> None:
    """Delete a checkpoint. A part of it that cannot be deleted is never taken for a checkpoint."""
    doomed = folder.with_name(f"{_STAGING}removed-{folder.name}-{secrets.token_hex(4)}")
    try:
        os.rename(folder, doomed)
    except OSError as error:
        _log.warning("%s cannot be deleted: %s", folder, error)
    else:
        _delete(doomed)


def _delete(folder: Path) -> None:
    """Delete a folder that is no checkpoint. What cannot be deleted is logged, and left for the next save."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("%s cannot be deleted: %s", folder, error)


def delete_oldest(folders: Sequence[Path], limit: int, kept: Set[Path]) -> None:
    """Delete the checkpoints that were saved first until `limit` remain.

    Args:
        folders: the checkpoints. Those of other libraries, whose order of saving is not known, are taken for the
            oldest, in this order. Links remain, and do not count.
        limit: how many remain.
        kept: these are not deleted.
    """

    def number(folder: Path) -> int:
        try:
            return Manifest.read(folder).number
        except Damaged:  # of another library, or deleted in part
            return 0

    ordered = sorted((folder for folder in folders if not folder.is_symlink()), key=number)
    excess = len(ordered) - max(limit, len(kept))
    for folder in [folder for folder in ordered if folder not in kept][: max(0, excess)]:
        remove(folder)


def find(path: Path, without: tuple[str, ...] = ()) -> tuple[list[Found], list[tuple[Path, str]]]:
    """Find the checkpoints in a folder. Reads manifests and file sizes, not contents.

    Args:
        path: a folder of checkpoints, or one checkpoint.
        without: see `Manifest.without`.

    Returns:
        The intact checkpoints, the one that was saved last first; and the others, with what is wrong with each.
    """
    found: list[Found] = []
    damaged: list[tuple[Path, str]] = []
    folders = [path] if (path / NAME).exists() else []
    if not folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith((_STAGING, "."))]
    for folder in folders:
        if folder != path and not (folder / NAME).exists() and not folder.name.startswith(_PREFIXES):
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


# -- files that others add to a published checkpoint ------------------------------------------------------------------


def add_checksums(folder: Path) -> None:
    """Write the checksums of the files that were added to a checkpoint since it was published."""
    known = {NAME, *Manifest.read(folder).files}
    sums = {
        path.name: zlib.crc32(path.read_bytes())
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in known
    }
    with atomic_file(folder / ADDED) as temporary:
        temporary.write_text(json.dumps(sums))


def find_damage(folder: Path, rank: int, size: int) -> str | None:
    """Return what is wrong with a checkpoint or the files added to it, None if nothing is.

    Reads the `rank`-th of `size` parts of the contents. Raises Damaged if the manifest or a file's size is wrong.
    """
    manifest = Manifest.read(folder)
    manifest.check_sizes(folder)
    problem = find_damage_of_added(folder) if rank == 0 else None
    if problem is not None:
        return problem
    for name, chunks in manifest.files.items():
        for _, problem in check_file(folder, name, chunks[rank::size]):
            if problem is not None:
                return problem
    return None


def find_damage_of_added(folder: Path) -> str | None:
    """Return what is wrong with the files that were added to a checkpoint, None if nothing is.

    Raises OSError if one is missing, ValueError if their checksums cannot be read.
    """
    sums = json.loads((folder / ADDED).read_bytes()) if (folder / ADDED).exists() else {}
    for name, crc in sums.items():
        if zlib.crc32((folder / name).read_bytes()) != crc:
            return f"{name} does not have the checksum that was saved (if you have edited it, delete {ADDED})"
    return None
