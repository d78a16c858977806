"""This rank's part of a gradient, with the norm of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..comm.collectives import Communicator
from ..ops.grad_norm import Segments, segmented_squared_norm
from ..ops.torch_internals import WithoutTorchFunction, amp_found_inf_and_unscale_, foreach_norm


class SegmentNorms:
    """The 2-norms over all ranks of the segments of a flat shard, by one pass and one all-reduce for all of them.

    They are cached until the shard's version counter changes; kernels that write the shard through raw pointers
    increment it. All ranks write and ask alike, so all of them measure again, or none.

    shard: (n,) float32, float16 or bfloat16. segments: of the shard; elements between the end of a segment and the next
    one are zero. squares: this rank's part of the segments' squares, (k,) float64, if the present shard has been
    measured already.
    """

    def __init__(
        self, shard: torch.Tensor, segments: Segments, communicator: Communicator, squares: torch.Tensor | None = None
    ) -> None:
        self._shard, self._segments, self.communicator = shard, segments, communicator
        self._norms: Sequence[torch.Tensor] = ()
        self._version = -1
        self._squares, self._measured = squares, shard._version

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the norm of segment `index`, a new scalar of the shard's dtype. Collective if it must be measured."""
        measure([self])
        return self._norms[index].clone()

    def local_squares(self) -> torch.Tensor:
        """Return this rank's part of the squared norms, (k,) float64."""
        if self._squares is not None and self._measured == self._shard._version:
            return self._squares
        return segmented_squared_norm(self._shard, self._segments)


def measure(norms: Iterable[SegmentNorms]) -> None:
    """Measure the stale ones again, by one all-reduce. Collective."""
    stale = [each for each in norms if each._version != each._shard._version]
    if not stale:
        return
    parts = [each.local_squares() for each in stale]
    squares = torch.cat(parts)
    stale[0].communicator.all_reduce(squares).wait()
    for each, part in zip(stale, squares.split([len(part) for part in parts])):
        each._norms = part.sqrt().to(each._shard.dtype).unbind()
        each._version = each._shard._version


class GradSlice(torch.Tensor):
    """This rank's 1-D part of one parameter's gradient. It behaves as a plain tensor in element-wise operations.

    Its norm is the norm over all ranks and its found-inf flag is that of any rank, so `torch.nn.utils.clip_grad_norm_`,
    `torch.amp.GradScaler` and what Trainer and Accelerate build on them are right without changes. These reductions
    are collective: every rank calls them, in the same order. A reduction whose result would cover this rank alone
    (`max`, `mean`, `any`, ...) raises RuntimeError. The result of an element-wise operation is a GradSlice again. It is
    pickled as a plain tensor.
    """

    _communicator: Communicator
    _segment: tuple[SegmentNorms, int] | None = None

    @classmethod
    def of(cls, values: torch.Tensor, communicator: Communicator) -> GradSlice:
        """Return `values` (n,), computed from a gradient slice, as a slice that shares their memory and version."""
        piece = values.as_subclass(cls)
        piece._communicator = communicator
        return piece

    @classmethod
    def become(cls, part: Any, communicator: Communicator, norms: SegmentNorms | None, index: int) -> None:
        """Turn `part` (n,), a view with no other reference, into a gradient slice without making a second tensor.

        norms: measure the flat gradient of which `part` is segment `index`.
        """
        part.__class__ = cls
        part._communicator, part._segment = communicator, None if norms is None else (norms, index)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        communicator = _find_communicator((args, kwargs))
        assert communicator is not None, "a GradSlice without its communicator"
        with WithoutTorchFunction():
            collective = _COLLECTIVE.get(func)
            if collective is not None:
                return collective(communicator, func, *args, **kwargs)
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and func is not torch.Tensor.as_subclass:
                if result.dim() == 0 and getattr(func, "__name__", "") not in ("__getitem__", "select"):
                    raise RuntimeError(
                        f"{getattr(func, '__name__', func)} of a gradient slice would only see the "
                        f"{args[0].numel() if isinstance(args[0], torch.Tensor) else 'few'} elements that rank "
                        f"{communicator.rank} holds. Use its norm, which is global, or `.as_subclass(torch.Tensor)` "
                        "for the local value, or `parameter.gather_gradient()` for the whole gradient."
                    )
                return GradSlice.of(result, communicator)
            if isinstance(result, (list, tuple)):
                each = [GradSlice.of(r, communicator) if isinstance(r, torch.Tensor) and r.dim() else r for r in result]
                return each if isinstance(result, list) else tuple(each)
            return result


def _find_communicator(values: Any) -> Communicator | None:
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, GradSlice):
            return value._communicator
        if isinstance(value, (tuple, list, dict)):
            communicator = _find_communicator(value)
            if communicator is not None:
                return communicator
    return None


def _norms(communicator: Communicator, pieces: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the `order`-norm over all ranks of every piece; 0 for one that is empty on all of them.

    2-norms of gradients as the backward left them come from SegmentNorms; the others take one all-reduce.
    """
    order = float(order)
    if order <= 0:
        raise ValueError(f"the norm of a gradient slice needs an order above 0 or inf, not {order}")
    segments = [getattr(piece, "_segment", None) if order == 2 else None for piece in pieces]
    measure(dict.fromkeys(segment[0] for segment in segments if segment is not None))
    others = iter(_measured_now(communicator, [p for p, segment in zip(pieces, segments) if segment is None], order))
    return [next(others) if segment is None else segment[0][segment[1]] for segment in segments]


def _measured_now(communicator: Communicator, pieces: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    if not pieces:
        return []
    real = [piece.dtype.to_real() for piece in pieces]
    wide = torch.float64 if torch.float64 in real else torch.float32
    total = torch.zeros(len(pieces), dtype=wide, device=pieces[0].device)
    for norm, piece in zip(total, pieces):
        if piece.numel():
            torch.linalg.vector_norm(piece.abs() if piece.is_complex() else piece, order, dtype=wide, out=norm)
    infinite = order == float("inf")
    total = total if infinite else total.pow_(order)
    communicator.all_reduce(total, maximum=infinite).wait()
    total = total if infinite else total.pow_(1.0 / order)
    return [norm.to(dtype) for norm, dtype in zip(total.unbind(), real)]


def _vector_norm(communicator, func, x, ord=2, dim=None, keepdim=False, *, dtype=None, p=None, **unused):
    order = ord if p is None else p
    order = 2 if order is None or order == "fro" else order
    _refuse_dimension(dim)
    (norm,) = _norms(communicator, [x], order)
    return norm if dtype is None else norm.to(dtype)


def _foreach_norm(communicator, func, pieces, ord=2, dtype=None):
    return _norms(communicator, pieces, ord)


def _sum(communicator, func, x, dim=None, *, dtype=None, **unused):
    _refuse_dimension(dim)
    wanted = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)  # as torch.sum counts
    total = x.sum(dtype=torch.promote_types(wanted, torch.float32) if wanted.is_floating_point else wanted)
    communicator.all_reduce(total).wait()
    return total.to(wanted)


def _data(communicator, func, x):
    return GradSlice.of(x.detach(), communicator)  # unlike `.data` it shares the version counter: a write is noticed


def _non_finite_check(communicator, func, pieces, found_inf, inv_scale):
    func(pieces, found_inf, inv_scale)
    torch.autograd.graph.increment_version(pieces)  # the operation does not count its writes itself
    communicator.all_reduce(found_inf, maximum=True).wait()


def _refuse_dimension(dim) -> None:
    if dim not in (None, 0, -1, (0,), [0]):
        raise ValueError(f"a gradient slice has one dimension; got dim={dim}")


_COLLECTIVE: dict[Callable, Callable] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _vector_norm,
    torch.Tensor.norm: _vector_norm,
    foreach_norm: _foreach_norm,
    torch.sum: _sum,
    torch.Tensor.sum: _sum,
    amp_found_inf_and_unscale_: _non_finite_check,
    torch.Tensor.data.__get__: _data,  # pyright: ignore[reportAttributeAccessIssue]
}
