"""The norm of gradients over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm.collectives import Communicator
from ..ops.grad_norm import accumulate_squared_norm
from ..ops.torch_internals import foreach_norm
from ..sharding.parameter import DistributedParameter
from .runs import Run, neighbours


def global_norm(
    parameters: Sequence[Any], order: float, communicator: Communicator, device: torch.device
) -> torch.Tensor:
    """Return the norm of the parameters' `.grad`s over all ranks: a scalar on `device`, inf or NaN if an element is.

    The 2-norm reads every gradient once, a flat range at a time, or not at all if its reduction has measured it; it
    adds squares in float64 and is a float64. Other orders are computed by torch in float32. One scalar is all-reduced.
    Ordinary parameters count once, not once per rank. ValueError unless order > 0.
    """
    if order <= 0:
        raise ValueError(f"norm_type must be positive or inf, not {order}")
    infinite = order == float("inf")
    add = _squares if order == 2 else _powers
    sliced = add([p for p in parameters if isinstance(p, DistributedParameter)], order, device)
    communicator.all_reduce(sliced, maximum=infinite).wait()
    own = add([p for p in parameters if not isinstance(p, DistributedParameter)], order, device)
    total = torch.maximum(sliced, own) if infinite else sliced.add_(own)
    return total[0] if infinite else total[0].pow(1.0 / order)


def _squares(parameters: list, order: float, device: torch.device) -> torch.Tensor:
    """Σg² of all elements, float64 (2,); the second element is `accumulate_squared_norm`'s flag."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    measured = []
    for members in neighbours(parameters):
        squares = _measured(members)
        if squares is not None:
            measured.append(squares)
            continue
        for flat in _flat(members):
            if flat.dtype == torch.float64:
                total[0] += torch.dot(flat, flat)
            else:
                accumulate_squared_norm(flat, total)
    if measured:
        total[0] += torch.cat(measured).sum()
    return total


def _measured(members: list) -> torch.Tensor | None:
    """The sums of squares of neighbouring slices' gradients, (k,) float64; None if no reduction has measured them."""
    if not isinstance(members[0], DistributedParameter):
        return None
    return members[0].buffer.gradient.squares([piece.index for piece in members])


def _powers(parameters: list, order: float, device: torch.device) -> torch.Tensor:
    """Σ|g|^order of all elements (their maximum for inf), float32 (1,)."""
    filled = [flat for members in neighbours(parameters) for flat in _flat(members) if flat.numel()]
    if not filled:
        return torch.zeros(1, dtype=torch.float32, device=device)
    norms = torch.stack(foreach_norm(filled, order, dtype=torch.float32))
    return norms.max().reshape(1) if order == float("inf") else norms.pow(order).sum().reshape(1)


def _flat(members: list) -> list[torch.Tensor]:
    """1-D tensors that hold every element of neighbouring parameters' `.grad`s once, and zeros; as few as possible."""
    flat = Run.over(members).flat_gradient() if isinstance(members[0], DistributedParameter) else None
    if flat is not None:
        return [flat]
    return [p.grad.as_subclass(torch.Tensor).reshape(-1) for p in members if p.grad is not None]
