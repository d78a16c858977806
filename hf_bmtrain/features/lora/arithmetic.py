"""Represent float32 matrices of a LoRA adapter as sums of bfloat16 matrices; on a GPU, by one CUDA kernel per call.

A matrix is represented by hi + lo, where hi is the matrix rounded to bfloat16, and lo is the remainder, also rounded.
`factors` explains how products are computed with these sums.

The CUDA kernels are in kernels/lora.cu. On the CPU, torch's operators compute the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.base.launch import Variant, kernel

VARIANT = Variant("lora", ())
"""The CUDA source of the kernels, kernels/lora.cu. It has no macros."""
_THREADS = 256


def split_factors(a: Tensor, b: Tensor) -> Tensor:
    """Return [hi; lo; hi] (stacked rows), where hi + lo represents the matrix [A | Bᵀ]: A and Bᵀ side by side.

    hi is the matrix rounded to bfloat16, and lo is the remainder, also rounded. hi and lo are (r, K + N).

    Args:
        a: A, (r, K) float32.
        b: B, (N, r) float32, on the same device.

    Returns:
        (3 r, K + N) bfloat16.
    """
    rank, width = a.shape
    out = a.new_empty(3 * rank, width + b.shape[0], dtype=torch.bfloat16)
    if _on_gpu(a):
        _launch("split_factors", out.numel() // 3, a.contiguous(), b.contiguous(), rank, width, out.shape[1], out)
        return out
    matrix = torch.cat([a, b.t()], 1)
    parts = out.view(3, rank, -1).copy_(matrix)
    torch.sub(matrix, parts[0], out=parts[1])
    return out


def split_sums(sums: Tensor, scaling: float) -> Tensor:
    """Return [rest | hi | hi]: three bfloat16 matrices side by side, where rest + hi represents s (p + q).

    hi is s p, rounded to bfloat16, and rest is s p - hi + s q, also rounded.

    Args:
        sums: the float32 matrices [p | q], (rows, 2 r), contiguous.
        scaling: s, a factor.

    Returns:
        (rows, 3 r) bfloat16.
    """
    rows, rank = sums.shape[0], sums.shape[1] // 2
    out = sums.new_empty(rows, 3 * rank, dtype=torch.bfloat16)
    if _on_gpu(sums):
        _launch("split_sums", rows * rank, sums, scaling, rank, rows * rank, out)
        return out
    rest, high, again = out.split(rank, 1)
    p, q = (sums * scaling).split(rank, 1)
    again.copy_(high.copy_(p))
    torch.add(p - high, q, out=rest)
    return out


def _on_gpu(x: Tensor) -> bool:
    """Return whether x is on a GPU or on the meta device, which represents a GPU when memory is predicted."""
    return x.is_cuda or x.is_meta


def _launch(name: str, values: int, *arguments: Any) -> None:
    """Launch the CUDA kernel `name`. Do nothing if `values` is 0, or on meta tensors.

    values: the number of values to process, one per thread.
    arguments: the kernel's arguments, the last of which is the tensor that it writes.
    """
    out = arguments[-1]
    if values and not out.is_meta:
        kernel(VARIANT, name, out.device)(-(-values // _THREADS), _THREADS, *arguments)
