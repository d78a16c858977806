"""Loss functions that compute in float32 whatever the dtype of the logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["FusedCrossEntropy", "cross_entropy"]

LOGIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
REDUCTIONS = ("mean", "sum", "none")


class FusedCrossEntropy(torch.nn.Module):
    """Cross entropy between logits and class indices, in float32, also for half-precision logits.

    Args:
        weight: one weight a class, shape (C,), any floating dtype; the mean divides by the targets' weights.
        ignore_index: a target with this value adds nothing to the loss and gets no gradient.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: share of each target spread evenly over all classes, in [0, 1].

    Raises:
        ValueError: an unknown reduction, a label smoothing outside [0, 1], or a weight that is not 1-D.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in [0, 1], got {label_smoothing}")
        if weight is not None and weight.dim() != 1:
            raise ValueError(f"weight must have shape (C,), one number a class, got {tuple(weight.shape)}")
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of `logits`, shape (N, C) or (N, C, d...), for `targets`, shape (N,) or (N, d...).

        Args:
            logits: float16, bfloat16 or float32; their gradient has the same dtype.
            targets: class indices of any integer dtype, each in [0, C) or equal to `ignore_index`.

        Returns:
            float32: a scalar, or the targets' shape with reduction "none". The mean of no targets at all is
            0 with zero gradient, because under data parallelism one rank may hold only padding.

        Raises:
            ValueError: wrong shapes or dtypes; on CPU also a target out of range (a CUDA device asserts it
                later, as in torch, because looking would stop the device).
        """
        return cross_entropy(
            logits, targets, self.weight, self.ignore_index, self.reduction, self.label_smoothing
        )

    def extra_repr(self) -> str:
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}"
        )


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`FusedCrossEntropy` as a function, in plain torch: the arithmetic that any faster path must match."""
    check_shapes(logits, targets, weight)
    targets = targets.long()  # before any comparison: uint8 cannot hold -100
    if targets.device.type == "cpu":
        check_range(targets, logits.shape[1], ignore_index)
    weight = None if weight is None else weight.float()
    losses = F.cross_entropy(
        logits.float(),
        targets,
        weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction != "mean":
        return losses
    counted = targets != ignore_index
    if weight is None:
        total = counted.sum()
    else:
        total = torch.where(counted, weight[targets.where(counted, 0)], 0.0).sum()
    return losses / torch.where(total == 0, 1, total)  # no target counts: 0, not torch's nan


def check_shapes(logits: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor | None) -> None:
    """Raise ValueError unless dtypes and shapes are those of `FusedCrossEntropy.forward`."""
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype == torch.bool:
        raise ValueError(f"targets must be class indices of an integer dtype, got {targets.dtype}")
    if logits.dim() < 2 or targets.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"logits of shape (N, C) need targets of shape (N,), and (N, C, d...) need (N, d...); "
            f"got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if weight is not None and weight.shape != logits.shape[1:2]:
        raise ValueError(
            f"weight has {weight.numel()} numbers for {logits.shape[1]} classes; "
            f"logits have shape {tuple(logits.shape)}"
        )


def check_range(targets: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Raise ValueError naming the first target that is neither a class nor `ignore_index`."""
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= classes))
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target {targets[where].item()} at {list(where)} is neither a class in [0, {classes}) nor "
            f"ignore_index {ignore_index}; {int(wrong.sum())} of {targets.numel()} targets are so"
        )
