"""The context manager `gathered`, which makes full parameters available to be read or modified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ..base.arguments import expect_flag, expect_kind
from ..runtime.world import World, current_world
from .parameter import DistributedParameter
from .slots import Slot, find_slots

Wholes = dict[DistributedParameter, torch.nn.Parameter]
"""{local parameter: a copy of the full parameter}."""


@contextmanager
def gathered(what: torch.nn.Module | Iterable[torch.Tensor] | torch.Tensor, modify: bool = False) -> Iterator[Any]:
    """Context manager that makes full parameters available, to read or modify them.

    Collective: every rank must enter and leave the context. The full parameters are copies on each rank's device. All
    copies exist at the same time, so the device needs memory for all of them. They have no `.grad`, and gradients are
    disabled inside the context. If tensor parallelism splits a tensor, the copy is this rank's part of it.

    If `what` is a module, calling it or one of its submodules inside the context raises RuntimeError. So does calling
    the method `state_dict` of any of them. If the code inside the context raises an exception, nothing is written back.

    Args:
        what: a module, or one or several sharded parameters. Inside the context, all parameters of the module and its
            submodules are full.
        modify: whether to write the values back when the context ends. All ranks get rank 0's values. (If tensor
            parallelism splits a parameter, all ranks with the same part get the values of the first of these ranks.)
            The float32 masters that AdamOptimizer keeps for half-precision weights are changed so that they round to
            the new values.

    Returns:
        A context manager. It yields the module or, for one or several parameters, a list of the full parameters.

    Raises:
        TypeError: `what` is neither a module, a tensor nor an iterable, or `modify` is neither True nor False.
        ValueError: the tensor `what`, or an item of the iterable `what`, is not a sharded parameter.
        RuntimeError: in these cases, when the context ends and before anything is written:

            * Values were changed without `modify`.
            * Values of quantized weights, which are read-only, were changed.
            * A shape or dtype was changed.
            * A parameter or module was replaced, for example by resizing embeddings or tying weights, which must be
              done before `auto_wrap`.

    Example::

        with bmt.gathered(model.lm_head, modify=True):
            model.lm_head.weight.normal_(std=0.02)
    """
    world = current_world()
    wanted = "a model or sharded parameters (an ordinary tensor is full already)"
    expect_kind("what", what, (torch.nn.Module, torch.Tensor, Iterable), wanted)
    expect_flag("modify", modify)
    sharded_params: list[Any] = []
    if not isinstance(what, torch.nn.Module):
        sharded_params = [what] if isinstance(what, torch.Tensor) else list(what)
    for sharded in sharded_params:
        if not isinstance(sharded, DistributedParameter):
            raise ValueError(
                "gathered: the argument 'what' must be one module or sharded parameters (ordinary tensors are full "
                f"already), but it is or contains an object of type {type(sharded).__name__}."
            )
    occasion = f"gathered(modify={modify})"
    world.barrier(occasion)
    if isinstance(what, torch.nn.Module):
        slots = find_slots(what.modules())
        full_params = clone_full_params([slot.sharded for slot in slots])
        inside, result = _shown(what, slots, full_params), what
    else:
        full_params = clone_full_params(sharded_params)
        inside, result = nullcontext(), [full_params[sharded] for sharded in sharded_params]
    with torch.no_grad():
        with inside:
            yield result
        world.barrier(f"end of {occasion}")
        fixed = {p: full for p, full in full_params.items() if not modify or p.buffer.storage.read_only}
        _check_unchanged(world, fixed, modify)
        if modify:
            _write_back(world, {p: full for p, full in full_params.items() if p not in fixed})


def _by_buffer(sharded_params: Iterable[DistributedParameter]) -> Iterator[DistributedParameter]:
    """Yield each local (sharded) parameter once, while its full parameter is readable.

    Collective: every rank must call it. Only one flat buffer is unsharded at a time.
    """
    unique = dict.fromkeys(sharded_params)
    for buffer in dict.fromkeys(sharded.buffer for sharded in unique):
        with buffer.unsharded():
            yield from (sharded for sharded in unique if sharded.buffer is buffer)


def clone_full_params(sharded_params: Iterable[DistributedParameter]) -> Wholes:
    """Gather a copy of the full parameter of each local parameter, for code that reads or changes full parameters.

    Collective: every rank must call it. Only one flat buffer is unsharded at a time, but all copies stay in memory.

    Args:
        sharded_params: the local parameters. One that occurs several times (a tied parameter) is copied once.

    Returns:
        {local parameter: the copy of its full parameter}. The type Wholes is a dict of this form.
    """
    copies = {p: torch.nn.Parameter(p.full.detach().clone(), p.requires_grad) for p in _by_buffer(sharded_params)}
    for p, copied in copies.items():
        vars(copied).update(p.buffer.attributes[p.index])
    return copies


@contextmanager
def _shown(model: torch.nn.Module, slots: Sequence[Slot], full_params: Wholes) -> Iterator[None]:
    """Context manager that puts full parameters into the modules of `model`, which cannot be called inside the context.

    Inside it, the forward and the `state_dict` of each module raise RuntimeError. At its end, the local parameters are
    put back. If the code inside the context has replaced a parameter or module, the replacement is undone, and
    RuntimeError is raised.

    slots: the entries of modules' `_parameters` that are set to local (sharded) parameters.
    full_params: for each local parameter, the full parameter that replaces it.
    """
    modules = list(model.modules())
    hooks = [module.register_forward_pre_hook(_refuse) for module in modules]
    hooks += [module.register_state_dict_pre_hook(_refuse) for module in modules]
    for slot in slots:
        slot.show(full_params[slot.sharded])
    shown: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        shown += [(module, own, dict(own)) for own in (module._parameters, module._modules)]
    try:
        yield
        replaced = dict.fromkeys(type(module).__name__ for module, own, before in shown if _differ(own, before))
    finally:
        for hook in hooks:
            hook.remove()
        for _, own, before in shown:
            own.clear()
            own.update(before)
        for slot in slots:
            slot.show(slot.sharded)
    if replaced:
        raise RuntimeError(
            f"gathered: a parameter or module of {', '.join(replaced)} was replaced. Nothing was written back. "
            "Inside the context only values may change, not shapes, ties or layers. Resize, tie or replace before "
            "auto_wrap. For PEFT adapters, call merge_adapter() inside the context and unload() after it."
        )


def _differ(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return list(now) != list(before) or any(now[name] is not value for name, value in before.items())


def _refuse(*args: Any) -> None:
    raise RuntimeError(
        "Inside bmt.gathered the model's parameters are copies, so neither the model nor its state_dict() can be "
        "called. Call them after the `with` block. (The state dict has full tensors anyway.)"
    )


def _write_back(world: World, full_params: Wholes) -> None:
    """Write rank 0's values of the full parameters into the shards. Collective: every rank must call it.

    Raises RuntimeError, before anything is written, if a shape or dtype was changed.

    full_params: {local (sharded) parameter: a copy of the full parameter}. The user may have changed the copy.
    """
    misfits = [
        f"{tuple(sharded.full_shape)} {sharded.dtype} became {tuple(full.shape)} {full.dtype}"
        for sharded, full in full_params.items()
        if full.dtype != sharded.dtype or full.shape != sharded.full_shape
    ]
    problem = f"{', '.join(misfits)}" if misfits else None
    world.raise_everywhere(
        "gathered: nothing was written back, because shapes or dtypes changed. Change them before auto_wrap", problem
    )
    for sharded, full in full_params.items():
        values = full.detach().to(sharded.device, copy=True).contiguous()
        if values.numel():
            sharded.buffer.communicator.broadcast(values, 0).wait()
        sharded.copy_(sharded.take(values))


def _check_unchanged(world: World, full_params: Wholes, modify: bool) -> None:
    """Raise RuntimeError on every rank if any rank changed values that must not change inside `gathered`.

    Collective: every rank must call it.

    Args:
        world: all ranks.
        full_params: {local (sharded) parameter: a copy of the full parameter} of the parameters that must not change.
        modify: the argument `modify` of `gathered`. If True, all parameters in `full_params` are quantized, and the
            error says why quantized parameters cannot be written. If False, the error says to pass modify=True.
    """
    if not full_params:
        return
    changed = [p for p in _by_buffer(full_params) if not torch.equal(_bytes(full_params[p]), _bytes(p.full))]
    problem = f"shapes {', '.join(str(tuple(sharded.full_shape)) for sharded in changed)}" if changed else None
    way_out = "the context is read-only. To write, use bmt.gathered(..., modify=True)"
    if modify:
        way_out = next(iter(full_params)).buffer.storage.read_only
    world.raise_everywhere(f"gathered: parameters were changed, but the changes cannot be kept: {way_out}", problem)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements as a 1-D uint8 tensor. Comparing bytes treats identical NaNs as equal."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
