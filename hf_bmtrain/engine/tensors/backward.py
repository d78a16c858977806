"""Support `loss.backward(inputs=...)` for sharded parameters, and refuse `torch.autograd.grad` for them."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from ..base.torch_internals import WithoutTorchFunction

_backward = torch.autograd.backward  # torch's own function, which the end of this module replaces before torch 2.11


def backward_to(tensors: Any, inputs: tuple | None, **options: Any) -> None:
    """Run `torch.autograd.backward` with respect to `inputs`, which may include sharded parameters.

    Called instead of `torch.autograd.backward`, also by `loss.backward(inputs=...)`, if sharded parameters are among
    `inputs` or `tensors`. Collective: every rank must call it. The gradient of each sharded parameter in `inputs` is
    averaged over the ranks and accumulated into its `.grad`. The `.grad` of parameters that are not in `inputs` does
    not change.

    Args:
        tensors: the tensor or tensors to differentiate, such as the loss.
        inputs: the tensors whose `.grad` receives gradients; None if they were not passed.
        **options: other arguments of `torch.autograd.backward`.

    Raises:
        RuntimeError: `inputs` is None, so a sharded parameter is among `tensors`, which is not supported.
    """
    if inputs is None:
        raise RuntimeError(
            "torch.autograd.backward cannot start at a sharded parameter, which stores only this rank's elements. "
            "Compute a loss from the parameter, and call loss.backward()."
        )
    leaves: list[Any] = []
    for each in inputs:
        leaves += each.autograd_leaves() if hasattr(each, "autograd_leaves") else [each]
    if leaves:
        with WithoutTorchFunction():
            _backward(tensors, inputs=leaves, **options)


def refuse_grad(*args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError, because `torch.autograd.grad` would find no gradients of sharded parameters.

    Called instead of `torch.autograd.grad` if sharded tensors are among its inputs or outputs.

    *args, **kwargs: the arguments of `torch.autograd.grad`, which are ignored.
    """
    raise RuntimeError(
        "torch.autograd.grad would find no gradient for parameters of a sharded model, because their gradients are "
        "averaged over the ranks and then stored in `.grad`. Call loss.backward(inputs=parameters) on every rank, and "
        "read parameter.grad (this rank's elements) or parameter.gather_gradient() (the full gradient)."
    )


def double_backward() -> RuntimeError:
    """Create the RuntimeError that autograd functions raise if their backward runs with `create_graph=True`."""
    return RuntimeError(
        "A sharded model does not support double backward (create_graph=True), because the full weights are freed "
        "after the first backward. Compute gradient penalties on a model that is not wrapped."
    )


def _listed(tensors: Any) -> tuple:
    return (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)


@wraps(_backward)
def _backward_with_sharded(tensors, grad_tensors=None, *args: Any, inputs=None, **options: Any) -> None:
    """Replacement of `torch.autograd.backward` in torch before 2.11. `inputs` may include sharded parameters."""
    if inputs is None and any(hasattr(each, "autograd_leaves") for each in _listed(tensors)):
        return backward_to(tensors, None)
    named = () if inputs is None else _listed(inputs)
    if not any(hasattr(each, "autograd_leaves") for each in named):
        return _backward(tensors, grad_tensors, *args, inputs=inputs, **options)
    options |= dict(zip(("retain_graph", "create_graph"), args))
    return backward_to(tensors, inputs=named, grad_tensors=grad_tensors, **options)


if torch.__version__ < "2.11":  # older versions ignore `__torch_function__` of the argument `inputs`
    torch.autograd.backward = _backward_with_sharded
