"""Cross-entropy over rows of logits: losses and the gradient written over the logits, in one launch or two.

A `CrossEntropy` defines the loss of a row; its methods use kernels/cross_entropy*.cu for CUDA tensors and
float32 torch for others. How rows become one number is the caller's: the factor of each row is an argument.
"""

from functools import cache
from typing import NamedTuple

import torch

from hf_bmtrain.ops.expect import expect
from hf_bmtrain.ops.launch import C_NAMES, Variant, kernel, shared_memory_limit
from hf_bmtrain.ops.row_loss import RowLoss

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


class CrossEntropy(RowLoss):
    """The losses of rows and their gradient, defined by RowLoss, computed where the logits are.

    Arguments of all methods:
        logits         (N, V) float32, float16 or bfloat16; rows contiguous, any distance and alignment
        targets        (N,) int64
        scale          (1,) or (N,) float32: 1 / number of targets for a mean, times the loss scale. In
                       float16 it has to carry the loss scale, or the gradient underflows when rounded.
        class_weight   (V,) float32, or None
    """

    def losses(
        self, logits: torch.Tensor, targets: torch.Tensor, class_weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(losses, lses), each (N,) float32. Nothing is written."""
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
        """`losses`, and the gradient of sum(scale * losses) written over the logits: one read, one write."""
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
    ) -> None:
        """Write the gradient of sum(scale * losses) over the logits, given the `lses` of `losses`."""
        self._gradient_into(logits, logits, targets, lses, scale, class_weight)

    def gradient(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        lses: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`gradient_` into a new tensor like `logits`, which stay as they are."""
        if logits.is_contiguous() and logits.data_ptr() % 16 == 0:  # then a new tensor's rows lie on the same grid
            gradient = torch.empty_like(logits)
            self._gradient_into(gradient, logits, targets, lses, scale, class_weight)
        else:
            gradient = logits.detach().clone(memory_format=torch.contiguous_format)
            self._gradient_into(gradient, gradient, targets, lses, scale, class_weight)
        return gradient

    def _gradient_into(
        self,
        gradient: torch.Tensor,
        logits: torch.Tensor,
        targets: torch.Tensor,
        lses: torch.Tensor,
        scale: torch.Tensor,
        class_weight: torch.Tensor | None,
    ) -> None:
        _check(logits, targets, class_weight)
        _check_scale("scale", scale, logits)
        expect("lses", lses, (torch.float32,), (logits.shape[0],), logits.device)
        if not logits.is_cuda:
            gradient.detach().copy_(self.reference_gradient(logits, targets, lses, scale, class_weight))
        elif logits.shape[0] > 0:
            parts = _parts(logits)
            chosen = gradient_variant(logits.dtype, self._general(class_weight), class_weight is not None)
            arguments = (*self._arguments(logits, targets, class_weight), parts, scale, _stride(scale), lses, gradient)
            blocks = logits.shape[0] * parts
            kernel(chosen, "cross_entropy_gradient", logits.device)(blocks, 256, *arguments)

    def plan(self, logits: torch.Tensor) -> Plan:
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
