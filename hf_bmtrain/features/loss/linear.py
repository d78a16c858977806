"""Cross entropy of a linear layer's output, computed in chunks of rows so that the full logits are never in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...engine.base.arguments import expect_number, expect_tensor
from ...engine.base.launch import C_NAMES
from ...engine.base.torch_internals import autocast_type
from ...engine.runtime.world import current_world
from ...engine.sharding.on_demand import OnDemandGather
from ...engine.sharding.parameter import DistributedParameter
from .criterion import Criterion, NumItems, criterion, refuse_double_backward
from .cross_entropy import rescale_
from .wide_product import add_product

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # the gradients of hidden, weight and bias


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    num_items_in_batch: NumItems = None,
    chunk_bytes: int = 1 << 30,
) -> Tensor:
    """Compute `cross_entropy(hidden @ weight.T + bias, targets)` with at most `chunk_bytes` of logits in memory.

    With reduction "mean" or "sum", the forward computes the gradients, chunk by chunk, and the backward multiplies them
    by the incoming gradient. With "none", each row has its own incoming gradient, so the backward computes the logits
    again, and then the gradients. The weight's gradient is summed over chunks in float32. Gradients that are not needed
    are not computed. Targets are not shifted: `targets[i]` belongs to `hidden[i]`.

    `weight` and `bias` may be parameters of a sharded model (`model.lm_head.weight`), inside or outside the model's
    forward. In this case, the function is collective: every rank must call it, because it all-gathers these parameters.
    It reshards them before it returns, unless they were unsharded before the call. With reduction "none", the backward
    all-gathers them again. Their gradients are averaged over the ranks, like those of all sharded parameters.

    Args:
        hidden: (..., H) float16, bfloat16 or float32.
        weight: (V, H), of hidden's dtype. Under autocast, the dtypes may differ: hidden, weight and bias are cast to
            the autocast dtype.
        targets: (...,) class indices of any integer dtype, each in [0, V) or equal to `ignore_index`.
        bias: (V,), of hidden's dtype, or None.
        class_weight: (V,), one weight per class, as the `weight` of torch.nn.functional.cross_entropy. None weights all
            classes equally.
        ignore_index: targets with this value contribute neither to the loss nor to the gradient.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".
        label_smoothing: the weight, in [0, 1], of the uniform distribution over all classes in each target.
        z_loss: the factor of logsumexp(logits)^2 (after `softcap`), which is added to the loss of every row that is not
            ignored; 0 for none.
        softcap: replaces the logits by softcap * tanh(logits / softcap); 0 for none.
        num_items_in_batch: the divisor of the mean, as a number or a tensor of one element; 0 counts as 1. None divides
            by this rank's number of targets that are not ignored in this call or, with `class_weight`, by the sum of
            these targets' weights. Must be None with reduction "sum" or "none".
        chunk_bytes: the maximum number of bytes of logits in memory at a time; a chunk has at least one row. The limit
            does not include other memory. With reduction "mean" or "sum", the gradients stay in memory from the forward
            to the backward: those of `weight` and `bias` in float32, and that of `hidden` in its own dtype or, under
            autocast, in the autocast dtype. If V is not a multiple of 8, the call also makes a padded copy of `weight`,
            and frees it before it returns.

    Returns:
        float32: a scalar, or a tensor of the targets' shape with reduction "none".

        * If all targets are ignored, the mean is 0 and the gradient 0 (a rank may have only padding).
        * If a logit is NaN or, without `softcap`, +inf, the loss of its row is NaN.
        * On CUDA, a target out of range makes the loss of its row NaN, and hence the mean or sum too. Its row
          contributes nothing to the gradients.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: a shape, dtype, device or setting is wrong.
        ValueError: a target on the CPU is out of range. (On CUDA, this is not checked, because the check would
            synchronize.)
        RuntimeError: in backward, if create_graph=True.
        RuntimeError: in a second backward through the same mean or sum.
    """
    how = criterion(class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, num_items_in_batch)
    _check(hidden, weight, targets, bias)
    targets = how.indices(targets, weight.shape[0])
    expect_number("chunk_bytes", chunk_bytes, "at least 1", lambda size: size >= 1, integer=True)
    recorded, device = torch.is_grad_enabled(), autocast_type(hidden.device)
    wants = tuple(recorded and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    work = _Work(how, wants, dtype, chunk_bytes)
    rows = hidden.reshape(-1, hidden.shape[-1])
    for parameter in (weight, bias):
        if isinstance(parameter, DistributedParameter):
            _gather_of(parameter).note_read()
    losses = _LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1).contiguous(), work)
    return losses.view(targets.shape) if reduction == "none" else losses


@dataclass(frozen=True)
class _Work:
    """The settings of one call of `linear_cross_entropy`.

    Attributes:
        how: the Criterion, which computes the loss of each row and reduces these losses.
        wants: three flags: whether hidden, weight and bias need a gradient.
        dtype: the dtype of the matrix products.
        chunk_bytes: the maximum number of bytes of logits in memory at a time.
    """

    how: Criterion
    wants: tuple[bool, ...]
    dtype: torch.dtype
    chunk_bytes: int

    def run(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Compute the losses, and the gradients of sum(scale * losses). Collective if `weight` or `bias` is sharded.

        Args:
            rows: (N, H), the hidden states.
            weight: (V, H), a tensor or a parameter of a sharded model.
            bias: (V,), a tensor or a parameter of a sharded model, or None.
            targets: (N,) int64.
            scale: (1,) or (N,) float32, the factor of each row's loss. None computes no gradients.

        Returns:
            The losses, (N,) float32, and the gradients of rows, weight and bias. A gradient is None if autograd does
            not need it, or if `scale` is None. The gradients of weight and bias are float32.
        """
        with _full(weight) as full, _full(bias) as shift, torch.autocast(autocast_type(rows.device), enabled=False):
            return self._chunks(rows.to(self.dtype), full, shift, targets, scale)

    def _chunks(self, rows, weight, bias, targets, scale) -> tuple[Tensor, Gradients]:
        """Compute the losses and the gradients that `run` returns, in chunks of rows, so that few logits are in memory.

        rows: (N, H) in `self.dtype`, the hidden states.
        weight: (V, H), full.
        bias: (V,), full, or None.
        targets: (N,) int64.
        scale: (1,) or (N,) float32, the factor of each row's loss. None computes no gradients.
        """
        (count, _), classes = rows.shape, weight.shape[0]
        for_rows, for_weight, for_bias = (wanted and scale is not None for wanted in self.wants)
        losses = rows.new_empty(count, dtype=torch.float32)
        d_rows = rows.new_empty(rows.shape) if for_rows else None
        d_weight, d_bias = None, losses.new_zeros(classes) if for_bias else None
        weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        # Pad the weight with zeros to a multiple of 8 classes, so that rows of 16-bit logits are aligned to 16 bytes.
        # cuBLAS's fast kernels need this alignment. For example, with the 50,257 classes of GPT-2, products take 6
        # times as long as with 50,264.
        more = -classes % 8
        if more:
            weight = pad(weight, (0, 0, 0, more))
            bias = None if bias is None else pad(bias, (0, more))
        size = chunk_rows(count, (classes + more) * rows.element_size(), self.chunk_bytes)
        space = rows.new_empty(size, classes + more)
        for start in range(0, count, size):
            chunk, part = rows[start : start + size], targets[start : start + size]
            products, here = space[: len(chunk)], losses[start : start + size]
            if bias is None:
                torch.mm(chunk, weight.t(), out=products)
            else:
                torch.addmm(bias, chunk, weight.t(), out=products)
            logits = products[:, :classes]
            if scale is None:
                here.copy_(self.how.rows.losses(logits, part)[0])
                continue
            factor = scale if scale.numel() == 1 else scale[start : start + size]
            here.copy_(self.how.rows.losses_and_gradient_(logits, part, factor)[0])
            if more:
                # Set the columns of the added classes to 0, because they are NaN in rows in which a hidden state is inf
                # or NaN. The product below multiplies these columns by weights of 0, but NaN * 0 is NaN.
                products[:, classes:].zero_()
            if d_rows is not None:
                torch.mm(products, weight, out=d_rows[start : start + size])
            if for_weight:
                d_weight = add_product(d_weight, products.t(), chunk)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=torch.float32)
        if for_weight:
            d_weight = torch.zeros_like(weight, dtype=torch.float32) if d_weight is None else d_weight
            d_weight = d_weight[:classes]
        return losses, (d_rows, d_weight, d_bias)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the cross entropy of hidden states times `weight`ᵀ plus `bias`. The result is float32, (N,) or a scalar.

    rows: (N, H), the hidden states.
    weight: (V, H), a tensor or a parameter of a sharded model.
    bias: (V,), a tensor or a parameter of a sharded model, or None.
    targets: (N,) int64, the class of each row.
    work: the other settings of `linear_cross_entropy`, such as the reduction.
    """

    @staticmethod
    def forward(ctx, rows, weight, bias, targets, work: _Work):
        factor = work.how.factor(targets)
        # Float16 gradients of a mean would underflow without the loss scale, which is known only in backward. So they
        # are computed here for the factor 1, and backward multiplies them by the factor and the loss scale.
        written = torch.ones_like(factor) if work.dtype == torch.float16 else factor
        at_once = any(work.wants) and work.how.reduction != "none"
        for parameter in (weight, bias):
            if isinstance(parameter, DistributedParameter):
                # As in a block's forward, free memory that is no longer needed: gradients left over from a failed
                # backward, and the gradient shard if no .grad refers to it.
                current_world().schedule.discard_failed_backward()
                parameter.buffer.gradient.free_if_unused()
        losses, gradients = work.run(rows, weight, bias, targets, written if at_once else None)
        ctx.work, ctx.at_once, ctx.gradients = work, at_once, gradients
        ctx.like = rows.dtype, weight, bias
        if any(work.wants):
            ctx.save_for_backward(factor, written, *(() if at_once else (rows, weight, bias, targets)))
        return work.how.reduce(losses, factor)

    @staticmethod
    def backward(ctx, *incoming: Tensor):
        refuse_double_backward("linear_cross_entropy")
        factor, written, *inputs = ctx.saved_tensors
        wanted = (incoming[0] * factor).contiguous()
        if ctx.at_once:
            if ctx.gradients is None:
                raise RuntimeError(
                    "A second backward through linear_cross_entropy is not possible, because the forward computed the "
                    "gradients and the first backward consumed them. Call linear_cross_entropy again, or pass "
                    "reduction='none', which computes the gradients in each backward, and sum the losses yourself."
                )
            d_rows, d_weight, d_bias = ctx.gradients
            ctx.gradients = None
        else:
            d_rows, d_weight, d_bias = ctx.work.run(*inputs, wanted)[1]
            wanted = written = torch.ones_like(factor)
        dtype, weight, bias = ctx.like
        if d_rows is not None:
            rescale_(d_rows, wanted, written)
            d_rows = d_rows.to(dtype)
        d_weight, d_bias = (
            _hand_over(parameter, gradient, wanted, written)
            for parameter, gradient in ((weight, d_weight), (bias, d_bias))
        )
        return d_rows, d_weight, d_bias, None, None


def _hand_over(parameter: Tensor, gradient: Tensor | None, wanted: Tensor, used: Tensor) -> Tensor | None:
    """Multiply the gradient of the weight or bias by wanted / used, and pass it on to autograd or to a flat buffer.

    For a parameter of a sharded model, add the product to the gradient that the parameter's flat buffer will reduce,
    and return None. For any other parameter, return the product in the parameter's dtype, for autograd. Return None if
    `gradient` is None.

    parameter: the weight or the bias.
    gradient: float32, of the parameter's shape, the gradient of used * sum(losses); overwritten.
    wanted: (1,) float32. The product is the gradient of wanted * sum(losses). Includes the incoming gradient.
    used: (1,) float32. With reduction "none", `gradient` includes the incoming gradients already, and `wanted` and
        `used` are both 1.
    """
    if gradient is None:
        return None
    rescale_(gradient.view(-1, gradient.shape[-1]), wanted, used)
    gradient = gradient.to(parameter.dtype)  # the only rounding: `rescale_` has multiplied in float32
    if not isinstance(parameter, DistributedParameter):
        return gradient
    _gather_of(parameter).collect(parameter.index, gradient)
    return None


def _gather_of(parameter: DistributedParameter) -> OnDemandGather:
    return OnDemandGather.of(parameter, current_world().schedule)


@contextmanager
def _full(parameter: Tensor | None) -> Iterator[Any]:
    """Return a context that all-gathers a parameter of a sharded model, and yields the full parameter.

    On exit, the parameter is resharded if it was sharded before. Any other tensor, or None, is yielded unchanged.
    Collective if `parameter` belongs to a sharded model: every rank must then enter the context.
    """
    if isinstance(parameter, DistributedParameter):
        with parameter.buffer.unsharded():
            yield parameter.buffer.full_params[parameter.index].detach()
    else:
        yield parameter


def chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Return how many rows of logits to compute at a time, so that chunks are about equal and at most `budget` bytes.

    Args:
        rows: the total number of rows.
        row_bytes: the size of a row of logits in bytes.
        budget: the maximum size of a chunk in bytes. A chunk has at least one row.
    """
    most = max(1, budget // row_bytes)
    even = -(-rows // max(1, -(-rows // most)))
    return min(most, max(1, -(-even // 128) * 128))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError if a tensor argument is not as the docstring of `linear_cross_entropy` requires."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("targets", targets)):
        expect_tensor(name, tensor)
    if bias is not None:
        expect_tensor("bias", bias)
    shape = weight.shape
    if len(shape) != 2 or 0 in shape or hidden.dim() < 1 or hidden.shape[-1] != shape[1]:
        raise ValueError(
            f"weight must have shape (V, H) with V and H at least 1, and hidden shape (..., H); got weight "
            f"{tuple(shape)} and hidden {tuple(hidden.shape)}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} needs targets of shape {tuple(hidden.shape[:-1])}, got "
            f"{tuple(targets.shape)}"
        )
    if bias is not None and bias.shape != shape[:1]:
        raise ValueError(
            f"a weight of shape {tuple(shape)} needs a bias of {shape[0]} numbers, got {tuple(bias.shape)}"
        )
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    autocast = torch.is_autocast_enabled(autocast_type(hidden.device))
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if not dtypes <= C_NAMES.keys() or (len(dtypes) > 1 and not autocast):
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"hidden, weight and bias must share one dtype of float16, bfloat16, float32; got {found}")
    devices = {str(tensor.device) for tensor in (*tensors.values(), targets)}
    if len(devices) > 1:
        raise ValueError(
            f"hidden, weight, bias and targets must be on the same device, got {', '.join(sorted(devices))}"
        )
