"""Reductions of each sharded tensor to one number over all ranks, such as a norm or sum, without gathering elements.

Each function in REDUCTIONS takes the arguments of the torch function that it replaces. It is collective: every rank
must call it. In two cases, the function returns NotImplemented without communicating, and the caller gathers the full
tensors:

* The function would need the full tensors, for example for a sum over one dimension.
* The caller passed an argument by an alternative name that torch accepts, such as `axis` instead of `dim`. (The
  parameter `others` collects such arguments.)

If tensor parallelism splits a tensor into parts, the norm of a part is the norm of the tensor before the split. The sum
and mean of a part include only the elements of this part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.torch_internals import amp_found_inf_and_unscale_, foreach_norm
from ..comm.communicator import all_reduce_largest
from .norms import norms_of, note_clipping


def _is_local(value: Any) -> bool:
    """Return whether `value` is a sharded tensor."""
    return getattr(value, "placement", None) is not None


def _norms(pieces: Sequence[Any], order: Any) -> list[torch.Tensor]:
    """Return the norm of order `order` of each of `pieces` over all ranks. Collective: every rank must call it.

    The 2-norms of gradients that a backward has stored in `.grad` are computed for all tensors of a flat buffer at
    once, and cached. All other norms are computed with one further all-reduce in total, and not cached.

    Raises ValueError if `order` is not greater than 0.

    pieces: sharded tensors.
    order: a number greater than 0, or inf.
    """
    order = float(order)
    if order <= 0:
        raise ValueError(f"The order of the norm of a sharded tensor must be greater than 0 (or inf), but is {order}.")
    # A gradient's attribute `segment` is a pair: a function that returns the SegmentNorms of the flat buffer, and the
    # gradient's index in this buffer. The list `segments` has the function's result in place of the function.
    found = [getattr(piece, "segment", None) if order == 2 else None for piece in pieces]
    segments = [None if segment is None else (segment[0](), segment[1]) for segment in found]
    buffers = dict.fromkeys(segment[0] for segment in segments if segment is not None)
    norms = norms_of([*buffers]) if buffers else {}
    others = iter(_measured_now([p for p, segment in zip(pieces, segments) if segment is None], order))
    return [next(others) if segment is None else norms[segment[0]][segment[1]] for segment in segments]


def _measured_now(pieces: Sequence[Any], order: float) -> list[torch.Tensor]:
    if not pieces:
        return []
    note_clipping(pieces[0].placement.norms.collective_log)
    real = [torch.promote_types(piece.dtype.to_real(), torch.float32) for piece in pieces]
    wide = torch.float64 if torch.float64 in real else torch.float32
    total = torch.zeros(len(pieces), dtype=wide, device=pieces[0].device)
    for norm, piece in zip(total, pieces):
        piece.settle()
        if piece.numel():
            torch.linalg.vector_norm(piece.abs() if piece.is_complex() else piece, order, dtype=wide, out=norm)
    communicator = pieces[0].placement.norms
    if order == float("inf"):
        all_reduce_largest(communicator, total)
    else:
        communicator.all_reduce(total.pow_(order)).wait()
        total.pow_(1.0 / order)
    return [norm.to(dtype) for norm, dtype in zip(total.unbind(), real)]


def _vector_norm(x: Any = None, ord: Any = 2, dim=None, keepdim=False, *, dtype=None, p=None, out=None, **others):
    order = ord if p is None else p
    order = 2 if order is None or order == "fro" else order
    if dim is not None or keepdim or others or isinstance(order, str) or not _is_local(x):
        return NotImplemented
    (norm,) = _norms([x], order)
    return norm if dtype is None else norm.to(dtype)


def _linalg_norm(x: Any = None, ord: Any = None, dim=None, keepdim=False, *, dtype=None, **others):
    if ord is not None and (others or len(x.full_shape) != 1):
        return NotImplemented  # with several dimensions, this would be a matrix norm, which needs the full tensor
    return _vector_norm(x, ord, dim, keepdim, dtype=dtype, **others)


def _foreach_norm(pieces, ord=2, dtype=None):
    slices = iter(_norms([piece for piece in pieces if _is_local(piece)], ord))
    norms = [next(slices) if _is_local(p) else torch.linalg.vector_norm(p, ord) for p in pieces]
    return norms if dtype is None else [norm.to(dtype) for norm in norms]


def _sum(x: Any = None, dim=None, keepdim=False, *, dtype=None, **others):
    if dim is not None or keepdim or others or not _is_local(x):
        return NotImplemented
    wanted = dtype or (x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64)
    return _add_up(x, x, wanted)


def _mean(x: Any = None, dim=None, keepdim=False, *, dtype=None, **others):
    if dim is not None or keepdim or others or not _is_local(x):
        return NotImplemented
    wanted = dtype or x.dtype
    if not wanted.is_floating_point:
        return NotImplemented
    return (_add_up(x, x, torch.promote_types(wanted, torch.float32)) / x.placement.numel).to(wanted)


def _dot(x: Any = None, y: Any = None, **others):
    slices = not others and _is_local(x) and _is_local(y) and x.placement.matches(y.placement)
    if not slices or len(x.full_shape) != 1 or not x.dtype.is_floating_point:
        return NotImplemented
    wide = torch.promote_types(x.dtype, torch.float32)
    x.settle()
    y.settle()
    return _add_up(x, x.to(wide) * y.to(wide), x.dtype)


def _add_up(x: Any, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the elements of `part` over all ranks that store elements of `x`.

    Collective: every rank must call it.

    x: the sharded tensor whose communicator does the all-reduce.
    part: this rank's numbers, computed from its elements of `x`.
    dtype: the dtype of the result. Floating-point numbers are added in float32, or in `dtype` if it is wider.
    """
    x.settle()
    total = part.sum(dtype=torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype)
    total = total.as_subclass(torch.Tensor)
    x.placement.communicator.all_reduce(total).wait()
    return total.to(dtype)


def _non_finite_check(pieces, found_inf, inv_scale):
    amp_found_inf_and_unscale_(pieces, found_inf, inv_scale)
    torch.autograd.graph.increment_version(pieces)  # torch has written to `pieces` without incrementing their versions
    slices = [piece for piece in pieces if _is_local(piece)]
    slices[0].placement.norms.all_reduce(found_inf, maximum=True).wait()


REDUCTIONS: dict[Callable, Callable] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _vector_norm,
    torch.Tensor.norm: _vector_norm,
    foreach_norm: _foreach_norm,
    torch.sum: _sum,
    torch.Tensor.sum: _sum,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    torch.dot: _dot,
    torch.Tensor.dot: _dot,
    amp_found_inf_and_unscale_: _non_finite_check,
}
