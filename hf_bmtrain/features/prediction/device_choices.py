"""Make dropout, softmax and attention on the meta device allocate the same tensors as on CUDA."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_log_once = functools.cache(logging.getLogger("hf_bmtrain").warning)
_aten = torch.ops.aten
_FLASH_WIDTH = 256


@contextmanager
def cuda_choices() -> Iterator[None]:
    """Context manager inside which dropout, softmax and attention of meta tensors allocate the same tensors as on CUDA.

    `predict_memory` simulates training in this context. Inside it, `torch.autocast("meta")` has no effect, and logs a
    warning once if it would enable autocast. Outside, `torch.autocast("meta")` raises an error, because torch has no
    autocast for the meta device.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradMeta")
    library.impl("scaled_dot_product_attention", _attend, "AutogradMeta")
    library.impl("_safe_softmax", _safe_softmax, "AutogradMeta")
    library.impl("_softmax_backward_data", _softmax_backward, "AutogradMeta")
    make = torch.autocast.__init__

    # Replace the constructor of torch.autocast, because it raises an error for the meta device. The simulated forward
    # may call it in two cases. PEFT disables autocast around adapters on fused experts. A sharded model enables
    # autocast if the program has an Accelerator with mixed precision.
    def without_meta(self, device_type, dtype=None, enabled=True, cache_enabled=None) -> None:
        meta = device_type == "meta"
        if meta and enabled:
            _log_once(
                "The prediction ignores autocast, which the Accelerator's mixed precision enables, so training may "
                "take more or less memory than predicted. For an accurate prediction, load the model in the dtype that "
                "it computes in, and do not enable mixed precision."
            )
        make(self, "cpu" if meta else device_type, dtype, enabled and not meta, cache_enabled)

    try:
        torch.autocast.__init__ = without_meta
        yield
    finally:
        torch.autocast.__init__ = make
        library._destroy()


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Emulate CUDA's `aten::dropout` for meta tensors: for 0 < p < 1, one kernel, which saves a mask for the backward.

    values: the input. It is returned itself if nothing is to be dropped.
    p: the probability with which an element is dropped.
    train: whether to drop elements.
    """
    if p == 0 or not train or values.numel() == 0:
        return values
    return _aten.native_dropout(values, p, True)[0] if p < 1 else values * 0


def _attend(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> torch.Tensor:
    """Emulate scaled_dot_product_attention on a GPU of compute capability 8.0 or higher, for meta tensors.

    The arguments are those of torch.nn.functional.scaled_dot_product_attention. As on the GPU, dtypes, shapes and the
    mask select the kernel (flash attention, the memory-efficient kernel, or separate operations, "math"), and with it
    the tensors that are saved for the backward.
    """
    half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    alike = query.dim() == 4 and width == key.shape[-1] == value.shape[-1] and width % 8 == 0
    if half and attn_mask is None and alike and width <= _FLASH_WIDTH:
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if query.dim() == 4 and query.dtype != torch.float64 and not (enable_gqa and query.shape[1] != key.shape[1]):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    arguments: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **arguments)[0]


def _safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Emulate CUDA's `aten::_safe_softmax` for meta tensors.

    CUDA's operator temporarily allocates a mask of the scores that are -inf. This function does so, too, so that the
    predicted peak of memory contains the mask.

    scores, dim, dtype: as for torch.softmax.
    """
    result = torch.softmax(scores, dim, dtype)
    marks = scores.detach().eq(float("-inf"))
    del marks
    return result


def _softmax_backward(gradient: torch.Tensor, result: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Emulate CUDA's `aten::_softmax_backward_data` for meta tensors: it temporarily allocates a product of its inputs.

    gradient: the gradient of the softmax's result.
    result: the softmax's result. Not used, because meta tensors have no values.
    dim: the dimension of the softmax. Not used either.
    dtype: the dtype of the softmax's input, and so of the gradient that is returned.
    """
    product = torch.empty_like(gradient)
    scores = torch.empty_like(gradient, dtype=dtype)
    del product
    return scores


def _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale) -> torch.Tensor:
    """Call the memory-efficient kernel with the mask as an additive bias, as torch does on CUDA.

    The arguments are those of torch.nn.functional.scaled_dot_product_attention, with 4-D tensors.
    """
    bias = attn_mask
    if bias is not None:
        if bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(bias.logical_not(), float("-inf"))
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needed = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needed, dropout_p, is_causal, scale=scale
    )[0]
