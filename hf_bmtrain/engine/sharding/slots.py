"""Move parameters into flat buffers, and keep track of their entries in modules' `_parameters` (class `Slot`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..comm.reduce import Reduction
from ..runtime.world import World
from .buffer import ShardedBuffer
from .parameter import DistributedParameter
from .sourced import SourcedParameter
from .storage import PLAIN, StorageKind


class Slot(NamedTuple):
    """An entry of a module's `_parameters`. It is set to the full parameter when needed, else to the local parameter.

    The local parameter contains only this rank's elements. A parameter that several modules share has several slots.

    Attributes:
        parameters: the module's `_parameters`.
        name: the key of the entry.
        full: the full parameter.
        sharded: the local parameter.
    """

    parameters: dict[str, Any]  # not the module: if the module refers to the slot, this would be a reference cycle
    name: str
    full: torch.nn.Parameter
    sharded: DistributedParameter

    def show(self, parameter: torch.nn.Parameter | None) -> None:
        self.parameters[self.name] = parameter


Place = tuple[torch.nn.Module, str, torch.nn.Parameter]


def find_places(modules: Iterable[torch.nn.Module]) -> list[Place]:
    """List the parameters of these modules, without those of their submodules, for example to pass to `shard_places`.

    Returns (module, name, parameter) for each entry of a module's `_parameters` that is not None. A parameter that
    several of the modules share occurs several times.
    """
    return [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def buffers_of(model: torch.nn.Module) -> list[ShardedBuffer]:
    """Return the flat buffers of a sharded model, in the order of `model.parameters()`."""
    return list(dict.fromkeys(p.buffer for p in model.parameters() if isinstance(p, DistributedParameter)))


def find_slots(modules: Iterable[torch.nn.Module]) -> list[Slot]:
    """Return a Slot for each local (sharded) parameter of these modules, without those of their submodules.

    A Slot is an entry of a module's `_parameters` that can be set to the local or the full parameter.
    """
    return [
        Slot(module._parameters, name, parameter.full, parameter)
        for module, name, parameter in find_places(modules)
        if isinstance(parameter, DistributedParameter)
    ]


def tensor_facts(model: torch.nn.Module) -> dict[str, str]:
    """Describe the class, parameters and buffers (`register_buffer`) of `model`, to compare them between ranks.

    Returns {name: description}, for `World.check_same_on_all_ranks`. The descriptions must be equal on all ranks.
    """
    facts: dict[str, str] = {"class": type(model).__qualname__}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        told = [str(tuple(parameter.shape)), str(parameter.dtype), f"requires_grad={parameter.requires_grad}"]
        if first.setdefault(id(parameter), name) != name:
            told.append(f"tied to '{first[id(parameter)]}'")
        if isinstance(parameter, DistributedParameter):
            told.append("sharded already")
        if isinstance(parameter, SourcedParameter):
            told.append(parameter.fingerprint)
        facts[f"parameter '{name}'"] = " ".join(told)
    for name, buffer in model.named_buffers():
        facts[f"buffer '{name}'"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return facts


def shard_places(
    world: World,
    places: Sequence[Place],
    reduction: Reduction,
    kind_of: Callable[[torch.nn.Parameter], StorageKind | None] = lambda parameter: None,
    separate: Set[int] = frozenset(),
) -> tuple[list[ShardedBuffer], list[Slot]]:
    """Move parameters into flat buffers, and replace them in their modules by local parameters.

    Collective: every rank must call it. Parameters share a buffer if they have the same dtype, `requires_grad` and
    storage kind (plain, quantized, …). There are two deviations from this rule:

    * The parameters in `separate` share buffers only with each other.
    * Plain parameters may share a buffer with parameters of another kind that accepts them (`StorageKind.takes`).

    Tied parameters are stored once. The old parameters get the attribute `sharded_elsewhere`: an optimizer that still
    has them would train nothing, so code that receives such an optimizer can raise an error.

    Args:
        world: the ranks over which the parameters are sharded. A storage kind may choose fewer (`StorageKind.share`).
        places: (module, name, parameter) of each entry of a module's `_parameters` to be set to a local parameter.
        reduction: averages the gradients over the ranks, unless a storage kind chooses another reduction.
        kind_of: a function that takes a parameter, and returns its storage kind or None. If None, the storage kind is
            the parameter's attribute `storage_kind`, or PLAIN if there is no such attribute. By default, the function
            always returns None.
        separate: the `id(parameter)` of each parameter that must not share a buffer with the others, for example
            because adapters are to have flat buffers of their own.

    Returns:
        The buffers, and the slots (the module entries, now set to local parameters) in the order of `places`.
    """
    groups: dict[_Group, dict[int, torch.nn.Parameter]] = {}
    for _, _, parameter in places:
        kind = kind_of(parameter) or getattr(parameter, "storage_kind", PLAIN)
        key = _Group(parameter.dtype, parameter.requires_grad, id(parameter) in separate, kind)
        groups.setdefault(key, {})[id(parameter)] = parameter
    small = {key: _join_small(groups, key) for key in [*groups] if key.kind != PLAIN}
    slices: dict[int, DistributedParameter] = {}
    for key, parameters in groups.items():
        full_params = [_full(parameter) for parameter in parameters.values()]
        ranks, mean = key.kind.share(world, reduction)
        buffer = ShardedBuffer(ranks, full_params, mean, key.kind.make(full_params, small.get(key, 0)))
        slices.update(zip(parameters, buffer.make_local(key.kind.parameter_class or DistributedParameter, full_params)))
        del full_params
        for parameter in parameters.values():
            note: Any = parameter
            note.sharded_elsewhere = True
    slots = []
    for module, name, parameter in places:
        sharded = module._parameters[name] = slices[id(parameter)]
        slots.append(Slot(module._parameters, name, sharded.buffer.full_params[sharded.index], sharded))
    return list(dict.fromkeys(sharded.buffer for sharded in slices.values())), slots


class _Group(NamedTuple):
    """The properties in which parameters must agree to share a flat buffer."""

    dtype: torch.dtype
    requires_grad: bool
    separate: bool
    kind: StorageKind


def _join_small(groups: dict[_Group, dict[int, torch.nn.Parameter]], key: _Group) -> int:
    """Move plain parameters (stored as they are) into a group of another storage kind, if this kind accepts them.

    Each group becomes one flat buffer with its own all-gather, so this saves an all-gather. For example, norms and
    biases can share a buffer with weights that are gathered in 8 bits. The moved parameters agree with `key` in dtype,
    `requires_grad` and `separate`. They are put at the start of the group `key`.

    groups: for each group, its parameters as {id(parameter): parameter}. Changed in place.
    key: the group that gets the parameters. Its storage kind is not PLAIN.

    Returns:
        The number of moved parameters.
    """
    plain = key._replace(kind=PLAIN)
    others = groups.get(plain, {})
    if not others or not key.kind.takes([*others.values()], [*groups[key].values()]):
        return 0
    groups[key] = groups.pop(plain) | groups[key]
    return len(others)


def _full(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a full copy of `parameter` if it is sharded, otherwise `parameter` itself. Collective if it is sharded."""
    if not isinstance(parameter, DistributedParameter):
        return parameter
    full: Any = torch.nn.Parameter(parameter.gather(), requires_grad=parameter.requires_grad)
    vars(full).update(parameter.buffer.attributes[parameter.index])
    parameter.mark(full)
    return full


@contextmanager
def hidden(slots: Sequence[Slot], convert) -> Iterator[None]:
    """Context manager that hides sharded parameters from `module._apply(convert)`, so that they are not converted.

    `Module.to`, `half`, `cuda` and other methods call `_apply`, which would move the parameters to new memory, but a
    shard never moves. Inside the context the slots are None. At its end they are set to the local (sharded) parameters
    again, even if the body has raised an error.

    Args:
        slots: the entries of modules' `_parameters` that are set to local parameters.
        convert: the function that `_apply` applies to every tensor.

    Raises:
        RuntimeError: when the context is entered, if `convert` would change the dtype or device of a local parameter.
            This is tried on empty tensors, before any slot is changed.
    """
    for slot in slots:
        probe = torch.empty(0, dtype=slot.sharded.dtype, device=slot.sharded.device)
        converted = convert(probe)
        if converted.dtype != probe.dtype or converted.device != probe.device:
            raise RuntimeError(
                f"A sharded model cannot be moved or cast ({probe.dtype} on {probe.device} to {converted.dtype} on "
                f"{converted.device}), because each rank keeps its part of the weights in fixed memory. Cast the "
                "model before auto_wrap, which moves it to the rank's device."
            )
    for slot in slots:
        slot.show(None)
    try:
        yield
    finally:
        for slot in slots:
            slot.show(slot.sharded)
