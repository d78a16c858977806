"""Loss functions that compute in float32 whatever the dtype of the logits."""

from __future__ import annotations

import torch

from .linear_loss import linear_cross_entropy
from .ops.criterion import Criterion, NumItems, as_indices, criterion, refuse_double_backward
from .ops.cross_entropy import rescale_

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]

LOGIT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class FusedCrossEntropy(torch.nn.Module):
    """Cross entropy between logits and class indices, in float32, also for half-precision logits.

    One kernel reads the logits for the losses, and one reads them again for the gradient, a new tensor like them.

    Args:
        weight: one weight a class, shape (C,), any floating dtype; the mean divides by the targets' weights.
        ignore_index: a target with this value adds nothing to the loss and gets no gradient.
        reduction: "mean" over the targets that count, "sum", or "none".
        label_smoothing: share of each target spread evenly over all classes, in [0, 1].
        inplace: the gradient is written over the logits, which saves their size in memory; for a mean or a sum
            of bfloat16 or float32 logits in the forward already, in one launch. The caller must not read the
            logits afterwards (autograd raises where it needs them itself).
        z_loss: adds z_loss * logsumexp(logits)^2 to every row that counts.
        softcap: the loss is that of softcap * tanh(logits / softcap); 0 is off.

    Raises:
        ValueError: an unknown reduction, a label smoothing outside [0, 1], a negative z_loss or softcap, or a
            weight that is not 1-D.
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        inplace: bool = False,
        *,
        z_loss: float = 0.0,
        softcap: float = 0.0,
    ):
        super().__init__()
        criterion(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, None)  # raises now, not later
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.inplace = inplace
        self.z_loss = z_loss
        self.softcap = softcap

    def forward(self, logits: torch.Tensor, targets: torch.Tensor, num_items_in_batch: NumItems = None) -> torch.Tensor:
        """The loss of `logits`, shape (N, C) or (N, C, d...), for `targets`, shape (N,) or (N, d...).

        Args:
            logits: float16, bfloat16 or float32; their gradient has the same dtype.
            targets: class indices of any integer dtype, each in [0, C) or equal to `ignore_index`.
            num_items_in_batch: what the mean divides by instead of the targets that count in this call; a number
                or a tensor of one element.

        Returns:
            float32: a scalar, or the targets' shape with reduction "none". The mean of no targets at all is
            0 with zero gradient, because under data parallelism one rank may hold only padding. -inf logits
            are impossible classes; a row with a NaN or +inf logit has loss and gradient NaN.

        Raises:
            ValueError: wrong shapes or dtypes; on CPU also a target out of range. On CUDA looking would stop the
                device: there a target out of range makes its row's loss, and so a mean or a sum, NaN, with a
                zero gradient for that row and the right one for the others.
            RuntimeError: in backward: create_graph=True; with `inplace`, a second backward through the same loss.
        """
        return cross_entropy(
            logits,
            targets,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.inplace,
            z_loss=self.z_loss,
            softcap=self.softcap,
            num_items_in_batch=num_items_in_batch,
        )

    def extra_repr(self) -> str:
        names = ("ignore_index", "reduction", "label_smoothing", "inplace", "z_loss", "softcap")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace: bool = False,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    num_items_in_batch: NumItems = None,
) -> torch.Tensor:
    """`FusedCrossEntropy` as a function."""
    how = criterion(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, num_items_in_batch)
    _check_shapes(logits, targets)
    targets = as_indices(targets)
    how.check(targets, logits.shape[1])
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if inplace and wanted and logits.is_leaf:
        raise ValueError(
            "inplace=True writes the gradient over the logits, and these are a leaf whose values would be lost: "
            "use inplace=False, or pass the output of a layer"
        )
    losses = _CrossEntropy.apply(_rows(logits), targets.reshape(-1).contiguous(), how, inplace, wanted)
    return losses.view(targets.shape) if reduction == "none" else losses


class _CrossEntropy(torch.autograd.Function):
    """Rows of logits (N, C), targets (N,) → losses (N,) or a scalar; everything in float32."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, how: Criterion, inplace: bool, wanted: bool):
        factor = how.factor(targets, logits.shape[1])
        # In float16 a gradient that does not carry the loss scale yet would underflow: backward writes it.
        early = wanted and inplace and how.reduction != "none" and logits.dtype != torch.float16
        if early:
            losses, lses = how.rows.losses_and_gradient_(logits, targets, factor, how.class_weight)
        else:
            losses, lses = how.rows.losses(logits, targets, how.class_weight)
        if wanted:
            ctx.how, ctx.inplace, ctx.early, ctx.spent = how, inplace, early, False
            ctx.save_for_backward(logits, targets, lses, factor)
        return how.reduce(losses, factor)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        refuse_double_backward("cross_entropy")
        if ctx.spent:
            raise RuntimeError(
                "A second backward through cross_entropy(…, inplace=True): the first one wrote its gradient over the "
                "logits and handed it on. Use inplace=False where retain_graph=True is needed."
            )
        how, (logits, targets, lses, factor) = ctx.how, ctx.saved_tensors
        ctx.spent = ctx.inplace
        scale = (gradients[0] * factor).contiguous()
        if not ctx.inplace:
            return how.rows.gradient(logits, targets, lses, scale, how.class_weight), None, None, None, None
        if ctx.early:
            rescale_(logits.detach(), scale, factor)
        else:
            how.rows.gradient_(logits, targets, lses, scale, how.class_weight)
        return logits.detach(), None, None, None, None


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """(N, C, d...) as rows of logits next to each other: a copy unless they lie so."""
    rows = logits if logits.dim() == 2 else logits.movedim(1, -1).reshape(-1, logits.shape[1])
    count, classes = rows.shape
    if rows.stride(1) == 1 and (count <= 1 or rows.stride(0) >= classes):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _check_shapes(logits: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise ValueError unless dtypes and shapes are those of `FusedCrossEntropy.forward`."""
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(f"logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if logits.dim() < 2 or targets.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"logits of shape (N, C) need targets of shape (N,), and (N, C, d...) need (N, d...); "
            f"got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if logits.shape[1] == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no classes")
