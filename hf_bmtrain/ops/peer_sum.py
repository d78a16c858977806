"""The mean over ranks of one part of a gradient whose rows all lie in this rank's reach."""

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


def peer_mean(
    own: torch.Tensor, others: torch.Tensor, rank: int, out: torch.Tensor, total: torch.Tensor | None = None
) -> None:
    """Write the mean over ranks, or add it to a running sum and write that.

    own      (n,) float32, float16 or bfloat16 (on CPU also float64): this rank's row, number `rank` of size
    others   (size - 1, n) of that dtype: the rows of the other ranks in their order, without this one's
    out      (n,) of that dtype, written: the mean, or `total` where there is one, rounded to nearest even
    total    (n,) float32 (float64 for float64), to which the mean is added; or None. It may be `out` itself
    Rows are added in the order of ranks, in float32 (float64 for float64), and divided once: the same rows give the
    same bits on every rank and every run. All contiguous, on one device; `out` and `total` overlap no row. Fast when
    all rows begin on 16 bytes; right in any case.
    """
    n, device = own.numel(), own.device
    expect("own", own, C_NAMES if own.is_cuda else (*C_NAMES, torch.float64), (n,), device)
    expect("others", others, (own.dtype,), (len(others), n), device)
    expect("out", out, (own.dtype,), (n,), device)
    if total is not None:
        expect("total", total, (torch.promote_types(own.dtype, torch.float32),), (n,), device)
    if not 0 <= rank <= len(others):
        raise ValueError(f"rank must be 0 to {len(others)} with {len(others)} other rows, got {rank}")
    if n == 0:
        return
    if not own.is_cuda:
        return reference(own, others, rank, out, total)
    count = 16 // own.element_size()
    tensors = [own, out, *others.unbind(), *([] if total is None else [total])]
    vectors = 0 if any(tensor.data_ptr() % 16 for tensor in tensors) else n // count
    blocks = -(-max(vectors, n - count * vectors) // THREADS)
    kernel(variant(own.dtype, total is not None), "peer_mean", device)(
        blocks, THREADS, own, others, rank, len(others) + 1, out, total, n, vectors
    )


def reference(
    own: torch.Tensor, others: torch.Tensor, rank: int, out: torch.Tensor, total: torch.Tensor | None = None
) -> None:
    """`peer_mean` in torch, on any device."""
    rows = [*others[:rank], own, *others[rank:]]
    mean = rows[0].to(torch.promote_types(own.dtype, torch.float32), copy=True)
    for row in rows[1:]:
        mean += row
    mean /= len(rows)
    out.copy_(mean if total is None else total.add_(mean))
