"""Cross-entropy over rows of logits: losses, and the gradient written over the logits, in one launch or two.

The methods of `CrossEntropy` use kernels/cross_entropy*.cu for CUDA tensors and float32 torch for others. The caller
reduces the rows: the factor of each row is an argument.
"""

from functools import cache
from typing import NamedTuple

import torch

from hf_bmtrain.ops.expect import expect
from hf_bmtrain.ops.launch import C_NAMES, Variant, kernel, shared_memory_limit
from hf_bmtrain.ops.row_loss import RowLoss

SCRATCH = 640  # bytes of shared memory in addition to the staged row, as in the source
SHARE = 72 << 10  # bytes of a row per block: three such blocks fit on an SM of 227 KiB
BYTES_A_THREAD = 256  # sixteen 16-byte vectors, all in flight at once
PART_VECTORS = 2048  # 16-byte vectors of a row per block of the streaming kernels


@cache
def gradient_variant(dtype: torch.dtype, general: bool, weighted: bool) -> Variant:
    macros = ("ELEMENT", C_NAMES[dtype]), ("GENERAL", str(int(general))), ("WEIGHT", "float" if weighted else "none")
    return Variant("cross_entropy_gradient", macros)


@cache
def rows_variant(dtype: torch.dtype, general: bool, weighted: bool, cluster: int) -> Variant:
    macros = gradient_variant(dtype, general, weighted).macros
    return Variant("cross_entropy", (("CLUSTER", str(cluster)), *macros))


def variants(arch: int) -> list[Variant]:
    """Return all variants that this module can compile."""
    clusters = (1, 2, 4, 8) if arch >= 90 else (1,)
    kinds = [(dtype, *kind) for dtype in C_NAMES for kind in ((False, False), (True, False), (True, True))]
    rows = [rows_variant(*kind, cluster) for kind in kinds for cluster in clusters]
    return [gradient_variant(*kind) for kind in kinds] + rows


class Plan(NamedTuple):
    """The division of a row: blocks per row, threads per block, and 16-byte vectors that a block keeps on chip."""

    cluster: int
    threads: int
    stage: int


def plan(row_bytes: int, clusters: bool, shared_limit: int) -> Plan:
    """Choose the fewest blocks per row such that three fit on an SM. Vectors beyond that are read twice."""
    row_bytes += 16  # a row that is not aligned touches one vector more
    cluster = next((c for c in (1, 2, 4, 8) if row_bytes <= c * SHARE), 8) if clusters else 1
    share = -(-row_bytes // (16 * cluster))  # vectors
    stage = min(share, (shared_limit - SCRATCH) // 16)
    wanted = 1 << (16 * share // BYTES_A_THREAD - 1).bit_length()
    return Plan(cluster, min(max(64, wanted), 1024 if share > stage else 512), stage)


class CrossEntropy(RowLoss):
    """The losses of rows and their gradient, defined by RowLoss, computed on the device of the logits.

    Arguments of all methods:
        logits         (N, V) float32, float16 or bfloat16; rows contiguous, any row stride and alignment
        targets        (N,) int64
        lses           (N,) float32: logsumexp of each row, as `losses` returns it
        scale          (1,) or (N,) float32: 1 / number of targets for a mean, times the loss scale. For float16 it
                       must include the loss scale, or the gradient underflows when rounded.
        class_weight   (V,) float32, or None
    """

    def losses(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (losses, lses), each (N,) float32. The arguments are not written."""
        _check(logits, targets, class_weight)
        if not logits.is_cuda:
            return self.reference_losses(logits, targets, class_weight)
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
        """Return `losses`, and write the gradient of sum(scale * losses) over the logits: one read, one write."""
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        if not logits.is_cuda:
            losses, lses = self.reference_losses(logits, targets, class_weight)
            gradient = self.reference_gradient(logits, targets, lses, scale, class_weight)
            logits.detach().copy_(gradient)
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
        out: torch.Tensor | None = None,
    ) -> None:
        """Write the gradient of sum(scale * losses) over the logits, or into `out`, whose rows have equal strides and
        alignment."""
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        expect("lses", lses, (torch.float32,), (logits.shape[0],), logits.device)
        out = logits if out is None else out
        if not logits.is_cuda:
            out.detach().copy_(self.reference_gradient(logits, targets, lses, scale, class_weight))
        elif logits.shape[0] > 0:
            parts = _parts(logits)
            chosen = gradient_variant(logits.dtype, self._general(class_weight), class_weight is not None)
            arguments = (*self._arguments(logits, targets, class_weight), parts, scale, _stride(scale), lses, out)
            kernel(chosen, "cross_entropy_gradient", logits.device)(logits.shape[0] * parts, 256, *arguments)

    def gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        lses: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the gradient of `gradient_` as a new tensor; `logits` are not written."""
        if logits.is_contiguous() and logits.data_ptr() % 16 == 0:  # a new tensor has equal strides and alignment
            gradient = torch.empty_like(logits)
            self.gradient_(logits, targets, lses, scale, class_weight, gradient)
        else:
            gradient = logits.detach().clone(memory_format=torch.contiguous_format)
            self.gradient_(gradient, targets, lses, scale, class_weight)
        return gradient

    def plan(self, logits: torch.Tensor) -> Plan:
        """Return the plan for rows of `logits` on their device."""
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
        cluster, threads, stage = self.plan(logits)
        chosen = rows_variant(logits.dtype, self._general(class_weight), class_weight is not None, cluster)
        arguments = (*self._arguments(logits, targets, class_weight), stage, *rest)
        launch = kernel(chosen, name, logits.device)
        launch(logits.shape[0] * cluster, threads, *arguments, shared_memory=SCRATCH + 16 * stage)


def rescale_(gradient: torch.Tensor, wanted: torch.Tensor, used: torch.Tensor) -> None:
    """Multiply rows by wanted / used, in place. On CUDA rows with equal factors are neither read nor written.

    gradient       (N, V)
    wanted, used   (1,) or (N,) float32: the scale given to backward, and the scale with which the gradient was
                   written. A row written with scale 0 stays as it is.
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
