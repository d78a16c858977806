"""A place in a module where a sharded parameter stands."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.schedule import Step
from .buffer import DistributedParameter, ShardedBuffer


@dataclass(frozen=True)
class Slot:
    """`module.name` holds parameter `index` of `buffer`; tied parameters have several slots."""

    module: torch.nn.Module
    name: str
    buffer: ShardedBuffer
    index: int

    def place(self) -> tuple[dict, str, torch.nn.Parameter, DistributedParameter]:
        """The module's dict, the name in it, and what stands there: whole or slice. For those who swap every layer."""
        return (
            self.module._parameters,
            self.name,
            self.buffer.wholes[self.index],
            self.buffer.slices[self.index],
        )

    def show_whole(self) -> None:
        self.module._parameters[self.name] = self.buffer.wholes[self.index]

    def show_slice(self) -> None:
        self.module._parameters[self.name] = self.buffer.slices[self.index]

    def hide(self) -> None:
        self.module._parameters[self.name] = None


def slice_loads(slots: Iterable[Slot]) -> None:
    """From now on a state dict that is loaded into the slots' modules gives each its part."""
    by_module: dict[torch.nn.Module, list[Slot]] = {}
    for slot in slots:
        by_module.setdefault(slot.module, []).append(slot)
    for module, own in by_module.items():
        module.register_load_state_dict_pre_hook(functools.partial(_slice_on_load, own))


def _slice_on_load(slots, module, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
    slice_entries(slots, state_dict, prefix, metadata, errors)


Place = tuple[torch.nn.Module, str, torch.nn.Parameter]


def find_places(modules: Iterable[torch.nn.Module]) -> list[Place]:
    """Every (module, name, parameter) that the modules own themselves."""
    return [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def shard_places(step: Step, places: Sequence[Place], device: torch.device) -> tuple[list[ShardedBuffer], list[Slot]]:
    """Move the parameters of `places` into flat buffers, alike in dtype and requires_grad, and leave slices there.

    A parameter met twice is stored once. Collective; one group of whole parameters is held at a time. The old
    parameters are marked `sharded_elsewhere`: an optimizer that still holds them would train nothing.
    """
    groups: dict[tuple[torch.dtype, bool], dict[int, torch.nn.Parameter]] = {}
    for _, _, parameter in places:
        groups.setdefault((parameter.dtype, parameter.requires_grad), {})[id(parameter)] = parameter
    where: dict[int, tuple[ShardedBuffer, int]] = {}
    buffers = []
    for parameters in groups.values():
        buffer = ShardedBuffer(step, [_whole(p) for p in parameters.values()], device)
        buffers.append(buffer)
        where.update({key: (buffer, index) for index, key in enumerate(parameters)})
        for parameter in parameters.values():
            note: Any = parameter
            note.sharded_elsewhere = True  # for an optimizer that still holds it
    slots = [Slot(module, name, *where[id(parameter)]) for module, name, parameter in places]
    for slot in slots:
        slot.show_slice()
    return buffers, slots


def _whole(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """`parameter` itself, or the whole of one that was sharded before."""
    if not isinstance(parameter, DistributedParameter):
        return parameter
    whole: Any = torch.nn.Parameter(parameter.gather(), requires_grad=parameter.requires_grad)
    whole.init_method, whole.group = parameter.init_method, parameter.group
    return whole


@contextmanager
def hidden(slots: Sequence[Slot], convert) -> Iterator[None]:
    """Keep the slices out of `module.to(…)` and its kin: `convert` may not move or cast them."""
    for slot in slots:
        piece = slot.buffer.slices[slot.index]
        probe = torch.empty(0, dtype=piece.dtype, device=piece.device)
        converted = convert(probe)
        if converted.dtype != probe.dtype or converted.device != probe.device:
            raise RuntimeError(
                f"A sharded model cannot be moved or cast ({probe.dtype} on {probe.device} to {converted.dtype} on "
                f"{converted.device}): its slices would lose their place in the flat buffers. Cast the model "
                "before auto_wrap; it is moved to the rank's device by auto_wrap."
            )
    for slot in slots:
        slot.hide()
    try:
        yield
    finally:
        for slot in slots:
            slot.show_slice()


class StateDict(OrderedDict):
    """The result of a collective `state_dict`, while it is made: remembers copies, so that ties stay ties.

    keep: False on a rank that takes part but wants no values; it gets empty tensors.
    """

    def __init__(self, keep: bool = True) -> None:
        super().__init__()
        self._metadata = OrderedDict()
        self.keep = keep
        self.copies: dict[torch.nn.Parameter, torch.Tensor] = {}

    def plain(self) -> OrderedDict:
        result = OrderedDict(self)
        result._metadata = self._metadata  # pyright: ignore[reportAttributeAccessIssue]
        return result


def copy_wholes(destination, slots: Sequence[Slot], collect) -> None:
    """Run `collect`, which fills `destination` from the slots' modules, with whole parameters; keep CPU copies.

    Collective. destination: a StateDict, or a plain dict of torch's own when a plain module is the root.
    """
    wholes = {slot.buffer.wholes[slot.index] for slot in slots}
    with ExitStack() as stack:
        for buffer in dict.fromkeys(slot.buffer for slot in slots):
            stack.enter_context(buffer.whole_now())
        for slot in slots:
            stack.callback(slot.show_slice)
            slot.show_whole()
        collect()
        copies, keep = getattr(destination, "copies", {}), getattr(destination, "keep", True)
        for key, value in destination.items():
            if isinstance(value, torch.nn.Parameter) and value in wholes:
                if value not in copies:
                    copies[value] = value.detach().to("cpu", copy=True) if keep else torch.empty(0)
                destination[key] = copies[value]


class _Part(torch.Tensor):
    """This rank's part of an entry of a state dict that is being loaded."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]


def slice_entries(slots: Sequence[Slot], state_dict: dict, prefix: str, metadata: dict, errors: list[str]) -> None:
    """Replace the whole tensors of `state_dict` that belong to `slots` by this rank's part, for loading in place.

    A module may be asked twice, for its block and for itself (a DistributedModule in a block): parts stay parts.
    """
    for buffer in dict.fromkeys(slot.buffer for slot in slots):
        buffer.prepare_write()
    for slot in slots:
        key = prefix + slot.name
        if key not in state_dict or isinstance(state_dict[key], _Part):
            continue
        if metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace the slices of a sharded model: use assign=False, "
                "which copies into them."
            )
        piece = slot.buffer.slices[slot.index]
        try:
            part = piece.take(state_dict[key])
        except ValueError as error:
            errors.append(f"{key}: {error}. Is this the state dict of another model?")
            part = piece.detach()
        state_dict[key] = part.as_subclass(_Part)
