"""Whole checkpoints: one file with whole tensors under the model's own keys, for any number of ranks."""

from __future__ import annotations

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
from ..engine.base.files import atomic_file
from ..engine.runtime.world import current_world
from ..engine.sharding.state_dict import gather_state_dict
from .header import read_indexed

_SAFETENSORS = ".safetensors"
_INDEX = ".index.json"
_IN_FOLDER = [base + ending for base in ("model.safetensors", "pytorch_model.bin") for ending in ("", _INDEX)]


class Saving:
    """A checkpoint that a thread is writing. The interpreter does not exit before the file is complete."""

    def __init__(self, state: OrderedDict | None, path: Path) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, args=(state, path), name=f"save {path}")
        if state is not None:
            self._thread.start()

    def _write(self, state: OrderedDict, path: Path) -> None:
        try:
            write_atomically(state, path)
        except BaseException as error:
            self._error = error
            raise  # threading's hook reports it even without a wait

    def wait(self) -> None:
        """Block until the file is complete and in its place. Raises RuntimeError, on rank 0, if writing failed."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise RuntimeError(
                f"{self._thread.name} failed, an earlier file is untouched: {self._error}"
            ) from self._error


def save(model: torch.nn.Module, file_name: str | os.PathLike, non_blocking: bool = False) -> Saving | None:
    """Write the whole tensors of `model`, persistent buffers included, to one file. Collective.

    If the name ends in `.safetensors`, the file has that format and contains tied weights once; otherwise it is a
    `torch.save` of the state dict, which `torch.load(weights_only=True)` opens. Rank 0 writes a file in a folder
    `file_name`.*.tmp, flushes it to disk and renames it, so that a kill at any moment leaves the previous file or the
    new one; the next save to `file_name` deletes what it left.
    Raises RuntimeError on every rank if writing fails.

    non_blocking: return a `Saving` as soon as the values are in host memory, on rank 0 alone. Call its `wait` before
    saving to the same file again.
    """
    world = current_world()
    expect_module("model", model)
    expect_path("file_name", file_name)
    expect_flag("non_blocking", non_blocking)
    world.assemble("save")
    path = Path(file_name)
    state = gather_state_dict(model, keep=world.rank == 0)
    if non_blocking:
        return Saving(state if world.rank == 0 else None, path)
    problem = None
    if world.rank == 0:
        try:
            write_atomically(state, path)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    world.raise_everywhere(f"save: {path} could not be written, an earlier file is untouched", problem)
    return None


def load(model: torch.nn.Module, file_name: str | os.PathLike, strict: bool = True) -> Any:
    """Load a whole checkpoint into `model`, in place, and return the result of `load_state_dict`. Collective.

    Reads files of `save`, of `torch.save(model.state_dict())`, of Hugging Face and of BMTrain, torch's with
    weights_only=True. A folder of Hugging Face, or the `.index.json` in it, stands for the weights there, in one file
    or several, under the names in them. Every rank reads its own parts, so every host needs the file. It may contain a
    tied weight once. Raises RuntimeError on every rank if the file cannot be read, or if its keys (unless strict is
    False) or shapes are not the model's; the error names them, and entries that fit may have been loaded.
    """
    world = current_world()
    expect_module("model", model)
    expect_path("file_name", file_name)
    expect_flag("strict", strict)
    world.assemble("load")
    path, state, problem = Path(file_name), OrderedDict(), None
    try:
        state = read_state(path)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    world.raise_everywhere(f"load: {path} could not be read", problem)
    _fill_ties(model, state)
    try:
        return model.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise RuntimeError(f"load: {path} does not fit this model. {error}") from error
    finally:
        world.assemble("end of load")


def write_atomically(state: dict, path: Path) -> None:
    """Write `state` to `path`, which is never incomplete. Not collective."""
    with atomic_file(path) as temporary:
        if path.suffix == _SAFETENSORS:
            save_file(_each_once(state), temporary, metadata={"format": "pt"})
        else:
            torch.save(state, temporary)


def _each_once(state: dict) -> dict[str, torch.Tensor]:
    """Keep the first key of tied tensors, as Hugging Face does: safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"a {_SAFETENSORS} file holds tensors only, and {key!r} is a {type(value).__name__}")
        if value.numel() == 0 or value.data_ptr() not in seen:
            tensors[key] = value.contiguous()
            seen.add(value.data_ptr())
    return tensors


def read_state(path: Path) -> OrderedDict:
    """Return the tensors in the file at `path`, or in the files that a folder or an index of Hugging Face names.

    They are mapped where the format allows it, so that memory is used for what is read of them.
    """
    if path.is_dir():
        found = [path / name for name in _IN_FOLDER if (path / name).exists()]
        if not found:
            raise ValueError(f"a folder without weights of Hugging Face: none of {', '.join(_IN_FOLDER)}")
        path = found[0]
    return OrderedDict(read_indexed(path, _read_file)) if path.name.endswith(_INDEX) else _read_file(path)


def _read_file(path: Path) -> OrderedDict:
    try:
        if path.suffix == _SAFETENSORS:
            return OrderedDict(load_file(path))
        mapped = zipfile.is_zipfile(path)  # torch's present format can be read in parts
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors file ({error})") from error
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"not a file of tensors alone ({' '.join(str(error).split())[:200]}). Save model.state_dict(), not the "
            "model, and no Python objects beside it."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        found = ", ".join(map(str, list(state)[:5])) if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"not a state dict of a model, which maps names to tensors; it holds: {found}")
    return OrderedDict(state) if not isinstance(state, OrderedDict) else state


def _fill_ties(model: torch.nn.Module, state: OrderedDict) -> None:
    """Add a tied weight that `state` contains under one of its names in `model` under the other names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for tied in names.values():
        present = next((name for name in tied if name in state), None)
        if present is not None:
            for name in tied:
                state.setdefault(name, state[present])
