"""Cross entropy of float16, bfloat16 or float32 logits, computed in float32 by fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...engine.base.arguments import expect_flag, expect_tensor
from ...engine.base.launch import C_NAMES
from .criterion import Criterion, NumItems, criterion, refuse_double_backward
from .cross_entropy import rescale_
from .linear import linear_cross_entropy
from .parallel import parallel_cross_entropy

__all__ = ["FusedCrossEntropy", "cross_entropy", "linear_cross_entropy"]


class FusedCrossEntropy(torch.nn.Module):
    """Cross entropy between logits and class indices, computed in float32 even for half-precision logits.

    On a GPU, one kernel computes the losses in forward. By default, a second kernel computes the gradient in backward,
    as a new tensor. With `inplace`, the gradient is written over the logits instead.

    Args:
        weight: one weight per class, shape (C,), any floating-point dtype. The mean divides by the sum of the targets'
            weights, unless `forward` gets a divisor (`num_items_in_batch`). None weights all classes equally.
        ignore_index: targets with this value contribute neither to the loss nor to the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.
        parallel: whether the classes are split over a tensor-parallel group (`tp_size` of `init_distributed`), so that
            each rank has the logits of only its classes. In this case, the forward is collective: every rank must call
            it, because it sums over the classes of all ranks of the group. It uses torch's operations instead of the
            fused kernels. Not supported together with `weight`, `inplace`, `z_loss` or `softcap`.
        inplace: whether to overwrite the logits with their gradient, which saves a tensor of their size. For a mean or
            sum of bfloat16 or float32 logits, the gradient is written in forward, by the kernel that computes the
            losses; otherwise it is written in backward. Do not read the logits after the call. Autograd raises an error
            if the backward of another operation needs them.
        z_loss: the factor of logsumexp(logits)^2 (after `softcap`), which is added to the loss of every row that is not
            ignored; 0 for none.
        softcap: replaces the logits by softcap * tanh(logits / softcap); 0 for none.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the reduction is unknown.
        ValueError: label smoothing is outside [0, 1].
        ValueError: z_loss or softcap is negative or not finite.
        ValueError: weight is not 1-D.
        ValueError: `parallel` is set together with an argument that it does not support.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        parallel: bool = False,
        *,
        inplace: bool = False,
        z_loss: float = 0.0,
        softcap: float = 0.0,
    ):
        super().__init__()
        expect_flag("parallel", parallel)
        expect_flag("inplace", inplace)
        if parallel:
            given = {"weight": weight is not None, "inplace": inplace, "z_loss": z_loss != 0, "softcap": softcap != 0}
            if any(given.values()):
                names = ", ".join(name for name, is_given in given.items() if is_given)
                raise ValueError(f"FusedCrossEntropy(parallel=True) does not support {names}. Leave out {names}.")
        # Check the arguments now, so that a wrong one raises an error here and not in the first forward.
        criterion(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, None)
        self.register_buffer("weight", weight)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.inplace, self.z_loss, self.softcap, self.parallel = inplace, z_loss, softcap, parallel

    def forward(self, input: Tensor, target: Tensor, num_items_in_batch: NumItems = None) -> Tensor:
        """Return the loss of the logits `input` for the class indices `target`.

        With `parallel`, this is collective: every rank must call it.

        Args:
            input: (N, C) or (N, C, d...) logits, float16, bfloat16 or float32. The gradient has the same dtype. With
                `parallel`: (..., C / tp_size), the logits of this rank's classes.
            target: (N,) or (N, d...) class indices of any integer dtype, each in [0, C) or equal to `ignore_index`.
                With `parallel`: (...), the same on all ranks of the group.
            num_items_in_batch: the divisor of the mean, as a number or a tensor of one element; 0 counts as 1. None
                divides by this rank's number of targets that are not ignored in this call or, with class weights, by
                the sum of these targets' weights. Must be None with reduction "sum" or "none".

        Returns:
            float32: a scalar, or a tensor of the target's shape with reduction "none".

            * If all targets are ignored, the mean is 0 and the gradient 0 (a rank may have only padding).
            * A logit of -inf means that the class has probability 0. If a logit is NaN or +inf, the loss and gradient
              of its row are NaN. With `softcap`, -inf and +inf are replaced by -softcap and +softcap.
            * On CUDA, a target out of range makes the loss of its row NaN, and hence the mean or sum too. The gradient
              of that row is 0; the gradients of other rows are correct.

        Raises:
            TypeError: an argument has a wrong type.
            ValueError: a shape or dtype is wrong.
            ValueError: a target on the CPU is out of range. (On CUDA, this is not checked, because the check would
                synchronize.)
            ValueError: `inplace` is set, and the logits are a leaf that requires a gradient, or a view of one.
            RuntimeError: in backward, if create_graph=True.
            RuntimeError: in a second backward, if `inplace` is set.
        """
        if self.parallel:
            return parallel_cross_entropy(
                input, target, self.ignore_index, self.reduction, self.label_smoothing, num_items_in_batch
            )
        return cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, self.inplace,
            z_loss=self.z_loss, softcap=self.softcap, num_items_in_batch=num_items_in_batch,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("ignore_index", "reduction", "label_smoothing", "inplace", "parallel", "z_loss", "softcap")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    inplace: bool = False,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    num_items_in_batch: NumItems = None,
) -> Tensor:
    """Compute the cross entropy between logits and class indices, in float32, by the kernels of `FusedCrossEntropy`.

    On a GPU, one kernel computes the losses in forward, and a second one the gradient in backward, as a new tensor.
    With `inplace`, the gradient is written over the logits instead.

    Args:
        logits: (N, C) or (N, C, d...) float16, bfloat16 or float32; the gradient has the same dtype.
        targets: (N,) or (N, d...) class indices of any integer dtype, each in [0, C) or equal to `ignore_index`.
        weight: (C,), one weight per class, any floating-point dtype, as in torch.nn.functional.cross_entropy. None
            weights all classes equally.
        ignore_index: targets with this value contribute neither to the loss nor to the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.
        inplace: whether to overwrite the logits with their gradient, which saves a tensor of their size. Do not read
            the logits after the call.
        z_loss: the factor of logsumexp(logits)^2 (after `softcap`), which is added to the loss of every row that is not
            ignored; 0 for none.
        softcap: replaces the logits by softcap * tanh(logits / softcap); 0 for none.
        num_items_in_batch: the divisor of the mean, as a number or a tensor of one element; 0 counts as 1. None divides
            by this rank's number of targets that are not ignored in this call or, with `weight`, by the sum of these
            targets' weights. Must be None with reduction "sum" or "none".

    Returns:
        float32: a scalar, or a tensor of the targets' shape with reduction "none".

        * If all targets are ignored, the mean is 0 and the gradient 0 (a rank may have only padding).
        * A logit of -inf means that the class has probability 0. If a logit is NaN or +inf, the loss and gradient of
          its row are NaN. With `softcap`, -inf and +inf are replaced by -softcap and +softcap.
        * On CUDA, a target out of range makes the loss of its row NaN, and hence the mean or sum too. The gradient of
          that row is 0; the gradients of other rows are correct.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape, dtype or setting is wrong.
        ValueError: a target on the CPU is out of range. (On CUDA, this is not checked, because the check would
            synchronize.)
        ValueError: `inplace` is set, and the logits are a leaf that requires a gradient, or a view of one.
        RuntimeError: in backward, if create_graph=True.
        RuntimeError: in a second backward, if `inplace` is set.
    """
    how = criterion(weight, ignore_index, reduction, label_smoothing, z_loss, softcap, num_items_in_batch)
    expect_tensor("logits", logits)
    expect_tensor("targets", targets)
    expect_flag("inplace", inplace)
    if logits.dtype not in C_NAMES:
        raise ValueError(f"logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if logits.dim() < 2 or targets.shape != logits.shape[:1] + logits.shape[2:]:
        raise ValueError(
            f"logits of shape (N, C) need targets of shape (N,), and (N, C, d...) need (N, d...); "
            f"got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if logits.shape[1] == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no classes: dimension 1 is empty")
    targets = how.indices(targets, logits.shape[1])
    wanted = torch.is_grad_enabled() and logits.requires_grad
    if inplace and wanted:
        base: Any = logits._base if logits._is_view() else logits
        if logits.is_leaf or (base.is_leaf and base.requires_grad):
            raise ValueError(
                "inplace=True writes the gradient over the logits, but these logits are a leaf tensor or a view of "
                "one, whose values would be lost. Use inplace=False, or pass the output of a layer."
            )
    losses = _CrossEntropy.apply(_rows(logits), targets.reshape(-1).contiguous(), how, inplace, wanted)
    return losses.view(targets.shape) if reduction == "none" else losses


class _CrossEntropy(torch.autograd.Function):
    """Computes the loss of logits (N, C). The result is float32, (N,) or a scalar.

    targets: (N,) int64, contiguous.
    how: the Criterion, which contains the settings of the loss.
    inplace: whether to overwrite the logits with their gradient.
    wanted: whether the logits need a gradient.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, how: Criterion, inplace: bool, wanted: bool):
        factor = how.factor(targets)
        # `early`: whether the forward, instead of the backward, writes the gradient over the logits. False for float16:
        # without the loss scale, which is known only in backward, the gradient would underflow.
        early = wanted and inplace and how.reduction != "none" and logits.dtype != torch.float16
        if early:
            losses, lses = how.rows.losses_and_gradient_(logits, targets, factor)
        else:
            losses, lses = how.rows.losses(logits, targets)
        if wanted:
            ctx.how, ctx.inplace, ctx.early, ctx.spent = how, inplace, early, False
            ctx.save_for_backward(logits, targets, lses, factor)
        return how.reduce(losses, factor)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        refuse_double_backward("cross_entropy")
        if ctx.spent:
            raise RuntimeError(
                "A second backward through cross_entropy(…, inplace=True) is not possible, because the first one wrote "
                "its gradient over the logits. Use inplace=False where you need retain_graph=True."
            )
        how, (logits, targets, lses, factor) = ctx.how, ctx.saved_tensors
        ctx.spent = ctx.inplace
        scale = (gradients[0] * factor).contiguous()
        if not ctx.inplace:
            return how.rows.gradient(logits, targets, lses, scale), None, None, None, None
        if ctx.early:
            rescale_(logits.detach(), scale, factor)
        else:
            how.rows.gradient_(logits, targets, lses, scale)
        return logits.detach(), None, None, None, None


def _rows(logits: Tensor) -> Tensor:
    """Return logits (N, C, d...) as contiguous rows (N * d..., C): a view if possible, else a copy."""
    rows = logits if logits.dim() == 2 else logits.movedim(1, -1).reshape(-1, logits.shape[1])
    count, classes = rows.shape
    if rows.stride(1) == 1 and (count <= 1 or rows.stride(0) >= classes):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
