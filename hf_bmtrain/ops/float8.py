"""Matrix products of float8 factors: e4m3 values with one float32 scale for each row, or for a whole matrix.

An element is value x scale. A scale is absmax / 448, and a value is the element times 448 / absmax, in float32, rounded
to float8_e4m3fn. An absmax of inf or NaN makes its elements NaN, so that overflows are found as in other dtypes. Below
1e-30 it counts as 1e-30.

A product is computed from the values, with sums in float32, and multiplied by both scales. Both factors of `product`
have the summed dimension last. A GPU's product takes scales that are the same for all summed elements, so a matrix that
is used in both directions is rounded twice: `quantize_both` rounds it by its rows and, transposed, by its columns. A
weight has one scale for all its elements, and is rounded once for both.

References: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for e4m3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .autocast import autocast_type
from .expect import expect
from .torch_internals import scaled_mm

MOST = 448.0
"""The largest value of float8_e4m3fn."""
ALIGNMENT = 16
"""Rows of factors and of results have a multiple of so many elements; GPUs read 16 bytes at a time."""
_LEAST = 1e-30
_CAPABILITY = (8, 9)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_device(device: torch.device) -> None:
    """Raise ValueError if a GPU has no float8 products."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} has no float8 products: its compute capability is {found[0]}.{found[1]}, they need 8.9. Leave out "
            "float8, or use a GPU of the generations Ada, Hopper or Blackwell."
        )


class Float8(NamedTuple):
    """A matrix. values: (R, C) float8_e4m3fn, contiguous. scales: (R, 1), or (1, 1) for all rows, float32."""

    values: Tensor
    scales: Tensor


def quantize_rows(x: Tensor) -> Float8:
    """Return x (M, K), float32, float16 or bfloat16, with a scale for each row."""
    expect("x", x, _DTYPES, (len(x), x.shape[-1]), x.device)
    return _rounded(x, x.abs().amax(1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1))


def quantize_both(x: Tensor) -> tuple[Float8, Float8]:
    """Return x (M, K) with a scale for each row, and its transpose (K, M') with a scale for each of its rows.

    M' is M rounded up to a multiple of ALIGNMENT; the columns behind M are zero.
    """
    columns = torch.nn.functional.pad(x.t(), (0, -len(x) % ALIGNMENT))
    return quantize_rows(x), quantize_rows(columns.contiguous())


def quantize_whole(weight: Tensor) -> Float8:
    """Return weight (N, K) with one scale."""
    expect("weight", weight, _DTYPES, (len(weight), weight.shape[-1]), weight.device)
    return _rounded(weight, weight.abs().amax().view(1, 1))


def transpose(factor: Float8) -> Float8:
    """Return the transpose, contiguous, of a factor with one scale."""
    assert factor.scales.numel() == 1, "rows of the transpose would have several scales"
    return Float8(factor.values.t().contiguous(), factor.scales)


def product(a: Float8, b: Float8, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a @ b.T: (M, K), (N, K) -> (M, N) of `dtype`.

    K and N are multiples of ALIGNMENT on a GPU. fast: its sums may be kept in fewer bits between steps of tensor cores,
    which is faster. A GPU rounds to bfloat16 first, whatever `dtype` is.
    """
    if a.values.is_meta:
        return a.values.new_empty(len(a.values), len(b.values), dtype=dtype)
    scales = b.scales.t()
    if a.values.is_cuda:
        rows, columns = a.scales.expand(len(a.values), 1).contiguous(), scales.expand(1, len(b.values)).contiguous()
        narrow = scaled_mm(a.values, b.values.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return narrow.to(dtype)
    with torch.autocast(autocast_type(a.values.device), enabled=False):
        return (torch.mm(a.values.float(), b.values.float().t()) * a.scales * scales).to(dtype)


def _rounded(x: Tensor, absmax: Tensor) -> Float8:
    absmax = absmax.float().clamp(min=_LEAST)
    values = (x.float() * (MOST / absmax)).clamp(-MOST, MOST)
    return Float8(values.to(torch.float8_e4m3fn), absmax / MOST)
