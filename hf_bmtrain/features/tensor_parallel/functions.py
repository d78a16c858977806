"""Differentiable collectives between the ranks of a tensor-parallel group.

"Rows" are dimension 0, and "features" are the last dimension. Every rank of the group must call each function, and run
its backward. If a tensor is equal on all ranks, its gradient is too. If each rank has a part of a tensor, each rank has
the gradient of its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.runtime.world import Grid


def gather_rows(grid: Grid, x: Tensor) -> Tensor:
    """All-gather the rows (dimension 0) of all ranks of the tensor-parallel group. Collective.

    The ranks use the result differently, for example with their parts of a weight. Backward therefore sums the ranks'
    gradients of the result, and returns this rank's rows of the sum (a reduce-scatter).

    Args:
        grid: the tensor-parallel groups.
        x: (n, ...), of equal shape on all ranks of the group.

    Returns:
        (grid.size * n, ...)
    """
    return _GatherRows.apply(grid, x)


def add_rows(grid: Grid, x: Tensor) -> Tensor:
    """Sum the tensors of all ranks of the tensor-parallel group, and return this rank's rows of the sum. Collective.

    This is a reduce-scatter on the rows (dimension 0). It is used, for example, for the outputs of a row-parallel
    linear layer, if each rank needs only its own rows of the sum. Each rank then has the gradient of its own rows.
    Backward all-gathers these gradients, so that every rank gets the gradient of all rows.

    Args:
        grid: the tensor-parallel groups.
        x: (grid.size * n, ...), of equal shape on all ranks of the group.

    Returns:
        (n, ...)
    """
    return _AddRows.apply(grid, x)


def add(grid: Grid, x: Tensor) -> Tensor:
    """Sum the tensors of all ranks of the tensor-parallel group, in an all-reduce. Collective.

    Used for the outputs of a row-parallel linear layer, for example. Every rank must use the sum in the same way. The
    gradient of the sum is then equal on all ranks, so backward returns it as the gradient of `x`, without
    communication.

    Args:
        grid: the tensor-parallel groups.
        x: of any shape. All ranks of the group must pass the same shape.
    """
    return _Add.apply(grid, x)


def share(grid: Grid, x: Tensor) -> Tensor:
    """Return `x`, and in backward, sum its gradient over the ranks of the tensor-parallel group (an all-reduce).

    Used for the input of a layer in which each rank uses the same input differently, for example with its own part of a
    weight. In backward, each rank then computes only its own contribution to the gradient of `x`, and the sum of these
    contributions is the gradient.

    Every rank of the group must call it and run its backward. The call itself does not communicate; the backward is
    collective.

    Args:
        grid: the tensor-parallel groups.
        x: of any shape, with the same elements on all ranks of the group.
    """
    return _Share.apply(grid, x)


def gather_features(grid: Grid, x: Tensor) -> Tensor:
    """All-gather the features (last dimension) of all ranks of the tensor-parallel group. Collective.

    All ranks must use the result in the same way, so that its gradient is equal on all ranks. Backward therefore
    returns this rank's features of the gradient, without communication.

    Args:
        grid: the tensor-parallel groups.
        x: (..., k), of equal shape on all ranks of the group.

    Returns:
        (..., grid.size * k)
    """
    return _GatherFeatures.apply(grid, x)


def features_of_all_rows(grid: Grid, x: Tensor) -> Tensor:
    """Turn this rank's rows, with all features, into the rows of all ranks, with this rank's features. Collective.

    Rows are dimension 0, and features are the last dimension. Used for the input of a row-parallel linear layer, if
    each rank has only its own rows of the input. The layer needs all rows on every rank, but only some features of
    them: those to which the rank's part of the weight applies.

    This all-gathers the rows, and selects this rank's features. Backward all-gathers the features of the gradient, and
    selects this rank's rows.

    Args:
        grid: the tensor-parallel groups.
        x: (n, ..., grid.size * k), all features of this rank's rows. Its shape is equal on all ranks of the group.

    Returns:
        (grid.size * n, ..., k), this rank's features of the rows of all ranks of the group.
    """
    return _FeaturesOfAllRows.apply(grid, x)


def _gathered(grid: Grid, x: Tensor) -> Tensor:
    """All-gather and stack `x` of all ranks of the tensor-parallel group: (grid.size, *x.shape). Collective."""
    part = x.detach().contiguous()
    every = part.new_empty((grid.size, *part.shape))
    if part.numel():
        grid.together.all_gather(every.view(-1), part.view(-1)).wait()
    return every


def _rows_of_sum(grid: Grid, x: Tensor) -> Tensor:
    if x.shape[0] % grid.size:
        raise ValueError(
            f"the {x.shape[0]} rows (dimension 0) of a tensor of shape {tuple(x.shape)} cannot be divided between the "
            f"{grid.size} ranks of a tensor-parallel group. Pad them to a multiple of tp_size, or give every rank all "
            "rows: pass all_reduce_output=True to RowParallelLinear, or ReduceType.ALL_REDUCE to OpParallelLinear."
        )
    every = x.detach().contiguous()
    rows = every.new_empty((x.shape[0] // grid.size, *x.shape[1:]))
    if rows.numel():
        grid.together.reduce_scatter_mean(rows.view(-1), every.view(-1)).wait()
    return rows.mul_(grid.size)


def _sum(grid: Grid, x: Tensor) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    if total.numel():
        grid.together.all_reduce(total.view(-1)).wait()
    return total


def _own(grid: Grid, x: Tensor, dim: int) -> Tensor:
    return x.chunk(grid.size, dim)[grid.place]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        ctx.grid = grid
        return _gathered(grid, x).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _rows_of_sum(ctx.grid, gradient)


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        ctx.grid = grid
        return _rows_of_sum(grid, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _gathered(ctx.grid, gradient).flatten(0, 1)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        return _sum(grid, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        ctx.grid = grid
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _sum(ctx.grid, gradient)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        ctx.grid = grid
        return torch.cat(_gathered(grid, x).unbind(), -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _own(ctx.grid, gradient, -1)


class _FeaturesOfAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor) -> Tensor:
        ctx.grid = grid
        return _own(grid, _gathered(grid, x).flatten(0, 1), -1).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, _own(ctx.grid, torch.cat(_gathered(ctx.grid, gradient).unbind(), -1), 0)
