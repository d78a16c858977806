"""Average a part of a gradient over the ranks. The other ranks have already copied their values to this device."""

from functools import cache

import torch
from torch import Tensor

from ..base.arguments import expect
from ..base.launch import C_NAMES, Variant, kernel

THREADS = 256


@cache
def variant(dtype: torch.dtype, summed: bool) -> Variant:
    """Return the Variant of the CUDA kernel `peer_mean` for these arguments, to pass to `kernel`, which compiles it.

    A Variant is a CUDA source file and the macros with which it is compiled.

    dtype: the dtype of the gradients: float32, float16 or bfloat16.
    summed: whether the kernel adds the mean over the ranks to a float32 running sum, the argument `total` of the
        function `peer_mean`.
    """
    return Variant("peer_sum", (("ELEMENT", C_NAMES[dtype]), ("TOTAL", "float" if summed else "none")))


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `peer_mean` supports gradients of `dtype` on `device`.

    If not, the gradients of a flat buffer are averaged by a reduce-scatter instead of peer copies.
    """
    return dtype in C_NAMES or (dtype == torch.float64 and device.type == "cpu")


def peer_mean(rows: Tensor, mine: Tensor, own: int, out: Tensor, total: Tensor | None = None) -> Tensor:
    """Average the gradient values of all ranks, and write the mean to `out`.

    With `total`, the mean is added to `total` instead, and the new `total` is written to `out`. This function does not
    communicate: the other ranks have already copied their values to `rows`.

    Values are added in rank order, in float32 (float64 for float64), and the sum is divided once, so results are
    bit-identical in every run. The host does not wait for the device. All tensors are on one device, and `out` and
    `total` do not overlap `rows` and `mine`. The kernel uses vector loads if all tensors and all rows begin at
    multiples of 16 bytes.

    Args:
        rows: (ranks - 1, n) float32, float16 or bfloat16 (on the CPU also float64), the other ranks' values in rank
            order. Each row must be contiguous, but consecutive rows may be any distance apart.
        mine: (n,) of the same dtype, this rank's values.
        own: this rank's index, from 0 to ranks - 1: the position of `mine` in rank order.
        out: (n,) of the same dtype, written with the mean, or with the new `total`, rounded to nearest even.
        total: (n,) float32 (float64 for float64), a running sum to which the mean is added in place, or None. It may be
            `out` itself.

    Returns:
        (k,) float64, partial sums of the squares of `out`, where k depends on n, the dtype, the device and the
        alignment. Their sum is the squared norm of `out`, and is inf or NaN if an element of `out` is.

    Raises:
        ValueError: a tensor does not have the shape, dtype or device described above, `mine`, `out`, `total` or a row
            is not contiguous, or `own` is out of range.
    """
    (others, n), device = rows.shape, rows.device
    expect("mine", mine, C_NAMES if rows.is_cuda else (*C_NAMES, torch.float64), (n,), device)
    expect("out", out, (mine.dtype,), (n,), device)
    if total is not None:
        expect("total", total, (torch.promote_types(mine.dtype, torch.float32),), (n,), device)
    if rows.dtype != mine.dtype or (n > 1 and rows.stride(1) != 1) or not 0 <= own <= others:
        raise ValueError(
            f"peer_mean: rows must have the dtype of mine, {mine.dtype}; each row must be contiguous (stride 1 in the "
            f"last dimension); and own, this rank's index, must be from 0 to {others}. Got rows of {rows.dtype} with "
            f"strides {rows.stride()}, and own={own}."
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
    """Compute the same `out` and `total` as the CUDA kernel of `peer_mean`, with torch's functions, on any device.

    `peer_mean` calls it on the CPU. Tests compare the kernel's results with it.

    Args:
        rows: (ranks, n), the values of all ranks in rank order, those of this rank included.
        out: (n,) of the same dtype, written with the mean, or with the new `total`.
        total: (n,) float32 (float64 for float64), a running sum to which the mean is added in place, or None.
    """
    mean = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        mean += row
    mean /= len(rows)
    out.copy_(mean if total is None else total.add_(mean))
