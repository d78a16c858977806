"""Cross-entropy of rows of logits: the losses, and the gradient, which may overwrite the logits.

The methods of `CrossEntropy` use kernels/cross_entropy*.cu for CUDA tensors, and torch in float32 for others. They do
not reduce the losses over rows; the caller does. For the gradient of the reduced loss, the caller passes `scale`, the
factor by which the reduction multiplies each row's loss.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.base.arguments import expect, expect_number
from ...engine.base.launch import C_NAMES, Variant, kernel, shared_memory_limit

# Bytes of shared memory besides the copy of the row. Equal to SCRATCH in kernels/cross_entropy.cu, which counts vectors
# of 16 bytes.
SCRATCH = 640
SHARE = 72 << 10  # maximum bytes of a row per thread block, so that three thread blocks fit into an SM's 227 KiB
BYTES_A_THREAD = 256  # bytes of a row per thread, which loads sixteen 16-byte vectors concurrently
# 16-byte vectors of a row per thread block, in the kernels that do not copy rows to shared memory (gradient, rescale)
PART_VECTORS = 2048


@cache
def gradient_variant(dtype: torch.dtype, general: bool, weighted: bool) -> Variant:
    """Return the CUDA source, and its macros, of the kernels that compute the gradient of the logits, or rescale it.

    The source is kernels/cross_entropy_gradient.cu. To load one of its kernels, pass the returned Variant to `kernel`.
    Each combination of arguments is compiled separately, so that the kernels contain only the code that is used.

    dtype: the dtype of the logits and of their gradient.
    general: whether to compile the code for label smoothing, class weights and a softcap. False if none is used.
    weighted: whether there are class weights. If so, `general` must be True.
    """
    macros = ("ELEMENT", C_NAMES[dtype]), ("GENERAL", str(int(general))), ("WEIGHT", "float" if weighted else "none")
    return Variant("cross_entropy_gradient", macros)


@cache
def rows_variant(dtype: torch.dtype, general: bool, weighted: bool, cluster: int) -> Variant:
    """Return the CUDA source, and its macros, of the kernels that compute the losses of the rows of logits.

    The source is kernels/cross_entropy.cu. It has two kernels: one computes only the losses, and the other computes the
    losses and the gradient. To load one of them, pass the returned Variant to `kernel`. Each combination of arguments
    is compiled separately, so that the kernels contain only the code that is used.

    dtype: the dtype of the logits.
    general: whether to compile the code for label smoothing, class weights and a softcap. False if none is used.
    weighted: whether there are class weights. If so, `general` must be True.
    cluster: the number of thread blocks that process a row together: 1, 2, 4 or 8.
    """
    macros = gradient_variant(dtype, general, weighted).macros
    return Variant("cross_entropy", (("CLUSTER", str(cluster)), *macros))


class Plan(NamedTuple):
    """How a kernel launch divides the rows among thread blocks.

    Attributes:
        cluster: the number of thread blocks per row.
        threads: the number of threads per thread block.
        stage: the number of 16-byte vectors of the row that a thread block copies to shared memory.
    """

    cluster: int
    threads: int
    stage: int


def plan(row_bytes: int, clusters: bool, shared_limit: int) -> Plan:
    """Return how a kernel divides each row of logits: the number of thread blocks, their threads and shared memory.

    A row is divided between 1, 2, 4 or 8 thread blocks, and each of them copies its part of the row to shared memory.
    The number of thread blocks is the smallest for which a part has at most `SHARE` bytes (72 KiB), so that the shared
    memory of an SM has room for three thread blocks. If even an eighth of the row is larger, the number is 8. What does
    not fit into the shared memory of a thread block is read from global memory twice.

    Args:
        row_bytes: the size of a row in bytes.
        clusters: whether the device has thread block clusters; without them a row has one thread block.
        shared_limit: the maximum number of bytes of shared memory of a thread block.
    """
    row_bytes += 16  # a row that does not start at a multiple of 16 bytes extends into one more 16-byte vector
    cluster = next((c for c in (1, 2, 4, 8) if row_bytes <= c * SHARE), 8) if clusters else 1
    share = -(-row_bytes // (16 * cluster))  # 16-byte vectors per thread block
    stage = min(share, (shared_limit - SCRATCH) // 16)
    wanted = 1 << (16 * share // BYTES_A_THREAD - 1).bit_length()
    return Plan(cluster, min(max(64, wanted), 1024 if share > stage else 512), stage)


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy loss of each row. For a row with logits x, target t and class weights w (1 if none are given):

        z = softcap * tanh(x / softcap) if softcap else x,   lse = log(sum(exp(z)))
        loss = (1 - s) w_t (lse - z_t)  +  s / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

    s is `label_smoothing`, V the number of classes. This is the loss of torch.nn.functional.cross_entropy without a
    reduction, with the z_loss of PaLM (Chowdhery et al. 2022).

    A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside 0 .. V - 1 has loss NaN and
    gradient 0. If z_j is -inf, class j has probability 0; values below -2e38 count as -inf. If a z_j is NaN or +inf,
    the loss and gradient of its row are NaN. (With a softcap, logits of -inf and +inf become -softcap and +softcap.)

    `class_weight` is (V,) float32, or None. The methods take these arguments:
        logits         (N, V) float32, float16 or bfloat16; rows contiguous, any row stride and alignment
        targets        (N,) int64
        lses           (N,) float32: the logsumexp of each row, as `losses` returns it
        scale          (1,) or (N,) float32: the factor of each row's loss. For a mean, it is 1 / the divisor
                       of the mean, multiplied in backward by the gradient of the mean. That gradient includes
                       the loss scale, without which float16 gradients would underflow.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    class_weight: Tensor | None = None

    def __post_init__(self) -> None:
        expect_number(
            "ignore_index", self.ignore_index, "in the range of int64", lambda n: -(2**63) <= n < 2**63, integer=True
        )
        expect_number("label_smoothing", self.label_smoothing, "between 0 and 1", lambda part: 0 <= part <= 1)
        for name, factor in (("z_loss", self.z_loss), ("softcap", self.softcap)):
            expect_number(name, factor, "finite and must not be negative", lambda factor: 0 <= factor < math.inf)
        if self.class_weight is not None and self.class_weight.dim() != 1:
            shape = tuple(self.class_weight.shape)
            raise ValueError(
                f"class weights (weight, class_weight) must have shape (C,), one number per class, got {shape}"
            )

    def count(self, targets: Tensor) -> Tensor:
        """Return the default divisor of the mean of the rows' losses: a tensor (1,) float32.

        Without class weights, it is the number of targets that are not ignored. With class weights, it is the sum of
        the weights of these targets.

        targets: int64, of any shape, the class of each row.
        """
        counted = targets != self.ignore_index
        if self.class_weight is not None:
            counted = self.class_weight[targets.clamp(0, len(self.class_weight) - 1)] * counted
        return counted.sum(dtype=torch.float32).view(1)

    def losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's loss and its logsumexp (`lses`), both (N,) float32.

        The logsumexp is 0 for rows whose target is ignored or out of range.

        Args:
            logits: (N, V). Not modified.
            targets: (N,) int64, the class of each row.
        """
        self._check(logits, targets)
        if logits.is_meta:
            return _empty_losses(logits)
        if not logits.is_cuda:
            return self.reference_losses(logits, targets)
        return self._launch_rows("cross_entropy_losses", logits, targets)

    def losses_and_gradient_(self, logits: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's loss and logsumexp, and overwrite the logits with the gradient of sum(scale * losses).

        Both results are (N,) float32. The logsumexp is 0 for rows whose target is ignored or out of range. On a GPU,
        one kernel launch computes the losses and the gradient.

        Args:
            logits: (N, V). Overwritten.
            targets: (N,) int64, the class of each row.
            scale: (1,) or (N,) float32, the factor of each row's loss.
        """
        self._check(logits, targets)
        _check_scale("scale", scale, logits)
        if logits.is_meta:
            return _empty_losses(logits)
        if not logits.is_cuda:
            losses, lses = self.reference_losses(logits, targets)
            logits.detach().copy_(self.reference_gradient(logits, targets, lses, scale))
            return losses, lses
        return self._launch_rows("cross_entropy_fused", logits, targets, scale, _stride(scale))

    def gradient_(
        self, logits: Tensor, targets: Tensor, lses: Tensor, scale: Tensor, out: Tensor | None = None
    ) -> None:
        """Write the gradient of sum(scale * losses) with respect to the logits into `out`.

        Args:
            logits: (N, V).
            targets: (N,) int64, the class of each row.
            lses: (N,) float32, the log-sum-exp of each row, as `losses` has returned it.
            scale: (1,) or (N,) float32, the factor of each row's loss.
            out: (N, V), with the same dtype and row stride as the logits, and the same `data_ptr() % 16`. None
                overwrites the logits.
        """
        self._check(logits, targets)
        _check_scale("scale", scale, logits)
        expect("lses", lses, (torch.float32,), (logits.shape[0],), logits.device)
        out = logits if out is None else out
        if logits.is_meta:
            return
        if not logits.is_cuda:
            out.detach().copy_(self.reference_gradient(logits, targets, lses, scale))
        elif logits.shape[0] > 0:
            parts = _parts(logits)
            arguments = (*self._arguments(logits, targets), parts, scale, _stride(scale), lses, out)
            launch = kernel(gradient_variant(logits.dtype, *self._kind), "cross_entropy_gradient", logits.device)
            launch(logits.shape[0] * parts, 256, *arguments)

    def gradient(self, logits: Tensor, targets: Tensor, lses: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of sum(scale * losses) with respect to the logits, as a new tensor.

        Args:
            logits: (N, V). Not modified.
            targets: (N,) int64, the class of each row.
            lses: (N,) float32, the log-sum-exp of each row, as `losses` has returned it.
            scale: (1,) or (N,) float32, the factor of each row's loss.
        """
        # `gradient_` needs an `out` with the stride and alignment of the logits. A new tensor is contiguous and aligned
        # to 16 bytes. If the logits are not, copy them to a new tensor, and write the gradient over this copy.
        if logits.is_contiguous() and logits.data_ptr() % 16 == 0:
            gradient = torch.empty_like(logits)
            self.gradient_(logits, targets, lses, scale, gradient)
        else:
            gradient = logits.detach().clone(memory_format=torch.contiguous_format)
            self.gradient_(gradient, targets, lses, scale)
        return gradient

    def plan(self, logits: Tensor) -> Plan:
        """Return how a kernel divides the rows of `logits` among the GPU's thread blocks, as a Plan."""
        clusters = torch.cuda.get_device_capability(logits.device)[0] >= 9
        return plan(logits.shape[1] * logits.element_size(), clusters, shared_memory_limit(logits.device))

    @property
    def _kind(self) -> tuple[bool, bool]:
        """Two flags, (general, weighted), that select the compiled variant of a CUDA kernel.

        general: whether the variant must support label smoothing, a softcap or class weights.
        weighted: whether there are class weights.
        """
        weighted = self.class_weight is not None
        return bool(self.label_smoothing or self.softcap or weighted), weighted

    def _arguments(self, logits: Tensor, targets: Tensor) -> tuple[object, ...]:
        weight = self.class_weight
        total = None if weight is None else weight.sum().view(1)
        rows = (logits, logits.stride(0), logits.shape[1], targets, self.ignore_index)
        return (*rows, self.label_smoothing, self.z_loss, self.softcap, weight, total)

    def _launch_rows(self, name: str, logits: Tensor, targets: Tensor, *scale: object) -> tuple[Tensor, Tensor]:
        """Launch the kernel `name`, which computes the losses, and return (losses, lses), both (N,) float32.

        name: "cross_entropy_losses", or "cross_entropy_fused", which also overwrites the logits with the gradient.
        logits: (N, V).
        targets: (N,) int64.
        scale: two arguments, only for "cross_entropy_fused": a tensor of the factors of the rows' losses, and its
            stride, which is 0 if all rows share one factor and 1 otherwise.
        """
        out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        if logits.shape[0] > 0:
            cluster, threads, stage = self.plan(logits)
            launch = kernel(rows_variant(logits.dtype, *self._kind, cluster), name, logits.device)
            arguments = (*self._arguments(logits, targets), stage, *scale, out[0], out[1])
            launch(logits.shape[0] * cluster, threads, *arguments, shared_memory=SCRATCH + 16 * stage)
        return out[0], out[1]

    def _check(self, logits: Tensor, targets: Tensor) -> None:
        _check_logits(logits)
        expect("targets", targets, (torch.int64,), (logits.shape[0],), logits.device)
        if self.class_weight is not None:
            expect("class_weight", self.class_weight, (torch.float32,), (logits.shape[1],), logits.device)

    # -- reference in torch, in float32 -------------------------------------------------------------------------

    def reference_losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's loss and its logsumexp, both (N,) float32, computed with torch on any device.

        The logsumexp is 0 for rows whose target is ignored or out of range. `losses` and `losses_and_gradient_` call
        this method for tensors that are not on a GPU.

        Args:
            logits: (N, V). Not modified.
            targets: (N,) int64, the class of each row.
        """
        z, at, weight = self._prepare(logits, targets)
        ignored, outside = targets == self.ignore_index, (targets < 0) | (targets >= len(weight))
        lses = z.logsumexp(1)
        hit, smooth = (1 - self.label_smoothing) * weight[at[:, 0]], self.label_smoothing / len(weight)
        losses = hit * (lses - z.gather(1, at)[:, 0]) + self.z_loss * lses.square()
        if self.label_smoothing:
            losses = losses + smooth * (weight.sum() * lses - (weight * z).sum(1))
        losses = losses.masked_fill(outside, torch.nan).masked_fill(ignored, 0)
        return losses, lses.masked_fill(ignored | outside, 0)

    def reference_gradient(self, logits: Tensor, targets: Tensor, lses: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient of sum(scale * losses) with respect to the logits, computed with torch on any device.

        `gradient_` and `losses_and_gradient_` call it for tensors that are not on a GPU. The result is a new float32
        tensor, also for half-precision logits.

        Args:
            logits: (N, V). Not modified.
            targets: (N,) int64, the class of each row.
            lses: (N,) float32, the log-sum-exp of each row, as `reference_losses` has returned it.
            scale: (1,) or (N,) float32, the factor of each row's loss.
        """
        z, at, weight = self._prepare(logits, targets)
        nothing = (targets == self.ignore_index) | (targets < 0) | (targets >= len(weight))
        hit, smooth = (1 - self.label_smoothing) * weight[at[:, 0]], self.label_smoothing / len(weight)
        factor = hit + smooth * weight.sum() + 2 * self.z_loss * lses
        gradient = torch.exp(z - lses[:, None]).mul_(factor[:, None])
        if self.label_smoothing:
            gradient -= smooth * weight
        gradient.scatter_add_(1, at, -hit[:, None])
        if self.softcap:
            gradient *= 1 - (z / self.softcap).square()
        return gradient.mul_(scale[:, None]).masked_fill_(nothing[:, None], 0)

    def _prepare(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the soft-capped logits (N, V), the targets clamped to valid classes (N, 1), and the weights (V,)."""
        z = logits.detach().float()
        z = self.softcap * torch.tanh(z / self.softcap) if self.softcap else z
        weight = z.new_ones(z.shape[1]) if self.class_weight is None else self.class_weight
        return z.masked_fill(z < -2e38, -torch.inf), targets.clamp(0, len(weight) - 1)[:, None], weight


def rescale_(gradient: Tensor, wanted: Tensor, used: Tensor) -> None:
    """Multiply each row of `gradient` by wanted / used, in place.

    The backward of a loss function calls this if its forward has already computed the gradient, with the scale `used`.
    Only the backward knows the scale `wanted`, which includes the loss scale. A row with used = 0 has a gradient of 0,
    and is not changed. On CUDA, rows with wanted = used are neither read nor written.

    Args:
        gradient: (N, V), a gradient that was computed with `scale=used`.
        wanted: (1,) or (N,) float32, the scale that the gradient should have.
        used: (1,) or (N,) float32, the scale that it has.
    """
    _check_logits(gradient)
    _check_scale("wanted", wanted, gradient)
    _check_scale("used", used, gradient)
    if gradient.is_meta:
        return
    if not gradient.is_cuda:
        factor = torch.where((wanted == used) | (used == 0), torch.ones_like(used), wanted / used)
        torch.mul(gradient, factor[:, None], out=gradient)
    elif gradient.shape[0] > 0:
        parts = _parts(gradient)
        launch = kernel(gradient_variant(gradient.dtype, False, False), "rescale", gradient.device)
        rows = (gradient, gradient.stride(0), gradient.shape[1], parts)
        launch(gradient.shape[0] * parts, 256, *rows, wanted, _stride(wanted), used, _stride(used))


def _empty_losses(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(len(logits), dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _parts(logits: Tensor) -> int:
    """Return the number of thread blocks per row of `logits`, for the kernels that compute or rescale gradients."""
    return -(-(logits.shape[1] * logits.element_size() // 16 + 2) // PART_VECTORS)


def _stride(scale: Tensor) -> int:
    """Return the number of elements between the scales of two consecutive rows: 1, or 0 if all rows share one scale."""
    return int(scale.numel() > 1)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in C_NAMES:
        raise ValueError(
            "logits must be float32, float16 or bfloat16 of shape (rows, classes), got "
            f"{logits.dtype} of shape {tuple(logits.shape)}"
        )
    rows, classes = logits.shape
    if classes < 1 or logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < classes):
        raise ValueError(
            "rows of logits must be contiguous, not overlap, and have at least one class, got shape "
            f"{tuple(logits.shape)} and strides {logits.stride()}. If the strides are the problem, pass "
            "logits.contiguous()."
        )


def _check_scale(name: str, scale: Tensor, logits: Tensor) -> None:
    rows = 1 if scale.numel() == 1 else logits.shape[0]
    expect(name, scale, (torch.float32,), (rows,), logits.device)
