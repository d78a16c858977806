"""The tensors of a checkpoint: those of a model and of its optimizers, and this rank's part of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.base.arguments import expect_kind, expect_module, expect_path
from ..engine.base.torch_internals import WithoutTorchFunction
from ..engine.optim.adam import AdamOptimizer
from ..engine.optim.manager import OptimManager
from ..engine.optim.state import check_keys, divide_state
from ..engine.runtime.world import World
from ..engine.sharding.parameter import DistributedParameter, is_read_only
from ..engine.tensors.tensor import ShardBase
from .header import TensorSpec


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        first: the element of the full tensor at which this rank's part begins.
        part: 1-D, this rank's part. If `sharded` is False, every rank has the full tensor. It may share the tensor's
            memory, or be a copy of one that is not contiguous.
    """

    spec: TensorSpec
    first: int
    part: torch.Tensor
    sharded: bool


MODEL, TRAINED = "model", "trained"
"""The names of the files of a model, without their endings: of all its tensors, or of what is trained."""


def model_entries(model: torch.nn.Module, chosen: Callable[[str, Any], bool] | None = None) -> list[Entry]:
    """Return the entries of a model's state dict, a tied weight under the first of its names. Not collective.

    Args:
        model: the model.
        chosen: which parameters to take, by name and parameter, in addition to all buffers. None takes all.

    Raises:
        ValueError: `chosen` is None, and a weight is quantized.
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
    """Return whether a parameter is trained, or was: PEFT freezes an adapter that is not active."""
    return parameter.requires_grad or (isinstance(parameter, DistributedParameter) and parameter.trained)


def refuse_quantized(model: torch.nn.Module) -> None:
    """Raise ValueError if a weight is quantized: quantized weights are not saved in checkpoints."""
    if any(is_read_only(parameter) for parameter in model.parameters()):
        raise ValueError(
            "a model with quantized weights is saved and resumed by what is trained: save_state(..., "
            "trained_only=True). bmt.save(model, file) writes all of it, the quantized weights as they are unpacked."
        )


def named_persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, buffer) for the buffers that a state dict contains, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def _of_parameter(name: str, parameter: torch.Tensor, values: torch.Tensor) -> Entry:
    """Return the entry of `values`, which are laid out like `parameter`."""
    if not isinstance(parameter, DistributedParameter):
        return _full(name, values)
    part = values.part if isinstance(values, ShardBase) else values
    spec = TensorSpec(name, part.dtype, tuple(parameter.full_shape))
    return Entry(spec, parameter.placement.range.tensor_start, part.detach().reshape(-1), True)


def _full(name: str, tensor: torch.Tensor) -> Entry:
    part = tensor.detach().reshape(-1)
    return Entry(TensorSpec(name, tensor.dtype, tuple(tensor.shape)), 0, part, False)


# -- optimizers -----------------------------------------------------------------------------------------------------


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of an OptimManager, of a sequence or of None, or the one that was given."""
    if given is None:
        return []
    if isinstance(given, OptimManager):
        return list(given.optimizers)
    return list(given) if isinstance(given, Iterable) else [given]


def check_arguments(folder: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Raise TypeError or ValueError for an argument of `save_state` or `load_state` that is not what they document."""
    expect_path("folder", folder)
    expect_module("model", model)
    for each in optimizers_of(optimizer):
        expect_kind("optimizer", each, torch.optim.Optimizer, "an OptimManager, an optimizer, several or None")
    for each in schedulers_of(scheduler):
        if isinstance(each, (torch.nn.Module, type)) or not callable(getattr(each, "load_state_dict", None)):
            raise TypeError(f"scheduler must be one or several objects with a state_dict, or None, got {each!r:.80}")


def schedulers_of(given: Any) -> list[Any]:
    """Return the schedulers of a sequence or of None, or the one that was given."""
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def file_base(number: int) -> str:
    """Return the name of the files of optimizer `number`, without its ending."""
    return "optimizer" if number == 0 else f"optimizer{number + 1}"


def named(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Return the optimizer's parameters by their names in `model`, in its order. Raises ValueError for another's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    mine = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [tuple(parameter.shape) for parameter in mine if parameter not in names]
    if strangers:
        raise ValueError(
            f"{type(optimizer).__name__} updates {len(strangers)} parameters that are not the model's, of shapes "
            f"{', '.join(map(str, strangers[:5]))}: pass the module that holds all that it updates."
        )
    return {names[parameter]: parameter for parameter in mine}


def groups_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups with the names of their parameters."""
    names = {parameter: name for name, parameter in named(optimizer, model).items()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def check_groups(kind: str, saved: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless parameter groups, with the names of their parameters, have the same ones."""
    theirs, own = ([sorted(group["params"]) for group in groups] for groups in (saved, mine))
    if theirs != own:
        counts = [", ".join(str(len(names)) for names in groups) for groups in (theirs, own)]
        raise ValueError(
            f"its {kind} has parameter groups of {counts[0]} parameters, this one of {counts[1]}, or of others: make "
            "the optimizer with the same groups"
        )


def optimizer_entries(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, world: World
) -> tuple[list[Entry], dict[str, dict[str, Any]]]:
    """Return the entries `<parameter>.<name>` of the state that has its parameter's layout, and all other state.
    Collective.

    All other state (step counts and the like) is copied to the CPU, by the parameter's name. Raises RuntimeError for
    state that is neither.
    """
    parameters = named(optimizer, model)
    check_keys(optimizer, optimizer.state)
    state: dict[Any, dict[str, Any]] = dict(optimizer.state)
    if isinstance(optimizer, AdamOptimizer):
        state = optimizer.stored_state()
    with WithoutTorchFunction():
        held = {name: state[parameter] for name, parameter in parameters.items() if parameter in state}
    sharded, others = divide_state(parameters, held, world)
    for name, values in others.items():
        for key, value in values.items():
            if _holds_local(value):
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps '{key}' of {name}, which is not laid out like a parameter: its "
                    "state cannot be saved in parts. Save optimizer.state_dict() of each rank with torch.save."
                )
    entries = [_of_parameter(f"{name}.{key}", parameters[name], held[name][key]) for key, name in sharded]
    return sorted(entries, key=lambda entry: entry.spec.name), others


def _holds_local(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(map(_holds_local, value))
    return isinstance(value, ShardBase)


class LoadedState:
    """The state of an optimizer that is being loaded. Constructing one for an AdamOptimizer discards its present state.

    Args:
        optimizer: the optimizer.
        parameters: its parameters, as `named` returns them.
        names: (parameter, name) of the tensors that `target` is asked for.
        others: all other state, by the parameter's name.
        groups: parameter groups as they were saved, in the order of the optimizer's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, Any],
        names: list[tuple[str, str]],
        others: dict[str, dict[str, Any]],
        groups: list[dict[str, Any]],
    ) -> None:
        numbers = {name: number for number, name in enumerate(parameters)}
        self._optimizer, self._parameters, self._numbers = optimizer, parameters, numbers
        # Parameters may be in another order in a group than they were: state goes by their names.
        counts = itertools.count()
        self._groups = []
        for saved, mine in zip(groups, optimizer.param_groups):
            own = {"params": [next(counts) for _ in mine["params"]]}
            if "param_names" in mine:  # torch's, in the order of its parameters
                own["param_names"] = mine["param_names"]
            settings = {key: value for key, value in saved.items() if key != "param_names"}
            self._groups.append({**settings, **own})
        self._state = {numbers[name]: dict(values) for name, values in others.items()}
        self._places: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        if names and isinstance(optimizer, AdamOptimizer):
            places = optimizer.allocate_state({"state": self._state, "param_groups": self._groups})
            if all(what in places.get(parameters[name], ()) for name, what in names):
                self._places = places  # else masters were saved in the form of another device

    def target(self, name: str, what: str, dtype: torch.dtype) -> torch.Tensor:
        """Return 1-D memory for this rank's part of a tensor that is stored as `dtype`."""
        parameter = self._parameters[name]
        if self._places:
            return self._places[parameter][what]
        on = "cpu" if isinstance(self._optimizer, AdamOptimizer) else parameter.device
        values = torch.empty(parameter.placement.range.length, dtype=dtype, device=on)
        self._state.setdefault(self._numbers[name], {})[what] = values
        return values

    def load(self) -> None:
        """Load the values that were written to the targets."""
        state = {"state": self._state, "param_groups": self._groups}
        if not isinstance(self._optimizer, AdamOptimizer):
            self._optimizer.load_state_dict(state)
        elif not self._places:
            self._optimizer.take_state_dict(state)
