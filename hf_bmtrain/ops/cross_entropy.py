"""Cross-entropy over rows of logits: losses and the gradient written over the logits, in one launch or two.

A `CrossEntropy` defines the loss of a row; its methods use kernels/cross_entropy*.cu for CUDA tensors and
float32 torch for others. How rows become one number is the caller's: the factor of each row is an argument.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from hf_bmtrain.ops.expect import expect
from hf_bmtrain.ops.launch import C_NAMES, Variant, kernel, shared_memory_limit

SCRATCH = 640  # bytes of shared memory beside the staged row, as in the source
SHARE = 72 << 10  # a block's part of a row: three such blocks fit on an SM of 227 KiB
BYTES_A_THREAD = 256  # sixteen 16-byte vectors, all in flight at once
PART_VECTORS = 2048  # 16-byte vectors of a row that a block of the streaming kernels takes


@cache
def gradient_variant(dtype: torch.dtype, general: bool, weighted: bool) -> Variant:
    return Variant(
        "cross_entropy_gradient",
        (
            ("ELEMENT", C_NAMES[dtype]),
            ("GENERAL", str(int(general))),
            ("WEIGHT", "float" if weighted else "none"),
        ),
    )


@cache
def rows_variant(dtype: torch.dtype, general: bool, weighted: bool, cluster: int) -> Variant:
    macros = gradient_variant(dtype, general, weighted).macros
    return Variant("cross_entropy", (("CLUSTER", str(cluster)), *macros))


def variants(arch: int) -> list[Variant]:
    """All that this module can ask the compiler for."""
    clusters = (1, 2, 4, 8) if arch >= 90 else (1,)
    kinds = [
        (dtype, general, weighted)
        for dtype in C_NAMES
        for general, weighted in ((False, False), (True, False), (True, True))
    ]
    return [gradient_variant(*kind) for kind in kinds] + [
        rows_variant(*kind, cluster) for kind in kinds for cluster in clusters
    ]


class Plan(NamedTuple):
    """How a row is shared out: blocks a row, threads a block, 16-byte vectors that a block keeps on chip."""

    cluster: int
    threads: int
    stage: int


def plan(row_bytes: int, clusters: bool, shared_limit: int) -> Plan:
    """The fewest blocks a row such that three of them fit on an SM; what does not fit is read twice."""
    row_bytes += 16  # a row that is not aligned touches one vector more
    cluster = next((c for c in (1, 2, 4, 8) if row_bytes <= c * SHARE), 8) if clusters else 1
    share = -(-row_bytes // (16 * cluster))  # vectors
    stage = min(share, (shared_limit - SCRATCH) // 16)
    wanted = 1 << (16 * share // BYTES_A_THREAD - 1).bit_length()
    return Plan(cluster, min(max(64, wanted), 1024 if share > stage else 512), stage)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of one row with logits x, target t and class weights w (1 if none are given):

        z = softcap * tanh(x / softcap) if softcap else x,   lse = log(sum(exp(z)))
        loss = (1 - s) w_t (lse - z_t)  +  s / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

    s is `label_smoothing`, V the number of classes (as torch.nn.functional.cross_entropy before its
    reduction; z_loss as in PaLM, Chowdhery et al. 2022). A row whose target is `ignore_index` has loss 0 and
    gradient 0; a target outside 0 .. V - 1 has loss NaN and gradient 0. -inf logits are impossible classes;
    logits below -2e38 count as -inf; a NaN or +inf logit makes its row NaN.

    Arguments of all methods:
        logits         (N, V) float32, float16 or bfloat16; rows contiguous, any distance and alignment
        targets        (N,) int64
        scale          (1,) or (N,) float32: 1 / number of targets for a mean, times the loss scale. In
                       float16 it has to carry the loss scale, or the gradient underflows when rounded.
        class_weight   (V,) float32, or None
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must lie in 0 .. 1, got {self.label_smoothing}")
        if self.softcap < 0.0 or self.z_loss < 0.0:
            raise ValueError(f"softcap and z_loss must not be negative, got {self.softcap} and {self.z_loss}")

    def losses(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses, lses), each (N,) float32. Nothing is written."""
        _check(logits, targets, class_weight)
        if not logits.is_cuda:
            return self.reference(logits, targets, class_weight)[:2]
        out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        self._launch_rows("cross_entropy_losses", logits, targets, class_weight, (out[0], out[1]))
        return out[0], out[1]

    def losses_and_gradient_(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`losses`, and the gradient of sum(scale * losses) written over the logits: one read, one write."""
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        if not logits.is_cuda:
            losses, lses, gradient = self.reference(logits, targets, class_weight)
            logits.detach().copy_(gradient * scale[:, None])
            return losses, lses
        out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        rest = (scale, _stride(scale), out[0], out[1])
        self._launch_rows("cross_entropy_fused", logits, targets, class_weight, rest)
        return out[0], out[1]

    def gradient_(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        lses: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None = None,
    ) -> None:
        """Write the gradient of sum(scale * losses) over the logits, given the `lses` of `losses`."""
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        expect("lses", lses, (torch.float32,), (logits.shape[0],), logits.device)
        if not logits.is_cuda:
            logits.detach().copy_(self.reference(logits, targets, class_weight)[2] * scale[:, None])
        elif logits.shape[0] > 0:
            parts = _parts(logits)
            chosen = gradient_variant(logits.dtype, self._general(class_weight), class_weight is not None)
            arguments = (*self._arguments(logits, targets, class_weight), parts, scale, _stride(scale), lses)
            blocks = logits.shape[0] * parts
            kernel(chosen, "cross_entropy_gradient", logits.device)(blocks, 256, *arguments)

    def count(self, targets: torch.Tensor, classes: int, class_weight: torch.Tensor | None = None) -> torch.Tensor:
        """(1,) float32: the sum of w_t over rows that are not ignored, by which a mean divides."""
        counted = targets != self.ignore_index
        if class_weight is None:
            return counted.sum(dtype=torch.float32).view(1)
        return (class_weight[targets.clamp(0, classes - 1)] * counted).sum(dtype=torch.float32).view(1)

    def reference(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(losses, lses, gradient of each row's loss), all float32, in torch on any device."""
        classes = logits.shape[1]
        z = logits.detach().float()
        weight = z.new_ones(classes) if class_weight is None else class_weight
        tanh = torch.tanh(z / self.softcap) if self.softcap else None
        z = z if tanh is None else self.softcap * tanh
        z = z.masked_fill(z < -2e38, -torch.inf)
        ignored, outside = targets == self.ignore_index, (targets < 0) | (targets >= classes)
        at = targets.clamp(0, classes - 1)[:, None]
        lses = z.logsumexp(1)
        hit, smooth = (1 - self.label_smoothing) * weight[at[:, 0]], self.label_smoothing / classes
        losses = hit * (lses - z.gather(1, at)[:, 0]) + self.z_loss * lses.square()
        factor = hit + smooth * weight.sum() + 2 * self.z_loss * lses
        gradient = torch.exp(z - lses[:, None]) * factor[:, None]
        if self.label_smoothing:
            losses = losses + smooth * (weight.sum() * lses - (weight * z).sum(1))
            gradient -= smooth * weight
        gradient.scatter_add_(1, at, -hit[:, None])
        if tanh is not None:
            gradient *= 1 - tanh.square()
        nothing = ignored | outside
        losses = losses.masked_fill(outside, torch.nan).masked_fill(ignored, 0)
        return losses, lses.masked_fill(nothing, 0), gradient.masked_fill(nothing[:, None], 0)

    def _plan(self, logits: torch.Tensor) -> Plan:
        clusters = torch.cuda.get_device_capability(logits.device)[0] >= 9
        return plan(logits.shape[1] * logits.element_size(), clusters, shared_memory_limit(logits.device))

    def _general(self, class_weight: torch.Tensor | None) -> bool:
        return bool(self.label_smoothing or self.softcap or class_weight is not None)

    def _arguments(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None
    ) -> tuple[object, ...]:
        total = None if class_weight is None else class_weight.sum().view(1)
        rows = (logits, logits.stride(0), logits.shape[1], targets, self.ignore_index)
        return (*rows, self.label_smoothing, self.z_loss, self.softcap, class_weight, total)

    def _launch_rows(
        self,
        name: str,
        logits: torch.Tensor,
        targets: torch.Tensor,
        class_weight: torch.Tensor | None,
        rest: tuple[object, ...],
    ) -> None:
        if logits.shape[0] == 0:
            return
        cluster, threads, stage = self._plan(logits)
        chosen = rows_variant(logits.dtype, self._general(class_weight), class_weight is not None, cluster)
        arguments = (*self._arguments(logits, targets, class_weight), stage, *rest)
        launch = kernel(chosen, name, logits.device)
        launch(logits.shape[0] * cluster, threads, *arguments, shared_memory=SCRATCH + 16 * stage)


def rescale_(gradient: torch.Tensor, wanted: torch.Tensor, used: torch.Tensor) -> None:
    """Multiply rows by wanted / used; on CUDA equal factors are found out on the device and cost nothing.

    gradient       (N, V), in place
    wanted, used   (1,) or (N,) float32: the scale that backward was given, and the one the gradient was
                   written with. A row written with 0 stays as it is.
    """
    _check_logits(gradient)
    _check_scale("wanted", wanted, gradient)
    _check_scale("used", used, gradient)
    if not gradient.is_cuda:
        factor = torch.where((wanted == used) | (used == 0), torch.ones_like(used), wanted / used)
        gradient.copy_(gradient.float() * factor[:, None])
    elif gradient.shape[0] > 0:
        parts = _parts(gradient)
        launch = kernel(gradient_variant(gradient.dtype, False, False), "rescale", gradient.device)
        rows = (gradient, gradient.stride(0), gradient.shape[1], parts)
        launch(gradient.shape[0] * parts, 256, *rows, wanted, _stride(wanted), used, _stride(used))


def _parts(logits: torch.Tensor) -> int:
    return -(-(logits.shape[1] * logits.element_size() // 16 + 2) // PART_VECTORS)


def _stride(scale: torch.Tensor) -> int:
    return int(scale.numel() > 1)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in C_NAMES:
        raise ValueError(
            "logits must be float32, float16 or bfloat16 of shape (rows, classes), got "
            f"{logits.dtype} of shape {tuple(logits.shape)}"
        )
    rows, classes = logits.shape
    if classes < 1 or logits.stride(1) != 1 or (rows > 1 and logits.stride(0) < classes):
        raise ValueError(
            f"rows of logits must be contiguous and not overlap: shape {tuple(logits.shape)}, strides {logits.stride()}"
        )


def _check(logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None) -> None:
    _check_logits(logits)
    expect("targets", targets, (torch.int64,), (logits.shape[0],), logits.device)
    if class_weight is not None:
        expect("class_weight", class_weight, (torch.float32,), (logits.shape[1],), logits.device)


def _check_scale(name: str, scale: torch.Tensor, logits: torch.Tensor) -> None:
    rows = 1 if scale.numel() == 1 else logits.shape[0]
    expect(name, scale, (torch.float32,), (rows,), logits.device)
