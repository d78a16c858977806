"""A gradient that knows it is a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.collectives import Communicator
from .segment_norms import SegmentNorms, measure


class GradSlice(torch.Tensor):
    """This rank's 1-D part of one parameter's gradient; a plain tensor in all that is element-wise.

    Its norm is the norm over all ranks and its found-inf flag is everyone's, so `torch.nn.utils.clip_grad_norm_`,
    `torch.amp.GradScaler` and what Trainer and Accelerate build on them are right as they stand. These reductions
    are collective: every rank calls them, in the same order. A reduction that would answer for this rank alone
    (`max`, `mean`, `any`, …) raises. What is computed element-wise from it is a GradSlice again. It is pickled as
    a plain tensor.
    """

    _lane: Communicator
    _segment: tuple[SegmentNorms, int] | None

    @classmethod
    def of(cls, values: torch.Tensor, lane: Communicator) -> GradSlice:
        """`values` (n,), which were computed from a gradient slice, as another that shares their memory and version."""
        piece = values.as_subclass(cls)
        piece._lane, piece._segment = lane, None
        return piece

    @classmethod
    def become(cls, part: Any, lane: Communicator, norms: SegmentNorms | None, index: int) -> None:
        """`part` (n,), a view that nobody else has, is a gradient slice from now on, with no second tensor made.

        norms: `part` is segment `index` of the flat gradient that these measure. What is computed from it is not.
        """
        part.__class__ = cls
        part._lane, part._segment = lane, None if norms is None else (norms, index)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        lane = _find_lane((args, kwargs))
        assert lane is not None, "a GradSlice without its lane"
        with torch._C.DisableTorchFunctionSubclass():
            collective = _COLLECTIVE.get(func)
            if collective is not None:
                return collective(lane, func, *args, **kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and func not in _PLAIN:
                if result.dim() == 0 and getattr(func, "__name__", "") not in ("__getitem__", "select"):
                    raise RuntimeError(
                        f"{getattr(func, '__name__', func)} of a gradient slice would only see the "
                        f"{args[0].numel() if isinstance(args[0], torch.Tensor) else 'few'} elements that rank "
                        f"{lane.rank} holds. Use its norm, which is global, or `.as_subclass(torch.Tensor)` "
                        "for the local value, or `parameter.gather_gradient()` for the whole gradient."
                    )
                return GradSlice.of(result, lane)
            if isinstance(result, (list, tuple)):
                sliced = [GradSlice.of(r, lane) if isinstance(r, torch.Tensor) and r.dim() else r for r in result]
                return sliced if isinstance(result, list) else tuple(sliced)
            return result


def _find_lane(values: Any) -> Communicator | None:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, GradSlice):
            return value._lane
        if isinstance(value, (tuple, list, dict)):
            lane = _find_lane(value)
            if lane is not None:
                return lane
    return None


def _norms(lane: Communicator, pieces: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The `order`-norm over all ranks of every piece. 0 for what is empty everywhere.

    2-norms of gradients as the backward left them come from SegmentNorms; the rest takes one all-reduce.
    """
    order = float(order)
    if order <= 0:
        raise ValueError(f"the norm of a gradient slice needs an order above 0 or inf, not {order}")
    segments = [getattr(piece, "_segment", None) if order == 2 else None for piece in pieces]
    measure(dict.fromkeys(segment[0] for segment in segments if segment is not None))
    others = iter(_measured_now(lane, [p for p, segment in zip(pieces, segments) if segment is None], order))
    return [next(others) if segment is None else segment[0][segment[1]] for segment in segments]


def _measured_now(lane: Communicator, pieces: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    if not pieces:
        return []
    wide = torch.float64 if any(piece.dtype == torch.float64 for piece in pieces) else torch.float32
    local = torch.stack([_local_norm(piece, order, wide) for piece in pieces])
    infinite = order == float("inf")
    total = local if infinite else local.pow_(order)
    lane.all_reduce(total, maximum=infinite).wait()
    total = total if infinite else total.pow_(1.0 / order)
    return [norm.to(piece.dtype) for norm, piece in zip(total.unbind(), pieces)]


def _local_norm(piece: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    if piece.numel() == 0:
        return torch.zeros((), dtype=dtype, device=piece.device)
    return torch.linalg.vector_norm(piece, order, dtype=dtype)


def _vector_norm(lane, func, x, ord=2, dim=None, keepdim=False, *, dtype=None, p=None, **unused):
    order = ord if p is None else p
    order = 2 if order is None or order == "fro" else order
    _refuse_dimension(dim)
    (norm,) = _norms(lane, [x], order)
    return norm if dtype is None else norm.to(dtype)


def _foreach_norm(lane, func, pieces, ord=2, dtype=None):
    return _norms(lane, pieces, ord)


def _sum(lane, func, x, dim=None, *, dtype=None, **unused):
    _refuse_dimension(dim)
    wanted = dtype or (x.dtype if x.dtype.is_floating_point else torch.int64)  # as torch.sum counts
    total = x.sum(dtype=torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted)
    lane.all_reduce(total).wait()
    return total.to(wanted)


def _data(lane, func, x):
    return GradSlice.of(x.detach(), lane)  # unlike `.data` it shares the version counter: a write is noticed


def _non_finite_check(lane, func, pieces, found_inf, inv_scale):
    func(pieces, found_inf, inv_scale)
    torch.autograd.graph.increment_version(pieces)  # the operation does not count its writes itself
    lane.all_reduce(found_inf, maximum=True).wait()


def _refuse_dimension(dim) -> None:
    if dim not in (None, 0, -1, (0,), [0]):
        raise ValueError(f"a gradient slice has one dimension; got dim={dim}")


_COLLECTIVE: dict[Callable, Callable] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _vector_norm,
    torch.Tensor.norm: _vector_norm,
    torch._foreach_norm: _foreach_norm,
    torch.sum: _sum,
    torch.Tensor.sum: _sum,
    torch._amp_foreach_non_finite_check_and_unscale_: _non_finite_check,
    torch.Tensor.data.__get__: _data,  # pyright: ignore[reportAttributeAccessIssue]
}
_PLAIN = {torch.Tensor.as_subclass}
