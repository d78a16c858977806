"""The mean over ranks of one part of a gradient, for which every other rank has delivered a row."""

from functools import cache

import torch
from torch import Tensor

from ..base.arguments import expect
from ..base.launch import C_NAMES, Variant, kernel

THREADS = 256


@cache
def variant(dtype: torch.dtype, summed: bool) -> Variant:
    return Variant("peer_sum", (("ELEMENT", C_NAMES[dtype]), ("TOTAL", "float" if summed else "none")))


def variants(arch: int) -> list[Variant]:
    """Return all variants that this module can compile."""
    return [variant(dtype, summed) for dtype in C_NAMES for summed in (False, True)]


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `peer_mean` supports gradients of this dtype on this device."""
    return dtype in C_NAMES or (dtype == torch.float64 and device.type == "cpu")


def peer_mean(rows: Tensor, mine: Tensor, own: int, out: Tensor, total: Tensor | None = None) -> Tensor:
    """Write the mean over ranks, or add it to a running sum and write that. Return the result's sums of squares.

    rows     (size - 1, n) float32, float16 or bfloat16 (on CPU also float64): the other ranks' values, in the order of
             ranks; contiguous rows, any row stride
    mine     (n,) of that dtype: this rank's values. own: this rank's number
    out      (n,) of that dtype, written: the mean, or `total` if there is one, rounded to nearest even
    total    (n,) float32 (float64 for float64), to which the mean is added; or None. It may be `out` itself
    returns  (k,) float64: sums of squares of the k parts of `out`; inf or NaN where an element is
    Values are added in the order of ranks, in float32 (float64 for float64), and divided once, so results are
    reproducible bit by bit. All tensors are on one device; `out` and `total` do not overlap the tensors that are read.
    Vector loads are used if all begin on 16 bytes.
    """
    (others, n), device = rows.shape, rows.device
    expect("mine", mine, C_NAMES if rows.is_cuda else (*C_NAMES, torch.float64), (n,), device)
    expect("out", out, (mine.dtype,), (n,), device)
    if total is not None:
        expect("total", total, (torch.promote_types(mine.dtype, torch.float32),), (n,), device)
    if rows.dtype != mine.dtype or (n > 1 and rows.stride(1) != 1) or not 0 <= own <= others:
        raise ValueError(
            f"rows must be {mine.dtype} with adjacent elements, and own one of {others + 1} ranks: got {rows.dtype} "
            f"with strides {rows.stride()}, own = {own}"
        )
    if n == 0 or rows.is_meta:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if not rows.is_cuda:
        reference(torch.cat([rows[:own], mine[None], rows[own:]]), out, total)
        return out.double().square().sum()[None]
    tensors = [rows, mine, out] + ([] if total is None else [total])
    count = 16 // rows.element_size()
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors) and rows.stride(0) % count == 0
    vectors = n // count if aligned else 0
    blocks = -(-(vectors or n) // THREADS)
    squares = torch.empty(blocks, dtype=torch.float64, device=device)
    kernel(variant(rows.dtype, total is not None), "peer_mean", device)(
        blocks, THREADS, rows, rows.stride(0), mine, own, others + 1, out, total, n, vectors, squares
    )
    return squares


def reference(rows: Tensor, out: Tensor, total: Tensor | None = None) -> None:
    """Compute `peer_mean` of all ranks' `rows` (size, n) in torch, on any device."""
    mean = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        mean += row
    mean /= len(rows)
    out.copy_(mean if total is None else total.add_(mean))
