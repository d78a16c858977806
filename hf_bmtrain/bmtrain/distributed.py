"""Differentiable collectives, and reductions of results over all ranks.

An operation maps the inputs x_0 ... x_{N-1} of the N ranks to their outputs y_0 ... y_{N-1}. Its backward is the
adjoint of that map: each rank gets the gradient of the *sum* of all ranks' losses with respect to its own input.
For sharded parameters you need not divide the loss, because their gradients are averaged over the ranks afterwards.
If you use the gradient of another tensor, divide it by the world size yourself. Every rank must call every operation,
in the same order, and run its backward.
"""

from __future__ import annotations

from typing import Any

import torch

from ..engine.base.arguments import expect_number
from ..engine.comm.communicator import as_bytes
from ..engine.runtime.world import current_world

_OPERATIONS = ("sum", "avg", "max", "min", "prod")


def all_gather(x: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """Stack the tensors of all ranks along a new dimension 0. Differentiable. Collective: every rank must call it.

    Args:
        x: (...), any dtype; shape and dtype must be equal on all ranks.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.

    Returns:
        (world size, ...), a new tensor on the device of `x`, equal on all ranks.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    current_world().check_comm(comm)
    _check_alike("all_gather", "x", x)
    return _AllGather.apply(x)


def all_reduce(x: torch.Tensor, op: str = "sum", comm: Any = None) -> torch.Tensor:
    """Reduce a tensor over all ranks, element by element. Differentiable. Collective: every rank must call it.

    Args:
        x: (...); shape and dtype must be equal on all ranks. The dtypes bool, int16 and complex are not supported.
        op: "sum", "avg", "max", "min" or "prod". "avg" needs a floating dtype. If several ranks have the maximum or
            minimum, its gradient is divided evenly between them, as in torch.amax.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.

    Returns:
        (...), a new tensor on the device of `x`, equal on all ranks.

    Raises:
        ValueError: `op` is unknown or cannot reduce this dtype; or, on every rank, shapes or dtypes differ.
    """
    current_world().check_comm(comm)
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise ValueError(f"op must be one of the operations {', '.join(_OPERATIONS)}, not {op!r}")
    _check_tensor("all_reduce", "x", x)
    if x.dtype in (torch.bool, torch.int16) or x.dtype.is_complex or (op == "avg" and not x.dtype.is_floating_point):
        raise ValueError(f"all_reduce cannot take the {op} of {x.dtype}: convert it first, for example with .float()")
    _check_alike("all_reduce", "x", x)
    if op in ("sum", "avg"):
        total = _Sum.apply(x)
        return total / current_world().size if op == "avg" else total
    everyone = _AllGather.apply(x)
    return {"max": everyone.amax, "min": everyone.amin, "prod": everyone.prod}[op](0)


def reduce_scatter(x: torch.Tensor, op: str = "sum", comm: Any = None) -> torch.Tensor:
    """Reduce a tensor over all ranks and return this rank's part of dimension 0. Differentiable.

    Collective: every rank must call it.

    Args:
        x: (world size * n, ...); shape and dtype must be equal on all ranks.
        op: as in `all_reduce`.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.

    Returns:
        (n, ...), the rows rank * n to (rank + 1) * n of the reduced tensor.

    Raises:
        ValueError: the size of dimension 0 is not a multiple of the world size, or `all_reduce` raises it.
    """
    world = current_world()
    _check_tensor("reduce_scatter", "x", x)
    if x.dim() == 0 or x.shape[0] % world.size:
        raise ValueError(
            f"reduce_scatter splits dimension 0 of x evenly over {world.size} ranks, so its size must be a multiple "
            f"of the world size, but the shape is {tuple(x.shape)}"
        )
    rows = x.shape[0] // world.size
    return all_reduce(x, op, comm)[world.rank * rows : (world.rank + 1) * rows]


def broadcast(x: torch.Tensor, root: int, comm: Any = None) -> torch.Tensor:
    """Return one rank's tensor on every rank. Differentiable. Collective: every rank must call it.

    Args:
        x: (...), any dtype; shape and dtype must be equal on all ranks.
        root: the rank whose `x` is returned.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.

    Returns:
        (...), a new tensor on the device of `x`.

    Raises:
        ValueError: `root` is not a rank; or, on every rank, shapes or dtypes differ.
    """
    current_world().check_comm(comm)
    size = current_world().size
    expect_number("root", root, f"a rank: ranks are 0 to {size - 1}", lambda rank: 0 <= rank < size, integer=True)
    _check_alike("broadcast", "x", x)
    return _Broadcast.apply(x, root)


def _check_tensor(function: str, name: str, x: Any) -> None:
    """Raise ValueError unless `x` is a tensor that is not on the meta device."""
    if not isinstance(x, torch.Tensor) or x.is_meta:
        kind = "one on the meta device" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"{function}: {name} must be a tensor with values, not {kind}. Pass torch.tensor(...).")


def _check_alike(function: str, name: str, x: torch.Tensor) -> None:
    """Raise ValueError on every rank unless the shapes and dtypes of `x` are equal on all ranks.

    Collective: every rank must call it.
    """
    _check_tensor(function, name, x)
    everyone = current_world().gather_objects((tuple(x.shape), x.dtype))
    if any(other != everyone[0] for other in everyone):
        listing = ", ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(everyone))
        raise ValueError(
            f"{function} needs equal shapes and dtypes on all ranks, got {listing}. Pad to a common length first."
        )


def _stack(x: torch.Tensor) -> torch.Tensor:
    """Return the `x` of all ranks as one new tensor (world size, ...) on the device of `x`.

    Collective: every rank must call it.
    """
    world = current_world()
    local = x.detach().to(world.device).contiguous()
    full = local.new_empty((world.size, *local.shape))
    if local.numel():
        world.gather.all_gather(as_bytes(full), as_bytes(local)).wait()
    return full.to(x.device)


class _AllGather(torch.autograd.Function):
    """y_s = (x_0, ..., x_{N-1}) on every rank s. Adjoint: rank r gets the sum over s of part r of y_s's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _stack(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(gradient)[current_world().rank]


class _Sum(torch.autograd.Function):
    """y_s = x_0 + ... + x_{N-1} on every rank s. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        world = current_world()
        total = x.detach().to(world.device, copy=True).contiguous()
        if total.numel():
            world.reduce.all_reduce(total.view(-1)).wait()
        return total.to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(gradient)


class _Broadcast(torch.autograd.Function):
    """y_s = x_root on every rank s. Adjoint: the root gets the sum over s of y_s's gradients, other ranks zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int) -> torch.Tensor:
        ctx.root = root
        world = current_world()
        values = x.detach().to(world.device, copy=True).contiguous()
        if values.numel():
            world.gather.broadcast(as_bytes(values), root).wait()
        return values.to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = _Sum.apply(gradient)
        return (total if current_world().rank == ctx.root else torch.zeros_like(total)), None


def sum_loss(loss: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """Return the mean of a loss over all ranks, element by element. Differentiable.

    Collective: every rank must call it. The name is BMTrain's, which returns the mean too. For logging, keep `.item()`
    or `.detach()` of the result, because the result itself keeps the autograd graph of the forward in memory.

    Args:
        loss: (...), a scalar or a tensor whose shape and dtype are equal on all ranks.
        comm: for compatibility with BMTrain: None or `config["comm"]`, both of which mean all ranks.

    Returns:
        (...) float32, on the device of `loss`. If every rank calls backward on it, the gradients are those of the mean.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    world = current_world()
    world.check_comm(comm)
    _check_tensor("sum_loss", "loss", loss)
    if loss.dim():
        _check_alike("sum_loss", "loss", loss)
    return _Sum.apply(loss.to(torch.float32)) / world.size


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """Concatenate the results of all ranks on dimension 0, in rank order. Not differentiable.

    Collective: every rank must call it.

    Args:
        result: (n, ...); shape and dtype must be equal on all ranks. A scalar is treated as shape (1,).

    Returns:
        (world size * n, ...), on the device of `result`.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    _check_alike("gather_result", "result", result)
    return _stack(result.reshape(1) if result.dim() == 0 else result).flatten(0, 1)
