"""Matrix products of float8 factors: e4m3 values with a float32 scale for each row, of which a weight has one alone.

An element is value x scale. A scale is absmax / 448, and a value is the element times 448 / absmax, in float32, rounded
to float8_e4m3fn. An absmax of inf or NaN makes its elements NaN, so that overflows are found as in other dtypes. Below
1e-30 it counts as 1e-30.

A product is computed from the values, with sums in float32, and multiplied by both scales. Both factors of `product`
have the summed dimension last. A GPU's product takes scales that are the same for all summed elements, so a matrix that
is used in both directions is rounded twice: `quantize_both` rounds it by its rows and, transposed, by its columns. A
weight has one scale for all its elements, and is rounded once for both; so its pieces on different ranks can be rounded
apart (`measure_piece`, `round_piece`) once the ranks know its largest magnitude. On a GPU kernels/float8.cu rounds; its
bits are those of the reference, but for the sign of NaN.

References: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for e4m3.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.autocast import autocast_type
from ..base.expect import expect
from ..base.launch import C_NAMES, Variant, kernel
from ..base.torch_internals import scaled_mm

MOST = 448.0
"""The largest value of float8_e4m3fn."""
ALIGNMENT = 16
"""Rows of factors and of results have a multiple of so many elements; GPUs read 16 bytes at a time."""
_LEAST = 1e-30
_THREADS = 256
_TILE = 64  # rows
_PARTS = 4  # of 16 bytes, that a thread keeps
_CAPABILITY = (8, 9)


def check_device(device: torch.device) -> None:
    """Raise ValueError if a GPU has no float8 products."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} has no float8 products: its compute capability is {found[0]}.{found[1]}, they need 8.9. Leave out "
            "float8, or use a GPU of the generations Ada, Hopper or Blackwell."
        )
    if device.type == "cuda":
        ones = torch.ones(ALIGNMENT, 1, dtype=torch.float32, device=device)
        factor = Float8(torch.zeros(ALIGNMENT, ALIGNMENT, device=device).to(torch.float8_e4m3fn), ones)
        try:
            product(factor, factor, torch.bfloat16, fast=True)
        except RuntimeError as error:
            raise ValueError(
                f"torch {torch.__version__} has no float8 products with scales of rows for {device}: {error}. Leave "
                "out float8, or install a newer torch."
            ) from error


class Float8(NamedTuple):
    """A matrix. values: (R, C) float8_e4m3fn, contiguous. scales: (R, 1) float32."""

    values: Tensor
    scales: Tensor


def quantize_rows(x: Tensor) -> Float8:
    """Return x (M, K), float32, float16 or bfloat16, with a scale for each row."""
    expect("x", x, tuple(C_NAMES), (len(x), x.shape[-1]), x.device)
    if not _by_kernels(x):
        return _rounded(x, x.abs().amax(1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1))
    width, out = x.shape[1], _empty(x, *x.shape)
    warps = -(-width * x.element_size() // (32 * _PARTS * 16))
    _launch("quantize_rows", len(x), x, width, *out, threads=min(32 * warps, _THREADS), aligned=width % ALIGNMENT == 0)
    return out


def quantize_both(x: Tensor) -> tuple[Float8, Float8]:
    """Return x (M, K) with a scale for each row, and its transpose (K, M') with a scale for each of its rows.

    M' is M rounded up to a multiple of ALIGNMENT; the columns behind M are zero.
    """
    if torch.compiler.is_compiling():
        values, scales, transposed, transposed_scales = torch.ops.hf_bmtrain.quantize_both(x)
        return Float8(values, scales), Float8(transposed, transposed_scales)
    expect("x", x, tuple(C_NAMES), (len(x), x.shape[-1]), x.device)
    if not _by_kernels(x):
        return quantize_rows(x), quantize_rows(torch.nn.functional.pad(x.t(), (0, -len(x) % ALIGNMENT)).contiguous())
    rows, width = x.shape
    aligned = width % ALIGNMENT == 0
    most = torch.zeros(rows + width, dtype=torch.int32, device=x.device)
    own = most[:rows], most[rows:]
    _launch("absmax_both", _tiles(x, 32), x, rows, width, *own, aligned=aligned)
    by_rows, by_columns = _empty_both(x)
    values = rows, width, *own, *by_rows, *by_columns, by_columns.values.shape[1]
    _launch("round_both", _tiles(x, 16), x, *values, aligned=aligned)
    return by_rows, by_columns


def quantize_whole(weight: Tensor) -> Float8:
    """Return weight (N, K) with one scale, N times."""
    expect("weight", weight, tuple(C_NAMES), (len(weight), weight.shape[-1]), weight.device)
    if not _by_kernels(weight):
        return _rounded(weight, weight.abs().amax().expand(len(weight), 1))
    return _launch_whole("round_whole", weight, _empty(weight, *weight.shape))


def quantize_transposed(weight: Tensor) -> Float8:
    """Return the transpose of `quantize_whole(weight)`, (K, N), without the copy in between."""
    expect("weight", weight, tuple(C_NAMES), (len(weight), weight.shape[-1]), weight.device)
    if not _by_kernels(weight):
        values, scales = quantize_whole(weight)
        return Float8(values.t().contiguous(), scales[:1].expand(weight.shape[1], 1).contiguous())
    return _launch_whole("round_transposed", weight, _empty(weight, *weight.shape[::-1]))


def measure_piece(x: Tensor, bits: Tensor) -> None:
    """Set `bits` (1,) int32, 0 before, to the bits of the largest magnitude of x (n,), as float32.

    As integers the bits are in the order of the magnitudes, and those of NaN are the largest.
    """
    expect("x", x, tuple(C_NAMES), (len(x),), x.device)
    if not len(x):
        return
    if _by_kernels(x):
        _launch("absmax_whole", _blocks(x), x, len(x), bits, aligned=len(x) % ALIGNMENT == 0)
    else:
        bits.copy_(x.abs().float().view(torch.int32).amax())


def round_piece(x: Tensor, bits: Tensor, out: Tensor) -> None:
    """Write x (n,), a piece of a weight, into `out` (n,) uint8 as `quantize_whole` of the weight rounds it.

    bits: (1,) int32, the largest of those that `measure_piece` finds in the weight's pieces.
    """
    expect("x", x, tuple(C_NAMES), (len(x),), x.device)
    if not len(x):
        return
    if _by_kernels(x):
        aligned = len(x) % ALIGNMENT == 0 and out.data_ptr() % 16 == 0
        _launch("round_piece", _blocks(x), x, len(x), bits, out.view(torch.float8_e4m3fn), aligned=aligned)
    else:
        out.copy_(_rounded(x, bits.view(torch.float32)).values.view(torch.uint8))


def scales_of(bits: Tensor) -> Tensor:
    """Return the scales (n,) float32 of weights whose largest magnitudes have the `bits` (n,) int32."""
    absmax = bits.view(torch.float32).clamp(min=_LEAST)
    return absmax / torch.full_like(absmax, MOST)  # a GPU would multiply by the rounded 1 / MOST


def product(a: Float8, b: Float8, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a @ b.T: (M, K), (N, K) -> (M, N) of `dtype`.

    K and N are multiples of ALIGNMENT on a GPU. fast: its sums may be kept in fewer bits between steps of tensor cores,
    which is faster. A GPU rounds to bfloat16 first, whatever `dtype` is.
    """
    device = a.values.device.type  # torch 2.6 traces neither `is_meta` nor `is_cuda` here
    if device == "meta":
        return a.values.new_empty(len(a.values), len(b.values), dtype=torch.bfloat16).to(dtype)
    if not (a.values.numel() and b.values.numel()):
        return torch.zeros(len(a.values), len(b.values), dtype=dtype, device=a.values.device)
    if device == "cuda":
        scales = a.scales, b.scales.t()
        y = scaled_mm(a.values, b.values.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    else:
        with torch.autocast(autocast_type(a.values.device), enabled=False):
            y = torch.mm(a.values.float(), b.values.float().t()) * a.scales * b.scales.t()
    # What an autograd.Function returns by a `to` that changes nothing has no gradient once torch 2.11 compiles it.
    return y if y.dtype == dtype else y.to(dtype)


def _by_kernels(x: Tensor) -> bool:
    """Return whether kernels round x, or would on the GPU that the meta device stands for.

    Compilers make their own, but for `quantize_both`, which is an operator to them: Inductor fuses largest magnitudes
    of columns with what computes the elements, and took 1.3 ms where a pass for each takes 0.6 (H200, SwiGLU of 8192 x
    14336, backward).
    """
    return not torch.compiler.is_compiling() and (x.is_cuda or x.is_meta) and x.numel() > 0


def _rounded(x: Tensor, absmax: Tensor) -> Float8:
    absmax = absmax.float().clamp(min=_LEAST)
    factor = torch.full_like(absmax, MOST) / absmax  # MOST / absmax would be rounded twice: 1 / absmax, times MOST
    values = (x.float() * factor).clamp(-MOST, MOST)
    return Float8(values.to(torch.float8_e4m3fn), absmax / MOST)


def _empty(x: Tensor, rows: int, columns: int) -> Float8:
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    return Float8(values, torch.empty(rows, 1, dtype=torch.float32, device=x.device))


def _empty_both(x: Tensor) -> tuple[Float8, Float8]:
    rows, width = x.shape
    return _empty(x, rows, width), _empty(x, width, rows + -rows % ALIGNMENT)


def _tiles(x: Tensor, parts: int) -> int:
    """Return the number of tiles of _TILE rows and `parts` times 16 bytes that cover x."""
    return -(-len(x) // _TILE) * -(-x.shape[1] * x.element_size() // (16 * parts))


def _blocks(x: Tensor) -> int:
    """Return the number of blocks whose threads keep _PARTS times 16 bytes each that cover x."""
    return -(-x.numel() * x.element_size() // (_THREADS * _PARTS * 16))


def _launch_whole(name: str, weight: Tensor, out: Float8) -> Float8:
    aligned = len(weight) % ALIGNMENT == 0 and weight.shape[1] % ALIGNMENT == 0
    most = torch.zeros(1, dtype=torch.int32, device=weight.device)
    _launch("absmax_whole", _blocks(weight), weight, weight.numel(), most, aligned=aligned)
    _launch(name, _tiles(weight, 16), weight, *weight.shape, most, *out, aligned=aligned)
    return out


def _launch(name: str, grid: int, x: Tensor, *values: Any, aligned: bool, threads: int = _THREADS) -> None:
    """Launch a kernel over x. aligned: whether all rows have a multiple of ALIGNMENT elements."""
    if x.is_meta:
        return
    chosen = variant(x.dtype, aligned and x.data_ptr() % 16 == 0)
    kernel(chosen, name, x.device)(grid, threads, x, *values)


@cache
def variant(dtype: torch.dtype, aligned: bool) -> Variant:
    return Variant("float8", (("ALIGNED", str(int(aligned))), ("ELEMENT", C_NAMES[dtype])))


def variants(arch: int) -> list[Variant]:
    """Return all variants that this module can compile."""
    return [variant(dtype, aligned) for dtype in C_NAMES for aligned in (False, True)]


def _flat(factors: tuple[Float8, Float8]) -> tuple[Tensor, ...]:
    return tuple(tensor for factor in factors for tensor in factor)


# In compiled code `quantize_both` is this operator.
_library = torch.library.Library("hf_bmtrain", "DEF")
_library.define("quantize_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)", tags=torch.Tag.needs_fixed_stride_order)
for _key in ("CPU", "CUDA"):
    _library.impl("quantize_both", lambda x: _flat(quantize_both(x)), _key)
torch.library.register_fake("hf_bmtrain::quantize_both", lambda x: _flat(_empty_both(x)), lib=_library)
