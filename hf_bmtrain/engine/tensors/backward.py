"""Backwards with respect to named parameters: `loss.backward(inputs=...)` and `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..base.torch_internals import WithoutTorchFunction


def backward_to(tensors: Any, inputs: tuple, **options: Any) -> None:
    """Run `torch.autograd.backward` with respect to `inputs`, in which slices stand for their wholes. Collective.

    The slices get the mean over the ranks as their `.grad`. Others in buffers that backward passes get zero.
    """
    leaves: list[Any] = []
    for each in inputs:
        leaves += each.autograd_leaves() if hasattr(each, "autograd_leaves") else [each]
    if leaves:
        with WithoutTorchFunction():
            torch.autograd.backward(tensors, inputs=leaves, **options)


def refuse_grad(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "torch.autograd.grad with respect to parameters of a sharded model would find no gradient: it is averaged over "
        "the ranks on its way to `.grad`. Call loss.backward(inputs=parameters) on every rank, and read "
        "parameter.grad (this rank's slice) or parameter.gather_gradient() (the whole)."
    )


def double_backward() -> RuntimeError:
    """Return the error of a backward that autograd records."""
    return RuntimeError(
        "A backward of a backward (create_graph=True) through a sharded model is not supported: its weights are "
        "gathered for one backward only. Compute gradient penalties on a model that is not wrapped."
    )


def _ask_inputs(backward: Callable[..., None]) -> Callable[..., None]:
    """Return `backward` with slices among its inputs handled as in `backward_to`."""

    @wraps(backward)
    def backward_with_local(tensors, grad_tensors=None, *args: Any, inputs=None, **options: Any) -> None:
        named = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs or ())
        if not any(hasattr(each, "autograd_leaves") for each in named):
            return backward(tensors, grad_tensors, *args, inputs=inputs, **options)
        options |= dict(zip(("retain_graph", "create_graph"), args))
        return backward_to(tensors, inputs=named, grad_tensors=grad_tensors, **options)

    return backward_with_local


if torch.__version__ < "2.11":  # torch asks the class of the tensors for an override, but not that of the inputs
    torch.autograd.backward = _ask_inputs(torch.autograd.backward)
