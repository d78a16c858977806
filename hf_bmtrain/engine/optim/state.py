"""Save and load the state of an optimizer over slices: this rank's slices, or whole tensors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from ..base.arguments import expect_kind
from ..comm.agreement import contents, fingerprint
from ..runtime.world import World, current_world
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter
from ..tensors.tensor import ShardTensor
from ..wrap.accelerator import accelerator_is_running
from .runs import stored_numel

_log_once = functools.cache(logging.getLogger("hf_bmtrain").warning)
_QUANTIZED = "__bnb_optimizer_quant_state__"
_BLOCKWISE = {"absmax1", "absmax2", "qmap1", "qmap2"}
"""State of bitsandbytes: of the blocks of a whole tensor, and tables. The same on all ranks."""
States = dict[Any, dict[str, Any]]
"""The "state" of an optimizer's state dict: by the number of the parameter, its values by name."""


# -- OptimManager's checkpoints -----------------------------------------------------------------------------------


def save_state(optimizer: torch.optim.Optimizer, world: World, gather: bool) -> dict[str, Any]:
    """Return a copy of the state in host memory: the sharded state or, with `gather`, the gathered one.

    The sharded state is this rank's, for the same rank of an equally large world. The gathered state is whole on rank
    0; other ranks get the parameter groups alone. Its "sliced" names the tensors that are laid out like the parameters;
    the others are whole on every rank. Collective with `gather`.
    """
    full_state: FullState | None = getattr(optimizer, "full_state", None)
    with nullcontext() if full_state is None else full_state.local():
        state = optimizer.state_dict()
    check_keys(optimizer, state["state"])
    state = {**state, "state": {key: _with_quantized(values) for key, values in state["state"].items()}}
    if gather:
        full, sharded = _gather(optimizer, state, world, keep=world.rank == 0)
        return {**state, "state": full, "sliced": sharded}
    own = {key: {name: _copy(value) for name, value in values.items()} for key, values in state["state"].items()}
    return {**state, "state": own, "rank": world.rank, "world_size": world.size}


def check_state(state_dict: Any) -> None:
    """Raise TypeError or ValueError unless `state_dict` looks like an optimizer's."""
    expect_kind("state_dict", state_dict, dict, "what state_dict() of an optimizer returned")
    lacking = [key for key in ("state", "param_groups") if key not in state_dict]
    if lacking:
        raise ValueError(
            f"state_dict must be what state_dict() of an optimizer returned: it has no {' and no '.join(lacking)}, but "
            f"{', '.join(map(repr, [*state_dict][:5])) or 'nothing'}"
        )


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any], world: World) -> None:
    """Load a sharded state, or this rank's part of a gathered state, which every rank passes whole.

    What is loaded of a gathered state shares no memory with it. Raises ValueError for the sharded state of another rank
    or another number of ranks, and RuntimeError unless gathered states, or the settings in sharded ones, are equal on
    all ranks. Collective.
    """
    state: States = saved["state"]
    own = () if "sliced" in saved else ("state", "rank")
    if world.size > 1:
        world.check_same_on_all_ranks(
            "load_state_dict", contents({name: value for name, value in saved.items() if name not in own})
        )
    if "sliced" in saved:
        parameters = _by_key(optimizer, saved)
        state = {key: dict(values) for key, values in state.items()}
        for key, values in state.items():
            parameter = parameters[key]
            if isinstance(parameter, DistributedParameter):
                values.update({name: parameter.take(values[name]) for name in saved["sliced"] if name in values})
    elif (saved["rank"], saved["world_size"]) != (world.rank, world.size):
        raise ValueError(
            f"this optimizer state is that of rank {saved['rank']} of {saved['world_size']}, loaded on rank "
            f"{world.rank} of {world.size}: save it with state_dict(gather_opt=True) to load it on another number of "
            "ranks."
        )
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    for values in optimizer.state.values() if "sliced" in saved else ():
        for name, value in values.items():
            if isinstance(value, ShardTensor) and value.part.untyped_storage().nbytes() > value.part.nbytes:
                values[name] = value.clone()  # a view would keep the whole in memory


# -- the optimizer's own state_dict -------------------------------------------------------------------------------


class FullState:
    """Makes `optimizer.state_dict()` return whole tensors while an Accelerator runs, and allows loading whole tensors.

    An optimizer over slices has one as its attribute `full_state`. Accelerate saves rank 0's state_dict and loads the
    file on every rank, so rank 0's slices would reach all. With an Accelerator `state_dict()` is therefore collective,
    and `accelerator.save_state` calls it on every rank. Without one it returns this rank's slices. Either can be
    loaded: a tensor with as many elements as the whole parameter is sliced before the next step.

    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._local = False
        self._sharded: Any = None  # the optimizer's dict of states, which every load replaces, when it was sliced
        optimizer.register_state_dict_post_hook(self._make_full)

    def is_loaded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True from a load until `shard_loaded`, which the check before the next step calls."""
        return optimizer.state is not self._sharded

    @contextmanager
    def local(self) -> Iterator[None]:
        """Make `optimizer.state_dict()` return this rank's slices under `with`, without communication."""
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def shard_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace whole tensors in the state with this rank's slices, after a load."""
        self._sharded = optimizer.state
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, DistributedParameter):
                for name, value in state.items():
                    own = own_part(parameter, name, value)
                    state[name] = own if _is_laid_out_like(value, parameter) or own is value else own.clone()

    def _make_full(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._local or not state_dict["state"] or not accelerator_is_running():
            return None
        world = current_world()
        _log_once(
            "optimizer.state_dict() gathers the whole state in the host memory of every rank. Before "
            "accelerator.save_state call bmt.hf.shard_checkpoints(accelerator): then nothing is gathered, and a kill "
            "during a save loses no checkpoint; Accelerate deletes those beyond total_limit before it writes."
        )
        world.barrier("optimizer.state_dict")
        check_keys(optimizer, state_dict["state"])
        return {**state_dict, "state": _gather(optimizer, state_dict, world, keep=True)[0]}


def full_facts(entries: Iterable[tuple[Any, str, Any]]) -> dict[str, str]:
    """Return fingerprints of the whole tensors among (parameter, name, value) of a loaded state, for `World.agree`.

    Those of a parameter that one rank stores completely are left out: there its slice looks like the whole.
    """
    facts: dict[str, str] = {}
    for number, (parameter, name, value) in enumerate(entries):
        if not isinstance(parameter, DistributedParameter) or not isinstance(value, torch.Tensor):
            continue
        layout, numel = parameter.buffer.layout, parameter.placement.numel
        first, last = (layout.offsets[parameter.index] + at for at in (0, numel - 1))
        is_unsharded = value.numel() == numel and not isinstance(value, ShardTensor)
        if numel and is_unsharded and first // layout.shard_numel != last // layout.shard_numel:
            shape = tuple(parameter.full_shape)
            facts[f"'{name}' of a parameter of shape {shape}, entry {number}"] = fingerprint(value)
    return facts


def own_part(parameter: torch.Tensor, name: str, value: Any) -> Any:
    """Return this rank's part of state `value`, a view if that is whole. Raises ValueError if it fits neither.

    Numbers, and the state of an ordinary parameter, are returned as they are.
    """
    if not isinstance(parameter, DistributedParameter) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if _is_laid_out_like(value, parameter):
        return ShardTensor.of(value.as_subclass(torch.Tensor), parameter.placement)
    if value.numel() == parameter.full_shape.numel():
        return parameter.take(value.reshape(parameter.full_shape))
    if value.numel() == 1 or name in _BLOCKWISE or _is_factor(value.shape, parameter.full_shape):
        return value
    raise ValueError(
        f"Optimizer state '{name}' of shape {tuple(value.shape)} fits neither the parameter "
        f"{tuple(parameter.full_shape)} nor this rank's {stored_numel(parameter)} elements of it: it was saved for "
        "another model, or on another rank."
    )


def _is_factor(shape: torch.Size, full_shape: torch.Size) -> bool:
    """Return whether a tensor of `shape` has a value for each row, column or the like of one of `full_shape`."""
    if len(shape) == len(full_shape):  # Adafactor of torch
        return all(mine in (1, full) for mine, full in zip(shape, full_shape))
    left_out = [full_shape[:i] + full_shape[i + 1 :] for i in range(len(full_shape))]
    return len(full_shape) > 1 and shape in left_out  # that of transformers


# -- gathering ----------------------------------------------------------------------------------------------------


def _by_key(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[Any, Any]:
    """Return the optimizer's parameters by the keys of a state dict. Raises ValueError for another number of them."""
    mine = [group["params"] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in mine] != [len(group) for group in theirs]:
        raise ValueError(
            f"the state has parameter groups of {[len(g) for g in theirs]} parameters, the optimizer of "
            f"{[len(g) for g in mine]}: make the optimizer from the same model, with the same groups."
        )
    return dict(zip(chain(*theirs), chain(*mine)))


@torch.no_grad()
def _gather(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], world: World, keep: bool
) -> tuple[States, list[str]]:
    """Gather every tensor that is laid out like its parameter, into host memory. Collective.

    Returns the state, empty unless `keep`, and the names of the gathered tensors.
    """
    parameters, state = _by_key(optimizer, state_dict), state_dict["state"]
    sharded, full = divide_state(parameters, state, world)
    places: dict[tuple[str, ShardedBuffer, torch.dtype], dict[int, Any]] = {}  # the keys of a buffer's slices, by index
    for name, key in sharded:
        place = name, parameters[key].buffer, state[key][name].dtype
        places.setdefault(place, {})[parameters[key].index] = key
    for (name, buffer, _), keys in places.items():
        pieces = {index: state[key][name] for index, key in keys.items()}
        for index, value in buffer.gather_like_local(pieces).items():
            if keep:
                full[keys[index]][name] = _copy(value)
    return full if keep else {}, sorted({name for name, _ in sharded})


def divide_state(parameters: dict[Any, Any], state: States, world: World) -> tuple[list[tuple[str, Any]], States]:
    """Return the (name, key) of slices' per-element tensors, in the same order on all ranks, and all other values.

    A tensor is per-element if it has its slice's shape on every rank; a single rank cannot distinguish a step count
    from a slice of one element. Counters come from the rank that holds most of the parameter, because a rank that holds
    none of it need not count. Collective. Raises RuntimeError if the ranks hold state for different parameters.
    """
    mine: dict[tuple[str, Any], tuple[bool, int, Any]] = {}  # fits its slice, elements of the slice, a copy of few
    others: States = {key: {} for key in state}
    for key, values in state.items():
        parameter = parameters[key]
        for name, value in values.items():
            if not isinstance(parameter, DistributedParameter):
                others[key][name] = _copy(value)
                continue
            fits, numel = _is_laid_out_like(value, parameter), stored_numel(parameter)
            mine[name, key] = fits, numel, None if fits and numel != 1 else _copy(value)
    everyone = world.gather_objects(mine)
    if any(other.keys() != mine.keys() for other in everyone):
        raise RuntimeError("The ranks' optimizers hold state for different parameters: build them alike on all ranks.")
    sharded = []
    for name, key in sorted(mine):
        held = [other[name, key] for other in everyone]
        if all(fits for fits, _, _ in held):
            sharded.append((name, key))
        else:
            copies = [(numel, copy) for _, numel, copy in held if copy is not None]
            others[key][name] = max(copies, key=lambda each: each[0])[1]
    return sharded, others


def _is_laid_out_like(value: Any, parameter: DistributedParameter) -> bool:
    """Return whether `value` is a slice tensor, or an ordinary one with the shape of this rank's part."""
    part = value.part if isinstance(value, ShardTensor) else value
    return isinstance(part, torch.Tensor) and part.shape == (stored_numel(parameter),)


def check_keys(optimizer: torch.optim.Optimizer, state: Iterable[Any]) -> None:
    """Raise RuntimeError for an optimizer whose `state` has keys that are no parameters, such as names."""
    names = [key for key in state if isinstance(key, str)]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps its state under {len(names)} names, the first of which is '{names[0]}', "
            "not under parameters: which part of it belongs to which slice is not known, and it cannot be saved. Save "
            "the model alone (save_only_model=True in TrainingArguments, bmt.save), or use an optimizer of torch."
        )


def _with_quantized(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with what bitsandbytes keeps in a dict of its own beside the rest."""
    return {**{name: value for name, value in values.items() if name != _QUANTIZED}, **values.get(_QUANTIZED, {})}


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
