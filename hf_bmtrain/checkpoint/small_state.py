"""Save and load a checkpoint's small state, in the file `state.pt`: all state except the large tensors.

The small state consists of the states of random generators, parameter groups, step counts, schedulers, the loss scale,
the user's `extra`, and similar values.
"""

from __future__ import annotations

import io
import logging
import pickle
import random
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.base.checksums import checksums
from ..engine.base.torch_internals import unwrapped
from ..engine.optim.manager import OptimManager
from ..engine.runtime.launcher import seed_everything
from ..engine.runtime.world import World
from .entries import (
    added_entries,
    check_groups,
    check_settings,
    groups_of,
    named_persistent_buffers,
    optimizers_of,
    tied_names,
    write_full,
)

_log = logging.getLogger("hf_bmtrain")
NAME = "state.pt"


def collect_own(
    world: World,
    model: torch.nn.Module,
    optimizer: Any,
    others: list[dict[str, dict[str, Any]]],
    schedulers: Any,
    extra: Any,
) -> dict[str, Any]:
    """Return the state that this rank contributes to a checkpoint's file `state.pt`.

    `collect` then adds the random generators and `extra` of the other ranks, buffers, and the state of features.

    Collective: every rank must call it, because an OptimManager first completes its previous step here: it finds out
    whether the step was skipped because of inf or nan. If so, the ranks exchange messages to find which gradient was
    inf or nan.

    This function calls user code, such as a scheduler's `state_dict`, which may raise an error on one rank only. So the
    caller must exchange errors between the ranks before it calls `collect`.

    Args:
        world: the ranks that train together, with this process's rank, device and communicators.
        model: the model.
        optimizer: an OptimManager, or one or several optimizers; None if no optimizer state is saved.
        others: for each optimizer, the state that is not written to safetensors files, such as step counts, as
            {parameter name: {key: value}}.
        schedulers: a sequence of the schedulers, except those of an OptimManager, which are always collected.
        extra: this rank's object that the user passed to `save_state`.

    Returns:
        A dict. Its entry "rank" is a dict with this rank's random generators and `extra`. If the `state_dict` of an
        optimizer has entries beside "state" and "param_groups", the entry "rank" contains these entries too. All other
        entries of the result are the same on every rank: parameter groups, step counts, schedulers, the loss scale, and
        the like.
    """
    # Call own_state first, because it completes the previous step: it finds out whether that step was skipped because
    # of inf or nan. If not, own_state steps the schedulers, which set the learning rates that are collected below.
    manager = optimizer.own_state() if isinstance(optimizer, OptimManager) else None
    added = [added_entries(each, world) for each in optimizers_of(optimizer)]
    # Check now whether these entries can be loaded again. Otherwise, the exchange of entries between the ranks, which
    # pickles them, might fail with an error that does not name the entry.
    for each, entries in zip(optimizers_of(optimizer), added):
        encode(entries, f"the state_dict() of {type(each).__name__}")
    return _for_file(
        {
            "rank": {
                "random": _random_state(world.device),
                "extra": extra,
                **({"optimizers": added} if any(added) else {}),
            },
            "optimizers": [
                {"kind": type(each).__name__, "groups": groups_of(each, model), "others": state}
                for each, state in zip(optimizers_of(optimizer), others)
            ],
            "manager": manager,
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "modules": {name: module.get_extra_state() for name, module in _with_extra_state(model)},
            "tied": tied_names(model),
        }
    )


def collect(world: World, model: torch.nn.Module, own: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the file `state.pt` will contain: everything except the large tensors.

    Collective: every rank must call it. Raises RuntimeError on every rank if the object that a rank passed to
    `save_state` as `extra` cannot be pickled.

    Args:
        world: the ranks that train together, with this process's rank, device and communicators.
        model: the model.
        own: the result of `collect_own` on this rank.

    Returns:
        The state, which is the same on every rank: the random generators of every rank, the `extra` that each rank
        passed, parameter groups, step counts, schedulers, the loss scale, and similar values.
    """
    mine = {**own["rank"], "buffers": _own_buffers(world, model)}
    return {
        **{name: value for name, value in own.items() if name != "rank"},
        "ranks": world.control.gather(mine, "save_state's exchange of the ranks' extra"),
        **{name: state.save(world, model) for name, state in world.saved_states.items()},
    }


def _for_file(value: Any) -> Any:
    """Convert the tensors and numbers in `value` to a form that is suitable for the file `state.pt`.

    Tensors that are views of larger tensors are copied, because torch.save would write all elements of the larger
    tensor. NumPy numbers, such as a learning rate, become Python numbers, because torch.load(weights_only=True) refuses
    NumPy's. Tensors and numbers inside dicts, lists and tuples are converted too.
    """
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _for_file(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(_for_file, value))
    if type(value) is torch.Tensor and value.layout == torch.strided:
        if value.untyped_storage().nbytes() > value.nbytes:
            return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def encode(value: Any, what: str = NAME) -> bytes:
    """Return the bytes that torch.save writes for `value`, such as the state that `collect` returns.

    `save_state` calls this before it writes any file, so that an error leaves no incomplete checkpoint.

    Raises ValueError if torch.load(weights_only=True) would refuse an object in `value`. The error says where in
    `value` this object is.

    what: a name for `value`, for the error.
    """
    file, value = io.BytesIO(), _for_file(value)
    try:
        torch.save(value, file)
        torch.load(io.BytesIO(file.getvalue()), map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # pickle calls methods of the objects, which may raise any error
        place, refused = _refused(value)
        raise ValueError(
            f"{what} has an object of type {type(refused).__name__} at {place or 'its top'}, which "
            "torch.load(weights_only=True) would refuse. `extra` and the states of schedulers and optimizers may "
            "contain only tensors, numbers, strings, lists and dicts. Convert the object to these, remove it, or pass "
            "no optimizer and scheduler (in Trainer: save_only_model=True)."
        ) from error
    return file.getvalue()


def _refused(value: Any) -> tuple[str, Any]:
    """Return the place of the first object in `value` that torch cannot load, such as "['a'][0]", and the object."""
    if type(value) in (list, tuple):
        items = enumerate(value)
    else:
        items = value.items() if type(value) in (dict, OrderedDict) else ()
    for key, each in items:
        try:
            encode(each, "")
        except ValueError:
            place, refused = _refused(each)
            return f"[{key!r}]{place}", refused
    return "", value


def read(folder: Path) -> dict[str, Any]:
    """Read the file `state.pt` of the checkpoint in `folder`: random generators, schedulers and other small state.

    Raises ValueError if torch.load(weights_only=True) cannot read the bytes, or refuses objects in them.
    """
    data = (folder / NAME).read_bytes()
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"torch.load(weights_only=True) cannot read state.pt. The error was: {' '.join(str(error).split())[:300]}"
        ) from error


def restore(
    world: World, model: torch.nn.Module, optimizer: Any, schedulers: Any, state: dict[str, Any], buffers: bool
) -> Any:
    """Load schedulers, loss scale, extra state of modules, and this rank's own buffer values from `state.pt`.

    Other state in this file (of optimizers, features and random generators) is not loaded here. Collective: every rank
    must call it, because an OptimManager first completes its previous step, as in `collect_own`.

    Extra state and buffer values are loaded only if `buffers` is set. In this case, the caller must already have given
    every persistent buffer the value that it had on rank 0 when the checkpoint was saved. For each buffer that had a
    different value on this rank, `state.pt` contains this rank's value, which is loaded here. But if the number of
    ranks has changed since the checkpoint was saved, all buffers keep the values of rank 0.

    Args:
        world: the ranks that train together, with this process's rank, device and communicators.
        model: the model.
        optimizer: an OptimManager, whose loss scale and schedulers are loaded. Anything else is ignored.
        schedulers: a sequence of the schedulers, except those of an OptimManager, which are always loaded.
        state: the contents of `state.pt`, as `read` returns them.
        buffers: whether to load this rank's own buffer values, and the extra state of modules (`set_extra_state`).
            False leaves the model unchanged.

    Returns:
        The `extra` that this rank passed to `save_state`. If the number of ranks has changed, the `extra` of rank 0.
    """
    if isinstance(optimizer, OptimManager):
        optimizer.load_own_state(state["manager"])
    for scheduler, saved in zip(schedulers, state["schedulers"]):
        scheduler.load_state_dict(saved)
    for name, module in _with_extra_state(model) if buffers else ():
        module.set_extra_state(state["modules"][name])
    ranks = state["ranks"]
    if len(ranks) != world.size:
        return ranks[0]["extra"]
    targets = dict(named_persistent_buffers(model)) if buffers else {}
    for name, values in ranks[world.rank]["buffers"].items() if buffers else ():
        write_full(targets[name], values)
    return ranks[world.rank]["extra"]


def added_to(number: int, world: World, state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that an optimizer's `state_dict` had beside "state" and "param_groups" when it was saved.

    If the number of ranks is still the same, these are the entries of this rank, otherwise those of rank 0.

    Args:
        number: the index of the optimizer, from 0.
        world: the ranks that train together.
        state: the contents of `state.pt`, as `read` returns them.
    """
    ranks = state["ranks"]
    mine = ranks[world.rank if len(ranks) == world.size else 0]
    return mine["optimizers"][number] if "optimizers" in mine else {}


def restore_features(world: World, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the state of features, such as which layers compute in float8. Collective: every rank must call it.

    state: the contents of the checkpoint's file `state.pt`, as `read` returns them.
    """
    for name, feature in world.saved_states.items():
        feature.load(world, model, state.get(name) or {})


def restore_random(world: World, state: dict[str, Any], step: int) -> None:
    """Restore this rank's random generators of Python, NumPy, torch and the device from a checkpoint.

    If a different number of ranks saved the checkpoint, the generators are seeded by `seed_everything` instead. A GPU's
    generator then gets a different seed on each rank, and all other generators get the same seed on every rank. The
    seeds are computed from `step` and from the saved state of rank 0's torch generator.

    Args:
        world: the ranks that train together, with this process's rank, device and communicators.
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


def check_fit(optimizer: Any, schedulers: Any, model: torch.nn.Module, state: dict[str, Any], buffers: bool) -> None:
    """Raise ValueError if a checkpoint does not fit the given optimizers and schedulers, for example in their number.

    `load_state` calls this before it changes anything.

    Args:
        optimizer: an OptimManager, one or several optimizers, or None to load no optimizer state.
        schedulers: a sequence of the schedulers. Empty to load no scheduler state.
        model: the module that contains the optimizers' parameters.
        state: the contents of the checkpoint's file `state.pt`, as `read` returns them.
        buffers: whether the buffers and the extra state of modules will be loaded too.
    """
    for what, saved, mine in (
        ("optimizers", len(state["optimizers"]), len(optimizers_of(optimizer))),
        ("schedulers", len(state["schedulers"]), len(schedulers)),
    ):
        if mine and saved != mine:
            raise ValueError(
                f"the checkpoint has the state of {saved} {what}, but this load_state call passes {mine}. Pass the "
                "same number, in the order in which save_state got them, or none"
            )
    missing = [name for name, _ in _with_extra_state(model) if name not in state["modules"]]
    if missing and buffers:
        raise ValueError(
            f"the checkpoint has no extra state (get_extra_state) of the module {missing[0]!r}. Create the model with "
            "the configuration of the saved one"
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
        check_settings(saved["kind"], saved["groups"], unwrapped(each))


# -- extra state of modules, buffers, random generators -------------------------------------------------------------


def _with_extra_state(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    plain = torch.nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def _own_buffers(world: World, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of those persistent buffers of `model` whose values on this rank differ from those on rank 0.

    Collective: every rank must call it. The result contains CPU tensors, by the names of the buffers.
    """
    buffers = {name: buffer.detach().cpu() for name, buffer in named_persistent_buffers(model)}
    digests = checksums(buffers)
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
