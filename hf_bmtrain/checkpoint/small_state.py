"""Save and load a checkpoint's small state, in the file `state.pt`: all state except the large tensors.

The small state consists of random generators, parameter groups, step counts, schedulers, the loss scale, the user's
`extra`, and similar values.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.optim.manager import OptimManager
from ..engine.runtime.launcher import seed_everything
from ..engine.runtime.world import World
from .entries import check_groups, groups_of, named_persistent_buffers, optimizers_of, schedulers_of, tied_names
from .ranges import checksum

_log = logging.getLogger("hf_bmtrain")
NAME = "state.pt"


def collect(
    world: World,
    model: torch.nn.Module,
    optimizer: Any,
    others: list[dict[str, dict[str, Any]]],
    schedulers: Any,
    extra: Any,
) -> dict[str, Any]:
    """Collect the state of all ranks that the file `state.pt` will contain: everything except the large tensors.

    Collective: every rank must call it.

    Args:
        world: this rank's number, device and communicators.
        model: the model.
        optimizer: an OptimManager, or one or several optimizers; None if no optimizer state is saved.
        others: for each optimizer, the state that is not written to safetensors files, such as step counts, as
            {parameter name: {key: value}}.
        schedulers: one or several schedulers; None to collect only those of the OptimManager, if there is one.
        extra: this rank's object that the user passed to `save_state`.

    Returns:
        The state, which is the same on every rank: random generators and `extra` of every rank, parameter groups, step
        counts, schedulers, the loss scale, and similar values.
    """
    # Call own_state first. The host may not know yet whether the previous step was skipped because of inf or nan.
    # own_state finds out and, if it was not, steps the schedulers, which set the learning rates collected below.
    manager = optimizer.own_state() if isinstance(optimizer, OptimManager) else None
    ranks = world.gather_objects(
        {"random": _random_state(world.device), "extra": extra, "buffers": _own_buffers(world, model)}
    )
    return {
        "ranks": ranks,
        "optimizers": [
            {"kind": type(each).__name__, "groups": groups_of(each, model), "others": state}
            for each, state in zip(optimizers_of(optimizer), others)
        ],
        "manager": manager,
        "schedulers": [scheduler.state_dict() for scheduler in schedulers_of(schedulers)],
        **{name: state.save(world, model) for name, state in world.saved_states.items()},
        "modules": {name: module.get_extra_state() for name, module in _with_extra_state(model)},
        "tied": tied_names(model),
    }


def encode(state: dict[str, Any]) -> bytes:
    """Return the bytes of a checkpoint's file `state.pt`, which contains all state except the large tensors.

    `save_state` calls this before it writes any file, so that an error leaves no incomplete checkpoint.

    state: the random generators, schedulers and other small state, as `collect` returns them.

    Raises ValueError if torch.load(weights_only=True) would refuse objects in it.
    """
    file = io.BytesIO()
    torch.save(state, file)
    decode(file.getvalue())
    return file.getvalue()


def decode(data: bytes) -> dict[str, Any]:
    """Return the small state (random generators, schedulers and so on) from `data`, the bytes of the file `state.pt`.

    `read` calls this with the bytes of a file, and `encode` with bytes that it has just made, to check them.

    Raises ValueError if torch.load(weights_only=True) refuses objects in it.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            "The argument extra of save_state, and the states of schedulers and optimizers, may contain only tensors, "
            "numbers, strings, lists and dicts. If the optimizer keeps other objects, save only the model "
            f"(save_only_model=True in TrainingArguments). {' '.join(str(error).split())[:300]}"
        ) from error


def read(folder: Path) -> dict[str, Any]:
    """Read the file `state.pt` of the checkpoint in `folder`: random generators, schedulers and other small state.

    Raises ValueError if torch.load(weights_only=True) refuses objects in it.
    """
    return decode((folder / NAME).read_bytes())


def restore(
    world: World, model: torch.nn.Module, optimizer: Any, schedulers: Any, state: dict[str, Any], buffers: bool
) -> Any:
    """Load all state in the checkpoint's file `state.pt` except that of optimizers and random generators.

    This is the state of schedulers, the loss scale and the state of features such as float8. With `buffers`, it is also
    the extra state of modules, and this rank's values of buffers whose values differed between the saving ranks. These
    values are loaded only if the number of ranks is the same as when the checkpoint was saved; otherwise the buffers
    keep the values of rank 0, which the caller has loaded.

    Args:
        world: this rank's number, device and communicators.
        model: the model.
        optimizer: an OptimManager, whose loss scale and schedulers are loaded. Anything else is ignored.
        schedulers: one or several schedulers; None to load only those of the OptimManager, if there is one.
        state: the contents of `state.pt`, as `read` returns them.
        buffers: whether to load the state of the model itself. False leaves the model unchanged.

    Returns:
        The `extra` that this rank passed to `save_state` or, if the number of ranks is not the same, that of rank 0.
    """
    if isinstance(optimizer, OptimManager):
        optimizer.load_own_state(state["manager"])
    for scheduler, saved in zip(schedulers_of(schedulers), state["schedulers"]):
        scheduler.load_state_dict(saved)
    for name, module in _with_extra_state(model) if buffers else ():
        module.set_extra_state(state["modules"][name])
    for name, feature in world.saved_states.items():
        feature.load(world, model, state.get(name) or {})
    ranks = state["ranks"]
    if len(ranks) != world.size:
        return ranks[0]["extra"]
    targets = dict(named_persistent_buffers(model)) if buffers else {}
    for name, values in ranks[world.rank]["buffers"].items() if buffers else ():
        targets[name].copy_(values)
    return ranks[world.rank]["extra"]


def restore_random(world: World, state: dict[str, Any], step: int) -> None:
    """Restore this rank's random generators of Python, NumPy, torch and the device from a checkpoint.

    If another number of ranks saved the checkpoint, the generators are seeded instead, as by `seed_everything`: a GPU's
    generator gets a different seed on each rank, and all other generators get the same seed on every rank. The seeds
    are computed from rank 0's saved generator and `step`.

    Args:
        world: this rank's number, device and communicators.
        state: the contents of the checkpoint's file `state.pt`, as `read` returns them.
        step: the training step of the checkpoint.
    """
    ranks = state["ranks"]
    if len(ranks) == world.size:
        _set_random_state(ranks[world.rank]["random"], world.device)
        return
    seed = zlib.crc32(ranks[0]["random"]["torch"].numpy().tobytes()) ^ step
    seed_everything(seed, world.rank, world.device)
    _log.info(
        "load_state: %d ranks load a checkpoint that %d ranks saved, so the random generators "
        "are seeded with %d (derived from rank 0's saved generator and the step), and every "
        "rank gets what rank 0 passed to save_state as extra=", world.size, len(ranks), seed,
    )  # fmt: skip


def check_fit(optimizer: Any, schedulers: Any, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint does not fit the given optimizers and schedulers, for example in their number.

    `load_state` calls this before it changes anything.

    Args:
        optimizer: an OptimManager, one or several optimizers, or None to load no optimizer state.
        schedulers: one or several schedulers, or None to load no scheduler state.
        model: the module that contains the optimizers' parameters.
        state: the contents of the checkpoint's file `state.pt`, as `read` returns them.
    """
    for what, saved, mine in (
        ("optimizers", len(state["optimizers"]), len(optimizers_of(optimizer))),
        ("schedulers", len(state["schedulers"]), len(schedulers_of(schedulers))),
    ):
        if mine and saved != mine:
            raise ValueError(
                f"the checkpoint has the state of {saved} {what}, but this load_state call passes {mine}. Pass the "
                "same number, in the order in which save_state got them, or none"
            )
    if isinstance(optimizer, OptimManager):
        if state["manager"] is None:
            raise ValueError(
                "the checkpoint was saved from optimizers without an OptimManager, so it has no loss scale. Pass the "
                "optimizers to load_state instead of the OptimManager"
            )
        optimizer.check_own_state(state["manager"])
    for each, saved in zip(optimizers_of(optimizer), state["optimizers"]):
        check_groups(saved["kind"], saved["groups"], groups_of(each, model))


# -- extra state of modules, buffers, random generators -------------------------------------------------------------


def _with_extra_state(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def _own_buffers(world: World, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of those persistent buffers of `model` whose values on this rank differ from those on rank 0.

    Collective: every rank must call it. The result contains CPU tensors, by the names of the buffers.
    """
    buffers = {name: buffer.detach().cpu() for name, buffer in named_persistent_buffers(model)}
    digests = {name: checksum(buffer) for name, buffer in buffers.items()}
    first = world.control.broadcast_object(digests)
    return {name: buffer.clone() for name, buffer in buffers.items() if digests[name] != first.get(name)}


def _random_state(device: torch.device) -> dict[str, Any]:
    legacy: Any = np.random.get_state()
    kind, keys, *position = legacy
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "device": None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device),
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    kind, keys, *position = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *position))
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(state["device"], device)
