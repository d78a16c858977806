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
import stat
import zlib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import IO, NamedTuple

from ..engine.base.files import atomic_file, flush, flush_name
from .header import Damaged
from .manifest import NAME, Checked, Manifest
from .ranges import PIECE_BYTES, check_file, write_file

_log = logging.getLogger("hf_bmtrain")
_STAGING = "tmp-"
ADDED = "complete.json"
"""The name of the file with the checksums of files that were added to a complete checkpoint, for example by Trainer."""
_LOCK = ".lock"
_REPLACED = ".replaced-"
LISTINGS = 20
"""The maximum number of times that `find` or `load_state` lists a folder whose checkpoints other jobs keep changing."""
PREFIXES = ("checkpoint-", "checkpoint_")  # how `save_state` (with -) and Accelerate (with _) name checkpoints


class Found(NamedTuple):
    """A checkpoint whose manifest (the list of its files) is valid, and whose files have the sizes listed there.

    Attributes:
        folder: the checkpoint's folder.
        manifest: the manifest that was read from the folder, without the files that the argument `without` of `find`
            excludes.
    """

    folder: Path
    manifest: Manifest


def lock(root: Path, held: IO[str] | None = None) -> IO[str] | None:
    """Lock a folder, so that no other job can save to it until the returned file is closed or this process ends.

    Args:
        root: the folder, created if it does not exist.
        held: the result of the last call for this folder; None in the first call. Call this function again before each
            later save, because the lock may have been lost: a process loses all its locks on a file when it closes any
            descriptor of the file, for example after copying the folder. Normally, `held` itself is locked again and
            returned. If the folder or the lock file in it was deleted in the meantime, a new lock file is created.

    Returns:
        The locked file. None, with a warning in the log, if the file system does not support locks.

    Raises:
        RuntimeError: another process holds the lock.
        OSError: the folder or the lock file cannot be created.
    """
    root.mkdir(parents=True, exist_ok=True)
    file = held if held is not None and _is_in_place(held, root / _LOCK) else open(root / _LOCK, "a+")
    try:
        # Do not use flock: forked workers would inherit that lock, and keep it after this process is killed.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        if file is not held:
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
    """Return whether `name` is reserved for temporary or replaced folders. A user must not give it to a checkpoint.

    A name is reserved if it begins with "tmp-" or a dot, because `find` ignores such folders, or if it contains
    ".replaced-", because the next save deletes such checkpoints. `save_state` refuses reserved names.
    """
    return name.startswith((_STAGING, ".")) or _REPLACED in name


def stage(root: Path, step: int, nbytes: int) -> Path:
    """Create an empty temporary folder for a new checkpoint, and return the path of this folder.

    Older temporary folders in `root` are deleted. They are left over from saves that were interrupted, or from
    checkpoints whose deletion was interrupted. The new folder's name contains `step` and a random suffix, because a
    rank of a killed job may survive for a while and still write to the temporary folder of that job.

    Args:
        root: the folder of the checkpoints. The caller must have locked it with `lock`.
        step: the training step of the checkpoint.
        nbytes: the size of the checkpoint in bytes.

    Raises:
        OSError: the disk has less than `nbytes` bytes of free space, or the folder cannot be created. The space is only
            checked and not reserved, because some file systems reserve space by writing zeros, which takes long.
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


def write_manifest(folder: Path, manifest: Manifest, written: dict[str, list[Checked]]) -> None:
    """Complete a checkpoint in a temporary folder: write the manifest, which lists the files and their checksums.

    Args:
        folder: the temporary folder, which contains all files but the manifest.
        manifest: a manifest that has no files yet. This function adds the files to it.
        written: the chunks of each file, with their offsets, sizes and checksums, by file name. These are the results
            of the functions that wrote the files, such as `write_parts`, combined for each file.

    Raises:
        Damaged: the chunks of a file leave out bytes or overlap.
        OSError: a file is missing, or the manifest cannot be written.
    """
    for name, chunks in sorted(written.items()):
        manifest.add(name, chunks, os.path.getsize(folder / name))
    write_file(folder / NAME, manifest.to_bytes())


def publish(staging: Path, final: Path) -> None:
    """Rename the temporary folder of a complete checkpoint to the checkpoint's final name.

    An older checkpoint with this name is first renamed (".replaced-" is added to its name). `prune` deletes it later.

    Args:
        staging: the temporary folder, whose files were flushed to disk.
        final: the new path, in the same folder as `staging`.

    Raises:
        OSError: the folder could not be flushed or renamed. An older checkpoint keeps its name or gets it back; if it
            cannot be renamed back, the error gives its present name.
    """
    flush(staging)
    replaced = None
    if os.path.lexists(final):  # rename the old checkpoint; `find` still finds it until `prune` deletes it
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
                    error.errno,
                    f"{error.strerror}: the new checkpoint could not be renamed to {final.name}. The earlier one "
                    f"is complete, but is now named {replaced.name}, because it could not be renamed back",
                    str(final),
                ) from error  # fmt: skip
        raise


def prune(new: Path, keep: int | None) -> None:
    """Delete outdated checkpoints after a save: all replaced checkpoints, and all others except the newest `keep`.

    A checkpoint is replaced when a newer one is saved under the same name. `publish` then adds ".replaced-" to the name
    of the older one. Damaged checkpoints are neither counted nor deleted. Symbolic links to checkpoints are not
    counted, and are deleted (without their targets) only if they were replaced.

    Before anything is deleted, the renaming of the new checkpoint is flushed to disk, so that a crash of the machine
    cannot undo it. If this fails, nothing is deleted. All errors are only logged as warnings, because the new
    checkpoint is complete.

    Args:
        new: the new checkpoint, under its final name. The older checkpoints are in the same folder.
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
    """Delete a temporary folder. If this fails, only log a warning, because the next `save_state` tries again."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("the temporary folder %s cannot be deleted now (%s). The next save tries again", folder, error)


def delete_oldest(folders: Sequence[Path], limit: int, kept: Set[Path], new: Path) -> None:
    """Delete the oldest of the given checkpoints until `limit` remain. Used for Trainer's `save_total_limit`.

    A checkpoint that cannot be deleted is named in a warning, and no error is raised.

    Args:
        folders: the checkpoints, including the new one. Their order of saving is read from their manifests (the files
            `manifest.json`). Checkpoints without a readable manifest, such as those of other libraries, count as older
            than all others. Among these, the first in `folders` count as the oldest. Symbolic links are neither counted
            nor deleted.
        limit: the number of checkpoints that remain.
        kept: those of `folders` that must not be deleted, such as the new and the best checkpoint. They count towards
            `limit`. If there are more of them than `limit`, they alone remain.
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

    A manifest is the list of a checkpoint's files. The contents of the listed files are not read. If another job
    deletes or renames a checkpoint meanwhile, the folder is listed again.

    Args:
        path: a folder of checkpoints, or one checkpoint.
        without: prefixes of the names of files that the caller does not need, such as "model" if it will not load the
            weights. Safetensors files whose names begin with one of these prefixes, and their index files
            (`.safetensors.index.json`), are not checked, so they may be missing or damaged. The returned manifests do
            not list them.

    Returns:
        A tuple of two lists: the intact checkpoints, newest first; and, for each damaged checkpoint, a pair (folder,
        description of the damage). A folder without a manifest counts as damaged if its name begins with "checkpoint-"
        or "checkpoint_", and is ignored otherwise. Both lists are empty if `path` does not exist.

    Raises:
        OSError: `path` cannot be read.
        OSError: in each of 20 attempts, another job deleted or renamed a checkpoint while the checkpoints were read.
    """
    for _ in range(LISTINGS):
        listing = _find(path, without)
        if listing is not None:
            return listing
    raise OSError(
        errno.EBUSY,
        f"other jobs delete or rename checkpoints too fast: the folder was listed {LISTINGS} times, and each time a "
        "listed checkpoint vanished before it was read. Let those jobs save less often, or keep more checkpoints",
        str(path),
    )


def _find(path: Path, without: tuple[str, ...]) -> tuple[list[Found], list[tuple[Path, str]]] | None:
    """Make one attempt of `find`. Return its result, or None if a listed folder was deleted, renamed or replaced."""
    found: list[Found] = []
    damaged: list[tuple[Path, str]] = []
    folders: dict[Path, tuple[int, ...] | None] = {path: ()} if _has_manifest(path) else {}
    if not folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = {each: _identity(each) for each in path.iterdir() if not each.name.startswith((_STAGING, "."))}
    for folder, identity in folders.items():
        named = folder.name.startswith(PREFIXES)
        if folder != path and not (identity and (named or _has_manifest(folder))):
            continue
        try:
            manifest = Manifest.read(folder).without(without)
            manifest.check_sizes(folder)
        except Damaged as error:
            damaged.append((folder, str(error)))
        else:
            found.append(Found(folder, manifest))
    if any(before is None or (before and _identity(folder) != before) for folder, before in folders.items()):
        return None
    found.sort(key=lambda each: each.manifest.number, reverse=True)
    return found, sorted(damaged)


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return a folder's device and inode numbers, which do not change when the folder is renamed.

    Returns () for anything that is not a folder, and None if `path` does not exist.
    """
    try:
        status = os.stat(path)
    except OSError:
        return () if os.path.lexists(path) else None
    return (status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) else ()


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest, the file that lists the files of a checkpoint.

    The result is False for a folder that this process may not read, such as `lost+found`.
    """
    return os.path.exists(folder / NAME)  # unlike `Path.exists`, this returns False if reading is not permitted


# -- files that other code adds to a complete checkpoint ------------------------------------------------------------


def add_checksums(folder: Path) -> None:
    """Record the checksums of the files that other code, such as Trainer, has added to the checkpoint in `folder`.

    `find_damage_of_added` can later verify these files. The manifest lists the files that the checkpoint had when it
    became complete, and every other file directly in `folder` counts as added. The added files are flushed to disk, and
    their checksums are written to `complete.json`. Files in subfolders are flushed too, but get no checksums.
    """
    known = {NAME, ADDED, *Manifest.read(folder).files}
    added = [path for path in sorted(folder.rglob("*")) if path.name not in known or path.parent != folder]
    for path in added:
        if path.is_file() or path.is_dir():
            flush(path)
    sums = {path.name: _crc_of(path) for path in added if path.is_file() and path.parent == folder}
    with atomic_file(folder / ADDED) as temporary:
        temporary.write_text(json.dumps(sums))


def find_damage(folder: Path, rank: int, size: int) -> str | None:
    """Verify this rank's share of a checkpoint's contents. Not collective.

    The manifest is the list of the checkpoint's files, with a checksum for every chunk of at most 4 MiB. Each rank
    verifies every `size`-th chunk of each file, beginning with chunk `rank`. Rank 0 also verifies the files that were
    added after the checkpoint was complete.

    Args:
        folder: the checkpoint's folder.
        rank: this rank.
        size: the number of ranks that share the work.

    Returns:
        A description of the first damage that this rank finds in the contents of the files, or None.

    Raises:
        Damaged: the manifest cannot be read.
        Damaged: a file that the manifest lists is missing or has the wrong size.
        Damaged: on rank 0, `complete.json` (the checksums of added files) cannot be read.
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
    return None if found == crc else f"{name} does not match its checksum. If you edited it yourself, delete {ADDED}"


def _crc_of(path: Path) -> int:
    """Return the CRC-32 of a file.

    The file is read in pieces of 4 MiB, because it may contain all weights of a model.
    """
    crc = 0
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            crc = zlib.crc32(data, crc)
    return crc
