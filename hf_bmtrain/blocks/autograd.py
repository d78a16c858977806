"""Boundaries around the forward of sharded layers for autograd, and autocast without its cache.

The boundaries are identity functions that call back when backward reaches the layers and when it has left them.
`enter_backward` is applied to the outputs: its backward runs once all their gradients exist, before any node of the
layers. `leave_backward` is applied to the inputs: its backward runs once all their gradients exist, after the nodes
that made them. By then the gradients of the layers' weights are complete as well: autograd's engine runs, of the nodes
that are ready, those that accumulate gradients first and then the one that was made last.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..ops.torch_internals import functorch_transforms_active, pytree

_ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
"""Types of values that hold no tensors."""


class _EnterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, before: Callable[[Any], None], token: Any, *outputs: torch.Tensor):
        ctx.before, ctx.token = before, token
        ctx.set_materialize_grads(False)
        # detach() and not the tensor itself: an input returned as it is becomes a view that may not be modified.
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "A backward of a backward (create_graph=True) through a sharded model is not supported: its weights "
                "are gathered for one backward only. Compute gradient penalties on a model that is not wrapped."
            )
        ctx.before(ctx.token)
        return None, None, *gradients


class _LeaveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, after: Callable[[], None], *inputs: torch.Tensor):
        ctx.after = after
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.after()
        return None, *gradients


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)` without its search for functorch's wrappers, which takes half of its time.

    Under a transform of functorch torch's own call raises; torch.compile supports only the usual call.
    """
    if torch.compiler.is_compiling() or functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


def enter_backward(before: Callable[[Any], None], token: Any, outputs: Any) -> tuple[Any, bool]:
    """Return `outputs` (any pytree) with its differentiable tensors behind the boundary, and True if there are any.

    before: called with `token` before the layers' backward. Raises RuntimeError if an object that pytree cannot open
    holds differentiable tensors.
    """
    found: list[torch.Tensor] = []
    strange: list[Any] = []
    _find((outputs,), found, strange)
    for leaf in strange:
        attributes = getattr(leaf, "__dict__", {}).values()
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in attributes):
            raise RuntimeError(
                f"The forward of a sharded layer or model returned a {type(leaf).__name__}, whose tensors cannot be "
                "found. Return tensors, tuples, dicts or a transformers ModelOutput, or register the class with "
                "torch.export.register_dataclass."
            )
    if not found:
        return outputs, False
    return _replace(outputs, iter(_apply(_EnterBackward, before, token, *found))), True


def leave_backward(after: Callable[[], None], args: tuple, kwargs: dict) -> tuple[tuple, dict, Sequence[torch.Tensor]]:
    """Return `args` and `kwargs` (pytrees) behind the boundary, and the differentiable tensors in them.

    after: called when the gradients of all these tensors exist; never, if there are none.
    """
    found: list[torch.Tensor] = []
    _find(args, found, [])
    in_args = len(found)
    _find(kwargs.values(), found, [])
    if not found:
        return args, kwargs, found
    guarded = _apply(_LeaveBackward, after, *found)
    ahead = iter(guarded)
    if in_args:
        args = _replace(args, ahead)
    if len(found) > in_args:
        kwargs = _replace(kwargs, ahead)
    return args, kwargs, guarded


def _find(values: Iterable[Any], found: list[torch.Tensor], strange: list[Any]) -> None:
    """Add the differentiable tensors in `values`, in the order of `_replace`, and leaves of unusual types.

    The usual containers are searched here, several times faster than by pytree, which searches the others.
    """
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found.append(value)
        elif kind is tuple or kind is list:
            _find(value, found, strange)
        elif kind is dict:
            _find(value.values(), found, strange)
        elif kind not in _ATOMS:
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    if leaf.requires_grad:
                        found.append(leaf)
                elif isinstance(leaf, dict):  # of a class that pytree does not know
                    _find(leaf.values(), found, strange)
                else:
                    strange.append(leaf)


def _replace(value: Any, guarded: Iterator[torch.Tensor]) -> Any:
    """Return a copy of `value` in which the tensors of `_find` are replaced by the next ones of `guarded`."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return next(guarded) if value.requires_grad else value
    if kind is tuple:
        return tuple([_replace(item, guarded) for item in value])
    if kind is list:
        return [_replace(item, guarded) for item in value]
    if kind is dict:
        return {key: _replace(item, guarded) for key, item in value.items()}
    if kind in _ATOMS:
        return value
    leaves, spec = pytree.tree_flatten(value)
    if isinstance(value, dict) and leaves and leaves[0] is value:
        result = copy.copy(value)
        for key, item in value.items():
            result[key] = _replace(item, guarded)
        return result
    leaves = [_replace(leaf, guarded) if isinstance(leaf, (torch.Tensor, dict)) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec)


def uncached_autocast() -> AbstractContextManager:
    """Return the caller's autocast without its cache of casts.

    The cache is keyed by the whole parameter, which is the same object every step: a refilled block would compute
    with the casts of old weights, and the casts of all blocks would stay alive.
    """
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
    return nullcontext()
