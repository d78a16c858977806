"""The element-wise parts of a mixture of experts on a GPU, each in one pass over memory: sums of rows, SiLU gates.

The CUDA kernels are in kernels/experts.cu. They compute in float32, and round once at the end. On the CPU, the
functions use torch's operators instead, for tests. There, `silu_gate` also rounds silu(gate) to the dtype of its input.

In compiled code, `sum_rows` and the functions whose names end in `_backward` are custom operators, which torch.compile
does not trace into. If it did, Inductor would generate kernels that take up to twice as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.base.launch import C_NAMES, Variant, kernel

_THREADS = 256
_VECTOR = 16  # the kernels read and write this many bytes at a time (a vector)


def serves(rows: Tensor, parts: int = 1) -> bool:
    """Return whether this module's CUDA kernels can be called for the tensor `rows`.

    If the result is False, use torch's operators. The kernels need a GPU, and the dtype float32, float16 or bfloat16.
    They read vectors of 16 bytes, so the size of each part of a row must be a multiple of 16 bytes. Meta tensors count
    as tensors on a GPU, because predictions of memory use them in place of GPU tensors.

    Args:
        rows: (n, width), the tensor.
        parts: the number of equal parts into which the kernel divides each row: 2 for `silu_gate`, otherwise 1.
    """
    if rows.device.type not in ("cuda", "meta") or rows.dtype not in C_NAMES:  # torch 2.6 cannot trace `is_cuda` here
        return False
    return rows.shape[-1] * rows.itemsize % (_VECTOR * parts) == 0


@functools.cache
def variant(rows: torch.dtype, out: torch.dtype, weighted: bool) -> Variant:
    """Return the CUDA source kernels/experts.cu, with macros that define the dtypes of its kernels' tensors.

    The source contains four kernels: `sum_rows`, `sum_rows_backward`, `silu_gate` and `silu_gate_backward`. Each caller
    launches one of them.

    Args:
        rows: for the `sum_rows` kernels, the dtype of the rows that are added up. For the `silu_gate` kernels, the
            dtype of all tensors.
        out: for the `sum_rows` kernels, the dtype of the sums and of the sums' gradient: `rows` or torch.float32. The
            `silu_gate` kernels ignore it.
        weighted: whether `sum_rows` gets a tensor of weights, which must be float32, and multiplies each row by its
            weight. The other kernels ignore it.
    """
    names = (("ELEMENT", C_NAMES[rows]), ("OUT", C_NAMES[out]), ("WEIGHT", "float" if weighted else "none"))
    return Variant("experts", names)


def _operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a function a custom operator, into which torch.compile does not trace.

    Only compiled code calls the operator. Other code still calls the function itself.

    schema: the types of the operator's arguments and results, as torch.library.custom_op takes them.
    fake: a function with the same arguments. It returns tensors of the shapes and dtypes of the results, without
        computing them, for the tracing by torch.compile.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"hf_bmtrain::{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        operator.register_fake(fake)

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            return operator(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return call

    return decorate


@_operator(
    "(Tensor rows, Tensor places, Tensor? weights=None, ScalarType? dtype=None) -> Tensor",
    lambda rows, places, weights=None, dtype=None: rows.new_empty(places.shape[0], rows.shape[1], dtype=dtype),
)
def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return, for each token, the sum of its k rows, each multiplied by a weight.

    The forward of a mixture of experts calls this with weights: the rows are the outputs of the token's k experts. The
    backward of the step that copies each token to its k experts calls it without weights: the rows are the gradients of
    the copies.

    Args:
        rows: (tokens * k, width), the rows of all tokens, in any order.
        places: (tokens, k) int64, the indices of each token's rows in `rows`. The rows are added in this order.
        weights: (tokens, k), the weights of these rows; None for ones.
        dtype: the dtype of the result; None for that of `rows`. With weights, it may also be torch.float32.

    Returns:
        (tokens, width).
    """
    tokens, k = places.shape
    out = rows.new_empty(tokens, rows.shape[1], dtype=dtype)
    if not _on_gpu(rows):
        picked = rows.index_select(0, places.reshape(-1)).view(tokens, k, rows.shape[1]).float()
        return out.copy_((picked if weights is None else picked * weights[..., None].float()).sum(1))
    factors = None if weights is None else _dense(weights.float())
    launch = variant(rows.dtype, out.dtype, weights is not None), "sum_rows", tokens
    _launch(*launch, out.shape[1] * rows.itemsize, _dense(rows), _dense(places), factors, k, out)
    return out


@_operator(
    "(Tensor dout, Tensor rows, Tensor weights, Tensor order) -> (Tensor, Tensor)",
    lambda dout, rows, weights, order: (
        rows.new_empty(rows.shape),
        weights.new_empty(weights.shape, dtype=torch.float32),
    ),
)
def sum_rows_backward(dout: Tensor, rows: Tensor, weights: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `sum_rows` with respect to `rows` and `weights`.

    Args:
        dout: (tokens, width), the gradient of the result, in the dtype of the result.
        rows: (tokens * k, width), as passed to `sum_rows`.
        weights: (tokens, k), the weight of each row, as passed to `sum_rows`.
        order: (tokens * k,) int64: for each row, the index of its weight in the flattened `weights`.

    Returns:
        The gradient of `rows`, in their dtype, and that of `weights`, in float32.
    """
    drows, dweights = rows.new_empty(rows.shape), weights.new_empty(weights.shape, dtype=torch.float32)
    k = weights.shape[1]
    if not _on_gpu(rows):
        picked = dout.index_select(0, order // k).float()
        dweights.view(-1)[order] = (picked * rows.float()).sum(1)
        return drows.copy_(picked * weights.float().reshape(-1, 1).index_select(0, order)), dweights
    launch = variant(rows.dtype, dout.dtype, True), "sum_rows_backward", -(-len(rows) * 32 // _THREADS)
    values = (_dense(dout), _dense(rows), _dense(weights.float()), _dense(order), k, len(rows), drows, dweights)
    _launch(*launch, rows.shape[1] * rows.itemsize, *values, threads=_THREADS)
    return drows, dweights


def silu_gate(x: Tensor) -> Tensor:
    """Return silu(gate) * up (SwiGLU). In each row of `x`, the first half is gate, and the second half is up.

    This is the activation between the two matrix products of an expert. On a GPU, a CUDA kernel computes it. In
    compiled code and on the CPU, torch's operators are used instead. Inductor compiles them to a kernel that is as fast
    as the CUDA kernel.

    Args:
        x: (rows, 2 * width).

    Returns:
        (rows, width).
    """
    if torch.compiler.is_compiling() or not _on_gpu(x):
        gate, up = x.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    _launch(variant(x.dtype, x.dtype, False), "silu_gate", len(x), out.shape[1] * x.itemsize, _dense(x), out)
    return out


@_operator("(Tensor x, Tensor dout) -> Tensor", lambda x, dout: x.new_empty(x.shape))
def silu_gate_backward(x: Tensor, dout: Tensor) -> Tensor:
    """Return the gradient of `silu_gate` with respect to x, in the shape and dtype of x.

    Args:
        x: (rows, 2 * width), the argument of `silu_gate`.
        dout: (rows, width), the gradient of the result.
    """
    dx = x.new_empty(x.shape)
    if not _on_gpu(x):
        (gate, up), dy = x.float().chunk(2, 1), dout.float()
        sigmoid = gate.sigmoid()
        return dx.copy_(torch.cat([dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), dy * gate * sigmoid], 1))
    launch = variant(x.dtype, x.dtype, False), "silu_gate_backward", len(x)
    _launch(*launch, dout.shape[1] * x.itemsize, _dense(x), _dense(dout), dx)
    return dx


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda or x.is_meta


def _dense(x: Tensor) -> Tensor:
    """Return x or a copy of x, so that the result is contiguous and its address is a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.is_meta or x.data_ptr() % _VECTOR == 0 else x.clone()


def _launch(chosen: Variant, name: str, grid: int, row: int, *values: Any, threads: int = 0) -> None:
    """Launch the CUDA kernel `name`. Do nothing if there are no rows, and on meta tensors.

    chosen: the variant of the CUDA source, as `variant` returns it.
    grid: the number of thread blocks.
    row: the size in bytes of a row or, for the gate kernels, of half a row of their input. The kernel gets this size
        as a number of 16-byte vectors, in its first argument.
    values: the kernel's other arguments. The last one is a tensor that the kernel writes.
    threads: the number of threads of a block; 0 for one per vector of a row, up to 256.
    """
    if grid and not values[-1].is_meta:
        vectors = row // _VECTOR
        block = threads or min(_THREADS, -(-vectors // 32) * 32)
        kernel(chosen, name, values[-1].device)(grid, block, vectors, *values)
