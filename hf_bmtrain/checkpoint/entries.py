"""List the tensors that a checkpoint of a model and its optimizers contains, and this rank's elements of each."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..engine.base.arguments import expect_kind, expect_module, expect_path
from ..engine.base.torch_internals import WithoutTorchFunction, has_load_hooks, state_dict_hooks, unwrapped
from ..engine.optim.adam import START_ANEW, AdamOptimizer
from ..engine.optim.manager import OptimManager
from ..engine.optim.state import FullState, check_keys, divide_state, full_state_of, holds_shards, local_state_dict
from ..engine.runtime.world import World
from ..engine.sharding.parameter import DistributedParameter, is_part, is_read_only
from ..engine.sharding.state_dict import unexpanded
from ..engine.tensors.tensor import ShardBase
from .header import TensorSpec


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, and this rank's elements of it.

    Attributes:
        spec: name, dtype and shape of the full tensor, as it is saved (see `saved_as`).
        first: the index of this rank's first element in the flattened full tensor.
        part: this rank's elements, 1-D. Usually a view of the model's or optimizer's tensor; a copy if that tensor is
            not contiguous, or is a moment that the optimizer stores in 8 bits.
        sharded: whether this rank has only the elements of its shard. If False, every rank has the full tensor.
    """

    spec: TensorSpec
    first: int
    part: torch.Tensor
    sharded: bool


Named = dict[int, tuple[torch.Tensor, list[str]]]
"""Tensors of a model, as {id(tensor): (tensor, all its names in the state dict)}."""
MODEL, TRAINED = "model", "trained"
"""Base names of a model's files: `model*.safetensors` contains all tensors, `trained*.safetensors` only the trained
parameters and the buffers."""


def has_trained_only(files: Iterable[str]) -> bool:
    """Return whether a checkpoint was saved with `trained_only`, and so lacks weights that were never trained.

    Called when a checkpoint is loaded or merged. If True, weights that the checkpoint lacks are not an error: when
    it is loaded, they keep their present values, and when it is merged, they are read from the base model.

    The file names decide: with `trained_only`, weights are saved in `trained*.safetensors`, otherwise in
    `model*.safetensors`. Here, `*` stands only for "" or a part number such as "-00001-of-00002". A file such as
    "model_card.md", which the argument `add` of `save_state` may have written, is ignored. If there is no weight file,
    the result is True, because the checkpoint does not contain the full model.

    files: the names of the checkpoint's files.
    """
    matches = (re.fullmatch(rf"({MODEL}|{TRAINED})(-\d+-of-\d+)?\.safetensors", name) for name in files)
    written = {match[1] for match in matches if match}
    return TRAINED in written or MODEL not in written


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names of all tied weights, that is, of parameters that have several names in the model.

    Checkpoints store the result, because they contain a tied weight only under its first name.

    Returns:
        {first name: the other names of the same parameter}. Parameters with one name are left out.
    """
    named = by_tensor(model.named_parameters(remove_duplicate=False))
    return {first: others for _, (first, *others) in named.values() if others}


def by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> Named:
    """Group the names of a model's tensors by tensor: return {id(tensor): (tensor, all its names)}.

    A tied weight or a shared buffer has several names.

    named: pairs of a name and a tensor, such as `model.named_parameters(remove_duplicate=False)`.
    """
    found: Named = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return found


def model_entries(model: torch.nn.Module, chosen: Callable[[str, Any], bool] | None = None) -> list[Entry]:
    """List the tensors of a model that are saved in a checkpoint. Not collective.

    Each tensor is returned as an `Entry`: its name, dtype and shape, and this rank's elements. A tied weight has one
    entry, under its first name.

    Args:
        model: the model.
        chosen: a function that takes a parameter's name and the parameter, and returns whether to include it. It must
            not choose quantized weights, which a checkpoint cannot contain. None includes all parameters. Persistent
            buffers are always included.

    Raises:
        ValueError: `chosen` is None, so all parameters should be included, but the model has quantized weights.
    """
    if chosen is None:
        refuse_quantized(model)
    entries = [
        _of_parameter(name, parameter, parameter)
        for name, parameter in model.named_parameters()
        if chosen is None or chosen(name, parameter)
    ]
    for name, buffer in named_persistent_buffers(model):
        entries.append(_full(name, buffer))
    return entries


def was_trained(name: str, parameter: Any) -> bool:
    """Return whether a parameter is trainable now or, if it is sharded, was trained earlier.

    It was trained earlier if it required a gradient in any backward so far, or if its values were loaded from a
    checkpoint that was saved with `trained_only`. PEFT freezes adapters while they are inactive, but checkpoints saved
    with `trained_only` must contain them.

    Args:
        name: the parameter's name. Not used, but `model_entries` passes it to every function that selects parameters.
        parameter: the parameter, sharded or not.
    """
    return parameter.requires_grad or (isinstance(parameter, DistributedParameter) and parameter.trained)


def refuse_quantized(model: torch.nn.Module) -> None:
    """Raise ValueError if the model has quantized weights, which a checkpoint cannot contain."""
    if any(is_read_only(parameter) for parameter in model.parameters()):
        raise ValueError(
            "the model has quantized weights, which a checkpoint of the full model cannot contain. To resume training "
            "later, save only the trained parameters with save_state(..., trained_only=True). To export the model, "
            "bmt.save(model, file) dequantizes the weights and writes all of them."
        )


def refuse_parts(model: torch.nn.Module) -> None:
    """Raise NotImplementedError if tensor parallelism splits a weight, because `DCPState` cannot save such weights."""
    if any(map(is_part, model.parameters())):
        raise NotImplementedError(
            "DCPState does not support weights that are split over ranks by tp_size. Use bmt.save_state and "
            "bmt.load_state."
        )


def named_persistent_buffers(
    model: torch.nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for a model's persistent buffers.

    Args:
        model: the model.
        remove_duplicate: whether to yield a shared buffer only once, under its first name.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            if remove_duplicate:
                seen.add(id(buffer))
            yield f"{prefix}.{name}" if prefix else name, buffer


def _of_parameter(name: str, parameter: torch.Tensor, values: torch.Tensor) -> Entry:
    """Return the `Entry` (name, dtype, shape, this rank's elements) of a parameter or a tensor of its optimizer state.

    name: the tensor's name in the checkpoint.
    parameter: the parameter. It determines the saved shape and the elements that this rank has.
    values: the tensor to save. This is the parameter itself, or a tensor of optimizer state sharded like the parameter.
    """
    if not isinstance(parameter, DistributedParameter):
        return _full(name, values)
    part = values.part if isinstance(values, ShardBase) else values
    shape, first = saved_as(parameter)
    return Entry(TensorSpec(name, part.dtype, shape), first, part.detach().reshape(-1), True)


def saved_as(parameter: DistributedParameter) -> tuple[tuple[int, ...], int]:
    """Return a parameter's shape in checkpoints, and the index of this rank's first element in the flattened tensor.

    The shape is that of the full weight, with one exception. If tensor parallelism (`tp_size`) splits a weight on
    a dimension other than the first, its parts are saved as a stack, so that the elements of each rank are contiguous.
    The shape is then (tp_size, *shape of a part).
    """
    shape, first = parameter.buffer.storage.saved_as(parameter.index)
    return tuple(shape), first


def may_be_stack(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two shapes of a weight may differ because one is that of a stack of parts (see `saved_as`)."""
    return len(one) != len(other) and math.prod(one) == math.prod(other)


def write_full(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write loaded values to a buffer, or to a parameter that is not sharded.

    Args:
        target: the tensor to write. A buffer may be expanded: then several of its elements are in the same memory.
        values: the values, of the same shape.

    Raises:
        ValueError: `values` differ where elements of an expanded buffer are in the same memory.
    """
    once, first = unexpanded(target), values
    if once.shape != target.shape:
        first = values[tuple(map(slice, once.shape))]
        if not values.equal(first.expand_as(values)):
            raise ValueError(
                f"a buffer of shape {tuple(target.shape)} is expanded, so that it stores only {once.numel()} elements, "
                "but the checkpoint has different values for elements in the same memory. Register a clone instead"
            )
    once.copy_(first)


def _full(name: str, tensor: torch.Tensor) -> Entry:
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{name} has layout {tensor.layout}, which safetensors files do not support. Convert it with to_dense(), "
            "or register it as a non-persistent buffer."
        )
    part = tensor.detach().contiguous().view(-1)
    return Entry(TensorSpec(name, tensor.dtype, tuple(tensor.shape)), 0, part, False)


# -- optimizers -----------------------------------------------------------------------------------------------------


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """Return the argument `optimizer` of `save_state` or `load_state` as a list of optimizers.

    Accelerate's wrapper, which adds nothing to the state, is replaced by the optimizer inside. Other wrappers are kept,
    because their `state_dict` may return entries that the optimizer inside does not have.

    given: an OptimManager, an iterable of optimizers, or one optimizer. None gives an empty list.
    """
    optimizers: list[Any] = given.optimizers if isinstance(given, OptimManager) else _list_of(given)
    return [each.optimizer if type(each).__module__ == "accelerate.optimizer" else each for each in optimizers]


def _list_of(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def listed(optimizer: Any, scheduler: Any) -> tuple[Any, list[Any]]:
    """Convert the arguments `optimizer` and `scheduler` of `save_state` or `load_state` to lists, except OptimManagers.

    The callers go through the optimizers and schedulers several times, but a generator that a user passes can be read
    only once.

    Returns:
        Two values. The first is `optimizer` itself if it is an OptimManager, and otherwise the list of the optimizers.
        The second is the list of the schedulers. A single object becomes a list of one item, and None an empty list.
    """
    manager = isinstance(optimizer, OptimManager)
    return optimizer if manager else _list_of(optimizer), _list_of(scheduler)


def check_arguments(folder: Any, model: Any, optimizer: Any, schedulers: list[Any]) -> None:
    """Raise TypeError or ValueError if an argument of `save_state` or `load_state` has the wrong type or value.

    Args:
        folder: must be a path that is not empty.
        model: must be a torch.nn.Module.
        optimizer: must be an OptimManager, one or several torch optimizers, or None.
        schedulers: must be objects with a `load_state_dict` method.
    """
    expect_path("folder", folder)
    expect_module("model", model)
    wanted = "an OptimManager, one or several optimizers, or None"
    for each in optimizers_of(optimizer):
        expect_kind("optimizer", unwrapped(each), torch.optim.Optimizer, wanted)
    for each in schedulers:
        if isinstance(each, (torch.nn.Module, type)) or not callable(getattr(each, "load_state_dict", None)):
            raise TypeError(
                "scheduler must be one or several objects with state_dict() and load_state_dict(), or None, got "
                f"{each!r:.80}"
            )


def file_base(number: int) -> str:
    """Return the prefix of an optimizer's file names: "optimizer" for the first optimizer, "optimizer2" for the second.

    number: the index of the optimizer, from 0.
    """
    return "optimizer" if number == 0 else f"optimizer{number + 1}"


def named(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Return the parameters of an optimizer by their names in the model, in the optimizer's order.

    Args:
        optimizer: the optimizer.
        model: the module that contains all parameters of the optimizer.

    Returns:
        {name of the parameter in `model`: parameter}.

    Raises:
        ValueError: a parameter of the optimizer is not in `model`.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in mine if parameter not in names]
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} updates {len(strangers)} parameters that are not in the model, of shapes "
            f"{', '.join(map(str, strangers[:5]))}. Pass the module that contains all parameters of the optimizer."
        )
    return {names[parameter]: parameter for parameter in mine}


def split_key(key: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """Divide the name of a tensor in a checkpoint's optimizer files, PARAMETER.KEY, into PARAMETER and KEY.

    Both may contain dots. But only one division is possible: "a" and "a.b" cannot both be parameters, because a module
    cannot have a parameter and a submodule of the same name.

    key: the name of the tensor, such as "layer.weight.exp_avg".
    parameters: all parameters of the optimizer by name, as `named` returns them.
    """
    name = key.rpartition(".")[0]
    while "." in name and name not in parameters:
        name = name.rpartition(".")[0]
    return name, key[len(name) + 1 :]


def groups_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return copies of an optimizer's parameter groups, in which "params" lists names instead of parameters.

    Args:
        optimizer: the optimizer.
        model: the module that contains its parameters. The names are those of `model.named_parameters()`.

    Raises:
        ValueError: a parameter of the optimizer is not in `model`.
    """
    names = {parameter: name for name, parameter in named(optimizer, model).items()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def check_groups(kind: str, saved: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless an optimizer has the same parameters in the same groups as when its state was saved.

    The number and order of the groups must be equal. Groups are compared by the names of their parameters. The order of
    the parameters inside a group may differ.

    Args:
        kind: the class name of the saved optimizer, for the message. If the saved state does not contain this name,
            pass the class name of the optimizer into which the state is loaded.
        saved: the saved groups. In each, "params" is a list of parameter names.
        mine: the optimizer's present groups in the same form, from `groups_of`.
    """
    theirs, own = ([sorted(group["params"]) for group in groups] for groups in (saved, mine))
    if theirs != own:
        counts = [", ".join(str(len(names)) for names in groups) for groups in (theirs, own)]
        raise ValueError(
            f"the parameter groups of the saved {kind} and of this optimizer are different. The saved groups have "
            f"{counts[0]} parameters, and those of this optimizer have {counts[1]}. The parameters differ in group "
            f"{', '.join(str(i) for i in range(max(len(theirs), len(own))) if theirs[i : i + 1] != own[i : i + 1])} "
            "(counted from 0). Create the optimizer with the groups that were saved"
        )


def check_settings(kind: str, saved: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the saved parameter groups lack a setting that `optimizer` needs.

    This happens if the state was saved by another class of optimizer: for example, the groups of SGD lack "betas",
    which Adam needs. Some settings, such as "foreach", may be missing, because torch's optimizers add them when they
    load the state of an older version of torch.

    Only torch's own optimizers, such as Adam, and subclasses of them that do not override `load_state_dict` are
    checked.

    Args:
        kind: the class name of the saved optimizer, for the message.
        saved: the saved groups.
        optimizer: the optimizer into which the groups are to be loaded.
    """
    mine, plain = type(optimizer), torch.optim.Optimizer
    known = next((each for each in mine.__mro__ if each.__module__.startswith("torch.optim.")), plain)
    if known is plain or mine.load_state_dict is not plain.load_state_dict:
        return
    probe: Any = copy.copy(optimizer)
    known.__setstate__(probe, {"state": {}, "param_groups": [dict(group) for group in saved]})
    needed = [name for name in optimizer.defaults if name in inspect.signature(known).parameters]
    lacking = [name for name in needed if any(name not in group for group in probe.param_groups)]
    if lacking:
        raise ValueError(
            f"the checkpoint has the state of {kind}, which cannot be loaded into {mine.__name__}: the saved parameter "
            f"groups have no {' and no '.join(lacking)}. {START_ANEW}"
        )


def optimizer_entries(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, world: World
) -> tuple[list[Entry], dict[str, dict[str, Any]]]:
    """Divide an optimizer's state into tensors that are sharded like their parameters, such as moments, and the rest.

    Collective: every rank must call it.

    Args:
        optimizer: the optimizer.
        model: the module that contains all parameters of the optimizer.
        world: the ranks that train together, with this process's rank, device and communicators.

    Returns:
        Two values. The first is a list with an `Entry` (name, dtype, shape, this rank's elements) for each tensor that
        is sharded like its parameter. The name of an entry is PARAMETER.KEY, such as "weight.exp_avg". The second is
        the rest of the state, such as step counts, copied to the CPU, as {parameter name: {key: value}}.

    Raises:
        RuntimeError: a tensor is sharded differently from its parameter, the ranks have state for different
            parameters, or the optimizer stores state under names instead of parameters.
        ValueError: a parameter of the optimizer is not in `model`.
    """
    parameters, inner = named(optimizer, model), unwrapped(optimizer)
    check_keys(optimizer, inner.state)
    with WithoutTorchFunction():
        state: dict[Any, dict[str, Any]] = {}
        if isinstance(inner, AdamOptimizer):
            state = inner.stored_state()
        else:
            # A wrapper's own `state` may be empty, although its `state_dict` returns the state of the optimizer inside.
            given = local_state_dict(optimizer)
            keys = itertools.chain(*(group["params"] for group in given.get("param_groups", ())))
            returned = given.get("state", {})
            state = {p: returned[key] for key, p in zip(keys, parameters.values()) if key in returned} | inner.state
        held = {name: state[parameter] for name, parameter in parameters.items() if parameter in state}
    sharded, others = divide_state(parameters, held, world)
    for name, values in others.items():
        for key, value in values.items():
            if holds_shards(value):
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps its state '{key}' of {name} in tensors that are sharded "
                    "differently from the parameter, so save_state cannot save it. Save each rank's "
                    "optimizer.state_dict() with torch.save instead."
                )
    entries = [_of_parameter(f"{name}.{key}", parameters[name], held[name][key]) for key, name in sharded]
    return sorted(entries, key=lambda entry: entry.spec.name), others


def added_entries(optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """Return the entries that an optimizer's `state_dict()` has beside "state" and "param_groups". Not collective.

    Such entries come from subclasses that override `state_dict`, or from hooks of `state_dict`. If the optimizer has
    neither, the result is empty, and `state_dict` is not called, because it may convert the whole state.

    optimizer: the optimizer.
    world: the ranks that train together.

    Raises RuntimeError if there are several ranks and an entry has a sharded tensor, because the parameter to which
    this tensor belongs is unknown.
    """
    hooks = state_dict_hooks(optimizer)
    plain = torch.optim.Optimizer.state_dict, AdamOptimizer.state_dict
    adds = getattr(optimizer.state_dict, "__func__", None) not in plain
    if not (adds or any(not isinstance(getattr(h, "__self__", None), FullState) for h in hooks)):
        return {}
    state_dict = local_state_dict(optimizer)
    added = {name: value for name, value in state_dict.items() if name not in ("state", "param_groups")}
    for name, value in added.items():
        if world.size > 1 and holds_shards(value):
            raise RuntimeError(
                f"{type(optimizer).__name__} has sharded tensors in the entry '{name}' of its state_dict(), so it "
                "cannot be saved. Keep them in the state of their parameters, optimizer.state[parameter]."
            )
    return added


class LoadedState:
    """Loads the state that a checkpoint contains for one optimizer, such as moments and step counts.

    Use this object in three steps:

    1. Create it.
    2. Call `target` for each item of `names`, and copy this rank's saved elements into the tensor that `target`
       returns.
    3. Call `load`.

    For most optimizers, `target` returns temporary tensors, and the optimizer does not change before `load`.

    An AdamOptimizer is loaded without a second copy of the state in memory. The constructor discards the optimizer's
    present state (even if `load` is never called), loads the saved step counts and parameter groups, and allocates new
    state tensors. `target` returns these state tensors themselves, and `load` does nothing. There are two exceptions:

    * If `names` is empty, if `added` is not empty, or if hooks are registered on the optimizer's `load_state_dict`, an
      AdamOptimizer is loaded like any other optimizer. (These hooks must get the complete state.)
    * If the optimizer lacks a state tensor for an item of `names`, `target` returns temporary tensors, and `load`
      converts their values. For example, the checkpoint may contain moments in float32, while the optimizer stores
      moments in 8 bits. The present state is discarded in this case too.

    Args:
        optimizer: the optimizer. If it is a wrapper, its own `load_state_dict` is called.
        parameters: its parameters, as {name in the model: parameter}.
        names: the state tensors for which `target` will be called, as (parameter name, key). An example of a key is
            "exp_avg".
        others: the rest of the saved state, such as step counts, as {parameter name: {key: value}}.
        groups: the saved parameter groups with their settings, one for each group of the optimizer, in the same order.
            Their "params" is not used.
        added: the result of `added_entries` when the state was saved.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, Any],
        names: list[tuple[str, str]],
        others: dict[str, dict[str, Any]],
        groups: list[dict[str, Any]],
        added: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        numbers = {name: number for number, name in enumerate(parameters)}
        self._parameters, self._numbers, self._added = parameters, numbers, added
        self._optimizer: Any = unwrapped(optimizer)
        self._load = None if self._optimizer is optimizer else optimizer.load_state_dict
        # A state dict refers to parameters by index. The parameters of a group may have been in another order when they
        # were saved. So use the indices of this optimizer's parameters, and find the saved state of each by its name.
        counts = itertools.count()
        self._groups = []
        for saved, mine in zip(groups, optimizer.param_groups):
            own = {"params": [next(counts) for _ in mine["params"]]}
            if "param_names" in mine:  # keep the optimizer's own names: the saved names may be in another order
                own["param_names"] = mine["param_names"]
            settings = {key: value for key, value in saved.items() if key != "param_names"}
            self._groups.append({**settings, **own})
        self._state = {numbers[name]: dict(values) for name, values in others.items()}
        self._places: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        if names and isinstance(optimizer, AdamOptimizer) and not added and not has_load_hooks(optimizer):
            saved: dict[Any, set[str]] = {}
            for name, what in names:
                saved.setdefault(parameters[name], set()).add(what)
            for name, values in others.items():  # `others` has the whole state of parameters that are not sharded
                saved.setdefault(parameters[name], {*values} - {"step"})
            optimizer.expect_state(self._groups, saved)
            places = optimizer.allocate_state({"state": self._state, "param_groups": self._groups})
            # Read directly into the optimizer's own tensors only if it has one for every saved tensor. It lacks some in
            # two cases:
            # * The checkpoint contains another form of the state. For example, AdamOptimizer stores 8-bit moments only
            #   with `state_bits=8`. For bfloat16 weights, it stores float32 masters on CPUs, but residuals (differences
            #   between the masters and the weights) on GPUs.
            # * Other code has added tensors to the saved state, such as the slow weights of Lookahead.
            if all(what in places.get(parameters[name], ()) for name, what in names):
                self._places = places

    def target(self, name: str, what: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor into which the caller must copy this rank's elements of a saved state tensor.

        The result is the optimizer's own state tensor or a temporary tensor (see the class). Call this once for each
        item of `names`, before `load`.

        Args:
            name: the name of the parameter to which the state belongs.
            what: the key of the state, such as "exp_avg".
            dtype: the dtype in which the state was saved. A temporary tensor has this dtype. The optimizer's own tensor
                may have another; convert the saved elements to that dtype when copying them.
        """
        parameter = self._parameters[name]
        if self._places:
            return self._places[parameter][what]
        on = "cpu" if isinstance(self._optimizer, AdamOptimizer) else parameter.device
        values = torch.empty(parameter.placement.range.length, dtype=dtype, device=on)
        self._state.setdefault(self._numbers[name], {})[what] = values
        return values

    def load(self) -> None:
        """Load the saved state into the optimizer. Call this when all tensors from `target` have been filled."""
        state = {**self._added, "state": self._state, "param_groups": self._groups}
        if not isinstance(self._optimizer, AdamOptimizer):
            for values in self._state.values():
                # If AdamOptimizer saved this state, it may contain residuals (differences between float32 masters and
                # weights). This optimizer cannot use them, so drop them. AdamOptimizer also marks some of the residuals
                # by a negative sign of exp_avg_sq, which is never negative itself. So restore the positive signs.
                if values.pop("residual", None) is not None and "exp_avg_sq" in values:
                    values["exp_avg_sq"].abs_()
            # Make the optimizer's `state_dict` return full states from now on. Without this call, it would do so only
            # after the optimizer's first step.
            full_state_of(self._optimizer)
            (self._load or self._optimizer.load_state_dict)(state)
        elif not self._places:
            self._optimizer.take_state_dict(state, self._load)
