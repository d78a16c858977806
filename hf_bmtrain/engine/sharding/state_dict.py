"""Save sharded models as state dicts of full tensors, and load this rank's elements from such state dicts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch

from ..comm.agreement import fingerprint
from ..runtime.world import current_world
from ..tensors.tensor import ShardBase
from .slots import Slot, find_slots


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` that contains only the first element along each expanded dimension.

    An expanded dimension (from `torch.Tensor.expand`) has stride 0: all its elements are in the same memory. Torch
    refuses to write to such a tensor, but can write to this view. Without expanded dimensions, the view has the same
    elements as `tensor`.
    """
    return tensor[tuple([slice(1 if stride == 0 else None) for stride in tensor.stride()])]


class StateDict(OrderedDict):
    """A state dict that is filled with copies of full tensors on the CPU. Tied weights share one copy.

    All ranks fill their StateDicts at the same time, because the full tensors are all-gathered.

    Args:
        keep: whether this rank keeps the values. If not, this rank takes part in the all-gathers, but stores empty
            tensors.

    Attributes:
        copies: the tensors that `copy_to_cpu` has returned, as {source: tensor}.
    """

    def __init__(self, keep: bool = True) -> None:
        super().__init__()
        self._metadata = OrderedDict()
        self._keep = keep
        self.copies: dict[Hashable, torch.Tensor] = {}

    def copy_to_cpu(self, source: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of `value` on the CPU, or an empty tensor if this rank does not keep the values.

        source: a key that identifies the memory of `value`. Later calls with the same key return the same tensor, so
            that tied weights stay tied.
        """
        if source not in self.copies:
            self.copies[source] = (
                value.detach().to("cpu", copy=True) if self._keep else torch.empty(0, dtype=torch.float32, device="cpu")
            )
        return self.copies[source]

    def on_cpu(self) -> OrderedDict:
        """Return the entries as copies on the CPU, in a plain OrderedDict. Tied entries share one copy.

        Called once, when the state dict is complete.
        """
        made = {id(copy) for copy in self.copies.values()}
        for key, value in self.items():
            if isinstance(value, torch.Tensor) and id(value) not in made:
                place: Hashable = (id(value),)  # sparse tensors have no single address
                if value.layout is torch.strided:
                    place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
                self[key] = self.copy_to_cpu(place, value) if value.numel() else value.detach().cpu()
        return self.plain()

    def plain(self) -> OrderedDict:
        result = OrderedDict(self)
        result._metadata = self._metadata  # pyright: ignore[reportAttributeAccessIssue]
        return result


def copy_full_params(destination, slots: Sequence[Slot], collect) -> None:
    """Fill a state dict with full tensors, as copies on the CPU. `state_dict` of a sharded module calls this function.

    First the flat buffers are all-gathered, and the modules get full parameters. Next `collect` puts these parameters
    into the state dict, where they are then replaced by copies on the CPU. At the end, the modules have local
    parameters again. Collective: every rank must call it.

    Args:
        destination: the state dict that `collect` fills: a StateDict, or another dict, for example if `state_dict` was
            called on a module that is not sharded but contains sharded modules.
        slots: the entries of modules' `_parameters` that are set to the sharded parameters to save.
        collect: a function without arguments that puts the parameters that the modules contain into `destination`.
    """
    full_params = {slot.full: slot.sharded for slot in slots}
    with ExitStack() as stack:
        for buffer in dict.fromkeys(slot.sharded.buffer for slot in slots):
            stack.enter_context(buffer.unsharded())
        for slot in slots:
            stack.callback(slot.show, slot.sharded)
            slot.show(slot.full)
        collect()
        copies = destination if isinstance(destination, StateDict) else StateDict()
        for key, value in destination.items():
            if isinstance(value, torch.nn.Parameter) and value in full_params:
                sharded = full_params[value]
                storage = sharded.buffer.storage
                whole = value if value in copies.copies else storage.whole(sharded.index, value)
                destination[key] = copies.copy_to_cpu(value, whole)


def gather_state_dict(model: torch.nn.Module, keep: bool) -> OrderedDict:
    """Return a copy of the full state dict of `model` on the CPU, in which tied weights share memory.

    Called before full weights are written to a file, for example by `bmt.save`. Collective: every rank must call it,
    even if only rank 0 writes the file.

    keep: whether this rank keeps the values. If not, this rank takes part in the collectives, but the tensors in the
        returned state dict are empty.
    """
    destination = StateDict(keep)
    # Call the `state_dict` of the model's class. When Trainer saves a model, hf/staging.py may have replaced the
    # `state_dict` of the instance by a function that returns weights which were gathered earlier.
    type(model).state_dict(model, destination=destination)
    return destination.on_cpu()


def check_full_tensors(model: torch.nn.Module, state: Mapping[str, object]) -> None:
    """Raise RuntimeError unless all ranks are about to load the same full tensors. Collective: every rank must call it.

    The names, shapes, dtypes and hashes of parameters are compared. Entries for modules' buffers (`register_buffer`)
    are not compared, because they may differ between the ranks. Nor are sharded tensors, because each rank has
    different elements of them.

    Args:
        model: the sharded model.
        state: the state dict that this rank has passed to `model.load_state_dict`. A mapping that is not a dict is not
            checked.
    """
    world = current_world()
    # A DistributedStateDictWrapper (in bmt.store) is a mapping, but not a dict. It needs no check, because all ranks
    # read rank 0's values from it.
    if world.size == 1 or not isinstance(state, dict):
        return
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    facts = {
        f"'{name}'": f"{tuple(value.shape)} {value.dtype} {fingerprint(value)}"
        for name, value in sorted(state.items(), key=lambda item: str(item[0]))
        if name in names and isinstance(value, torch.Tensor) and not isinstance(value, ShardBase)
    }
    world.check_same_on_all_ranks("load_state_dict", facts)


def shard_on_load(
    module: torch.nn.Module,
    state_dict: dict,
    prefix: str,
    metadata: dict,
    strict,
    missing,
    unexpected,
    errors: list[str],
) -> None:
    """Replace full tensors of the module's parameters in `state_dict` by this rank's elements, which torch then loads.

    Collective: every rank must call it. This is a load_state_dict pre-hook. It runs twice if both the module itself and
    its block have registered it; the second run changes nothing. Raises RuntimeError if `load_state_dict` was called
    with assign=True.

    prefix: the module's name in front of its parameters' names in `state_dict`, such as "layers.0.".
    metadata: torch's metadata of the module. It contains the argument `assign` of `load_state_dict`.
    strict, missing, unexpected: torch passes them to every hook. They are not used.
    errors: a list to which a message is appended for each value whose shape does not match its parameter. torch raises
        one error with all messages.
    """
    slots = find_slots([module])
    for buffer in dict.fromkeys(slot.sharded.buffer for slot in slots):
        buffer.prepare_write()
    for slot in slots:
        key = prefix + slot.name
        if key not in state_dict or isinstance(state_dict[key], ShardBase):
            continue
        if metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) would replace sharded parameters, of which each rank stores only a part, "
                "by full tensors. Use assign=False, which copies this rank's part."
            )
        try:
            state_dict[key] = slot.sharded.take_whole(state_dict[key])
        except ValueError as error:
            errors.append(f"{key}: {error}. Check that this state dict belongs to this model.")
            state_dict[key] = slot.sharded.detach()


def follow_state_dicts(layer: torch.nn.Module, slots: Iterable[Slot]) -> None:
    """Register hooks on modules with sharded parameters, so that they save full tensors, and load from full tensors.

    Called when `layer` becomes a block, and when parameters were added to the block. `state_dict()` of such a module
    then returns full tensors. `load_state_dict` takes full tensors, of which each rank copies its own elements.

    Args:
        layer: a module. It and all modules inside it get the hooks.
        slots: the entries of modules' `_parameters` that are set to sharded parameters. Modules without such an entry
            get no hooks.
    """
    filled = {id(slot.parameters) for slot in slots}
    for module in layer.modules():
        if id(module._parameters) in filled:
            module.register_load_state_dict_pre_hook(shard_on_load)
            module.register_state_dict_post_hook(_gather_on_save)


def _gather_on_save(module, state_dict, prefix, metadata) -> None:
    """Replace sharded parameters in `state_dict` by full tensors on the CPU. Collective: every rank must call it.

    This is a state_dict post-hook of the modules inside a block, for users that call such a module's own `state_dict`.
    During `state_dict` of the block or the model, the modules contain full parameters, so nothing is done.

    prefix: the module's name in front of its parameters' names in `state_dict`, such as "layers.0.".
    metadata: torch passes it to every hook. It is not used.
    """
    slots = find_slots([module])
    if slots:
        current_world().barrier("state_dict")
    for slot in slots:
        if prefix + slot.name in state_dict:
            state_dict[prefix + slot.name] = slot.sharded.gather_all().cpu()
