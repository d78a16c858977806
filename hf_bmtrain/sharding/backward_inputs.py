"""Backwards with respect to named parameters: `loss.backward(inputs=...)` and `torch.autograd.grad`."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.torch_internals import WithoutTorchFunction


def backward_to(tensors: Any, inputs: tuple, **options: Any) -> None:
    """Run `torch.autograd.backward` with respect to `inputs`, in which slices stand for their wholes. Collective.

    The slices get the mean over the ranks as their `.grad`. Others in buffers that backward passes get zero.
    """
    leaves: list[Any] = []
    for each in inputs:
        leaves += wholes_of(each) if hasattr(each, "buffer") else [each]
    if leaves:
        with WithoutTorchFunction():
            torch.autograd.backward(tensors, inputs=leaves, **options)


def wholes_of(piece: Any) -> list[torch.nn.Parameter]:
    """Return the leaves that autograd knows for a slice: its whole in a block, or those of its readers outside."""
    return [piece.whole] if piece.on_demand is None else piece.on_demand.wholes(piece.index)


def refuse_grad(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "torch.autograd.grad with respect to parameters of a sharded model would find no gradient: it is averaged over "
        "the ranks on its way to `.grad`. Call loss.backward(inputs=parameters) on every rank, and read "
        "parameter.grad (this rank's slice) or parameter.gather_gradient() (the whole)."
    )
