"""Load values from files into a model on the meta device, before the model is sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..engine.runtime.world import World
from ..engine.sharding.parameter import DistributedParameter
from ..engine.sharding.sourced import SourcedParameter, divide_unless_mapped_everywhere
from .entries import Named, by_tensor, named_persistent_buffers
from .store import read_state


def fill_from(model: Any, weights: str | os.PathLike, world: World) -> None:
    """Replace a model's parameters and buffers by values from files, before the model is sharded.

    Collective: every rank must call it. `auto_wrap` calls it if its argument `weights` is given, so that a model too
    large for one rank can be created on the meta device and loaded here.

    How much of the files a rank reads depends on their format:

    * Safetensors files, and files of torch.save in its present format (zip), are mapped into memory. Of each parameter,
      a rank reads its own elements, and up to 192 others for a hash by which the ranks compare their values. If the
      files have checksums, each rank verifies some of the tensors, and reads these completely.
    * Other files are read completely, but each rank keeps only its own elements.

    All values are cast to the dtypes of the model. For a Hugging Face model, `tie_weights` is called first. The model's
    non-persistent buffers on the meta device, which no file contains, are computed by its method `_init_weights`.

    Args:
        model: the model, not yet sharded. Every tensor on the meta device must get a value. Any other tensor keeps its
            values if the files lack them.
        weights: a file, a folder with Hugging Face weights, or the `.index.json` in it.
        world: the ranks that train together. Each parameter will be divided among the ranks of `world.shard_group`.

    Raises:
        RuntimeError: on every rank, if the model is already sharded.
        RuntimeError: on every rank, if a rank cannot read the files.
        RuntimeError: on every rank, if a tensor on the meta device gets no value, if the files have names or shapes
            that do not match the model, or if they have different values for tied tensors.
    """
    with world.raising_everywhere(f"auto_wrap: {type(model).__name__} could not be loaded from weights={weights}"):
        if any(isinstance(parameter, DistributedParameter) for parameter in model.parameters()):
            raise ValueError("the model is already sharded. Load the weights with bmt.load(model, weights)")
        if callable(getattr(model, "tie_weights", None)):
            model.tie_weights()  # accelerate.init_empty_weights, in which the model may have been made, unties weights
        state = read_state(Path(weights), (world.rank, world.size))
        parameters = by_tensor(model.named_parameters(remove_duplicate=False))
        buffers = by_tensor(named_persistent_buffers(model, remove_duplicate=False))
        _compute_buffers(model, model)
        _check(parameters, buffers, model, state)
        _put(model, parameters, buffers, state, world)
    divide_unless_mapped_everywhere(model, world)


def _check(parameters: Named, buffers: Named, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `state`, the values in the files, fits the model's tensors in names and shapes.

    Each tensor on the meta device needs a value, and each value must belong to a tensor. If the files contain several
    values for tied tensors, these must be equal. Non-persistent buffers must already have values, because no file
    contains them.

    parameters: the model's parameters, as {id(tensor): (tensor, all its names in the state dict)}.
    buffers: its persistent buffers, in the same form.
    model: the model.
    state: the values in the files, by name.
    """
    entries = [*parameters.values(), *buffers.values()]
    known = {name for _, names in entries for name in names}
    missing = [names[0] for tensor, names in entries if tensor.is_meta and not any(name in state for name in names)]
    unexpected = [name for name in state if name not in known]
    if missing or unexpected:
        differences = []
        if missing:
            differences.append(f"lack {len(missing)} tensors of the model ({', '.join(missing[:5])})")
        if unexpected:
            which = "others" if missing else "tensors that are not in the model"
            differences.append(f"have {len(unexpected)} {which} ({', '.join(unexpected[:5])})")
        raise ValueError(
            f"the files {', and '.join(differences)}. The names in the files must be those of state_dict(); "
            "bmt.hf.from_pretrained converts other names. Initialize tensors that the files lack, such as a new head, "
            "before auto_wrap"
        )
    for tensor, names in entries:
        present = [name for name in names if name in state]
        for name in present:
            if state[name].shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(state[name].shape)} in the files, but {tuple(tensor.shape)} in the "
                    "model. Create the model with the configuration that belongs to these files"
                )
            if name != present[0] and not torch.equal(state[name], state[present[0]]):
                raise ValueError(
                    f"{present[0]} and {name} are tied in the model, but differ in the files. Create the model untied "
                    "(tie_word_embeddings=False), or remove one of the two from the files"
                )
    empty = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if empty:
        raise ValueError(
            f"{len(empty)} buffers on the meta device have no values, because they are not persistent, so no file "
            f"contains them ({', '.join(empty[:5])}). Give them values, or create the model under "
            "accelerate.init_empty_weights(), which does not put buffers on the meta device"
        )


@torch.no_grad()
def _put(
    model: torch.nn.Module, parameters: Named, buffers: Named, state: Mapping[str, torch.Tensor], world: World
) -> None:
    """Replace a model's parameters and buffers by the values in `state`. Tied tensors stay tied.

    The new parameters are `SourcedParameter`s, which refer to the memory-mapped files or contain only this rank's share
    of the values. When the model is sharded later, they are replaced by sharded parameters.

    parameters: the model's parameters, as {id(tensor): (tensor, all its names in the state dict)}.
    buffers: its persistent buffers, in the same form.
    state: the new values by name. Tensors without a new value are not replaced.
    world: the ranks that train together. Each parameter will be divided among the ranks of `world.shard_group`.
    """
    filled: dict[int, torch.Tensor] = {}
    for key, (tensor, names) in [*parameters.items(), *buffers.items()]:
        name = next((name for name in names if name in state), None)
        if name is None:
            continue
        if key in parameters:
            group = world.shard_group
            made: Any = SourcedParameter.scatter(state[name], group.rank, group.size, tensor.dtype)
            made.requires_grad_(tensor.requires_grad)
            made.__dict__.update({**tensor.__dict__, **made.__dict__})
        else:
            made = state[name].to(tensor.dtype, copy=True)
        filled[key] = made
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if id(tensor) in filled:
                setattr(module, name, filled[id(tensor)])


@torch.no_grad()
def _compute_buffers(module: Any, owner: Any) -> None:
    """Compute the values of non-persistent meta buffers in `module` and its children, by calling `_init_weights`.

    `_init_weights` is a method of Hugging Face models that initializes the module passed to it. Each module is passed
    to the method of the innermost Hugging Face model that contains the module. Buffers that the method does not write
    stay on the meta device, and tensors that already have values keep them.

    owner: the innermost Hugging Face model that contains `module`, or the root module if there is none.
    """
    owner = module if callable(getattr(module, "_init_weights", None)) else owner
    for child in module.children():
        _compute_buffers(child, owner)
    empty = {
        name: torch.empty_like(buffer, device="cpu")
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    }
    if not empty or not callable(getattr(owner, "_init_weights", None)):
        return
    kept = [tensor for tensor in [*module._parameters.values(), *module._buffers.values()] if tensor is not None]
    kept = [tensor for tensor in kept if not tensor.is_meta and not hasattr(tensor, "_is_hf_initialized")]
    before = {**module._buffers}
    for tensor in kept:
        tensor._is_hf_initialized = True  # transformers' init functions skip tensors with this mark
    module._buffers.update(empty)
    try:
        owner._init_weights(module)
    finally:
        for tensor in kept:
            del tensor._is_hf_initialized
        for name, buffer in empty.items():
            if module._buffers[name] is buffer and not buffer._version:
                module._buffers[name] = before[name]
