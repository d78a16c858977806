"""Products of half-precision matrices, accumulated in float32."""

import logging
from functools import cache

import torch

from ...engine.base.torch_internals import has_wide_products

log = logging.getLogger(__name__)


def add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Add the matrix product a @ b to `total` in place, and return `total`.

    linear_cross_entropy calls it for each chunk of tokens, to sum up the gradient of its weight. The product is
    computed and added in float32. There is one exception: if the GPU or the version of torch cannot multiply
    half-precision matrices with a float32 result, the product is rounded to the dtype of `a` before it is added.

    Args:
        total: (M, N) float32, or None to return the product as a new tensor.
        a: (M, K) float32, float16 or bfloat16; may be a transposed view.
        b: (K, N), of the dtype of `a`; may be a transposed view.
    """
    if a.dtype == torch.float32:
        return torch.mm(a, b) if total is None else total.addmm_(a, b)
    if a.is_meta:
        return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32) if total is None else total
    if not a.is_cuda:
        return add_product(total, a.float(), b.float())
    if _wide_output(a.device):  # tensor cores sum in float32, and the sum is not rounded to 16 bits
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    product = torch.mm(a, b)
    return product.float() if total is None else total.add_(product)


@cache
def _wide_output(device: torch.device) -> bool:
    """Return whether the GPU `device` can multiply half-precision matrices with a float32 result; warn if not."""
    if has_wide_products(device):
        return True
    log.warning(
        "linear_cross_entropy rounds the weight's gradient to half precision once per chunk, because torch %s on a GPU "
        "of compute capability %s cannot multiply half-precision matrices with a float32 result. The gradient is less "
        "accurate, and the loss is not affected. Torch 2.8 or newer and compute capability 8.0 or higher avoid this.",
        torch.__version__,
        ".".join(map(str, torch.cuda.get_device_capability(device))),
    )
    return False
