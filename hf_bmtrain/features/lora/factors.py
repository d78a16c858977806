"""The products of a LoRA layer with an adapter: u = x Aᵀ and y + s u Bᵀ, with A (r, K), B (N, r) and the scaling s.

x is the layer's input and y the output of the frozen layer. The products are computed in one of two modes:

*Rounded*: A and B are converted to the dtype in which the layer computes. u has that dtype too, and s is applied in the
product with B.

*Split* (`Adapter.split`): A and B are float32, and the layer computes in bfloat16. Bfloat16 products with float32 sums
then replace PEFT's slower float32 products. Each matrix P (A or Bᵀ) is represented as the sum of two bfloat16 matrices:
hi, which is P rounded to bfloat16, and lo, which is the remainder P - hi, also rounded. The sum hi + lo has a relative
error of 2⁻¹⁷. u is represented by bfloat16 matrices in the same way. A product of two such sums is the sum of several
bfloat16 products. That of the two small terms is left out, because it is about as small as the rounding errors. The
docstring of `enter` lists the terms.

In this mode, dA and dB have an error of 2⁻¹⁷ of their norm. (Measured: 4.6e-6 here, 4e-7 with PEFT, and 1.7e-3 with a
single rounding to bfloat16.) On a CPU, y and dx are as exact as PEFT's in float32. On a GPU, cuBLAS rounds the product
u @ factor to bfloat16 before the product is added to y or dx. PEFT also rounds the product that it adds to dx, but not
the one that it adds to y. So y is rounded once more than with PEFT. If the adapter adds little to y, this makes no
difference. (Measured: if the adapter's output is 2.5 times as large as the frozen layer's, the error of y is 2.4e-3
here and 1.8e-3 with PEFT. If it is 1/40 as large, the error is 2.35e-3 with both.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.base.torch_internals import autocast_type
from .arithmetic import split_factors, split_sums


class Adapter(NamedTuple):
    """The settings of one LoRA adapter, a pair of matrices A and B, for one forward and its backward.

    Attributes:
        scaling: the number by which the adapter's output is multiplied, including dropout's 1 / (1 - rate).
        rate: the probability with which dropout drops an element of the input.
        split: whether A and B are float32 and the layer computes in bfloat16. Each of A and B is then represented as a
            sum of two bfloat16 matrices, as the docstring of this file explains.
        wide: whether the device can multiply two 16-bit matrices and return their product in float32, not rounded to 16
            bits. If it can, the gradients of float32 matrices A and B are not rounded.
        needs_a: whether A needs a gradient.
        needs_b: whether B needs a gradient.
    """

    scaling: float
    rate: float
    split: bool
    wide: bool
    needs_a: bool
    needs_b: bool


def factors_of(a: Tensor, b: Tensor, dtype: torch.dtype, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Convert an adapter's matrices A and B for use in `enter` and `add_products`.

    Args:
        a: A, (r, K).
        b: B, (N, r).
        dtype: the dtype in which the layer computes.
        adapter: the settings of the adapter. If `adapter.split` is True, A and B are float32, and `dtype` is bfloat16.

    Returns:
        A and Bᵀ in `dtype`, (r, K) and (r, N). If `adapter.split` is True, each of the two is replaced by a stack
        [hi; lo; hi] of bfloat16 matrices, with 3 r rows, where hi + lo represents the float32 matrix.
    """
    if not adapter.split:
        return a.to(dtype), b.to(dtype).t()
    if torch.compiler.is_compiling():  # torch.compile cannot trace the launches of CUDA kernels in `arithmetic`
        high, low = _parts(torch.cat([a, b.t()], 1))
        rows = torch.cat([high, low, high]).to(dtype)
    else:
        rows = split_factors(a, b)
    of_a, of_b = rows.split([a.shape[1], b.shape[0]], 1)
    return of_a, of_b


def enter(x: Tensor, factor: Tensor, adapter: Adapter, rank: int, scaled: bool) -> Tensor:
    """Compute u, the first of the two products with an adapter's matrices: x Aᵀ in the forward, s dy B in the backward.

    `add_products` then multiplies u by the other matrix: Bᵀ in the forward, A in the backward. s is the adapter's
    scaling.

    If the adapter is split (`Adapter.split`), u includes s in the forward, too. A and Bᵀ are then each represented as
    the sum hi + lo of two bfloat16 matrices, and passed as stacked rows [hi; lo; hi]: `enter` gets the stack of one of
    the two matrices as `factor`, and `add_products` gets the stack of the other. u is computed in these steps:

    1. With the hi and lo of `factor`, compute p = s x hiᵀ and q = s x loᵀ in float32. So p + q is s x Aᵀ in the
       forward, and s dy B in the backward.
    2. Round p to bfloat16: p1. Round the rest, p - p1 + q, to bfloat16, too: t. So p1 + t represents p + q.
    3. Return u with the columns [t | p1 | p1].

    Hence, with the hi and lo of the other matrix,

        u @ [hi; lo; hi] = t hi + p1 lo + p1 hi.

    p1 occurs twice in u, because it is multiplied by lo and by hi. The product t lo is left out: it is about as small
    as the rounding errors.

    Args:
        x: (rows, width): in the forward, the layer's input after dropout; in the backward, dy, the gradient of the
            layer's output.
        factor: A in the forward, Bᵀ in the backward, as returned by `factors_of`: (r, width) or, if the adapter is
            split, the stack (3 r, width).
        adapter: the settings of the adapter.
        rank: the rank r of the adapter.
        scaled: whether u includes s: False in the forward, True in the backward. Ignored if the adapter is split: u
            then always includes s.

    Returns:
        u, (rows, r). If the adapter is split, (rows, 3 r) bfloat16: the three matrices above, side by side.
    """
    if not adapter.split:
        return _scaled_product(x, factor.t(), adapter.scaling if scaled else 1.0)
    sums = _wide_product(x, factor[: 2 * rank].t())
    if torch.compiler.is_compiling():
        p, q = (sums * adapter.scaling).split(rank, 1)
        high, low = _parts(p)
        return torch.cat([low + q, high, high], 1).to(x.dtype)
    return split_sums(sums, adapter.scaling)


def _parts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 `values` rounded to bfloat16, and the remainder, both as float32.

    The values are rounded by integer arithmetic on their bits and not by a conversion to bfloat16 and back, because
    Inductor would remove the conversion, and the remainder would then be zero.
    """
    low = values - ((values.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    # `values - low` is equal to the rounded values in the line above. Those are a view with a different dtype, and
    # torch 2.6 cannot concatenate such views, so the rounded values are computed again by this subtraction.
    return values - low, low


def add_products(y: Tensor, us: list[Tensor], factors: list[Tensor], scalings: list[float], split: bool) -> Tensor:
    """Return y + Σ scaling · u @ factor, the sum over all adapters of a layer.

    In the forward, y is the output of the frozen layer, u = x Aᵀ, and the factor is Bᵀ. In the backward, y is the part
    of x's gradient that comes from the frozen layer, u = s dy B with the adapter's scaling s, and the factor is A. y is
    changed in place, except in compiled code.

    If an adapter is split (`Adapter.split`), its float32 matrices are represented by sums of bfloat16 matrices (see
    `enter`). Its u then has three parts of r columns, and its factor has three parts of r rows. In this case, u
    includes s in the forward, too.

    Args:
        y: (rows, width).
        us: for each adapter, the tensor u, (rows, r), as returned by `enter`; (rows, 3 r) if the adapter is split.
        factors: for each adapter, the matrix by which u is multiplied, (r, width), as returned by `factors_of`;
            (3 r, width) if the adapter is split.
        scalings: for each adapter, the number by which u @ factor is multiplied: s in the forward if the adapter is not
            split, and otherwise 1, because u then includes s.
        split: True if all adapters are split: one matrix product then adds all of them, so that y is rounded once.
            False if none or only some are split: they are added one after another.
    """
    if split and len(us) > 1:
        # Compute one product for all adapters, so that y is rounded only once. The product can have only one scaling.
        # This is enough, because with `split`, each u includes its adapter's scaling, and all scalings here are 1.
        us, factors = [torch.cat(us, 1)], [torch.cat(factors)]
        scalings = scalings[:1]
    for u, factor, scaling in zip(us, factors, scalings, strict=True):
        # Compiled code must not change y in place: LoraProduct returns y, and if torch 2.11 compiles an
        # autograd.Function that changes its output in place, the gradients become zero.
        add = torch.addmm if torch.compiler.is_compiling() else Tensor.addmm_
        y = add(y, u, factor, alpha=scaling)
    return y


def draw_mask(x: Tensor, rate: float) -> Tensor:
    """Return a boolean mask of the elements of x that dropout keeps; each is dropped with probability `rate`.

    On the CPU, except in compiled code, the mask is the one that torch.nn.Dropout would draw from the same random
    state.
    """
    if torch.compiler.is_compiling():
        return torch.rand(x.shape, dtype=torch.float32, device=x.device) >= rate
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - rate)


def add_masked(y: Tensor, product: Tensor, mask: Tensor) -> Tensor:
    """Return y + product · mask, element by element. y is updated in place, except in compiled code.

    Args:
        y: (rows, width).
        product: (rows, width).
        mask: (rows, width), the boolean mask of a dropout.
    """
    add = torch.addcmul if torch.compiler.is_compiling() else Tensor.addcmul_
    return add(y, product, mask)


def gradient_of_a(du: Tensor, x: Tensor, adapter: Adapter, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of A in `dtype`: dA = duᵀ x.

    If the adapter is split (`Adapter.split`), its float32 matrices are represented as sums of bfloat16 matrices.

    Args:
        du: the gradient of x Aᵀ, (rows, r). If the adapter is split: three bfloat16 matrices side by side, (rows, 3 r).
            The sum of the first two represents this gradient. The third, a copy of the second, is not used here.
        x: (rows, K), the layer's input, after dropout.
        adapter: the settings of the adapter.
        rank: the rank r of the adapter.
        dtype: the dtype of the result.
    """
    if not adapter.split:
        return _parameter_product(du.t(), x, 1.0, adapter, dtype)
    return _wide_product(du[:, : 2 * rank].t(), x).view(2, rank, -1).sum(0)


def gradient_of_b(dy: Tensor, u: Tensor, adapter: Adapter, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient of B in `dtype`: dB = s dyᵀ u, where s is the adapter's scaling.

    If the adapter is split (`Adapter.split`), its float32 matrices are represented as sums of bfloat16 matrices.

    Args:
        dy: (rows, N), the gradient of the layer's output.
        u: x Aᵀ, (rows, r), from the forward. If the adapter is split: three bfloat16 matrices side by side,
            (rows, 3 r). The sum of the first two represents s x Aᵀ. The third, a copy of the second, is not used here.
        adapter: the settings of the adapter.
        rank: the rank r of the adapter.
        dtype: the dtype of the result.
    """
    if not adapter.split:
        return _parameter_product(dy.t(), u, adapter.scaling, adapter, dtype)
    return _wide_product(dy.t(), u[:, : 2 * rank]).view(-1, 2, rank).sum(1)


def _parameter_product(one: Tensor, other: Tensor, factor: float, adapter: Adapter, dtype: torch.dtype) -> Tensor:
    """Return factor · one @ other in `dtype`: the gradient of A or B.

    If `dtype` is float32, the matrices have 16 bits, and the device can multiply 16-bit matrices with a float32 result
    (`adapter.wide`), the product is computed in float32. Otherwise it is rounded to the dtype of the matrices before it
    is converted to `dtype`.

    one, other: matrices of one dtype, with shapes (M, K) and (K, N).
    factor: a number by which the product is multiplied before it is rounded.
    adapter: the settings of the adapter.
    dtype: the dtype of the result.
    """
    if dtype == torch.float32 != one.dtype and adapter.wide:
        return _wide_product(one, other, factor)
    return _scaled_product(one, other, factor).to(dtype)


def _scaled_product(one: Tensor, other: Tensor, factor: float) -> Tensor:
    """Return factor · one @ other, with the factor applied before rounding: `one @ other` may overflow in float16."""
    if factor == 1:
        return one @ other
    return one.new_empty(one.shape[0], other.shape[1]).addmm_(one, other, beta=0, alpha=factor)


def _wide_product(one: Tensor, other: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor · one @ other in float32, for 16-bit matrices `one` (M, K) and `other` (K, N)."""
    device = one.device.type  # torch 2.6 cannot compile `is_cuda` here
    if device == "cuda" and factor == 1:
        return torch.mm(one, other, out_dtype=torch.float32)
    if torch.compiler.is_compiling():  # the in-place products below would make gradients zero in compiled code
        wide = device == "cuda"
        return (torch.mm(one, other, out_dtype=torch.float32) if wide else one.float() @ other.float()) * factor
    total = one.new_empty(one.shape[0], other.shape[1], dtype=torch.float32)
    if device == "meta":
        return total
    if device == "cuda":
        return torch.addmm(total, one, other, out_dtype=torch.float32, beta=0, alpha=factor, out=total)
    with torch.autocast(autocast_type(one.device), enabled=False):
        return total.addmm_(one.float(), other.float(), beta=0, alpha=factor)
