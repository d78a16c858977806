"""`save` writes a full model to one file. `load` reads such files, and Hugging Face's, on any number of ranks."""

from __future__ import annotations

import functools
import json
import os
import pickle
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from ..engine.base.arguments import expect_flag, expect_module, expect_path
from ..engine.base.checksums import checksums, find_differences
from ..engine.base.files import atomic_file
from ..engine.runtime.world import current_world
from ..engine.sharding.state_dict import gather_state_dict
from .entries import by_tensor, named_persistent_buffers
from .header import read_indexed

_SAFETENSORS = ".safetensors"
_INDEX = ".index.json"
_CHECKSUMS = "hf_bmtrain_checksums"
"""The name under which a file stores the checksums of its tensors: an entry of the metadata of a safetensors file, or
an attribute of the state dict in other files. Other programs that read the file ignore the checksums."""
_METADATA = "_metadata"
"""The attribute of a state dict in which torch stores the versions of the modules."""
_IN_FOLDER = [base + ending for base in ("model.safetensors", "pytorch_model.bin") for ending in ("", _INDEX)]


class Saving:
    """The result of `save` with `non_blocking`: a file that a thread of rank 0 is writing.

    Call `wait` to block until the file is written. If the thread failed, `wait` raises an error on rank 0. The
    interpreter does not exit before the thread has ended.

    Args:
        state: the state dict to write, on rank 0; None on the other ranks, which write nothing.
        path: the file.
        suffix: the ending of the name that was passed to `save`, which decides the format of the file.
    """

    def __init__(self, state: OrderedDict | None, path: Path, suffix: str) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, args=(state, path, suffix), name=f"save {path}")
        if state is not None:
            self._thread.start()

    def _write(self, state: OrderedDict, path: Path, suffix: str) -> None:
        try:
            write_atomically(state, path, suffix)
        except BaseException as error:
            self._error = error
            raise  # threading.excepthook then logs it, even if nobody calls `wait`

    def wait(self) -> None:
        """Block until the file is complete and renamed into place. On ranks other than 0, return at once.

        Raises:
            RuntimeError: on rank 0, if the file could not be written. If the file existed before, it is not changed.
        """
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError(
                f"{self._thread.name}: the file could not be written, and any earlier file with this name was not "
                f"changed. {type(self._error).__name__}: {self._error}. Fix the cause, then save again."
            ) from self._error


def save(model: torch.nn.Module, file_name: str | os.PathLike, non_blocking: bool = False) -> Saving | None:
    """Save the full tensors of a model, including persistent buffers, to one file. Collective: every rank must call it.

    Rank 0 writes the file in a temporary folder `file_name`.*.tmp, flushes it to disk, and renames the file into place.
    If the job is killed, `file_name` is either the previous or the complete new file, and the next save deletes the
    temporary folder. The file contains a checksum of each tensor, which `load` verifies and other readers ignore.

    Args:
        model: a model with or without sharded parameters.
        file_name: the file to write. If the name ends in `.safetensors`, the file has that format, and contains tied
            weights once. With any other name, the file is a state dict that `torch.load(weights_only=True)` can read.
            If `file_name` is a symbolic link, the file to which the link points is written, and the link remains.
        non_blocking: whether to return as soon as the values are in host memory on rank 0, and let a thread of rank 0
            write the file.

    Returns:
        A `Saving` if `non_blocking`, otherwise None. `Saving.wait` waits for the file. Call it before saving to the
        same file again.

    Raises:
        RuntimeError: on every rank, if `non_blocking` differs between ranks.
        RuntimeError: on every rank, if the file cannot be written. If `file_name` existed before, it is not changed.
            With `non_blocking`, only `Saving.wait` on rank 0 raises this error.
        TypeError, ValueError: an argument has the wrong type, or the file name is empty.

    Example::

        bmt.save(model, "model.safetensors")
    """
    world = current_world()
    expect_module("model", model)
    expect_path("file_name", file_name)
    expect_flag("non_blocking", non_blocking)
    world.barrier("save")
    world.check_same_on_all_ranks("save", {"non_blocking": bool(non_blocking)}, {"file_name": os.fspath(file_name)})
    # Follow links, because renaming the new file to the name of a link would replace the link. Follow them before the
    # background thread starts, because later changes of a link or of the working directory must not affect it.
    path, suffix = Path(os.path.realpath(file_name)), Path(file_name).suffix
    state = gather_state_dict(model, keep=world.rank == 0)
    if non_blocking:
        return Saving(state if world.rank == 0 else None, path, suffix)
    with world.raising_everywhere(f"save: {path} could not be written, and an earlier file was not changed"):
        if world.rank == 0:
            write_atomically(state, path, suffix)
    return None


def load(model: torch.nn.Module, file_name: str | os.PathLike, strict: bool = True) -> Any:
    """Load a file of full tensors into a model, in place. Collective: every rank must call it.

    Every rank reads the file itself, so every host must be able to read it. If the format can be mapped into memory, a
    rank reads only its own elements of sharded tensors. The file may be written by `bmt.save`,
    `torch.save(model.state_dict())`, Hugging Face's `save_pretrained` or BMTrain. Files of torch.save are read with
    `weights_only=True`. The checksums in files of `bmt.save` are verified; the ranks share this work.

    Args:
        model: the model whose parameters and buffers are overwritten.
        file_name: a file, a folder with Hugging Face weights, or the `.index.json` in it. The tensors must have
            the names of the model's state dict. A tied weight needs only one of its names.
        strict: whether the file must contain exactly the names of the model's state dict. False leaves tensors that the
            file lacks unchanged, and ignores names that the model lacks.

    Returns:
        The result of torch's `model.load_state_dict`, with the lists `missing_keys` (not in the file) and
        `unexpected_keys` (not in the model).

    Raises:
        RuntimeError: on every rank, if `strict` differs between ranks.
        RuntimeError: on every rank, if the file cannot be read or is damaged. Nothing is loaded then.
        RuntimeError: on every rank, if shapes in the file (or, with `strict`, names) do not match the model. The error
            lists what does not match. Matching tensors may have been loaded before the error.
        TypeError, ValueError: an argument has the wrong type, or the file name is empty.
    """
    world = current_world()
    expect_module("model", model)
    expect_path("file_name", file_name)
    expect_flag("strict", strict)
    world.barrier("load")
    world.check_same_on_all_ranks("load", {"strict": bool(strict)}, {"file_name": os.fspath(file_name)})
    path = Path(file_name)
    with world.raising_everywhere(f"load: {path} could not be read"):
        state = read_state(path, (world.rank, world.size))
    _fill_ties(model, state)
    try:
        return model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise RuntimeError(f"load: {path} does not fit this model. {error}") from error
    finally:
        world.barrier("end of load")


def write_atomically(state: dict, path: Path, suffix: str) -> None:
    """Write a state dict to a temporary file, and rename this file, so that no incomplete file has the final name.

    Not collective.

    Args:
        state: the state dict.
        path: the final path. An existing file is replaced.
        suffix: the ending of the file name that the user passed. ".safetensors" writes a safetensors file, and anything
            else a file of torch.save. If the user passed a link, its target `path` may have a different ending.

    Raises:
        ValueError: a value is not a tensor, and the file is a safetensors file.
        OSError: the file cannot be written. An existing file is not changed.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a file, but a folder or a device. Pass the name of a file")
    with atomic_file(path) as temporary:
        if suffix == _SAFETENSORS:
            tensors = _each_once(state)
            sums = json.dumps(checksums(tensors), separators=(",", ":"))
            save_file(tensors, temporary, metadata={"format": "pt", _CHECKSUMS: sums})
        else:
            torch.save(_with_checksums(state), temporary)


def _with_checksums(state: dict) -> OrderedDict:
    """Return a shallow copy of a state dict with an additional attribute that contains checksums.

    torch.save writes the attributes of a state dict too. There is a checksum for each tensor, and one for `_metadata`,
    the attribute in which torch stores the versions of the modules.
    """
    result = OrderedDict(state)
    result.__dict__.update(getattr(state, "__dict__", {}))
    result.__dict__[_CHECKSUMS] = checksums(_with_metadata(result))
    return result


def _with_metadata(state: OrderedDict) -> dict[str, Any]:
    return {**state, _METADATA: getattr(state, _METADATA, None)}


def _each_once(state: dict) -> dict[str, torch.Tensor]:
    """Return the tensors of `state`, with each tied tensor only under its first key, as in Hugging Face's files.

    This is necessary because safetensors refuses tensors that share memory. Raises ValueError if a value is not a
    tensor.
    """
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"a {_SAFETENSORS} file can contain only tensors, but {key!r} has type {type(value).__name__}. Save to "
                "a file name with another ending, such as .pt"
            )
        if value.numel() == 0 or value.data_ptr() not in seen:
            tensors[key] = value.contiguous()
            seen.add(value.data_ptr())
    return tensors


def read_state(path: Path, part: tuple[int, int] = (0, 1)) -> OrderedDict:
    """Return the tensors in a file, in a folder of Hugging Face weights, or in the files that `*.index.json` lists.

    Files are memory-mapped if their format allows it, so that only the elements that the caller reads take memory.

    Args:
        path: the file, folder or index.
        part: (index, count): in each file, only every `count`-th tensor is compared with its checksum, beginning with
            tensor `index`, so that `count` ranks can share this work. By default, all tensors are compared.

    Returns:
        The tensors by name.

    Raises:
        ValueError: a file is in no supported format, or a tensor does not match its saved checksum.
        OSError: a file cannot be read.
    """
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).exists()]
        if not found:
            raise ValueError(
                f"the folder has no Hugging Face weights: it should contain one of {', '.join(_IN_FOLDER)}. Pass the "
                "folder that contains them, or the weight file itself."
            )
        path = found[0]
    read = functools.partial(_read_file, part=part)
    return OrderedDict(read_indexed(path, read)) if path.name.endswith(_INDEX) else read(path)


def _read_file(path: Path, part: tuple[int, int]) -> OrderedDict:
    if path.suffix == _SAFETENSORS:
        state, sums = _read_safetensors(path)
        verified: dict[str, Any] = state
    else:
        state = _read_pickled(path)
        sums, verified = getattr(state, _CHECKSUMS, None), _with_metadata(state)
    if sums is not None:
        _verify(path, sums, verified, part)
    return state


def _read_safetensors(path: Path) -> tuple[OrderedDict, Any]:
    """Return the tensors in a safetensors file, and the checksums in its metadata, as {tensor name: CRC-32}.

    The checksums are None if the file has none. If their JSON is invalid, it is returned as a string, which `_verify`
    reports as damage. Raises ValueError if the file is not a safetensors file.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_CHECKSUMS)
        state = OrderedDict(load_file(path))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a safetensors file, or is damaged ({error}). Use another copy of the file."
        ) from error
    try:
        return state, None if text is None else json.loads(text)
    except ValueError:
        return state, text


def _read_pickled(path: Path) -> OrderedDict:
    try:
        mapped = zipfile.is_zipfile(path)  # only zip files, which torch.save writes since 1.6, can be mapped
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{path.name} cannot be loaded with weights_only=True ({' '.join(str(error).split())[:200]}). If it "
            "contains the model itself or other Python objects, save model.state_dict() alone. Otherwise it is "
            "damaged: use another copy of the file."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        found = ", ".join(map(str, list(state)[:5])) if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"{path.name} is not a model's state dict, which maps names to tensors. It contains: {found}. Save "
            "model.state_dict() alone in a file."
        )
    return OrderedDict(state) if not isinstance(state, OrderedDict) else state


def _verify(path: Path, sums: Any, state: dict[str, Any], part: tuple[int, int]) -> None:
    """Raise ValueError unless the values in `state`, which was read from `path`, match their saved checksums.

    sums: {name: CRC-32} as saved in the file. Anything else counts as damage.
    part: (index, count). Only every `count`-th value is verified, beginning with value `index`, so that `count` ranks
        can share this work.
    """
    number, count = part
    if isinstance(sums, dict):
        chosen = {*sorted({*sums, *state}, key=str)[number::count]}
        sums = {name: crc for name, crc in sums.items() if name in chosen}
        state = {name: value for name, value in state.items() if name in chosen}
    problem = find_differences(sums, state)
    if problem is not None:
        raise ValueError(f"{path.name} is damaged: {problem}. Use another copy of the file.")


def _fill_ties(model: torch.nn.Module, state: OrderedDict) -> None:
    """Add missing names of tied weights to `state`, because a file may contain a tied weight under one name only.

    The same is done for persistent buffers with several names.

    model: the model, in which a tied weight has several names.
    state: a state dict. If it contains a tied weight under any name, the same tensor is added under the other names.
    """
    parameters = by_tensor(model.named_parameters(remove_duplicate=False))
    buffers = by_tensor(named_persistent_buffers(model, remove_duplicate=False))
    for _, tied in (*parameters.values(), *buffers.values()):
        present = next((name for name in tied if name in state), None)
        if present is not None:
            for name in tied:
                state.setdefault(name, state[present])
