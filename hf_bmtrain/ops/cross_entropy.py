"""Cross-entropy over rows of logits: losses and the gradient written over the logits, in one launch or two.

A loss is *defined* by a `CrossEntropy`; its methods work on CUDA tensors by kernels/cross_entropy.cu and on others by
the float32 torch below. How rows are reduced to one number is the caller's: he gives the factor of each row.
"""
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from hf_bmtrain.ops.launch import C_NAMES, Variant, kernel, shared_memory_limit

SCRATCH = 640          # bytes of shared memory beside the staged row, as in the source
SHARE = 72 << 10       # a block's part of a row: three such blocks fit on an SM of 227 KiB
BYTES_A_THREAD = 256   # sixteen 16-byte vectors, all in flight at once
PART_VECTORS = 2048    # 16-byte vectors of a row that a block of the streaming kernels takes


@cache
def gradient_variant(dtype: torch.dtype, general: bool, weighted: bool) -> Variant:
    return Variant("cross_entropy_gradient", (("ELEMENT", C_NAMES[dtype]), ("GENERAL", str(int(general))),
                                              ("WEIGHT", "float" if weighted else "none")))


@cache
def rows_variant(dtype: torch.dtype, general: bool, weighted: bool, cluster: int) -> Variant:
    macros = gradient_variant(dtype, general, weighted).macros
    return Variant("cross_entropy", (("CLUSTER", str(cluster)), *macros))


def variants(arch: int) -> list[Variant]:
    """All that this module can ask the compiler for."""
    clusters = (1, 2, 4, 8) if arch >= 90 else (1,)
    kinds = [(dtype, general, weighted) for dtype in C_NAMES
             for general, weighted in ((False, False), (True, False), (True, True))]
    return ([gradient_variant(*kind) for kind in kinds]
            + [rows_variant(*kind, cluster) for kind in kinds for cluster in clusters])


class Plan(NamedTuple):
    """How a row is shared out: blocks of one cluster, threads a block, 16-byte vectors a block keeps on chip."""
    cluster: int
    threads: int
    stage: int


def plan(row_bytes: int, clusters: bool, shared_limit: int) -> Plan:
    """The fewest blocks a row such that three of them fit on an SM; what does not fit is read twice."""
    row_bytes += 16  # a row that is not aligned touches one vector more
    cluster = next((c for c in (1, 2, 4, 8) if row_bytes <= c * SHARE), 8) if clusters else 1
    share = -(-row_bytes // (16 * cluster))  # vectors
    stage = min(share, (shared_limit - SCRATCH) // 16)
    threads = min(1024 if share > stage else 512, max(64, 1 << (16 * share // BYTES_A_THREAD - 1).bit_length()))
    return Plan(cluster, threads, stage)


@dataclass(frozen=True)
class CrossEntropy:
    """The loss of one row with logits x, target t and class weights w (1 if none are given):

        z = softcap * tanh(x / softcap) if softcap else x,   lse = log(sum(exp(z)))
        loss = (1 - s) w_t (lse - z_t)  +  s / V * sum_j w_j (lse - z_j)  +  z_loss * lse^2

    s is `label_smoothing`, V the number of classes (as torch.nn.functional.cross_entropy before its reduction; z_loss
    as in PaLM, Chowdhery et al. 2022). A row whose target is `ignore_index` has loss 0 and gradient 0; a target
    outside 0 .. V - 1 has loss NaN and gradient 0. -inf logits are impossible classes; logits below -2e38 count as
    -inf; a NaN or +inf logit makes its row NaN.
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

    def losses(self, logits: torch.Tensor, targets: torch.Tensor,
               class_weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses, lses), each (N,) float32. Nothing is written.

        logits         (N, V) float32, float16 or bfloat16; rows contiguous, any distance and alignment
        targets        (N,) int64
        class_weight   (V,) float32
        """
        _check(logits, targets, class_weight)
        out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        if not logits.is_cuda:
            return self.reference(logits, targets, class_weight)[:2]
        self._launch_rows("cross_entropy_losses", logits, targets, class_weight, self._plan(logits), out[0], out[1])
        return out[0], out[1]

    def losses_and_gradient_(self, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor,
                             class_weight: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`losses`, and the gradient of sum(scale * losses) written over the logits: one read, one write.

        scale   (1,) or (N,) float32: 1 / number of targets for a mean, times the loss scale. In float16 it has to
                carry the loss scale, or the gradient underflows here.
        """
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        if not logits.is_cuda:
            losses, lses, gradient = self.reference(logits, targets, class_weight)
            logits.detach().copy_(_scaled(gradient, scale))
            return losses, lses
        out = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
        self._launch_rows("cross_entropy_fused", logits, targets, class_weight, self._plan(logits), scale,
                          _stride(scale), out[0], out[1])
        return out[0], out[1]

    def gradient_(self, logits: torch.Tensor, targets: torch.Tensor, lses: torch.Tensor, scale: torch.Tensor,
                  class_weight: torch.Tensor | None = None) -> None:
        """Write the gradient of sum(scale * losses) over the logits, given the `lses` of an earlier `losses`."""
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        if lses.dtype != torch.float32 or lses.shape != targets.shape or not lses.is_contiguous():
            raise ValueError(f"lses must be contiguous float32 {tuple(targets.shape)}, got {lses.dtype} "
                             f"{tuple(lses.shape)}")
        if not logits.is_cuda:
            gradient = self.reference(logits, targets, class_weight)[2]
            logits.detach().copy_(_scaled(gradient, scale))
            return
        if logits.shape[0] == 0:
            return
        parts = _parts(logits)
        chosen = gradient_variant(logits.dtype, self._general(class_weight), class_weight is not None)
        kernel(chosen, "cross_entropy_gradient", logits.device)(
            logits.shape[0] * parts, 256, *self._arguments(logits, targets, class_weight), parts, scale,
            _stride(scale), lses)

    def count(self, targets: torch.Tensor, classes: int, class_weight: torch.Tensor | None = None) -> torch.Tensor:
        """(1,) float32: the sum of w_t over rows that are not ignored, by which a mean divides."""
        counted = targets != self.ignore_index
        if class_weight is None:
            return counted.sum(dtype=torch.float32).view(1)
        return (class_weight[targets.clamp(0, classes - 1)] * counted).sum(dtype=torch.float32).view(1)

    def reference(self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(losses, lses, gradients of the losses) in torch, on any device; float32, or float64 for such logits."""
        classes = logits.shape[1]
        z = logits.detach() if logits.dtype == torch.float64 else logits.detach().float()
        weight = z.new_ones(classes) if class_weight is None else class_weight.to(z.dtype)
        tanh = torch.tanh(z / self.softcap) if self.softcap else None
        z = z if tanh is None else self.softcap * tanh
        z = z.masked_fill(z < -2e38, -torch.inf)
        ignored, outside = targets == self.ignore_index, (targets < 0) | (targets >= classes)
        at = targets.clamp(0, classes - 1)[:, None]
        lses = z.logsumexp(1)
        hit, smooth = (1 - self.label_smoothing) * weight[at[:, 0]], self.label_smoothing / classes
        losses = hit * (lses - z.gather(1, at)[:, 0]) + self.z_loss * lses.square()
        gradient = torch.exp(z - lses[:, None]) * (hit + smooth * weight.sum() + 2 * self.z_loss * lses)[:, None]
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

    def _arguments(self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None) -> tuple:
        total = None if class_weight is None else class_weight.sum().view(1)
        return (logits, logits.stride(0), logits.shape[1], targets, self.ignore_index, self.label_smoothing,
                self.z_loss, self.softcap, class_weight, total)

    def _launch_rows(self, name: str, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None,
                     chosen: Plan, *rest) -> None:
        if logits.shape[0] == 0:
            return
        compiled = rows_variant(logits.dtype, self._general(class_weight), class_weight is not None, chosen.cluster)
        kernel(compiled, name, logits.device)(
            logits.shape[0] * chosen.cluster, chosen.threads, *self._arguments(logits, targets, class_weight),
            chosen.stage, *rest, shared_memory=SCRATCH + 16 * chosen.stage)


def rescale_(gradient: torch.Tensor, wanted: torch.Tensor, used: torch.Tensor) -> None:
    """Multiply rows by wanted / used; on CUDA the factors are compared on the device and equal ones cost nothing.

    gradient       (N, V), in place
    wanted, used   (1,) or (N,) float32: the scale backward was given, and the one the gradient was written with.
                   A row written with 0 stays as it is.
    """
    _check_logits(gradient)
    _check_scale("wanted", wanted, gradient)
    _check_scale("used", used, gradient)
    if not gradient.is_cuda:
        factor = torch.where((wanted == used) | (used == 0), torch.ones_like(used), wanted / used)
        gradient.copy_(_scaled(gradient, factor))
    elif gradient.shape[0] > 0:
        parts = _parts(gradient)
        kernel(gradient_variant(gradient.dtype, False, False), "rescale", gradient.device)(
            gradient.shape[0] * parts, 256, gradient, gradient.stride(0), gradient.shape[1], parts, wanted,
            _stride(wanted), used, _stride(used))


def _parts(logits: torch.Tensor) -> int:
    return -(-(logits.shape[1] * logits.element_size() // 16 + 2) // PART_VECTORS)


def _stride(scale: torch.Tensor) -> int:
    return int(scale.numel() > 1)


def _scaled(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (rows.float() * scale[:, None]).to(rows.dtype)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dtype not in C_NAMES:
        raise ValueError(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if logits.dim() != 2 or logits.shape[1] < 1 or logits.stride(1) != 1:
        raise ValueError(f"logits must be (rows, classes) with contiguous rows, got shape {tuple(logits.shape)} with "
                         f"strides {logits.stride()}")
    if logits.shape[0] > 1 and logits.stride(0) < logits.shape[1]:
        raise ValueError(f"rows of logits overlap: {logits.shape[1]} classes, {logits.stride(0)} elements apart")


def _check(logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None) -> None:
    _check_logits(logits)
    if targets.dtype != torch.int64 or tuple(targets.shape) != (logits.shape[0],) or not targets.is_contiguous():
        raise ValueError(f"targets must be contiguous int64 ({logits.shape[0]},), got {targets.dtype} "
                         f"{tuple(targets.shape)}")
    if class_weight is not None and (class_weight.dtype != torch.float32 or not class_weight.is_contiguous()
                                     or tuple(class_weight.shape) != (logits.shape[1],)):
        raise ValueError(f"class_weight must be contiguous float32 ({logits.shape[1]},), got {class_weight.dtype} "
                         f"{tuple(class_weight.shape)}")
    for name, tensor in (("targets", targets), ("class_weight", class_weight)):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, logits are on {logits.device}")


def _check_scale(name: str, scale: torch.Tensor, logits: torch.Tensor) -> None:
    if scale.dtype != torch.float32 or scale.dim() != 1 or scale.numel() not in (1, logits.shape[0]):
        raise ValueError(f"{name} must be float32 of shape (1,) or ({logits.shape[0]},), got {scale.dtype} "
                         f"{tuple(scale.shape)}")
    if scale.device != logits.device or not scale.is_contiguous():
        raise ValueError(f"{name} must be contiguous on {logits.device}, got {scale.device}, strides {scale.stride()}")
