"""Manage a folder of checkpoints: create them under a temporary name, rename them into place, find and delete them."""

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
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import IO, NamedTuple

from ..engine.base.files import atomic_file, flush, flush_name
from .header import Damaged
from .manifest import NAME, Manifest
from .ranges import PIECE_BYTES, check_file

_log = logging.getLogger("hf_bmtrain")
_STAGING = "tmp-"
ADDED = "complete.json"
"""The name of the file with the checksums of files that were added to a complete checkpoint, for example by Trainer."""
_LOCK = ".lock"
_REPLACED = ".replaced-"
_PREFIXES = ("checkpoint-", "checkpoint_")  # how names of checkpoints of `save_state` and of Accelerate begin


class Found(NamedTuple):
    """A checkpoint whose manifest (the list of its files) is valid, and whose files have the sizes listed there.

    Attributes:
        folder: the checkpoint's folder.
        manifest: the manifest that was read from the folder.
    """

    folder: Path
    manifest: Manifest


def lock(root: Path, held: IO[str] | None = None) -> IO[str] | None:
    """Lock a folder, so that no other job can save to it until the returned file is closed or this process ends.

    Args:
        root: the folder, created if it does not exist.
        held: the file that an earlier call for this folder returned, or None. The same file is returned again, unless
            the folder was deleted in the meantime.

    Returns:
        The locked file. None, with a warning in the log, if the file system does not support locks.

    Raises:
        RuntimeError: another process holds the lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    if held is not None and _is_in_place(held, root / _LOCK):
        return held
    file = open(root / _LOCK, "a+")
    try:
        # Do not use flock: forked workers would inherit that lock, and keep it after this process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RuntimeError(
            f"{holder} is also saving to {root}. Give each job its own folder, or end that process if it is left over "
            "from an earlier job."
        ) from error
    except OSError as error:
        _log.warning(
            "%s cannot be locked (%s), so save_state will not notice if a second job saves to the same folder. Give "
            "each job its own folder",
            root,
            error.strerror,
        )
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
    """Return whether a checkpoint must not have this name, because such folders are ignored or deleted.

    Names that begin with "tmp-" or a dot are ignored when checkpoints are searched. Names that contain ".replaced-" are
    those of replaced checkpoints, which the next save deletes.
    """
    return name.startswith((_STAGING, ".")) or _REPLACED in name


def stage(root: Path, step: int, nbytes: int) -> Path:
    """Create an empty temporary folder for a new checkpoint, and return the path of this folder.

    Temporary folders that killed jobs have left in `root` are deleted. The new folder's name contains `step` and a
    random suffix, because a rank of a killed job may survive for a while and still write to its old folder.

    Args:
        root: the folder of the checkpoints. The caller must have locked it with `lock`.
        step: the training step of the checkpoint.
        nbytes: the size of the checkpoint in bytes.

    Raises:
        OSError: the disk has less than `nbytes` bytes of free space. The space is only checked and not reserved,
            because some file systems reserve space by writing zeros, which takes long.
    """
    for kind in ("checkpoint", "removed"):
        for left in root.glob(f"{_STAGING}{kind}-*"):
            _delete(left)
    check_space(root, nbytes)
    staging = root / f"{_STAGING}checkpoint-{step}-{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def check_space(folder: Path, nbytes: int) -> None:
    """Raise OSError if the disk of `folder` has less than `nbytes` bytes of free space. The error gives both sizes."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        sizes = (
            f"the checkpoint takes {nbytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free (delete other files "
            "or choose a folder on another disk)"
        )
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", str(folder))


def publish(staging: Path, final: Path) -> None:
    """Rename the temporary folder of a complete checkpoint to the checkpoint's final name.

    An older checkpoint with this name is first renamed (".replaced-" is added to its name). `prune` deletes it later.

    Args:
        staging: the temporary folder, whose files were flushed to disk.
        final: the new path, in the same folder as `staging`.

    Raises:
        OSError: the folder could not be renamed. An older checkpoint has its own name again.
    """
    flush(staging)
    replaced = None
    if os.path.lexists(final):  # keep the old checkpoint, which `find` still finds, until `prune` deletes it
        aside = 1
        while os.path.lexists(replaced := final.with_name(f"{final.name}{_REPLACED}{aside}")):
            aside += 1
        os.rename(final, replaced)
    try:
        os.rename(staging, final)
    except OSError as error:
        if replaced is not None:
            try:
                os.rename(replaced, final)
            except OSError:
                raise OSError(
                    error.errno, f"{error.strerror} (the earlier checkpoint {final.name} is now named {replaced.name})",
                    str(final),
                ) from error  # fmt: skip
        raise


def prune(new: Path, keep: int | None) -> None:
    """Delete older checkpoints once a new one has its final name: replaced ones, and all but the newest `keep`.

    A checkpoint was replaced if a newer checkpoint was saved under the same name. First, the new name is flushed to
    disk. If this fails, a warning is logged, and nothing is deleted. If a checkpoint cannot be deleted, a warning names
    it. No error is raised, because the new checkpoint is complete.

    Args:
        new: the new checkpoint. The other checkpoints are in the same folder. Symbolic links to checkpoints are not
            counted, and are deleted only if they were replaced.
        keep: the number of checkpoints that remain, including the new one. None deletes only replaced checkpoints.
    """
    with deleting_older(new):
        if not flush_name(new):
            return
        for link in new.parent.glob(f"*{_REPLACED}*"):
            if link.is_symlink():
                _remove_link(link, new)
        found = [each.folder for each in find(new.parent)[0] if not each.folder.is_symlink()]
        replaced = [folder for folder in found if _REPLACED in folder.name]
        beyond = [] if keep is None else [folder for folder in found if folder not in replaced][keep:]
        for folder in (*replaced, *beyond):
            remove(folder, new)


@contextlib.contextmanager
def deleting_older(new: Path) -> Iterator[None]:
    """Context manager around code that deletes older checkpoints. It suppresses exceptions, and logs them as a warning.

    The new checkpoint is already complete, so saving it must not fail because older ones cannot be found or deleted.

    new: the new checkpoint, for the warning.
    """
    try:
        yield
    except Exception as error:
        _log.warning(
            "the checkpoint %s is complete, but finding and deleting outdated checkpoints beside it failed, so they "
            "may still take space. The next save tries again. The error was: %s: %s", new, type(error).__name__, error,
        )  # fmt: skip


def remove(folder: Path, new: Path | None = None) -> None:
    """Delete a checkpoint, or log a warning if it cannot be deleted.

    The folder is first renamed to a name that `find` ignores, because this process may be killed before all files are
    deleted.

    Args:
        folder: the checkpoint to delete.
        new: the newly saved checkpoint that makes `folder` outdated, for the warning. None if `folder` is deleted for
            another reason, such as being incomplete.
    """
    doomed = folder.with_name(f"{_STAGING}removed-{folder.name}-{secrets.token_hex(4)}")
    try:
        os.rename(folder, doomed)
    except OSError as error:
        advice = "Delete it by hand." if new is None else "The next save tries again."
        _log.warning(
            "%s %s could not be deleted and still takes space. %s The error was: %s",
            _what(new), folder, advice, error,
        )  # fmt: skip
        return
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        _log.warning(
            "%s %s could not be deleted completely. The rest of it, in %s, still takes space. The next save tries "
            "again. The error was: %s", _what(new), folder, doomed.name, error,
        )  # fmt: skip


def _remove_link(link: Path, new: Path) -> None:
    try:
        link.unlink()
    except OSError as error:
        _log.warning(
            "%s %s, a symbolic link, could not be deleted. The next save tries again. The error was: %s",
            _what(new), link, error,
        )  # fmt: skip


def _what(new: Path | None) -> str:
    return "the checkpoint" if new is None else f"the checkpoint {new} is complete, but the older checkpoint"


def _delete(folder: Path) -> None:
    """Delete a temporary folder. If this fails, log a warning, because the next `save_state` tries again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("the temporary folder %s cannot be deleted now (%s). The next save tries again", folder, error)


def delete_oldest(folders: Sequence[Path], limit: int, kept: Set[Path], new: Path) -> None:
    """Delete the oldest checkpoints until `limit` remain. A warning names those that cannot be deleted.

    Args:
        folders: the checkpoints. Their age is read from their manifests (`manifest.json`). Those without a readable
            manifest, such as checkpoints of other libraries, count as the oldest, in the given order. Symbolic links
            are neither counted nor deleted.
        limit: the number of checkpoints that remain.
        kept: checkpoints that are not deleted, even if more than `limit` remain because of them.
        new: the checkpoint that has just been completed, for the warnings.
    """

    def number(folder: Path) -> int:
        try:
            return Manifest.read(folder).number
        except Damaged:  # another library has saved the folder, or it was partly deleted
            return 0

    ordered = sorted((folder for folder in folders if not folder.is_symlink()), key=number)
    excess = len(ordered) - max(limit, len(kept))
    for folder in [folder for folder in ordered if folder not in kept][: max(0, excess)]:
        remove(folder, new)


def find(path: Path, without: tuple[str, ...] = ()) -> tuple[list[Found], list[tuple[Path, str]]]:
    """Find the checkpoints in a folder, and check them by their manifests and the sizes of their files.

    A manifest is the list of a checkpoint's files. The contents of other files are not read.

    Args:
        path: a folder of checkpoints, or one checkpoint.
        without: beginnings of file names, such as "model". Safetensors files whose names begin like this, and the index
            files that belong to them (`.safetensors.index.json`), are not checked, and the returned manifests do not
            list them.

    Returns:
        A tuple of two lists: the intact checkpoints, newest first; and, for each damaged checkpoint, a pair (folder,
        description of the damage).
    """
    found: list[Found] = []
    damaged: list[tuple[Path, str]] = []
    folders = [path] if _has_manifest(path) else []
    if not folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith((_STAGING, "."))]
    for folder in folders:
        if folder != path and not _has_manifest(folder) and not folder.name.startswith(_PREFIXES):
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


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest. A folder that this process may not read, like `lost+found`, has none."""
    return os.path.exists(folder / NAME)  # False if reading is not permitted, where `Path.exists` raises an error


# -- files that other code adds to a complete checkpoint ------------------------------------------------------------


def add_checksums(folder: Path) -> None:
    """Record the checksums of the files that other code, such as Trainer, has added to the checkpoint in `folder`.

    The manifest lists the files that the checkpoint had when it became complete, except those in subfolders. All other
    files count as added, and are flushed to disk. The checksums are written to `complete.json`. Files in subfolders get
    no checksums.
    """
    known = {NAME, *Manifest.read(folder).files}
    added = [path for path in sorted(folder.rglob("*")) if path.name not in known or path.parent != folder]
    for path in added:
        if path.is_file() or path.is_dir():
            flush(path)
    sums = {path.name: _crc_of(path) for path in added if path.is_file() and path.parent == folder}
    with atomic_file(folder / ADDED) as temporary:
        temporary.write_text(json.dumps(sums))


def find_damage(folder: Path, rank: int, size: int) -> str | None:
    """Verify this rank's share of a checkpoint. Return a description of the first damage, or None. Not collective.

    Each file has a checksum for every chunk of at most 4 MiB. Each rank verifies every `size`-th chunk, beginning with
    chunk `rank`. Rank 0 also verifies the files that were added after the checkpoint was complete.

    Args:
        folder: the checkpoint's folder.
        rank: this rank.
        size: the number of ranks that share the work.

    Raises:
        Damaged: the manifest (the list of files and checksums) is damaged, or a file is missing or has the wrong size.
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
    """Verify the files that other code, such as Trainer, has added after a checkpoint was complete.

    Returns a description of the first damage, or None. Raises Damaged if the file with their checksums cannot be read.
    """
    for name, crc in added_checksums(folder).items():
        if problem := check_added(folder, name, crc):
            return problem
    return None


def added_checksums(folder: Path) -> dict[str, int]:
    """Return the checksums that `add_checksums` recorded for files added to a complete checkpoint: {name: CRC-32}.

    Returns {} if nothing was recorded. Raises Damaged if the file with the checksums cannot be read.
    """
    try:
        return dict(json.loads((folder / ADDED).read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise Damaged(
            f"{ADDED}, which contains only checksums of files that were added to the checkpoint (for example by "
            f"Trainer), cannot be read: {type(error).__name__}: {error}. No other file is affected. To use the "
            f"checkpoint without verifying the added files, delete {ADDED}"
        ) from error


def check_added(folder: Path, name: str, crc: int) -> str | None:
    """Verify a file that was added after a checkpoint was complete. Return a description of the damage, or None.

    Args:
        folder: the checkpoint's folder.
        name: the file's name.
        crc: the CRC-32 that was recorded for the file.
    """
    try:
        found = _crc_of(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == crc else f"{name} does not match its checksum. If you have edited this file, delete {ADDED}"


def _crc_of(path: Path) -> int:
    """Return the CRC-32 of a file, of which 4 MiB are in memory at a time: it may contain all weights of a model."""
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            crc = zlib.crc32(data, crc)
    return crc
