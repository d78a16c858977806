"""Sums, in float32, of matrix products of half-precision factors."""

import logging
from functools import cache

import torch

log = logging.getLogger(__name__)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return total + a @ b in float32, written over `total`, or into a new tensor if it is None.

    total          (M, N) float32 or None
    a, b           (M, K), (K, N) of one dtype: float32, float16 or bfloat16; either may be transposed
    """
    if a.dtype == torch.float32:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.is_meta:
        return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32) if total is None else total
    if not a.is_cuda:
        return add_product(total, a.float(), b.float())
    if _wide_output(a.device):  # tensor cores add in float32; the sum is not rounded
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = torch.mm(a, b)
    return product.float() if total is None else total.add_(product)


@cache
def _wide_output(device: torch.device) -> bool:
    """Return whether cuBLAS returns float32 products of half-precision factors on this device; log a warning if not."""
    offered = "dtype_out" in torch.ops.aten.addmm.overloads()
    if offered and torch.cuda.get_device_capability(device)[0] >= 8:
        return True
    log.warning(
        "weight gradients of linear_cross_entropy are rounded once a chunk: torch %s on compute capability %s does "
        "not give float32 products of half-precision matrices (torch 2.8 and capability 8.0 do)",
        torch.__version__,
        torch.cuda.get_device_capability(device),
    )
    return False
