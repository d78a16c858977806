"""The state dict of a sharded model: save whole tensors, load this rank's parts of them."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from ..ops.torch_internals import no_torch_function
from .slots import Slot


class StateDict(OrderedDict):
    """The result of a collective `state_dict` under construction. It remembers copies, so that tied weights stay tied.

    keep: False on a rank that participates without keeping values; it gets empty tensors.
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
    """Run `collect`, which fills `destination` from the slots' modules, with whole parameters; store CPU copies.

    Collective. destination: a StateDict, or a dict of torch's own when a plain module is the root.
    """
    wholes = {slot.piece.whole for slot in slots}
    with ExitStack() as stack:
        for buffer in dict.fromkeys(slot.piece.buffer for slot in slots):
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


def gather_state_dict(model: torch.nn.Module, keep: bool) -> OrderedDict:
    """Return the whole state dict of `model` on the CPU, in new memory, tied weights tied. Collective.

    keep: if False, this rank participates and gets the keys, with empty tensors.
    """
    destination = StateDict(keep)
    type(model).state_dict(model, destination=destination)  # not a state_dict set on the instance
    made = {id(copy) for copy in destination.copies.values()}
    copies: dict[tuple, torch.Tensor] = {}
    for key, value in destination.items():
        if isinstance(value, torch.Tensor) and id(value) not in made:
            place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if place not in copies:
                copies[place] = value.detach().to("cpu", copy=True) if keep else torch.empty(0)
            destination[key] = copies[place] if value.numel() else value.detach().cpu()
    return destination.plain()


class _Part(torch.Tensor):
    """This rank's part of an entry of a state dict that is being loaded."""

    __torch_function__ = no_torch_function


def slice_entries(slots: Sequence[Slot], state_dict: dict, prefix: str, metadata: dict, errors: list[str]) -> None:
    """Replace the whole tensors of `state_dict` that belong to `slots` by this rank's part, to be loaded in place.

    It may run twice for a module (a DistributedModule inside a block); entries that are parts already stay as they are.
    """
    for buffer in dict.fromkeys(slot.piece.buffer for slot in slots):
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
        try:
            part = slot.piece.take(state_dict[key])
        except ValueError as error:
            errors.append(f"{key}: {error}. Is this the state dict of another model?")
            part = slot.piece.detach()
        state_dict[key] = part.as_subclass(_Part)


def slice_loads(layer: torch.nn.Module, slots: Iterable[Slot]) -> None:
    """Register hooks on the modules of `layer` that cut a state dict being loaded to this rank's parts of `slots`."""
    own: dict[int, list[Slot]] = defaultdict(list)
    for slot in slots:
        own[id(slot.parameters)].append(slot)
    for module in layer.modules():
        if id(module._parameters) in own:
            module.register_load_state_dict_pre_hook(functools.partial(_slice_on_load, own[id(module._parameters)]))


def _slice_on_load(slots, module, state_dict, prefix, metadata, strict, missing, unexpected, errors) -> None:
    slice_entries(slots, state_dict, prefix, metadata, errors)
