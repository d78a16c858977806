"""Quantize matrices to float8 (e4m3 values; float32 scales, one per row, column or weight), and multiply them.

A quantized element represents value * scale. The scale is absmax / 448. Here absmax is the largest magnitude among the
elements that share the scale, but at least 1e-30. The value is the element times 448 / absmax, computed in float32 and
rounded to float8_e4m3fn. If absmax is inf or NaN, all elements that share the scale become NaN, so overflows are
detected as in other dtypes.

A product multiplies the values, sums in float32, and multiplies the sums by both scales. Both factors of `product` have
the summed dimension last. All terms of a sum must share one scale. If one product sums the elements of each row of a
matrix, and another product sums the elements of each column, the matrix is quantized twice: with one scale per row, and
with one scale per column (`quantize_both`). A weight has a single scale, so both products can use the same quantized
values. Before a weight is all-gathered in float8, the ranks compute the absmax of the full weight, and then each rank
rounds its own part (`measure_pieces`, `round_pieces`).

On a GPU the kernels in kernels/float8.cu quantize, except in some compiled code (see `_by_kernels`). Their results
equal those of torch's operations on the CPU bit for bit, except for the sign of NaN. Code that Inductor generates for a
GPU divides less exactly: it multiplies by the rounded 1 / 448, and its quotient 448 / absmax may be off in the last
bits. So its scales may differ in the last bit, and a few elements may be rounded to the next float8 number.

References: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), for e4m3.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engine.base.arguments import expect
from ...engine.base.launch import C_NAMES, Variant, kernel
from ...engine.base.torch_internals import autocast_type, scaled_mm

MOST = 448.0
"""The largest value of float8_e4m3fn."""
ALIGNMENT = 16
"""On a GPU, the row length of the factors and of the result of a product must be a multiple of this number of elements,
because kernels read 16 bytes at a time."""
_LEAST = 1e-30  # lower bound of the absmax from which a scale is computed, so that no scale is 0
_THREADS = 256  # maximum number of threads of a CUDA thread block
_TILE = 64  # rows of a tile, the part of a matrix that one CUDA thread block processes
_PARTS = 4  # number of 16-byte groups that a thread holds in registers
_CAPABILITY = (8, 9)  # minimum compute capability of a GPU that can multiply float8 matrices


def check_device(device: torch.device) -> None:
    """Raise ValueError if `device` is a GPU on which torch cannot multiply float8 matrices. Other devices are accepted.

    Called when a model is wrapped with float8 layers. Otherwise the error would be raised later, in the first forward.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            f"{name} cannot multiply float8 matrices: its compute capability is {found[0]}.{found[1]}, and 8.9 is "
            "needed. Leave out float8, or use a GPU of the generations Ada, Hopper or Blackwell."
        )
    if device.type == "cuda":
        ones = torch.ones(ALIGNMENT, 1, dtype=torch.float32, device=device)
        factor = Float8(
            torch.zeros(ALIGNMENT, ALIGNMENT, dtype=torch.float32, device=device).to(torch.float8_e4m3fn), ones
        )
        try:
            product(factor, factor, torch.bfloat16, fast=True)
        except RuntimeError as error:
            raise ValueError(
                f"torch {torch.__version__} cannot multiply float8 matrices with row-wise scales on {device}: {error}. "
                "Leave out float8, or install a newer torch."
            ) from error


class Float8(NamedTuple):
    """A matrix (R, C) in float8 with one scale per row: its elements are values * scales.

    values: (R, C) float8_e4m3fn, contiguous.
    scales: (R, 1) float32.
    """

    values: Tensor
    scales: Tensor


def quantize_rows(x: Tensor) -> Float8:
    """Quantize a matrix x to float8 (e4m3), with one scale per row.

    x: (M, K) float32, float16 or bfloat16.

    Returns the values, (M, K) float8, and the scales, (M, 1) float32. Approximately, x is values * scales.
    """
    expect("x", x, C_NAMES, (len(x), x.shape[-1]), x.device)
    if not _by_kernels(x):
        return _rounded(x, x.abs().amax(1, keepdim=True) if x.numel() else x.new_zeros(len(x), 1))
    width, out = x.shape[1], _empty(x, *x.shape)
    warps = -(-width * x.element_size() // (32 * _PARTS * 16))
    _launch("quantize_rows", len(x), x, width, *out, threads=min(32 * warps, _THREADS), aligned=width % ALIGNMENT == 0)
    return out


def quantize_both(x: Tensor) -> tuple[Float8, Float8]:
    """Quantize the matrix x to float8 twice, with one scale per row and with one scale per column.

    A linear layer with a weight W uses two matrices in this form: its input x, and the gradient dy of its output. In a
    product, the elements of one sum must have the same scale. The forward, x Wᵀ, and the gradient of the input, dy W,
    sum over the elements of each row of x and dy, so they need one scale per row. The gradient of the weight, dyᵀ x,
    sums over the elements of each column of x and dy, so it needs one scale per column.

    Args:
        x: (M, K) float32, float16 or bfloat16, the input or the gradient of the output.

    Returns:
        Two Float8 objects. The first is x, (M, K), with one scale per row. The second is the transpose of x, (K, M'),
        also with one scale per row, that is, per column of x. M' is M rounded up to a multiple of ALIGNMENT (16); the
        added columns of the transpose are zero.
    """
    if torch.compiler.is_compiling():
        values, scales, transposed, transposed_scales = torch.ops.hf_bmtrain.quantize_both(x)
        return Float8(values, scales), Float8(transposed, transposed_scales)
    expect("x", x, C_NAMES, (len(x), x.shape[-1]), x.device)
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


def quantize_full(weight: Tensor) -> Float8:
    """Quantize `weight` (N, K) to float8 with one scale for all elements.

    A layer calls this for a weight that was not all-gathered in float8. The result's `scales`, (N, 1), contain the
    scale N times, because `product` takes one scale per row.
    """
    expect("weight", weight, C_NAMES, (len(weight), weight.shape[-1]), weight.device)
    if not _by_kernels(weight):
        return _rounded(weight, weight.abs().amax().expand(len(weight), 1))
    return _launch_full("round_whole", weight, _empty(weight, *weight.shape))


def quantize_transposed(weight: Tensor) -> Float8:
    """Quantize `weight` (N, K) to float8 with one scale for all elements, and return its transpose, (K, N).

    Both operands of `product` must have the summed dimension last. So one of the two products with the weight, in
    forward or in backward, needs the weight's transpose. The result's `scales`, (K, 1), contain the scale K times,
    because `product` takes one scale per row. The CUDA kernel that quantizes also transposes, without an intermediate
    matrix.
    """
    expect("weight", weight, C_NAMES, (len(weight), weight.shape[-1]), weight.device)
    if not _by_kernels(weight):
        values, scales = quantize_full(weight)
        return Float8(values.t().contiguous(), scales[:1].expand(weight.shape[1], 1).contiguous())
    return _launch_full("round_transposed", weight, _empty(weight, *weight.shape[::-1]))


class Pieces:
    """For each of several weights, the range of this rank's shard that contains the rank's part of the weight.

    `measure_pieces` and `round_pieces` take this object. On a GPU, each of them processes all ranges with one kernel
    launch. Create the object once per shard and not in each step, because its constructor copies a table of the ranges
    to the device.

    Args:
        ranges: (start, stop) of each weight in the shard, in ascending order, possibly with gaps. A range may be empty.
        dtype: the dtype of the shard.
        device: the device of the shard.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device):
        self.ranges = tuple(ranges)
        self.aligned = all(bound % ALIGNMENT == 0 for piece in ranges if piece[0] < piece[1] for bound in piece)
        # One kernel launch handles all ranges, each with its own thread blocks. `firsts` contains the index of the
        # first thread block of each range, followed by the total number of thread blocks.
        firsts = [0, *itertools.accumulate(_blocks(stop - start, dtype.itemsize) for start, stop in ranges)]
        self.blocks = firsts.pop()
        starts, stops = zip(*ranges)
        self.table = torch.tensor([starts, stops, firsts], dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return len(self.ranges)


def measure_pieces(x: Tensor, pieces: Pieces, bits: Tensor) -> None:
    """Write the absmax (largest magnitude) of each of the k ranges of x to `bits`, as the bit pattern of a float32.

    Read as integers, these bit patterns have the same order as the magnitudes, with NaN as the largest. So an
    all-reduce of the integers can compute the maximum over ranks.

    Args:
        x: (n,) float32, float16 or bfloat16, a shard.
        pieces: the k ranges of x, one per weight.
        bits: (k,) int32, the output. It must be zero before the call, and stays 0 for an empty range.
    """
    expect("x", x, C_NAMES, (len(x),), x.device)
    expect("bits", bits, (torch.int32,), (len(pieces),), x.device)
    if _by_kernels(x):
        _launch_pieces("absmax_pieces", x, pieces, bits, aligned=pieces.aligned)
        return
    for found, (start, stop) in zip(bits.split(1), pieces.ranges):
        if start < stop:
            found.copy_(x[start:stop].abs().float().view(torch.int32).amax())


def round_pieces(x: Tensor, pieces: Pieces, bits: Tensor, out: Tensor) -> None:
    """Round the k ranges of x to float8. Each range is a part of a weight, and is rounded with the full weight's scale.

    Called before an all-gather that sends the weights in float8: each rank rounds its own shard, after `measure_pieces`
    and an all-reduce have found the largest magnitude of each full weight. The rounded values are equal to those that
    `quantize_full` would compute from the full weights, outside compiled code.

    Args:
        x: (n,) float32, float16 or bfloat16, a shard.
        pieces: the k ranges of x, one per weight.
        bits: (k,) int32, the maximum over all ranks of the `bits` that `measure_pieces` wrote.
        out: (n,) uint8, to which the float8 values are written as bytes. Elements outside the ranges are not changed.
    """
    expect("x", x, C_NAMES, (len(x),), x.device)
    expect("bits", bits, (torch.int32,), (len(pieces),), x.device)
    expect("out", out, (torch.uint8,), (len(x),), x.device)
    if _by_kernels(x):
        aligned = pieces.aligned and out.data_ptr() % 16 == 0
        _launch_pieces("round_pieces", x, pieces, bits, out.view(torch.float8_e4m3fn), aligned=aligned)
        return
    for most, (start, stop) in zip(bits.split(1), pieces.ranges):
        if start < stop:
            out[start:stop] = _rounded(x[start:stop], most.view(torch.float32)).values.view(torch.uint8)


def scales_of(bits: Tensor) -> Tensor:
    """Return the float8 scales of n weight matrices, (n,) float32, from the largest magnitude in each matrix.

    The scale is max(absmax, 1e-30) / 448. A float8 value times the scale is the element that it represents, so the
    largest value of float8_e4m3fn, 448, represents absmax. The lower bound 1e-30 prevents a scale of 0.

    bits: (n,) int32, the largest magnitude (absmax) of each matrix as the bit pattern of a float32.
    """
    absmax = bits.view(torch.float32).clamp(min=_LEAST)
    # The divisor is a tensor, because a GPU computes `absmax / MOST` as a multiplication by the rounded 1 / MOST.
    return absmax / torch.full_like(absmax, MOST)


def transpose(values: Tensor) -> Tensor:
    """Return the transpose of `values` (R, C) float8_e4m3fn as a new contiguous tensor (C, R).

    A layer calls it for a weight that was all-gathered in float8, because both operands of `product` must have the
    summed dimension last. R and C may have any values. On a GPU, a CUDA kernel of this package transposes if `values`
    start at a multiple of 16 bytes, and R and C are multiples of ALIGNMENT. Otherwise torch transposes.
    """
    if torch.compiler.is_compiling():
        return torch.ops.hf_bmtrain.transpose_codes(values)
    rows, width = values.shape
    expect("values", values, (torch.float8_e4m3fn,), (rows, width), values.device)
    if not values.is_cuda or rows % ALIGNMENT or width % ALIGNMENT or values.data_ptr() % 16:
        return values.t().clone(memory_format=torch.contiguous_format)
    out = torch.empty(width, rows, dtype=values.dtype, device=values.device)
    grid = -(-rows // _TILE) * -(-width // _THREADS)
    kernel(variant(torch.bfloat16, True), "transpose_codes", values.device)(grid, _THREADS, values, rows, width, out)
    return out


def product(a: Float8, b: Float8, dtype: torch.dtype, fast: bool) -> Tensor:
    """Return the product a @ b.T of two float8 matrices, (M, N).

    On a GPU, K and N must be multiples of ALIGNMENT, and the result is rounded to bfloat16 before it is converted to
    `dtype`.

    Args:
        a: (M, K), with one scale per row.
        b: (N, K), with one scale per row.
        dtype: the dtype of the result.
        fast: whether tensor cores may accumulate sums with fewer bits, which is faster and less exact.
    """
    device = a.values.device.type  # torch 2.6 cannot compile `is_meta` and `is_cuda` here
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
    # Do not call `to` if the dtype is right already: in compiled code, torch 2.11 would lose the gradient.
    return y if y.dtype == dtype else y.to(dtype)


def _by_kernels(x: Tensor) -> bool:
    """Return whether to quantize x with this package's CUDA kernels. If not, torch's operations quantize it.

    True on GPUs, and on the meta device, which is used to predict the memory of a GPU. False for an empty x. Also False
    while torch.compile traces the caller: Inductor then generates kernels from torch's operations.
    """
    # `quantize_both` uses the CUDA kernels even in compiled code. There it is a custom operator, which torch.compile
    # does not trace into: it calls this function only while the compiled code runs, and `is_compiling` is then False.
    # The operator is faster than code from Inductor, which would fuse the column-wise absmax into the kernel that
    # computes x. For example, in the backward of a SwiGLU of 8192 x 14336 on an H200, the fused kernel takes 1.3 ms,
    # and the two separate kernels together take 0.6 ms.
    return not torch.compiler.is_compiling() and (x.is_cuda or x.is_meta) and x.numel() > 0


def _rounded(x: Tensor, absmax: Tensor) -> Float8:
    """Quantize x to float8 with torch's operations.

    absmax: the largest magnitude among the elements that share a scale, in a shape that broadcasts to x.
    """
    absmax = absmax.float().clamp(min=_LEAST)
    # The dividend is a tensor, because `MOST / absmax` is computed as MOST * (1 / absmax), which rounds twice.
    factor = torch.full_like(absmax, MOST) / absmax
    values = (x.float() * factor).clamp(-MOST, MOST)
    return Float8(values.to(torch.float8_e4m3fn), absmax / MOST)


def _empty(x: Tensor, rows: int, columns: int) -> Float8:
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    return Float8(values, torch.empty(rows, 1, dtype=torch.float32, device=x.device))


def _empty_both(x: Tensor) -> tuple[Float8, Float8]:
    rows, width = x.shape
    return _empty(x, rows, width), _empty(x, width, rows + -rows % ALIGNMENT)


def _tiles(x: Tensor, parts: int) -> int:
    """Return how many tiles cover the matrix x. One CUDA thread block processes a tile.

    A tile has _TILE rows, and `parts` * 16 bytes of each row.
    """
    return -(-len(x) // _TILE) * -(-x.shape[1] * x.element_size() // (16 * parts))


def _blocks(numel: int, itemsize: int) -> int:
    """Return how many CUDA thread blocks process `numel` elements of `itemsize` bytes, _PARTS * 16 bytes per thread."""
    return -(-numel * itemsize // (_THREADS * _PARTS * 16))


def _launch_full(name: str, weight: Tensor, out: Float8) -> Float8:
    """Quantize the full matrix `weight` into `out` with one scale, on the GPU. Return `out`.

    One kernel computes the absmax (largest magnitude) of `weight`, another kernel quantizes.

    name: the kernel that quantizes: "round_whole", or "round_transposed" if `out` is the transpose.
    """
    aligned = len(weight) % ALIGNMENT == 0 and weight.shape[1] % ALIGNMENT == 0
    most = torch.zeros(1, dtype=torch.int32, device=weight.device)
    blocks = _blocks(weight.numel(), weight.element_size())
    _launch("absmax_whole", blocks, weight, weight.numel(), most, aligned=aligned)
    _launch(name, _tiles(weight, 16), weight, *weight.shape, most, *out, aligned=aligned)
    return out


def _launch_pieces(name: str, x: Tensor, pieces: Pieces, *values: Tensor, aligned: bool) -> None:
    """Launch the CUDA kernel `name` for the ranges `pieces` of the shard x. Do nothing if all ranges are empty.

    values: the kernel's arguments after x and the ranges.
    aligned: whether all ranges start and stop at multiples of ALIGNMENT elements.
    """
    if pieces.blocks:
        _launch(name, pieces.blocks, x, pieces.table, len(pieces), *values, aligned=aligned)


def _launch(name: str, grid: int, x: Tensor, *values: Any, aligned: bool, threads: int = _THREADS) -> None:
    """Launch the CUDA kernel `name` for x, with `grid` thread blocks of `threads` threads. Do nothing on meta tensors.

    values: the kernel's arguments after x.
    aligned: whether all rows, or all ranges of a shard, start and stop at multiples of ALIGNMENT elements.
    """
    if x.is_meta:
        return
    chosen = variant(x.dtype, aligned and x.data_ptr() % 16 == 0)
    kernel(chosen, name, x.device)(grid, threads, x, *values)


@cache
def variant(dtype: torch.dtype, aligned: bool) -> Variant:
    """Return the CUDA source of the kernels that quantize (kernels/float8.cu), with the macros for these arguments.

    dtype: the dtype of the matrices to be quantized. The kernel `transpose_codes` does not use it.
    aligned: whether the kernels may access 16 bytes at a time: the memory begins at a multiple of 16 bytes, and all
        rows, or all ranges of a shard, start and stop at multiples of ALIGNMENT elements. If False, they access single
        elements.
    """
    return Variant("float8", (("ALIGNED", str(int(aligned))), ("ELEMENT", C_NAMES[dtype])))


def _flat(factors: tuple[Float8, Float8]) -> tuple[Tensor, ...]:
    return tuple(tensor for factor in factors for tensor in factor)


# In compiled code, `quantize_both` and `transpose` are custom operators, which torch.compile does not trace into.
_library = torch.library.Library("hf_bmtrain", "DEF")
_library.define("quantize_both(Tensor x) -> (Tensor, Tensor, Tensor, Tensor)", tags=torch.Tag.needs_fixed_stride_order)
_library.define("transpose_codes(Tensor values) -> Tensor", tags=torch.Tag.needs_fixed_stride_order)
for _key in ("CPU", "CUDA"):
    _library.impl("quantize_both", lambda x: _flat(quantize_both(x)), _key)
    _library.impl("transpose_codes", transpose, _key)
torch.library.register_fake("hf_bmtrain::quantize_both", lambda x: _flat(_empty_both(x)), lib=_library)
torch.library.register_fake("hf_bmtrain::transpose_codes", lambda x: x.new_empty(x.shape[1], x.shape[0]), lib=_library)
