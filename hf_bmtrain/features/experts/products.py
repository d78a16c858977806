"""Grouped products: each row is multiplied by the matrix of its group (its expert), for all groups in one call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_KERNEL: Any = getattr(torch.nn.functional, "grouped_mm", None)  # public since torch 2.10
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16
"""torch's kernel requires strides that are multiples of this number of bytes."""


def grouped_product(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by the matrix of its group. Differentiable.

    In a mixture of experts, a group consists of the rows that are routed to one expert, and its matrix is a weight of
    this expert.

    Args:
        x: (rows, K), the rows, sorted by group.
        matrices: (groups, K, N), in the dtype of x.
        ends: (groups,) int32, the end of each group's rows, exclusive; the last element is `rows`.

    Returns:
        (rows, N).
    """
    # Eager code calls torch's kernel directly. Compiled code calls the operator `_product_of_groups`, which calls the
    # kernel: if Inductor saw the kernel itself, it might choose strides that the kernel refuses. Dtypes other than
    # bfloat16 use the operator in eager code, too, because torch's kernel does not support them on meta tensors.
    if matrices.dtype == torch.bfloat16 and not torch.compiler.is_compiling() and has_kernel(matrices):
        return _KERNEL(x, matrices, offs=ends)
    return _product_of_groups(x, matrices, ends)


def has_kernel(stack: Tensor) -> bool:
    """Return whether torch's grouped_mm kernel can multiply by the matrices `stack`, (groups, rows, columns).

    This depends on the matrices' dtype, device and sizes. If the result is False, `grouped_product` multiplies by one
    matrix after another, which makes the host wait for the device. Therefore, experts without adapters run
    transformers' forward in this case.
    """
    return _fits(stack, *stack.shape[1:])


def _fits(like: Tensor, rows: int, columns: int) -> bool:
    """Return whether torch's grouped_mm kernel supports matrices (rows, columns) of the dtype and device of `like`."""
    if _KERNEL is None or like.dtype not in _KERNEL_DTYPES:
        return False
    if any(width * like.itemsize % ALIGNMENT for width in (rows, columns)):
        return False
    if like.device.type == "cuda":
        return torch.cuda.get_device_capability(like.device) >= (8, 0)
    return like.is_meta or torch.__version__ >= "2.11"


@torch.library.custom_op(
    "hf_bmtrain::product_of_groups", mutates_args=(), schema="(Tensor x, Tensor matrices, Tensor ends) -> Tensor"
)
def _product_of_groups(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return (rows, N): each row of `x` times the matrix of its group.

    This is the custom operator behind `grouped_product`. It accepts any dtype and device, and torch.compile does not
    trace into it. Where torch's grouped_mm kernel cannot be used, a loop multiplies one group after another. The host
    then waits for the device, because it reads `ends`.

    x: (rows, K), the rows, sorted by group.
    matrices: (groups, K, N), in the dtype of x.
    ends: (groups,) int32, the end of each group's rows, exclusive.
    """
    if has_kernel(matrices):
        return _KERNEL(x.contiguous(), matrices, offs=ends)
    y = x.new_empty(len(x), matrices.shape[2])
    for group, rows in _groups(ends):
        torch.mm(x[rows], matrices[group], out=y[rows])
    return y


@torch.library.custom_op(
    "hf_bmtrain::gradient_of_groups", mutates_args=(), schema="(Tensor x, Tensor dy, Tensor ends) -> Tensor"
)
def gradient_of_groups(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of `grouped_product` with respect to its argument `matrices`. Called in backward.

    A group consists of consecutive rows that are multiplied by the same matrix, such as the rows of one expert.

    Args:
        x: (rows, K), the rows, sorted by group, as for `grouped_product`.
        dy: (rows, N), the gradient of the result of `grouped_product`.
        ends: (groups,) int32, the end of each group's rows, exclusive.

    Returns:
        (groups, K, N), zero for a group without rows.
    """
    if _fits(x, x.shape[1], dy.shape[1]):
        return _KERNEL(x.contiguous().t(), dy.contiguous(), offs=ends)
    matrices = x.new_zeros(len(ends), x.shape[1], dy.shape[1])
    for group, rows in _groups(ends):
        torch.mm(x[rows].t(), dy[rows], out=matrices[group])
    return matrices


@_product_of_groups.register_fake
def _(x, matrices, ends):
    return x.new_empty(x.shape[0], matrices.shape[2])


@gradient_of_groups.register_fake
def _(x, dy, ends):
    return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, matrices, ends = ctx.saved_tensors
    # Call `_product_of_groups`, because `grouped_product` would call torch's kernel directly in compiled code, too: up
    # to torch 2.11, is_compiling() is False while torch.compile traces this function. If Inductor sees the kernel, it
    # may choose strides that the kernel refuses.
    dx = _product_of_groups(dy, matrices.transpose(1, 2), ends) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return dx, None, None
    # If `matrices` is the transposed view of a weight, return a transposed view, too. Autograd transposes it back, so
    # the gradient of the weight is contiguous.
    if matrices.stride(1) == 1 != matrices.stride(2):
        return dx, gradient_of_groups(dy, x, ends).transpose(1, 2), None
    return dx, gradient_of_groups(x, dy, ends), None


_product_of_groups.register_autograd(_backward, setup_context=_keep)


def _groups(ends: Tensor) -> Iterable[tuple[int, slice]]:
    """Yield the index and the slice of rows of each group that has rows. The host waits for the device.

    ends: (groups,) int32, the end of each group's rows, exclusive.
    """
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            yield group, slice(begin, end)
        begin = end
