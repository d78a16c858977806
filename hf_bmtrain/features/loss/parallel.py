"""Cross entropy of logits whose classes are split over a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.runtime.world import Grid, current_world
from .criterion import NumItems, criterion, refuse_double_backward


def parallel_cross_entropy_func(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of each row of logits whose classes are split over a tensor-parallel group.

    Collective: every rank must call it. Each rank of a group has the logits of its own classes, for the same rows.
    Without `tp_size`, this is the usual cross entropy.

    The backward does not communicate: each rank multiplies its incoming gradient of the losses by the derivatives of
    the losses with respect to its own logits. So all ranks of a group must compute the same total loss from the result.

    Args:
        logits: (..., classes / tp_size), floating, the logits of this rank's classes. They are the output of a
            ColumnParallelLinear or of the projection of a VPEmbedding.
        target: (...) of any integer dtype, the class of each row as an index into the classes of all ranks; the same on
            all ranks of a group. A target of -100 has loss 0 and gradient 0. On CUDA, where a check would make the host
            wait, any other target that is not a class has loss NaN and gradient 0.
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.

    Returns:
        (...) float32, the loss of each row, the same on all ranks of a group. A logit of -inf means that the class has
        probability 0.

    Raises:
        TypeError: `label_smoothing` is not a number.
        ValueError: `target` has no integer dtype.
        ValueError: the shape of `target` is not the shape of `logits` without the last dimension.
        ValueError: `label_smoothing` is not in [0, 1].
        ValueError: a target on the CPU is neither a class nor -100.
        RuntimeError: in backward, if create_graph=True.
    """
    return parallel_cross_entropy(logits, target, -100, "none", label_smoothing, None)


def parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    num_items: NumItems,
) -> Tensor:
    """Return the cross entropy of logits whose classes are split over a tensor-parallel group, reduced as requested.

    This implements `parallel_cross_entropy_func`, which uses reduction "none", and FusedCrossEntropy with
    `parallel=True`. Collective: every rank must call it. All ranks of a tensor-parallel group pass the same targets,
    and each of them passes the logits of its own classes.

    Args:
        logits: (..., classes / tp_size), the logits of this rank's classes.
        targets: (...) int, the class of each row, as an index into the classes of all ranks of the group.
        ignore_index: targets with this value contribute neither to the loss nor to the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.
        num_items: the divisor of the mean, a number or a tensor of one element; 0 counts as 1. None divides by the
            number of targets in this call that are not ignored. With reduction "sum" or "none", it must be None.

    Returns:
        float32, the same on all ranks of a group: a scalar or, with reduction "none", the loss of each row, (...).
    """
    how = criterion(None, ignore_index, reduction, label_smoothing, 0.0, 0.0, num_items)
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"target must have the shape of logits without the last dimension, {tuple(logits.shape[:-1])}, but has "
            f"{tuple(targets.shape)}. Every rank needs the targets of all rows of its tensor-parallel group."
        )
    grid = current_world().grid
    targets = how.indices(targets, logits.shape[-1] * (1 if grid is None else grid.size))
    losses = _CrossEntropy.apply(grid, logits, targets, ignore_index, label_smoothing)
    return how.reduce(losses, how.factor(targets))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grid: Grid | None, logits: Tensor, target: Tensor, ignore_index: int, smoothing: float
    ) -> Tensor:
        own = logits.shape[-1]
        wide = logits.detach().float()

        def reduce(values: Tensor, maximum: bool = False) -> Tensor:
            if grid is not None and values.numel():
                grid.together.all_reduce(values.view(-1), maximum=maximum).wait()
            return values

        start = 0 if grid is None else grid.place * own
        classes = own if grid is None else own * grid.size
        wide = wide - reduce(wide.amax(-1), maximum=True).unsqueeze(-1)
        others = (target < start) | (target >= start + own)
        index = (target - start).masked_fill(others, 0).unsqueeze(-1)
        chosen = wide.gather(-1, index).squeeze(-1).masked_fill(others, 0)
        sums = torch.stack([chosen, wide.exp().sum(-1), wide.sum(-1)])  # in one tensor, for a single all-reduce
        chosen, total, every = reduce(sums).unbind()
        log_total = total.log()
        loss = (1 - smoothing) * (log_total - chosen)
        if smoothing:  # without smoothing, this term would be 0 * inf, which is NaN, if a logit is -inf
            loss = loss + smoothing * (log_total - every / classes)
        ignored, outside = target == ignore_index, (target < 0) | (target >= classes)
        ctx.save_for_backward(wide - log_total.unsqueeze(-1), index, others, ignored | outside)
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, logits.dtype
        return loss.masked_fill(outside, torch.nan).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        refuse_double_backward("parallel_cross_entropy_func")
        log_softmax, index, others, nothing = ctx.saved_tensors
        own = log_softmax.exp()
        if ctx.smoothing:
            own -= ctx.smoothing / ctx.classes
        own.scatter_add_(-1, index, (ctx.smoothing - 1) * (~others).float().unsqueeze(-1))
        own.mul_(gradient.unsqueeze(-1)).masked_fill_(nothing.unsqueeze(-1), 0)
        return None, own.to(ctx.dtype), None, None, None
