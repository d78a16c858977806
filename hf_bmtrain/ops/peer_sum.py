"""The mean over ranks of one part of a gradient, to which every rank has brought a row."""

from functools import cache

import torch

from hf_bmtrain.ops.expect import expect
from hf_bmtrain.ops.launch import C_NAMES, Variant, kernel

THREADS = 256


@cache
def variant(dtype: torch.dtype, summed: bool) -> Variant:
    return Variant("peer_sum", (("ELEMENT", C_NAMES[dtype]), ("TOTAL", "float" if summed else "none")))


def variants(arch: int) -> list[Variant]:
    """All that this module can ask the compiler for."""
    return [variant(dtype, summed) for dtype in C_NAMES for summed in (False, True)]


def serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `peer_mean` takes gradients of this dtype on this device."""
    return dtype in C_NAMES or (dtype == torch.float64 and device.type == "cpu")


def peer_mean(rows: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None = None) -> None:
    """Write the mean over ranks, or add it to a running sum and write that.

    rows     (size, n) float32, float16 or bfloat16 (on CPU also float64): a row a rank
    out      (n,) of that dtype, written: the mean, or `total` where there is one, rounded to nearest even
    total    (n,) float32 (float64 for float64), to which the mean is added; or None. It may be `out` itself
    Rows are added in the order of ranks, in float32 (float64 for float64), and divided once: the same rows give the
    same bits on every run. All contiguous, on one device; `out` and `total` overlap no row. Fast when all rows begin
    on 16 bytes; right in any case.
    """
    (size, n), device = rows.shape, rows.device
    expect("rows", rows, C_NAMES if rows.is_cuda else (*C_NAMES, torch.float64), (size, n), device)
    expect("out", out, (rows.dtype,), (n,), device)
    if total is not None:
        expect("total", total, (torch.promote_types(rows.dtype, torch.float32),), (n,), device)
    if size == 0 or n == 0:
        return
    if not rows.is_cuda:
        return reference(rows, out, total)
    tensors = [rows, out] + ([] if total is None else [total])
    count = 16 // rows.element_size()
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors) and n % count == 0
    vectors = n // count if aligned else 0
    blocks = -(-(vectors or n) // THREADS)
    kernel(variant(rows.dtype, total is not None), "peer_mean", device)(
        blocks, THREADS, rows, size, out, total, n, vectors
    )


def reference(rows: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None = None) -> None:
    """`peer_mean` in torch, on any device."""
    mean = rows[0].to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        mean += row
    mean /= len(rows)
    out.copy_(mean if total is None else total.add_(mean))
