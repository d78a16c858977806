"""Save and load the state of an optimizer over sharded parameters, as this rank's elements or as full tensors."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from ..base.arguments import expect_kind
from ..base.torch_internals import pytree, unwrapped
from ..comm.agreement import contents, fingerprint
from ..runtime.world import World, current_world
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter
from ..tensors.tensor import ShardBase, ShardTensor
from .runs import stored_numel

_log_once = functools.cache(logging.getLogger("hf_bmtrain").warning)
_ADDED = "added_entries"
"""The entry of the result of `save_state` with all entries of `optimizer.state_dict()` beside "state" and
"param_groups". They have a dict of their own, because their names may be those of other entries of the result."""
_KNOWN = ("state", "param_groups", "rank", "world_size", "shard", "sliced", _ADDED)
"""The entries of the result of `save_state`. A subclass of AdamOptimizer may add others."""
_QUANTIZED = "__bnb_optimizer_quant_state__"
_BLOCKWISE = {"absmax1", "absmax2", "qmap1", "qmap2"}
"""The names of scales and lookup tables in the state of other packages' 8-bit optimizers.

Unlike moments, they are not laid out like the parameters.
"""
States = dict[Any, dict[str, Any]]
"""The entry "state" of an optimizer's state dict: {index of a parameter: {name, such as "exp_avg": value}}."""


# -- OptimManager's checkpoints -----------------------------------------------------------------------------------


def save_state(optimizer: torch.optim.Optimizer, world: World, gather: bool) -> dict[str, Any]:
    """Return a copy of an optimizer's state dict in host memory. Collective if `gather` is True.

    Args:
        optimizer: the optimizer.
        world: the ranks over which the parameters are sharded.
        gather: whether to return the full state. If False, the result is this rank's own state. Only the same rank can
            load it, and only if this rank still stores the same shard. If True, rank 0 gets the full state, which can
            be loaded with any number of ranks; on the other ranks, the entry "state" of the result is empty. On every
            rank, the result then has an entry "sliced": the names of the state tensors that are sharded like the
            parameters.

    Raises:
        RuntimeError: the optimizer keeps its state under names instead of parameters.
        ValueError: the optimizer's state dict has no "state" or no "param_groups".
        RuntimeError: `gather` is True, and the ranks have state for different parameters.
        RuntimeError: `gather` is True, there are several ranks, and the optimizer's state dict has sharded tensors in
            an entry other than "state".
    """
    given = local_state_dict(optimizer)
    check_state(given, f"{type(optimizer).__name__}.state_dict()")
    check_keys(optimizer, given["state"])
    added = {name: value for name, value in given.items() if name not in ("state", "param_groups")}
    state = {"state": {key: _with_quantized(values) for key, values in given["state"].items()}}
    state["param_groups"] = given["param_groups"]
    if added:
        state[_ADDED] = pytree.tree_map(_copy, added)
    if gather:
        for name, value in added.items():
            if world.size > 1 and holds_shards(value):
                raise RuntimeError(
                    f"{type(optimizer).__name__} has sharded tensors in the entry '{name}' of its state_dict(), which "
                    "cannot be gathered. Keep them in the state of their parameters, optimizer.state[parameter], or "
                    "save each rank's own state."
                )
        full, sharded = _gather(optimizer, state, world, keep=world.rank == 0)
        return {**state, "state": full, "sliced": sharded}
    own = {key: {name: _copy(value) for name, value in values.items()} for key, values in state["state"].items()}
    return {**state, "state": own, "rank": world.rank, "world_size": world.size, "shard": _shard(world)}


def local_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with this rank's elements of sharded tensors. Not collective.

    The optimizer may be a wrapper around another optimizer. The result then includes all entries that the wrapper's own
    `state_dict` adds.
    """
    full_state: FullState | None = getattr(unwrapped(optimizer), "full_state", None)
    with nullcontext() if full_state is None else full_state.local():
        return optimizer.state_dict()


def holds_shards(value: Any) -> bool:
    """Return whether `value` is a sharded tensor, or contains one in mappings and sequences, at any depth."""
    if isinstance(value, Mapping):
        return any(map(holds_shards, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(map(holds_shards, value))
    return isinstance(value, ShardBase)


def _shard(world: World) -> tuple[int, int, int]:
    """Return (the index of this rank's shard, the number of shards, the number of ranks in a tensor-parallel group).

    A rank can load the state that it saved itself only if these numbers have not changed. If one has changed, the rank
    stores other elements of the parameters than when it saved the state.
    """
    return world.shard_group.rank, world.shard_group.size, 1 if world.grid is None else world.grid.size


def copy_full_state(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Return an optimizer's state dict with full tensors, copied to host memory on every rank.

    Collective: every rank must call it. `copy.deepcopy` of an AdamOptimizer calls this, because the copies of its
    parameters are full, so their state must be full as well.

    Args:
        optimizer: an optimizer over sharded parameters.
        world: the ranks over which the parameters are sharded.
    """
    state = optimizer.state_dict()
    return {**state, "state": _gather(optimizer, state, world, keep=True)[0]}


def check_state(state_dict: Any, what: str = "state_dict") -> None:
    """Raise TypeError or ValueError unless `state_dict` is a dict with the keys "state" and "param_groups".

    `AdamOptimizer.load_state_dict` calls this before it changes anything. `what` names the dict in the message.
    """
    expect_kind(what, state_dict, dict, "the result of state_dict() of an optimizer")
    lacking = [key for key in ("state", "param_groups") if key not in state_dict]
    if lacking:
        raise ValueError(
            f"{what} must be the result of state_dict() of an optimizer, but has no "
            f"{' and no '.join(lacking)}. It has {', '.join(map(repr, [*state_dict][:5])) or 'nothing'}."
        )


def load_state(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    world: World,
    load: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Load a state that `save_state` returned. Collective: every rank must call it.

    Args:
        optimizer: the optimizer.
        saved: the result of `save_state`: either this rank's own state, or the full state. The full state must be
            passed on every rank. Each rank copies its own elements from it.
        world: the ranks over which the parameters are sharded.
        load: a function that takes a state dict with this rank's elements, and loads it; None for the optimizer's
            `load_state_dict`.

    Raises:
        ValueError: the state was saved for different parameters.
        ValueError: `saved` is a rank's own state, and was saved by a different rank, with a different number of ranks,
            or for a different shard.
        RuntimeError: the ranks pass different full states.
        RuntimeError: each rank passes its own state, and these states differ in their parameter groups, or were saved
            with different numbers of ranks.
    """
    state: States = saved["state"]
    # A full state must be the same on all ranks. If each rank passes its own state, compare only two of its entries,
    # because the others, such as the moments, may differ between ranks.
    same = saved if "sliced" in saved else {name: saved[name] for name in ("param_groups", "world_size")}
    if world.size > 1:
        world.check_same_on_all_ranks("load_state_dict", contents(same))
    if "sliced" in saved:
        parameters = _by_key(optimizer, saved)
        state = {key: dict(values) for key, values in state.items()}
        for key, values in state.items():
            parameter = parameters[key]
            if isinstance(parameter, DistributedParameter):
                values.update({name: parameter.take_whole(values[name]) for name in saved["sliced"] if name in values})
    else:  # each rank passes its own state: if one does not fit its rank, raise the error on all ranks
        problem = next(filter(None, world.gather_objects(_misfit(saved, world))), None)
        if problem is not None:
            raise ValueError(problem)
    # Call this for its effect: it registers a hook, so that the optimizer's `state_dict` returns full tensors even
    # before the first step.
    full_state_of(optimizer)
    added = {name: value for name, value in saved.items() if name not in _KNOWN} | saved.get(_ADDED, {})
    (load or optimizer.load_state_dict)({**added, "state": state, "param_groups": saved["param_groups"]})
    for values in unwrapped(optimizer).state.values() if "sliced" in saved else ():
        for name, value in values.items():
            if isinstance(value, ShardTensor) and value.part.untyped_storage().nbytes() > value.part.nbytes:
                values[name] = value.clone()  # `value` is a view, which would keep the full tensor in memory


def _misfit(saved: dict[str, Any], world: World) -> str | None:
    """Return None if this rank can load `saved`, otherwise the reason why it cannot, for the error.

    saved: the state that one rank saved for itself, with `gather=False`.
    """
    if (saved["rank"], saved["world_size"]) != (world.rank, world.size):
        return (
            f"this optimizer state was saved by rank {saved['rank']} of {saved['world_size']}, but is loaded on rank "
            f"{world.rank} of {world.size}. A state that is saved with OptimManager.state_dict(gather_opt=True) can be "
            "loaded on any rank, with any number of ranks."
        )
    mine = _shard(world)
    # States of older versions have no "shard". Assume for them that the index of a rank's shard was its rank.
    theirs = tuple(saved.get("shard", (world.rank, world.size, 1)))
    if theirs == mine:
        return None
    then, now = (f"shard {shard} of {shards} with tp_size={together}" for shard, shards, together in (theirs, mine))
    return (
        f"this optimizer state of rank {world.rank} was saved for {then}, but the rank now has {now}, because gather, "
        "shard_over or tp_size of init_distributed has changed, or the ranks are distributed differently over the "
        "hosts. A state that is saved with OptimManager.state_dict(gather_opt=True) can be loaded in all these cases."
    )


# -- the optimizer's own state_dict -------------------------------------------------------------------------------


class FullState:
    """Lets `optimizer.state_dict()` return full tensors where they are needed, and allows loading full tensors.

    An optimizer over sharded parameters has a FullState as its attribute `full_state`. `state_dict()` is collective and
    returns full tensors in two cases:

    * The program uses a Hugging Face `accelerate.Accelerator`. `accelerator.save_state` calls `state_dict()` on every
      rank, saves only rank 0's result, and loads the file on every rank.
    * `get_state_dict` or another function of torch.distributed.checkpoint.state_dict calls `state_dict()`. With
      `full_state_dict=True`, programs save only rank 0's result, too.

    In other cases, `state_dict()` returns this rank's elements. Either kind of state dict can be loaded: before the
    next step, a tensor with as many elements as the full parameter is replaced by this rank's elements.

    Args:
        optimizer: the optimizer. A hook that gathers the full tensors is registered on its `state_dict()`.

    Attributes:
        checked_groups: the parameter groups for which `compat.check` has found that the optimizer updates sharded
            parameters correctly.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.checked_groups: list[dict[str, Any]] = []
        self._local = False
        # The dict `optimizer.state` at the last call of `shard_loaded`. Loading a state sets `optimizer.state` to a new
        # dict, so `is_loaded` compares the two dicts by identity.
        self._sharded: Any = None
        optimizer.register_state_dict_post_hook(self._make_full)

    def is_loaded(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `shard_loaded` must be called before the next step, because a state was loaded.

        True if a state was loaded into `optimizer` since the last call of `shard_loaded`. Also True if `shard_loaded`
        has never been called, because it is then unknown whether a state was loaded.
        """
        return optimizer.state is not self._sharded

    @contextmanager
    def local(self) -> Iterator[None]:
        """Context manager inside which `optimizer.state_dict()` returns this rank's elements, without communication.

        The function `save_state` of this file calls `state_dict()` inside it. If full tensors are needed, `save_state`
        gathers them afterwards.
        """
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def shard_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace full tensors in the optimizer's loaded state by this rank's elements. Not collective.

        Tensors that already have only this rank's elements become sharded tensors (`ShardTensor`), and other values,
        such as step counts, do not change. Called before the first step after a state was loaded.
        """
        self._sharded = optimizer.state
        if isinstance(optimizer, torch.optim.LBFGS):
            return  # its state tensors are vectors over all parameters, and every rank keeps all of their elements
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, DistributedParameter):
                for name, value in state.items():
                    own = own_part(parameter, name, value)
                    state[name] = own if _is_laid_out_like(value, parameter) or own is value else own.clone()

    def _make_full(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._local or not state_dict["state"]:
            return None
        world = current_world()
        if world.accelerator is None and not _called_by("torch.distributed.checkpoint.state_dict"):
            return None
        if world.accelerator is not None:
            _log_once(
                "optimizer.state_dict() gathers the full state in the host memory of every rank. To write sharded "
                "checkpoints instead, call bmt.hf.shard_checkpoints(accelerator) before accelerator.save_state. A job "
                "that is killed while saving then keeps its previous checkpoint, whereas Accelerate deletes the "
                "checkpoints beyond total_limit before it writes."
            )
        world.barrier("optimizer.state_dict")
        check_keys(optimizer, state_dict["state"])
        return {**state_dict, "state": _gather(optimizer, state_dict, world, keep=True)[0]}


def _called_by(module: str) -> bool:
    """Return whether a function of the module with this name is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False


def full_state_of(optimizer: torch.optim.Optimizer) -> FullState | None:
    """Return the FullState of an optimizer, which the first call creates. None if none of its parameters is sharded.

    If the optimizer is wrapped, for example by Accelerate, the FullState belongs to the optimizer inside.
    """
    optimizer = unwrapped(optimizer)
    full_state: FullState | None = getattr(optimizer, "full_state", None)
    if full_state is None:
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if any(isinstance(parameter, DistributedParameter) for parameter in parameters):
            full_state = optimizer.full_state = FullState(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    return full_state


def full_facts(entries: Iterable[tuple[Any, str, Any]]) -> dict[str, str]:
    """Return a hash of some elements of each full tensor in a loaded state, as {description of the tensor: hash}.

    The ranks compare these hashes before the next step, to check that they loaded the same state. The following values
    have no hash:

    * Numbers, and the state of unsharded parameters.
    * Tensors with only this rank's elements, because they differ between ranks.
    * The state of a parameter of which one rank stores all elements. A tensor with this rank's elements may then have
      the same size as a full tensor, so it is unknown which of the two was loaded.

    entries: a tuple (parameter, name such as "exp_avg", value) for each value in the loaded state.
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
    """Return this rank's elements of one value in an optimizer's state, such as the "exp_avg" of a parameter.

    Called for each value of a loaded state. The value may be full or already sharded. For a sharded parameter:

    * If `value` is a "step" with one element, it is returned unchanged, even if it has the shape of a local parameter.
    * If `value` has only this rank's elements (in a 1-D tensor, or already in a `ShardTensor`), it is returned as a
      sharded tensor (`ShardTensor`).
    * If `value` has as many elements as the full parameter (with tensor parallelism: as the whole tensor before it was
      split), the result is a sharded tensor of this rank's elements, usually a view.
    * Values that are not laid out like the parameter are returned unchanged, so every rank keeps all of their elements.
      Such values are numbers, other tensors of one element (step counts), factors of a matrix (in Adafactor), scales
      and lookup tables (in 8-bit optimizers), and several full tensors that are stacked in a new dimension 0.

    For a parameter that is not sharded, `value` is returned unchanged.

    Args:
        parameter: the parameter to which the value belongs.
        name: the name of the value, such as "exp_avg", by which the scales and lookup tables are recognized.
        value: a tensor or a number.

    Raises:
        ValueError: the parameter is sharded, and `value` is a tensor of any other shape.
    """
    if not isinstance(parameter, DistributedParameter) or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if _is_step_count(name, value):
        return value
    if _is_laid_out_like(value, parameter):
        return ShardTensor.of(value.as_subclass(torch.Tensor), parameter.placement)
    whole_shape = parameter.buffer.storage.whole_shape(parameter.index)
    if value.numel() == whole_shape.numel():
        return parameter.take_whole(value.reshape(whole_shape))
    if value.numel() == 1 or name in _BLOCKWISE or _is_factor(value.shape, parameter.full_shape):
        return value
    if value.shape[1:] == parameter.full_shape:  # several full tensors, stacked; every rank keeps all of them
        return value
    raise ValueError(
        f"Optimizer state '{name}' of shape {tuple(value.shape)} fits neither the parameter "
        f"{tuple(parameter.full_shape)} nor this rank's {stored_numel(parameter)} elements of it. It was saved for "
        "another model, or on another rank. Load the state that this rank saved, or a full state: "
        "OptimManager.state_dict(gather_opt=True), AdamOptimizer.state_dict(gather=True), or state_dict() of a torch "
        "optimizer of a model that is not sharded."
    )


def _is_factor(shape: torch.Size, full_shape: torch.Size) -> bool:
    """Return whether a state tensor of this shape may be a factor (row or column means) of Adafactor.

    full_shape: the full shape of the parameter to which the state tensor belongs.
    """
    if len(shape) == len(full_shape):  # torch's Adafactor keeps reduced dimensions, of size 1
        return all(mine in (1, full) for mine, full in zip(shape, full_shape))
    left_out = [full_shape[:i] + full_shape[i + 1 :] for i in range(len(full_shape))]
    return len(full_shape) > 1 and shape in left_out  # transformers' Adafactor removes a reduced dimension


# -- gathering ----------------------------------------------------------------------------------------------------


def _by_key(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[Any, Any]:
    """Match the parameters of a state dict with those of the optimizer, by their order in the parameter groups.

    Returns {key of the parameter in `state`: the optimizer's parameter}. Raises ValueError if the parameter groups have
    different sizes.

    state: the state dict.
    """
    mine = [group["params"] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in mine] != [len(group) for group in theirs]:
        raise ValueError(
            f"the state has parameter groups of {[len(g) for g in theirs]} parameters, but the optimizer has groups of "
            f"{[len(g) for g in mine]}. Create the optimizer from the same model, with the same groups."
        )
    return dict(zip(chain(*theirs), chain(*mine)))


@torch.no_grad()
def _gather(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], world: World, keep: bool
) -> tuple[States, list[str]]:
    """Gather the full state of an optimizer in host memory.

    Collective: every rank must call it. Returns the full state, {key of a parameter: {name: value}}, and the names of
    the values that are sharded like their parameters and were gathered, such as ["exp_avg", "exp_avg_sq"].

    state_dict: the optimizer's own state dict, in which each rank has its elements of the sharded tensors.
    keep: whether this rank needs the full state. If not, it takes part in the all-gathers, but an empty state is
        returned.
    """
    parameters, state = _by_key(optimizer, state_dict), state_dict["state"]
    sharded, full = divide_state(parameters, state, world)
    # Tensors with the same name, flat buffer and dtype are gathered together:
    # {(name, buffer, dtype): {index of the parameter in the buffer: key of the parameter in `state`}}.
    places: dict[tuple[str, ShardedBuffer, torch.dtype], dict[int, Any]] = {}
    for name, key in sharded:
        place = name, parameters[key].buffer, state[key][name].dtype
        places.setdefault(place, {})[parameters[key].index] = key
    for (name, buffer, _), keys in places.items():
        pieces = {index: state[key][name] for index, key in keys.items()}
        for index, value in buffer.gather_like_local(pieces).items():
            value = buffer.storage.whole(index, value)
            if keep:
                full[keys[index]][name] = _copy(value)
    return full if keep else {}, sorted({name for name, _ in sharded})


def divide_state(parameters: dict[Any, Any], state: States, world: World) -> tuple[list[tuple[str, Any]], States]:
    """Divide an optimizer's state into tensors that are sharded like their parameters, and all other values.

    Called when a state is saved. Tensors that are sharded like their parameters, such as moments, are then gathered, or
    saved in parts. Other values, such as step counts, are saved once. Collective: every rank must call it.

    A tensor is sharded like its parameter if, on every rank, it has the shape of the local parameter. One rank alone
    cannot decide this, because a value that is not sharded may have the shape of a local parameter of one element. (A
    "step" with one element is never sharded.) Other values are taken from the rank that stores the most elements of the
    parameter, because some optimizers do not count steps on a rank without elements.

    Args:
        parameters: {key: parameter}, for all keys of `state`.
        state: this rank's state, {key of a parameter: {name, such as "exp_avg": value}}.
        world: the ranks over which the parameters are sharded.

    Returns:
        First, a list with (name, key) of each tensor that is sharded like its parameter, in the same order on all
        ranks. Second, {key: {name: value}} with all other values; tensors among them are copied to host memory.

    Raises:
        RuntimeError: the ranks have state for different parameters.
    """
    # For each state value of each sharded parameter: {(name, key): (whether the value has the local parameter's shape,
    # the number of local elements of the parameter, a copy of the value or None)}. Only values that are not sharded,
    # such as step counts, need a copy. A value with the local parameter's shape is taken to be sharded, so its copy is
    # None. If that shape has a single element, the value may also be a step count, so it is copied.
    mine: dict[tuple[str, Any], tuple[bool, int, Any]] = {}
    others: States = {key: {} for key in state}
    for key, values in state.items():
        parameter = parameters[key]
        for name, value in values.items():
            if not isinstance(parameter, DistributedParameter):
                others[key][name] = _copy(value)
                continue
            fits = _is_laid_out_like(value, parameter) and not _is_step_count(name, value)
            numel = stored_numel(parameter)
            mine[name, key] = fits, numel, None if fits and numel != 1 else _copy(value)
    everyone = world.gather_objects(mine)
    if any(other.keys() != mine.keys() for other in everyone):
        raise RuntimeError(
            "The ranks' optimizers have state for different parameters. Only some ranks have "
            f"{sorted({f'{n} of parameter {k}' for each in everyone for n, k in each.keys() ^ mine.keys()})[:5]}. "
            "Create the same optimizer on all ranks."
        )
    sharded = []
    for name, key in sorted(mine):
        held = [other[name, key] for other in everyone]
        if all(fits for fits, _, _ in held):
            sharded.append((name, key))
        else:
            copies = [(numel, copy) for _, numel, copy in held if copy is not None]
            others[key][name] = max(copies, key=lambda each: each[0])[1] if copies else None
    return sharded, others


def _is_step_count(name: str, value: Any) -> bool:
    """Return whether a value in an optimizer's state is a tensor of one element with the name of a step count.

    Such a tensor may have the same shape as a local parameter of one element, but it is not sharded like the parameter.
    """
    return name == "step" and isinstance(value, torch.Tensor) and value.numel() == 1


def _is_laid_out_like(value: Any, parameter: DistributedParameter) -> bool:
    """Return whether `value` is a 1-D tensor with as many elements as this rank stores of `parameter`.

    If `value` is a ShardTensor, its local part is compared.
    """
    part = value.part if isinstance(value, ShardTensor) else value
    return isinstance(part, torch.Tensor) and part.shape == (stored_numel(parameter),)


def check_keys(optimizer: torch.optim.Optimizer, state: Iterable[Any]) -> None:
    """Raise RuntimeError if an optimizer keeps its state under names (strings) instead of parameters.

    Such a state cannot be saved, because it is unknown which parameters it belongs to.

    Args:
        optimizer: the optimizer, for the message.
        state: the keys of its state.
    """
    names = [key for key in state if isinstance(key, str)]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps its state under {len(names)} names (strings such as '{names[0]}') "
            "instead of under its parameters. It cannot be saved, because it is unknown which state belongs to which "
            "parameter. Save the model alone (bmt.save, or save_only_model=True in TrainingArguments), or use an "
            "optimizer of torch."
        )


def _with_quantized(values: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's optimizer state with all tensors at the top level of the dict.

    Some 8-bit optimizers store a part of the state in a nested dict.
    """
    return {**{name: value for name, value in values.items() if name != _QUANTIZED}, **values.get(_QUANTIZED, {})}


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
