"""Values from files for a model on the meta device, before it is sharded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..engine.runtime.world import World
from ..engine.sharding.parameter import DistributedParameter
from ..engine.sharding.sourced import SourcedParameter, divide_unless_mapped_everywhere
from .store import read_state

Named = dict[int, tuple[torch.Tensor, list[str]]]
"""Tensors of a model by id, each with its names."""


def fill_from(model: Any, weights: str | os.PathLike, world: World) -> None:
    """Fill the parameters and buffers of a model with the values in files. Collective.

    Each rank maps the files and reads its part of each parameter, in the model's dtype. Weights that a Hugging Face
    model ties are tied first, and its `_init_weights` computes the buffers that are not in files.

    Args:
        model: the model, on the meta device, not sharded.
        weights: a folder or file, as `auto_wrap` takes it.
        world: the ranks.

    Raises:
        RuntimeError: on every rank, if one cannot read, if a tensor has no value, or if names or shapes differ.
    """
    problem = None
    try:
        if any(isinstance(parameter, DistributedParameter) for parameter in model.parameters()):
            raise ValueError("it is sharded already: bmt.load(model, weights) loads into it")
        if callable(getattr(model, "tie_weights", None)):
            model.tie_weights()  # accelerate.init_empty_weights unties them
        state = read_state(Path(weights), (world.rank, world.size))
        parameters, buffers = _named(model, False), _named(model, True)
        _compute_buffers(model, model)
        _check(parameters, buffers, model, state)
        _put(model, parameters, buffers, state, world)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    world.raise_everywhere(f"auto_wrap: {type(model).__name__} could not be filled from weights={weights}", problem)
    scattered = {name: p for name, p in model.named_parameters() if isinstance(p, SourcedParameter)}
    divide_unless_mapped_everywhere(scattered, world)


def _named(model: torch.nn.Module, of_buffers: bool) -> Named:
    """Return the parameters or the persistent buffers by id, with all their names in a state dict."""
    found: Named = {}
    for module, prefix in _modules(model):
        tensors: Mapping[str, Any] = module._buffers if of_buffers else module._parameters
        for name, tensor in tensors.items():
            if tensor is not None and not (of_buffers and name in module._non_persistent_buffers_set):
                found.setdefault(id(tensor), (tensor, []))[1].append(prefix + name)
    return found


def _modules(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    for name, module in model.named_modules(remove_duplicate=False):
        yield module, f"{name}." if name else ""


def _check(parameters: Named, buffers: Named, model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless each tensor on the meta device has one value, and each value a tensor of its shape."""
    entries = [*parameters.values(), *buffers.values()]
    known = {name for _, names in entries for name in names}
    missing = [names[0] for tensor, names in entries if tensor.is_meta and not any(name in state for name in names)]
    unexpected = [name for name in state if name not in known]
    if missing or unexpected:
        raise ValueError(
            f"missing {len(missing)} ({', '.join(missing[:5])}), unexpected {len(unexpected)} "
            f"({', '.join(unexpected[:5])}). Names must be those of state_dict(); bmt.hf.from_pretrained converts "
            "others. What the files lack, such as a new head, needs values of its own before auto_wrap"
        )
    for tensor, names in entries:
        present = [name for name in names if name in state]
        for name in present:
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, in the model {tuple(tensor.shape)}")
            if name != present[0] and not torch.equal(state[name], state[present[0]]):
                raise ValueError(f"{present[0]} and {name} are tied in the model, and differ in the files")
    empty = [
        prefix + name
        for module, prefix in _modules(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    ]
    if empty:
        raise ValueError(
            f"{len(empty)} buffers are on the meta device, and in no file because they are not persistent "
            f"({', '.join(empty[:5])}): give them values, or make the model under accelerate.init_empty_weights(), "
            "which leaves buffers as they are"
        )


@torch.no_grad()
def _put(
    model: torch.nn.Module, parameters: Named, buffers: Named, state: Mapping[str, torch.Tensor], world: World
) -> None:
    """Put sharded parameters and buffers with the values of `state` into the modules; tied ones stay tied."""
    filled: dict[int, torch.Tensor] = {}
    for key, (tensor, names) in [*parameters.items(), *buffers.items()]:
        name = next((name for name in names if name in state), None)
        if name is None:
            continue
        if key in parameters:
            made: Any = SourcedParameter.scatter(state[name], world.rank, world.size, tensor.dtype)
            made.requires_grad_(tensor.requires_grad)
            made.__dict__.update({**tensor.__dict__, **made.__dict__})
        else:
            made = state[name].to(tensor.dtype, copy=True)
        filled[key] = made
    for module, _ in _modules(model):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if id(tensor) in filled:
                setattr(module, name, filled[id(tensor)])


@torch.no_grad()
def _compute_buffers(module: Any, owner: Any) -> None:
    """Let `_init_weights` of the innermost Hugging Face model around a module compute its buffers that are in no file.

    Buffers that it does not write stay on the meta device. Parameters are initialized only if they have no values.
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
        tensor._is_hf_initialized = True  # transformers' functions of initialisation leave such tensors
    module._buffers.update(empty)
    try:
        owner._init_weights(module)
    finally:
        for tensor in kept:
            del tensor._is_hf_initialized
        for name, buffer in empty.items():
            if module._buffers[name] is buffer and not buffer._version:
                module._buffers[name] = before[name]
