"""Differentiable collectives, and reductions of results over all ranks.

In the backward of an operation, each rank gets the gradient of the *sum* of all ranks' losses with respect to the
tensor that this rank passed in. Gradients of sharded parameters are averaged over the ranks afterwards, so do not
divide the loss by the world size. But if you use the gradient of a tensor that is not a sharded parameter, divide this
gradient by the world size yourself. Every rank must call the same operations, in the same order, and run their
backward.

With `comm=config["tp_comm"]`, the ranks of a tensor-parallel group communicate. These ranks compute one loss together,
so a result that is equal on all of them, such as that of `all_gather`, has the same gradient on each of them. As in
BMTrain, these gradients are not summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..engine.base.arguments import expect_number
from ..engine.comm.communicator import Communicator, group_of
from ..engine.runtime.world import current_world

_OPERATIONS = ("sum", "avg", "max", "min", "prod")


def all_gather(x: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """Stack the tensors of all ranks, or of a group of ranks, along a new dimension 0. Differentiable.

    Collective: every rank of the world must call it, and run its backward, even if `comm` selects a smaller group.
    Below, "group" means the ranks that `comm` selects, which are all ranks by default.

    On the rank with index r in the group, the gradient of `x` is row r of G. Here, G is the sum (not the mean) of the
    gradients that the ranks of the group have for the result. With `config["tp_comm"]`, G is this rank's own gradient
    instead, because those ranks compute one loss together.

    Args:
        x: (...), any dtype; shape and dtype must be equal on all ranks of the group.
        comm: the group of this rank. None: all ranks. `config["tp_comm"]`: the ranks of this rank's tensor-parallel
            group. `config["tp_zero_comm"]`: the ranks with the same index in their tensor-parallel groups as this rank.

    Returns:
        (size of the group, ...), a new tensor on the device of `x`. Row r is the `x` of the rank with index r.

    Raises:
        NotImplementedError: `comm` is not a communicator from `config`.
        ValueError: on every rank, if shapes or dtypes differ.
    """
    ranks = _ranks(comm)
    _check_alike("all_gather", "x", x, ranks)
    return _AllGather.apply(ranks, x)


def all_reduce(x: torch.Tensor, op: str = "sum", comm: Any = None) -> torch.Tensor:
    """Reduce a tensor over all ranks, or over a group of ranks, element by element. Differentiable.

    Collective: every rank of the world must call it, and run its backward, even if `comm` selects a smaller group.
    Below, "group" means the ranks that `comm` selects, which are all ranks by default.

    Let g be the sum of the gradients that the ranks of the group have for the result. With `config["tp_comm"]`, g is
    this rank's own gradient instead of the sum, because those ranks compute one loss together. The gradient of `x` is:

    * "sum": g.
    * "avg": g divided by the size of the group.
    * "max" and "min": for each element, g on the rank that has the maximum or minimum (divided evenly if several ranks
      have it), and 0 on the other ranks.
    * "prod": g times the product of the other ranks' values.

    Args:
        x: (...); shape and dtype must be equal on all ranks of the group. The dtypes bool, int16 and complex are not
            supported.
        op: "sum", "avg", "max", "min" or "prod". "avg" needs a floating-point dtype; float16 and bfloat16 values are
            averaged in float32.
        comm: the group of this rank. None: all ranks. `config["tp_comm"]`: the ranks of this rank's tensor-parallel
            group. `config["tp_zero_comm"]`: the ranks with the same index in their tensor-parallel groups as this rank.

    Returns:
        (...), a new tensor of the dtype and on the device of `x`, equal on all ranks of the group.

    Raises:
        NotImplementedError: `comm` is not a communicator from `config`.
        ValueError: `op` is unknown, or cannot reduce this dtype.
        ValueError: on every rank, if shapes or dtypes differ.
    """
    return _all_reduce(_ranks(comm), x, op)


def _all_reduce(ranks: _Ranks, x: torch.Tensor, op: str, name: str = "all_reduce") -> torch.Tensor:
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise ValueError(f"op must be one of the operations {', '.join(_OPERATIONS)}, not {op!r}")
    _check_tensor(name, "x", x)
    if x.dtype in (torch.bool, torch.int16) or x.dtype.is_complex or (op == "avg" and not x.dtype.is_floating_point):
        convert = "torch.view_as_real(x)" if x.dtype.is_complex else "x.float()"
        raise ValueError(
            f"{name} cannot take the {op} of {x.dtype} tensors. Convert x first, for example with {convert}"
        )
    _check_alike(name, "x", x, ranks)
    if op == "sum":
        return _Sum.apply(ranks, x)
    if op == "avg":  # add in float32: a float16 sum may overflow although the average does not
        total = _Sum.apply(ranks, x.to(torch.promote_types(x.dtype, torch.float32)))
        return (total / ranks.size).to(x.dtype)
    everyone = _AllGather.apply(ranks, x)
    if op == "prod":
        return everyone.prod(0, dtype=x.dtype)  # without dtype, torch returns int64 for every integer dtype
    return everyone.amax(0) if op == "max" else everyone.amin(0)


def reduce_scatter(x: torch.Tensor, op: str = "sum", comm: Any = None) -> torch.Tensor:
    """Reduce a tensor over all ranks, or over a group, and return this rank's part of dimension 0. Differentiable.

    Collective: every rank of the world must call it, and run its backward, even if `comm` selects a smaller group.
    Below, "group" means the ranks that `comm` selects, which are all ranks by default.

    Each rank has a gradient of its own part of the reduced tensor. Let g be the concatenation of these gradients, in
    the order of the ranks in the group. The gradient of `x` is the following, for every group (also for
    `config["tp_comm"]`):

    * "sum": g.
    * "avg": g divided by the size of the group.
    * "max" and "min": for each element, g on the rank that has the maximum or minimum (divided evenly if several ranks
      have it), and 0 on the other ranks.
    * "prod": g times the product of the other ranks' values.

    Args:
        x: (size of the group * n, ...); shape and dtype must be equal on all ranks of the group. The dtypes bool, int16
            and complex are not supported.
        op: "sum", "avg", "max", "min" or "prod". "avg" needs a floating-point dtype; float16 and bfloat16 values are
            averaged in float32.
        comm: the group of this rank. None: all ranks. `config["tp_comm"]`: the ranks of this rank's tensor-parallel
            group. `config["tp_zero_comm"]`: the ranks with the same index in their tensor-parallel groups as this rank.

    Returns:
        (n, ...), of the dtype and on the device of `x`: rows r * n to (r + 1) * n - 1 of the reduced tensor, where r is
        this rank's index in the group.

    Raises:
        NotImplementedError: `comm` is not a communicator from `config`.
        ValueError: the size of dimension 0 is not a multiple of the size of the group.
        ValueError: `op` is unknown, or cannot reduce this dtype.
        ValueError: on every rank, if shapes or dtypes differ.
    """
    # together=False makes backward sum the gradients of all ranks. This is necessary even in a tensor-parallel group,
    # because its ranks, too, compute gradients for different rows of the result.
    ranks = _ranks(comm)._replace(together=False)
    _check_tensor("reduce_scatter", "x", x)
    if x.dim() == 0 or x.shape[0] % ranks.size:
        raise ValueError(
            f"reduce_scatter splits dimension 0 of x evenly over {ranks.size} ranks, so its size must be a multiple "
            f"of that number, but the shape is {tuple(x.shape)}"
        )
    rows = x.shape[0] // ranks.size
    return _all_reduce(ranks, x, op, "reduce_scatter")[ranks.rank * rows : (ranks.rank + 1) * rows]


def broadcast(x: torch.Tensor, root: int, comm: Any = None) -> torch.Tensor:
    """Return one rank's tensor on all ranks, or on all ranks of its group. Differentiable.

    Collective: every rank of the world must call it, and run its backward, even if `comm` selects a smaller group.
    Below, "group" means the ranks that `comm` selects, which are all ranks by default.

    On the rank `root`, the gradient of `x` is the sum (not the mean) of the gradients that the ranks of the group have
    for the result. With `config["tp_comm"]`, it is the root's own gradient instead of the sum, because those ranks
    compute one loss together. On the other ranks, the gradient of `x` is 0.

    Args:
        x: (...), any dtype; shape and dtype must be equal on all ranks of the group. Only the values on the rank `root`
            are used.
        root: the rank whose `x` is returned, as an index in the group. In the group of all ranks, the index is the rank
            itself.
        comm: the group of this rank. None: all ranks. `config["tp_comm"]`: the ranks of this rank's tensor-parallel
            group. `config["tp_zero_comm"]`: the ranks with the same index in their tensor-parallel groups as this rank.

    Returns:
        (...), a new tensor on the device of `x`, with the values that `x` has on the rank `root`.

    Raises:
        NotImplementedError: `comm` is not a communicator from `config`.
        TypeError: `root` is not an integer.
        ValueError: `root` is not the index of a rank in the group.
        ValueError: on every rank, if shapes or dtypes differ.
    """
    ranks = _ranks(comm)
    size = ranks.size
    expect_number("root", root, f"a rank (ranks are 0 to {size - 1})", lambda rank: 0 <= rank < size, integer=True)
    _check_alike("broadcast", "x", x, ranks)
    return _Broadcast.apply(ranks, x, root)


class _Ranks(NamedTuple):
    """The group of ranks between which an operation of this module communicates. It contains this rank.

    Attributes:
        gather: the communicator for all-gathers and broadcasts.
        reduce: the communicator for reductions.
        groups: the ranks of every group in which this operation runs at the same time, this group included. Each rank
            of the world is in exactly one of these groups.
        together: whether the ranks of a group compute one loss together, as in tensor parallelism. If so, backward does
            not sum the gradients that these ranks have for a tensor that is equal on all of them.
    """

    gather: Communicator
    reduce: Communicator
    groups: Sequence[range]
    together: bool

    @property
    def rank(self) -> int:
        return self.gather.rank

    @property
    def size(self) -> int:
        return self.gather.size


def _ranks(comm: Any) -> _Ranks:
    """Return the group of ranks that the user selected by the argument `comm` of a collective.

    comm: a communicator from `config`, or None for all ranks. Raises NotImplementedError for anything else.
    """
    world, grid = current_world(), current_world().grid
    if grid is not None and comm is not None:
        for communicator, size, stride in ((grid.together, grid.size, 1), (grid.across, grid.groups, grid.size)):
            if comm is communicator:
                groups = dict.fromkeys(group_of(rank, size, stride) for rank in range(world.size))
                return _Ranks(comm, comm, [*groups], comm is grid.together)
    world.check_comm(comm)
    return _Ranks(world.gather, world.reduce, [range(world.size)], False)


def _check_tensor(function: str, name: str, x: Any) -> None:
    """Raise ValueError if `x` is not a tensor, or is on the meta device. The message names `function` and `name`."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{function}: {name} must be a tensor, got type {type(x).__name__}: pass torch.tensor({name})")
    if x.is_meta:
        raise ValueError(
            f"{function}: {name} is on the meta device, so it has no values. Pass a tensor on a real device."
        )


def _check_alike(function: str, name: str, x: torch.Tensor, ranks: _Ranks) -> None:
    """Raise ValueError on every rank if the shape or dtype of `x` differs between ranks that communicate.

    Collective: every rank of the world must call it. The groups of ranks that communicate are in `ranks.groups`. The
    message names `function` and `name`.
    """
    _check_tensor(function, name, x)
    everyone = current_world().gather_objects((tuple(x.shape), x.dtype))
    if any(everyone[rank] != everyone[group[0]] for group in ranks.groups for rank in group):
        listing = ", ".join(f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(everyone))
        raise ValueError(
            f"{function} needs equal shapes and dtypes on all ranks that communicate, got {listing}. Pad to a common "
            "length or convert to a common dtype first."
        )


def _stack(ranks: _Ranks, x: torch.Tensor) -> torch.Tensor:
    """All-gather `x`: return the tensors of all `ranks`, stacked as (ranks.size, ...), on the device of `x`.

    Collective: every rank must call it.
    """
    local = x.detach().to(current_world().device).contiguous()
    full = local.new_empty((ranks.size, *local.shape))
    if local.numel():
        ranks.gather.all_gather(full, local).wait()
    return full.to(x.device)


class _AllGather(torch.autograd.Function):
    """Differentiable all-gather: every rank gets the stack of all ranks' inputs.

    In backward, rank r gets row r of the sum of all ranks' gradients. If the ranks compute one loss together, as in
    tensor parallelism (`ranks.together`), rank r gets row r of its own gradient instead.
    """

    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, x: torch.Tensor) -> torch.Tensor:
        ctx.ranks = ranks
        return _stack(ranks, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _added_up(ctx.ranks, gradient)[ctx.ranks.rank]


class _Sum(torch.autograd.Function):
    """Differentiable all-reduce: every rank gets the sum of all ranks' inputs.

    In backward, every rank gets the sum of all ranks' gradients. If the ranks compute one loss together, as in tensor
    parallelism (`ranks.together`), every rank gets its own gradient instead.
    """

    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, x: torch.Tensor) -> torch.Tensor:
        ctx.ranks = ranks
        total = x.detach().to(current_world().device, copy=True).contiguous()
        if total.numel():
            ranks.reduce.all_reduce(total.view(-1)).wait()
        return total.to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _added_up(ctx.ranks, gradient)


def _added_up(ranks: _Ranks, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of the gradients that the ranks in `ranks` have for a tensor that is equal on all of them.

    If these ranks compute one loss together, as in tensor parallelism, return this rank's own gradient instead.
    Collective: every rank must call it.
    """
    return gradient if ranks.together else _Sum.apply(ranks, gradient)


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast: every rank gets the input of the rank `root`.

    In backward, the root gets the sum of all ranks' gradients, and the other ranks get zeros. If the ranks compute one
    loss together, as in tensor parallelism (`ranks.together`), the root gets its own gradient instead of the sum.
    """

    @staticmethod
    def forward(ctx: Any, ranks: _Ranks, x: torch.Tensor, root: int) -> torch.Tensor:
        ctx.ranks, ctx.root = ranks, root
        values = x.detach().to(current_world().device, copy=True).contiguous()
        if values.numel():
            ranks.gather.broadcast(values, root).wait()
        return values.to(x.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        total = _added_up(ctx.ranks, gradient)
        return None, (total if ctx.ranks.rank == ctx.root else torch.zeros_like(total)), None


def sum_loss(loss: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """Return the mean of a loss over all ranks, or over a group of ranks, element by element. Differentiable.

    Collective: every rank of the world must call it, even if `comm` selects a smaller group. If one rank runs backward
    on the result, every rank must. Below, "group" means the ranks that `comm` selects, which are all ranks by default.
    Despite its name, the function returns the mean, as in BMTrain.

    Use this function to log the loss. Keep only `.item()` or `.detach()` of the result, because the result itself keeps
    the autograd graph of the forward in memory.

    Training does not need this function: if every rank calls `loss.backward()`, sharded parameters already get the
    gradients of the mean loss. If every rank instead calls backward on the result, sharded parameters get the same
    gradients, except with `config["tp_comm"]`.

    In backward, the gradient of `loss` is the sum of the gradients that the ranks of the group have for the result,
    divided by the size of the group. With `config["tp_comm"]`, it is this rank's own gradient, divided by that size.

    Args:
        loss: a scalar on every rank, or (...) with equal shape and dtype on all ranks of the group.
        comm: the group of this rank. None: all ranks. `config["tp_comm"]`: the ranks of this rank's tensor-parallel
            group. `config["tp_zero_comm"]`: the ranks with the same index in their tensor-parallel groups as this rank.

    Returns:
        (...) float32, on the device of `loss`.

    Raises:
        NotImplementedError: `comm` is not a communicator from `config`.
        ValueError: on every rank, if shapes or dtypes differ. A rank that passes a scalar skips this check. So if only
            some ranks pass a scalar, the ranks issue different collectives, and wait for each other until a different
            error is raised.
    """
    ranks = _ranks(comm)
    _check_tensor("sum_loss", "loss", loss)
    if loss.dim():
        _check_alike("sum_loss", "loss", loss, ranks)
    return _Sum.apply(ranks, loss.to(torch.float32)) / ranks.size


def gather_result(result: torch.Tensor) -> torch.Tensor:
    """Concatenate the results of all ranks on dimension 0, in rank order. Not differentiable.

    Collective: every rank must call it.

    Args:
        result: (n, ...); shape and dtype must be equal on all ranks. A scalar is treated as shape (1,).

    Returns:
        (world size * n, ...), a new tensor on the device of `result`, equal on all ranks.

    Raises:
        ValueError: on every rank, if shapes or dtypes differ.
    """
    ranks = _ranks(None)
    _check_alike("gather_result", "result", result, ranks)
    return _stack(ranks, result.reshape(1) if result.dim() == 0 else result).flatten(0, 1)
