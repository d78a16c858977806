"""Products with the two narrow matrices of an adapter, A and B, of which r rows or columns count as nothing.

*Rounded* factors are of the dtype that is computed in. u = x Aᵀ is of it too, s enters with B.

*Split* factors stand for float32 matrices in products of bfloat16 matrices, whose sums are in float32. P = hi + lo with
hi = bf16(P) and lo = bf16(P - hi), which leaves 2⁻¹⁷ of P. The factor of P, A or Bᵀ, has four times as many rows: those
of hi, lo, hi and hi. The first three give s x [hi, lo, hi]ᵀ = [p, q, p] in float32. With lo(p) = bf16(p - hi(p))

    u = [lo(p), hi(p), hi(q), hi(p)]        is kept,
    u [hi, lo, hi, hi]                      is u times P but for what is below 2⁻¹⁷, as one product,

and since the first three quarters of u sum to s x Aᵀ, gradients are the sum of three products with them. So y and dx
are as exact as PEFT's in float32, and dA and dB are to 2⁻¹⁷ of their norm (measured: 4.5e-6; PEFT 4e-7; one rounding to
bfloat16 1.7e-3).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.base.torch_internals import autocast_type

_OFFERED = "dtype_out" in torch.ops.aten.addmm.overloads()  # since torch 2.8


class Adapter(NamedTuple):
    """How one adapter is computed with.

    scaling: by which its product is multiplied, dropout's factor included. rate: of dropout. wide: whether products of
    16-bit matrices can be had in float32. needs_a, needs_b: whether A and B need a gradient.
    """

    scaling: float
    rate: float
    split: bool
    wide: bool
    needs_a: bool
    needs_b: bool


@functools.cache
def has_wide_products(device: torch.device) -> bool:
    """Return whether products of 16-bit matrices can be had in float32, without copies of them on a GPU."""
    return device.type != "cuda" or (_OFFERED and torch.cuda.get_device_capability(device)[0] >= 8)


def factors_of(a: Tensor, b: Tensor, dtype: torch.dtype, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return A and Bᵀ as they enter products: (r, K) and (r, N), or split (4 r, K) and (4 r, N)."""
    if not adapter.split:
        return a.to(dtype), b.to(dtype).t()
    matrix = torch.cat([a, b.t()], 1)  # both at once
    if torch.compiler.is_compiling():  # `out` of a view is not compiled, and this is one kernel
        high, low = _parts(matrix)
        made = torch.stack([high, low, high, high]).to(dtype)
    else:
        made = matrix.new_empty((4, *matrix.shape), dtype=dtype).copy_(matrix)
        torch.sub(matrix, made[0], out=made[1])
    of_a, of_b = made.flatten(0, 1).split([a.shape[1], b.shape[0]], 1)
    return of_a, of_b


def enter(x: Tensor, factor: Tensor, adapter: Adapter, rank: int, scaled: bool) -> Tensor:
    """Return x times a transposed factor, with the scaling if it is split or `scaled`. x: (rows, width)."""
    if not adapter.split:
        return _scaled_product(x, factor.t(), adapter.scaling if scaled else 1.0)
    wide = _wide_product(x, factor[: 3 * rank].t(), adapter.scaling, adapter)
    if torch.compiler.is_compiling():
        p, q, _ = wide.split(rank, 1)
        high, low = _parts(p)
        return torch.cat([low, high, q, high], 1).to(x.dtype)
    made = x.new_empty(x.shape[0], 4 * rank)
    made[:, rank:] = wide
    torch.sub(wide[:, :rank], made[:, rank : 2 * rank], out=made[:, :rank])
    return made


def _parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 `values` rounded to the upper 16 bits, those of bfloat16, and the rest.

    Inductor leaves out conversions to bfloat16 and back, and so would leave nothing of `values - values.bfloat16()`.
    """
    low = values - ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return values - low, low  # exact; torch 2.6 cannot concatenate what was only viewed as float32


def add_products(y: Tensor, us: list[Tensor], factors: list[Tensor], scalings: list[float], split: bool) -> Tensor:
    """Return y plus each scaling · u @ factor, in place unless compiled; split ones at once, so that y is rounded once.

    They are scaled already. Compiled by torch 2.11, a Function that modifies its output in place has gradients of zero.
    """
    if split and len(us) > 1:
        us, factors = [torch.cat(us, 1)], [torch.cat(factors)]
    for u, factor, scaling in zip(us, factors, scalings):
        add = torch.addmm if torch.compiler.is_compiling() else Tensor.addmm_
        y = add(y, u, factor, alpha=1.0 if split else scaling)
    return y


def draw_mask(x: Tensor, rate: float) -> Tensor:
    """Return which elements of x dropout keeps. On the CPU the same as torch.nn.Dropout, unless compiled."""
    if torch.compiler.is_compiling():
        return torch.rand(x.shape, device=x.device) >= rate
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - rate)


def add_masked(y: Tensor, product: Tensor, mask: Tensor) -> Tensor:
    """Return y plus the elements of `product` in `mask`, in place unless compiled."""
    add = torch.addcmul if torch.compiler.is_compiling() else Tensor.addcmul_
    return add(y, product, mask)


def gradient_of_a(du: Tensor, x: Tensor, adapter: Adapter, rank: int, dtype: torch.dtype) -> Tensor:
    """Return duᵀ x in `dtype`."""
    if not adapter.split:
        return _parameter_product(du.t(), x, 1.0, adapter, dtype)
    return _wide_product(du[:, : 3 * rank].t(), x, 1.0, adapter).view(3, rank, -1).sum(0)


def gradient_of_b(dy: Tensor, u: Tensor, adapter: Adapter, rank: int, dtype: torch.dtype) -> Tensor:
    """Return s dyᵀ u in `dtype`."""
    if not adapter.split:
        return _parameter_product(dy.t(), u, adapter.scaling, adapter, dtype)
    return _wide_product(dy.t(), u[:, : 3 * rank], 1.0, adapter).view(-1, 3, rank).sum(1)


def _parameter_product(one: Tensor, other: Tensor, factor: float, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """Return factor · one @ other in `dtype`: that of float32 parameters is not rounded on its way, if possible."""
    if dtype == torch.float32 != one.dtype and adapter.wide:
        return _wide_product(one, other, factor, adapter)
    return _scaled_product(one, other, factor).to(dtype)


def _scaled_product(one: Tensor, other: Tensor, factor: float) -> Tensor:
    """Return factor · one @ other, rounded once: in float16 the product alone may overflow."""
    if factor == 1:
        return one @ other
    return one.new_empty(one.shape[0], other.shape[1]).addmm_(one, other, beta=0, alpha=factor)


def _wide_product(one: Tensor, other: Tensor, factor: float, adapter: Adapter) -> Tensor:
    """Return factor · one @ other of 16-bit matrices in float32."""
    device = one.device.type  # torch 2.6 cannot compile `is_cuda` here
    if torch.compiler.is_compiling():  # not in place: see `add_products`
        wide = device == "cuda"
        return (torch.mm(one, other, out_dtype=torch.float32) if wide else one.float() @ other.float()) * factor
    total = one.new_empty(one.shape[0], other.shape[1], dtype=torch.float32)
    if device == "meta":
        return total
    if device == "cuda":
        return torch.addmm(total, one, other, out_dtype=torch.float32, beta=0, alpha=factor, out=total)
    with torch.autocast(autocast_type(one.device), enabled=False):
        return total.addmm_(one.float(), other.float(), beta=0, alpha=factor)
