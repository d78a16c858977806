"""Compute or read the place of each tensor in a safetensors file.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON), and the tensors in C order
without gaps (https://github.com/huggingface/safetensors, "Format"). Every rank computes the same header from the names,
shapes and dtypes of all tensors, and so knows where its elements of each tensor belong in the file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

FILE_BYTES = 5 * 10**9
"""Default maximum size of a safetensors file in bytes, without its header; a larger tensor gets its own file."""
LARGEST_HEADER = 100_000_000
"""Maximum size of a header in bytes; the safetensors library refuses longer ones."""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
Tensor = TypeVar("Tensor")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Damaged(ValueError):
    """Raised if a file of a checkpoint is missing, is invalid, or differs from the file that was saved."""


class TensorSpec(NamedTuple):
    """Name, dtype and shape of a full tensor to write to a checkpoint. `plan_files` computes its place in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """The dtype, shape and place of a full tensor in a checkpoint.

    The tensor occupies the bytes `start` to `stop` (exclusive) of `file`, which is a file name without a folder.
    """

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FilePlan:
    """The layout of a safetensors file that is to be written.

    Attributes:
        name: the file's name, without its folder.
        head: all bytes before the first tensor: the length of the header, and the header.
        tensors: the dtype, shape and place of each tensor, by the tensor's name.
        size: the size in bytes of the complete file.
    """

    name: str
    head: bytes
    tensors: dict[str, StoredTensor]
    size: int


def plan_files(
    base: str, specs: Iterable[TensorSpec], limit: int = FILE_BYTES
) -> tuple[list[FilePlan], dict[str, bytes]]:
    """Assign tensors to files with Hugging Face's names: `base`.safetensors, or `base`-00001-of-0000n.safetensors.

    The result depends only on the arguments, so all ranks plan the same files.

    Args:
        base: the prefix of the file names, such as "model".
        specs: the tensors. They fill one file after another, in this order.
        limit: maximum size of a file in bytes, without its header; a tensor larger than that gets its own file.

    Returns:
        Two values: the files, and the index file as {"`base`.safetensors.index.json": its contents}. The dict is empty
        if there is only one file.

    Raises:
        ValueError: safetensors does not support a dtype, or a header would be longer than safetensors allows.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    count = len(groups)
    names = [
        f"{base}-{i:05}-of-{count:05}.safetensors" if count > 1 else f"{base}.safetensors" for i in range(1, count + 1)
    ]
    plans = [_plan_file(name, group) for name, group in zip(names, groups)]
    if count == 1:
        return plans, {}
    total = sum(spec.nbytes for group in groups for spec in group)
    places = {spec.name: name for name, group in zip(names, groups) for spec in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return plans, {f"{base}.safetensors.index.json": json.dumps(index, indent=2).encode()}


def _plan_file(name: str, specs: Sequence[TensorSpec]) -> FilePlan:
    # Tensors are sorted by element size, largest first, so that each starts at a multiple of its element size.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = [], 0
    for spec in ordered:
        if spec.dtype not in _NAMES:
            raise ValueError(
                f"{spec.name} is {spec.dtype}, which safetensors files do not support. Cast it, or register it as a "
                "non-persistent buffer."
            )
        places.append((end, end + spec.nbytes))
        described[spec.name] = {
            "dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": list(places[-1])
        }  # fmt: skip
        end += spec.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > LARGEST_HEADER:
        raise ValueError(
            f"{name} would have a header of {len(text):,} bytes for {len(specs):,} tensors, but safetensors allows at "
            f"most {LARGEST_HEADER:,}. Stack small parameters into larger ones or, when merging, pass a smaller "
            "--max-shard-size."
        )
    head = len(text).to_bytes(8, "little") + text
    tensors = {
        spec.name: StoredTensor(name, spec.dtype, tuple(spec.shape), len(head) + start, len(head) + stop)
        for spec, (start, stop) in zip(ordered, places)
    }
    return FilePlan(name, head, tensors, len(head) + end)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the dtype, shape and place of each tensor in a safetensors file, by the tensor's name.

    Raises Damaged if the header is invalid or does not match the size of the file, and FileNotFoundError if there is no
    such file.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise Damaged(
                f"{path.name} is cut off, or is not a safetensors file: it has {size:,} bytes, but its first 8 bytes "
                f"give {length:,} bytes as the length of its header. Replace it by an intact copy"
            )
        text = file.read(length)
    try:
        described = json.loads(text)
        described.pop("__metadata__", None)
        tensors = {name: _stored(path.name, 8 + length, value) for name, value in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"the header of {path.name} cannot be read ({type(error).__name__}: {error}). Replace the file by an "
            "intact copy"
        ) from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        nbytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if tensor.start != end or tensor.stop - tensor.start != nbytes or tensor.stop > size:
            raise Damaged(
                f"the header of {path.name} is wrong: {name} of shape {tensor.shape} takes {nbytes:,} bytes and must "
                "begin where the tensor before it ends, but the header places it at bytes "
                f"{tensor.start:,} to {tensor.stop:,}, in a file of {size:,} bytes. Replace the file by an intact copy"
            )
        end = tensor.stop
    if end != size:
        raise Damaged(
            f"{path.name} has {size:,} bytes, but according to its header, it should end with the last tensor, at byte "
            f"{end:,}. Replace it by an intact copy"
        )
    return tensors


def _stored(file: str, begin: int, value: dict[str, Any]) -> StoredTensor:
    (start, stop), shape = value["data_offsets"], value["shape"]
    numbers = (start, stop, *shape)
    if {*map(type, numbers)} != {int} or min(numbers) < 0:
        raise ValueError(
            f"a tensor has the shape {shape} and the data_offsets {[start, stop]}, but both must consist of "
            "non-negative integers"
        )
    return StoredTensor(file, DTYPES[value["dtype"]], tuple(shape), begin + start, begin + stop)


def find_tensors(folder: Path, base: str) -> dict[str, StoredTensor]:
    """Return the dtype, shape and place of each tensor in the safetensors files of a model or an optimizer, by name.

    The files are those that the index `base`.safetensors.index.json lists or, if there is no index, the single file
    `base`.safetensors.

    Args:
        folder: the folder of the files.
        base: the prefix of the file names, such as "model" or "optimizer".

    Raises:
        Damaged: a listed file is missing or contradicts the index, or a header or the index is invalid.
        FileNotFoundError: the folder has neither the index nor the single file.
    """
    single, index = folder / f"{base}.safetensors", folder / f"{base}.safetensors.index.json"
    return read_indexed(index, read_header) if index.exists() else read_header(single)


def read_indexed(index: Path, read: Callable[[Path], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Read the files that a Hugging Face index (`*.index.json`) lists.

    Args:
        index: the path of the index.
        read: a function that takes the path of a listed file, and returns {tensor name: tensor}. A tensor may be
            represented by another object, such as its place in the file.

    Returns:
        The results of `read` for all files, in one dict.

    Raises:
        Damaged: `index` is not a Hugging Face index, lists a file in another folder, or lists files or tensors that are
            missing.
    """
    try:
        places = dict(json.loads(index.read_text("utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(
            f"{index.name} is not a Hugging Face index, which has a weight_map from tensor names to files "
            f"({type(error).__name__}: {error}). Save or download the checkpoint again"
        ) from error
    tensors: dict[str, Tensor] = {}
    names: dict[str, set[str]] = {}
    for file in sorted({*map(str, places.values())}):
        if not re.fullmatch(r"[^./\0][^/\0]*", file):
            raise Damaged(
                f"{index.name} lists the file {file!r}, but may list only names of files in its own folder, without a "
                "path or a leading dot. Save or download the checkpoint again"
            )
        try:
            found = read(index.with_name(file))
        except FileNotFoundError as error:
            raise Damaged(
                f"{file} is missing, although {index.name} lists it. Save or download the checkpoint again"
            ) from error
        tensors.update(found)
        names[file] = {*found}
    lost = sorted(name for name, file in places.items() if name not in names[str(file)])
    if lost:
        raise Damaged(
            f"{index.name} lists {len(lost)} tensors that its files do not contain: {', '.join(lost[:5])}. Save or "
            "download the checkpoint again"
        )
    return tensors
