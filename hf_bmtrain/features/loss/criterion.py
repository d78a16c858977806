"""Criterion: the loss of each row of logits, and the reduction of these losses to a mean or a sum."""

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
    """The settings of a cross entropy: how to compute the loss of each row of logits, and how to reduce these losses.

    Attributes:
        rows: the CrossEntropy that computes the loss of each row.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        num_items: the divisor of the mean, for example the number of targets in all micro-batches on all ranks. It is a
            number, or a tensor of one element on any device. None divides by the number of targets that are not ignored
            in this call or, with class weights, by the sum of their weights.
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
                f"num_items_in_batch is the divisor of a mean, but reduction={self.reduction!r} computes no mean. "
                "Leave it out, or use reduction='mean'."
            )
        if isinstance(self.num_items, Tensor):
            if self.num_items.numel() != 1:
                raise ValueError(
                    f"num_items_in_batch must be one number, got a tensor of shape {tuple(self.num_items.shape)}"
                )
        else:
            wanted = "finite and must not be negative"
            expect_number("num_items_in_batch", self.num_items, wanted, lambda n: 0 <= n < math.inf)

    def indices(self, targets: Tensor, classes: int) -> Tensor:
        """Check the targets of a loss, and return them as int64. Called before the loss is computed.

        Narrower integer dtypes are converted, because `ignore_index` may be a number that they cannot represent.

        Args:
            targets: a tensor of class indices of any integer dtype.
            classes: the number of classes.

        Raises:
            ValueError: the targets are not integers.
            ValueError: the number of class weights is not `classes`.
            ValueError: a target on the CPU is neither a class nor `ignore_index`. (On CUDA, this is not checked,
                because the check would synchronize.)
        """
        if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype == torch.bool:
            raise ValueError(f"targets must be class indices of an integer dtype, got {targets.dtype}")
        targets, weight, ignored = targets.long(), self.rows.class_weight, self.rows.ignore_index
        if weight is not None and weight.numel() != classes:
            raise ValueError(
                f"{weight.numel()} class weights were given for {classes} classes: pass one for each class"
            )
        if targets.device.type == "cpu":
            wrong = (targets != ignored) & ((targets < 0) | (targets >= classes))
            if wrong.any():
                where = tuple(wrong.nonzero()[0].tolist())
                raise ValueError(
                    f"target {targets[where].item()} at {list(where)} is neither a class in [0, {classes}) nor "
                    f"ignore_index {ignored}; {int(wrong.sum())} of {targets.numel()} targets are out of range"
                )
        return targets

    def factor(self, targets: Tensor) -> Tensor:
        """Return the factor by which `reduce` multiplies the sum of the losses: 1 / divisor for a mean, otherwise 1.

        Not collective, and the host does not wait for the device. The divisor is:

        * `num_items`, if it is not None, with or without class weights. To average over all ranks, the caller must pass
          a number that counts the targets of all ranks.
        * otherwise, without class weights, the number of targets in this call on this rank that are not ignored.
        * otherwise, with class weights, the sum of the class weights of these targets.

        If the divisor is 0, the factor is 1. So if all targets are ignored, the mean is 0, whereas torch's is NaN.

        Args:
            targets: int64, of any shape, the class of each row.

        Returns:
            The factor, (1,) float32, on the device of the targets.
        """
        one = torch.ones(1, dtype=torch.float32, device=targets.device)
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
        """Return the scalar `losses.sum() * factor`, or `losses` unchanged for reduction "none".

        Args:
            losses: float32, of the targets' shape: the loss of each row, 0 for ignored targets.
            factor: (1,) float32, the tensor that the method `factor` returned for these targets. For a mean of 1000
                losses it is 1 / 1000; for a sum it is 1.
        """
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
    """Check the settings of a loss function, and return them as a Criterion.

    Args:
        class_weight: (V,), one weight per class. None weights all classes equally.
        ignore_index: targets with this value contribute neither to the loss nor to the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.
        z_loss: the factor of logsumexp(logits)^2, which is added to the loss of every row that is not ignored.
        softcap: replaces the logits by softcap * tanh(logits / softcap); 0 for none.
        num_items: the divisor of the mean, as a number or a tensor of one element. None divides by the number of
            targets that are not ignored or, with class weights, by the sum of these targets' weights.

    Raises:
        TypeError: a setting has a wrong type.
        ValueError: a setting is out of range.
        ValueError: `num_items` is given, but `reduction` is not "mean".
    """
    if class_weight is not None:
        expect_tensor("the class weights (weight, class_weight)", class_weight)
    weight = None if class_weight is None else class_weight.detach().float().contiguous()
    return Criterion(CrossEntropy(ignore_index, label_smoothing, z_loss, softcap, weight), reduction, num_items)


def refuse_double_backward(function: str) -> None:
    """Raise RuntimeError if the running backward has create_graph=True.

    Called in the backward of loss functions whose gradient autograd cannot differentiate.

    function: the loss function's name, for the message.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{function} does not support double backward (create_graph=True): autograd cannot differentiate its "
            "gradient. Use torch.nn.functional.cross_entropy on the logits of all classes instead."
        )
