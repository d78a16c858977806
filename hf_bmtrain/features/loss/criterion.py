"""The reduction of the losses of rows to one number: the targets that count, and the divisor of the sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.base.arguments import expect_number, expect_tensor
from .cross_entropy import CrossEntropy

REDUCTIONS = ("mean", "sum", "none")
NumItems = Tensor | float | None


@dataclass(frozen=True)
class Criterion:
    """The loss of a row, and the reduction over rows.

    num_items: the divisor of "mean" in place of the targets that count here, for example those of all micro-batches
    and ranks. A number, or a tensor of one element on any device.
    """

    rows: CrossEntropy
    reduction: str = "mean"
    num_items: NumItems = None

    def __post_init__(self) -> None:
        if not isinstance(self.reduction, str) or self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {self.reduction!r}")
        if self.num_items is None:
            return
        if self.reduction != "mean":
            raise ValueError(
                f"num_items_in_batch is what the mean divides by; with reduction={self.reduction!r} nothing is divided"
            )
        if isinstance(self.num_items, Tensor):
            if self.num_items.numel() != 1:
                raise ValueError(f"num_items_in_batch must be one number, got shape {tuple(self.num_items.shape)}")
        else:
            wanted = "finite and must not be negative"
            expect_number("num_items_in_batch", self.num_items, wanted, lambda n: 0 <= n < math.inf)

    def indices(self, targets: Tensor, classes: int) -> Tensor:
        """Return the targets as int64, since uint8 cannot hold -100.

        Raises ValueError unless they are integers and the class weights fit `classes`; on CPU, where nothing waits for
        a device, also for a target that is neither a class nor `ignore_index`.
        """
        if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype == torch.bool:
            raise ValueError(f"targets must be class indices of an integer dtype, got {targets.dtype}")
        targets, weight, ignored = targets.long(), self.rows.class_weight, self.rows.ignore_index
        if weight is not None and weight.numel() != classes:
            raise ValueError(f"the class weights are {weight.numel()} numbers for {classes} classes")
        if targets.device.type == "cpu":
            wrong = (targets != ignored) & ((targets < 0) | (targets >= classes))
            if wrong.any():
                where = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(
                    f"target {targets[where].item()} at {list(where)} is neither a class in [0, {classes}) nor "
                    f"ignore_index {ignored}; {int(wrong.sum())} of {targets.numel()} targets are so"
                )
        return targets

    def factor(self, targets: Tensor) -> Tensor:
        """Return the factor of each row's loss, (1,) float32 on the device of `targets`, without waiting for it.

        If no target counts it is 1, so that the mean is 0 where torch's is NaN.
        """
        one = torch.ones(1, device=targets.device)
        if self.reduction != "mean":
            return one
        if self.num_items is None:
            total = self.rows.count(targets)
        elif isinstance(self.num_items, Tensor):
            at_once = self.num_items.device.type == "cpu"
            total = self.num_items.detach().to(targets.device, torch.float32, non_blocking=at_once).reshape(1)
        else:
            total = one * float(self.num_items)
        return torch.where(total == 0, one, one / total)

    def reduce(self, losses: Tensor, factor: Tensor) -> Tensor:
        """Return the losses (N,) as they are for reduction "none", otherwise their sum times `factor`, a scalar."""
        return losses if self.reduction == "none" else losses.sum() * factor[0]


def criterion(
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    num_items: NumItems,
) -> Criterion:
    """Return a Criterion from the arguments of the public functions."""
    if class_weight is not None:
        expect_tensor("the class weights (weight, class_weight)", class_weight)
    weight = None if class_weight is None else class_weight.detach().float().contiguous()
    return Criterion(CrossEntropy(ignore_index, label_smoothing, z_loss, softcap, weight), reduction, num_items)


def refuse_double_backward(function: str) -> None:
    """Raise RuntimeError in a backward that autograd records."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"A backward of a backward (create_graph=True) through {function} is not supported: its gradient is "
            "computed by kernels that autograd does not see. Use torch.nn.functional.cross_entropy for that term."
        )
