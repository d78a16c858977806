"""Write and read byte ranges of files in several threads, in chunks with checksums."""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from ..engine.base.pinned import pinned_bytes
from ..engine.base.threads import in_threads
from ..engine.comm.communicator import as_bytes
from ..engine.comm.streams import has_own_memory
from .header import Damaged, StoredTensor
from .manifest import Checked, Manifest

_log = logging.getLogger("hf_bmtrain")
PIECE_BYTES = 4 << 20
"""Maximum size in bytes of a chunk, which is a part of a file with a checksum of its own. It is a multiple of every
element size, so that chunks never split an element."""


class Part(NamedTuple):
    """A tensor that is to be written to a file.

    Attributes:
        file: the name of the file.
        start: the offset in the file, in bytes, at which the tensor's first byte is written.
        values: the tensor, 1-D, on any device.
    """

    file: str
    start: int
    values: torch.Tensor


def memory_of(data: torch.Tensor) -> memoryview:
    """Return a memoryview of a uint8 CPU tensor, without a copy."""
    return memoryview(data.numpy())  # pyright: ignore[reportArgumentType], arrays are buffers only from Python 3.12


class _Scratch(threading.local):
    """Host memory for one chunk of a file (at most 4 MiB), in which a thread reads, writes or verifies the chunk.

    Each thread has its own memory. If `device` is a GPU, the memory is page-locked. If `device` is the CPU, or if
    page-locked memory cannot be allocated, the memory is allocated with mmap, because malloc would not return all of it
    to the operating system.

    device: the device of the tensors that are written or read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def memory(self) -> torch.Tensor:
        if has_own_memory(self._device):
            try:
                return pinned_bytes(PIECE_BYTES, self._device, "chunks of a checkpoint")
            except RuntimeError as error:
                _log.warning(
                    "Checkpoints are saved and loaded more slowly, through ordinary host memory instead of page-locked "
                    "(pinned) memory: %s",
                    error,
                )
        return torch.frombuffer(mmap.mmap(-1, PIECE_BYTES), dtype=torch.uint8)


def _scratch_for(values: Iterable[torch.Tensor]) -> _Scratch:
    devices = [each.device for each in values if has_own_memory(each.device)]
    return _Scratch(devices[0] if devices else torch.device("cpu"))


# -- writing --------------------------------------------------------------------------------------------------------


def write_parts(folder: Path, parts: Sequence[Part]) -> dict[str, list[Checked]]:
    """Write tensors into existing files, with several threads, and flush the files to disk.

    Args:
        folder: the folder of the files.
        parts: the tensors, each with the file and the offset at which it is written.

    Returns:
        The offset, size and checksum of each written chunk (at most 4 MiB of a file), by file name.

    Raises:
        OSError: a file does not exist or cannot be written.
    """
    written: dict[str, list[Checked]] = {}
    scratch = _scratch_for(part.values for part in parts)
    with ExitStack() as stack:
        files: dict[str, int] = {}
        names: list[str] = []
        jobs: list[Callable[[], Checked]] = []
        for part in parts:
            if part.file not in files:
                files[part.file] = os.open(folder / part.file, os.O_WRONLY)
                stack.callback(os.close, files[part.file])
            data = as_bytes(part.values)
            for at in range(0, len(data), PIECE_BYTES):
                chunk = data[at : at + PIECE_BYTES]
                names.append(part.file)
                jobs.append(functools.partial(_write_chunk, files[part.file], part.start + at, chunk, scratch))
        for name, checked in zip(names, in_threads(jobs)):
            written.setdefault(name, []).append(checked)
        for handle in files.values():
            os.fsync(handle)
    return written


def _write_chunk(handle: int, start: int, data: torch.Tensor, scratch: _Scratch) -> Checked:
    if has_own_memory(data.device):
        data = scratch.memory[: len(data)].copy_(data)
    values = memory_of(data)
    crc = zlib.crc32(values)
    _write_all(handle, values, start)
    return Checked(start, len(values), crc)


def _write_all(handle: int, values: memoryview, start: int) -> None:
    at = 0
    while at < len(values):
        count = os.pwrite(handle, values[at:], start + at)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        at += count


def write_file(path: Path, data: bytes, size: int | None = None) -> list[Checked]:
    """Create a file that begins with `data`, and flush it to disk.

    Used for small files, which contain only `data`, and for safetensors files. For the latter, `data` is the header,
    and `write_parts` later writes the tensors into the rest of the file.

    Args:
        path: the file, which must not exist.
        data: the first bytes of the file.
        size: the size of the file in bytes, at least that of `data`; None uses the size of `data`. The bytes after
            `data` are zero.

    Returns:
        The offset, size and checksum of each chunk (at most 4 MiB) of `data`.

    Raises:
        OSError: the file exists or cannot be written.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if size:
            os.ftruncate(handle, size)
        view = memoryview(data)
        _write_all(handle, view, 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    return [
        Checked(at, len(view[at : at + PIECE_BYTES]), zlib.crc32(view[at : at + PIECE_BYTES]))
        for at in range(0, len(view), PIECE_BYTES)
    ]


def checksums(path: Path) -> list[Checked]:
    """Read a file, and return the offset, size and checksum of each chunk (at most 4 MiB) of it.

    `save_state` calls this for the files that the user's function `add` has written into a checkpoint. The file is also
    flushed to disk, because that function may not have done so.
    """
    chunks, start = [], 0
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            chunks.append(Checked(start, len(data), zlib.crc32(data)))
            start += len(data)
        os.fsync(file.fileno())
    return chunks


# -- reading --------------------------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """Consecutive elements to read from a tensor in a file, and the tensor in memory into which they are read.

    Attributes:
        name: the tensor's name, for messages.
        stored: the place of the full tensor in a file.
        first: the index of the first element to read, in the flattened tensor.
        values: the destination, a 1-D tensor on any device. Its length is the number of elements to read. The elements
            are cast to its dtype.
    """

    name: str
    stored: StoredTensor
    first: int
    values: torch.Tensor


def read_parts(folder: Path, manifest: Manifest | None, wanted: Sequence[Wanted]) -> None:
    """Read elements of stored tensors from files into tensors in memory, with several threads.

    Args:
        folder: the folder of the files.
        manifest: the manifest, which contains a checksum for each chunk (at most 4 MiB) of the files. Each chunk that
            contains a wanted byte is read completely and verified. If None, only the wanted bytes are read, and nothing
            is verified.
        wanted: the elements to read, and the tensors into which they are read.

    Raises:
        Damaged: a file cannot be read, is too short, or does not match a checksum. The message names tensor and file.
        OSError: a file cannot be opened.
    """
    scratch = _scratch_for(each.values for each in wanted)
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for each in wanted:
            if each.stored.file not in files:
                files[each.stored.file] = os.open(folder / each.stored.file, os.O_RDONLY)
                stack.callback(os.close, files[each.stored.file])
        in_threads(
            [
                functools.partial(_read_chunk, files[each.stored.file], each, chunk, scratch)
                for each in wanted
                for chunk in _chunks_of(each, manifest)
            ]
        )


def _chunks_of(wanted: Wanted, manifest: Manifest | None) -> Iterator[Checked]:
    """Yield the chunks (at most 4 MiB each) of a file that must be read to get the elements `wanted`.

    wanted: the elements to read, with the file that contains them.
    manifest: the list of each file's chunks and their checksums. All listed chunks that contain wanted bytes are
        yielded, because a checksum can be verified only if its chunk is read completely. If None, the yielded chunks
        contain only the wanted bytes, and have no checksums.
    """
    size = wanted.stored.dtype.itemsize
    start = wanted.stored.start + wanted.first * size
    stop = start + len(wanted.values) * size
    if manifest is None:
        for at in range(start, stop, PIECE_BYTES):
            yield Checked(at, min(PIECE_BYTES, stop - at), None)
        return
    chunks = manifest.files[wanted.stored.file]
    for chunk in chunks[max(0, bisect_right(chunks, (start, PIECE_BYTES + 1, 0)) - 1) :]:
        if chunk.start >= stop:
            return
        if chunk.start + chunk.length > start and start < stop:
            yield chunk


def _read_chunk(handle: int, wanted: Wanted, chunk: Checked, scratch: _Scratch) -> None:
    data = _read(handle, scratch, chunk, f"{wanted.name} in {wanted.stored.file}")
    size = wanted.stored.dtype.itemsize
    begin = wanted.stored.start + wanted.first * size
    first, last = max(begin, chunk.start), min(begin + len(wanted.values) * size, chunk.start + chunk.length)
    values = data[first - chunk.start : last - chunk.start].view(wanted.stored.dtype)
    wanted.values[(first - begin) // size : (last - begin) // size].copy_(values)


def _read(handle: int, scratch: _Scratch, chunk: Checked, what: str) -> torch.Tensor:
    """Read and verify a chunk of the open file `handle`. Return its bytes as a uint8 tensor in the memory of `scratch`.

    The next call on the same thread overwrites the result. Raises Damaged if the chunk cannot be read, the file is too
    short, or the checksum differs.

    handle: the file descriptor.
    scratch: host memory for one chunk, of which each thread has its own.
    chunk: the offset, size (at most 4 MiB) and checksum of the chunk. If the checksum is None, the chunk is not
        verified.
    what: the names of tensor and file, for messages.
    """
    if chunk.length > PIECE_BYTES:
        raise Damaged(
            f"{what}: the checkpoint's manifest lists a chunk of {chunk.length:,} bytes, but this version of "
            f"hf_bmtrain reads only chunks of at most {PIECE_BYTES:,} bytes. Use the version that saved the checkpoint"
        )
    data = scratch.memory[: chunk.length]
    view = memory_of(data)
    at = 0
    while at < len(view):
        try:
            count = os.preadv(handle, [view[at:]], chunk.start + at)
        except OSError as error:
            raise Damaged(f"{what}: byte {chunk.start + at:,} cannot be read: {error.strerror}") from error
        if not count:
            raise Damaged(f"{what}: the file ends early, at byte {chunk.start + at:,}")
        at += count
    if chunk.crc is not None and zlib.crc32(view) != chunk.crc:
        raise Damaged(
            f"{what}: bytes {chunk.start:,} to {chunk.start + chunk.length:,} do not match the saved checksum"
        )
    return data


def check_heads(folder: Path, manifest: Manifest) -> None:
    """Verify the headers of a checkpoint's safetensors files, and all bytes of its other files.

    Called before a checkpoint is loaded or merged. The tensors in safetensors files are not verified here, because
    `read_parts` verifies them when it reads them.

    Args:
        folder: the checkpoint's folder.
        manifest: the manifest, which contains a checksum for each chunk of the files.

    Raises:
        Damaged: a file cannot be read, is too short, or does not match a checksum.
        OSError: a safetensors file cannot be opened.
    """
    for name, chunks in manifest.files.items():
        small = not name.endswith(".safetensors")
        heads = [chunk for chunk in chunks if small or chunk.start < 8 + _header_bytes(folder / name)]
        for _, problem in check_file(folder, name, heads):
            if problem is not None:
                raise Damaged(problem)


def _header_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(file.read(8), "little")


def check_file(folder: Path, name: str, chunks: Sequence[Checked]) -> Iterator[tuple[int, str | None]]:
    """Compare chunks (at most 4 MiB) of a checkpoint's file with their checksums, and yield (size, damage) for each.

    `size` is the size of the chunk in bytes. `damage` is a message that says what is wrong, or None if the chunk is
    intact. Each chunk is read when its tuple is requested, so the caller can show progress or stop early. If the file
    cannot be opened, the only tuple is (0, the error message).

    Args:
        folder: the folder of the file.
        name: the file's name.
        chunks: the chunks to verify, with their checksums.
    """
    try:
        handle = os.open(folder / name, os.O_RDONLY)
    except OSError as error:
        yield 0, f"{name} cannot be opened: {error.strerror}"
        return
    scratch = _Scratch(torch.device("cpu"))
    try:
        for chunk in chunks:
            try:
                _read(handle, scratch, chunk, name)
            except Damaged as error:
                yield chunk.length, str(error)
            else:
                yield chunk.length, None
    finally:
        os.close(handle)
