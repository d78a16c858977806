"""Predict the memory that a training step takes on one rank, with a table of what it is used for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .simulation import Phase, Simulated, simulate

CUBLAS_BYTES = 64 << 20
"""Workspaces of cuBLAS in torch's allocator: one for the thread that runs forward, one for autograd's thread."""
CONTEXT_BYTES = 800 << 20
"""Device memory that the CUDA driver allocates for a process: context, kernels, stacks."""
NCCL_BYTES = 400 << 20
"""Device memory that NCCL allocates on a rank for its two communicators, if there are several ranks."""
_SMALLEST_RESERVE = 2 << 30
_PARTS = 10_000
"""A printed prediction leaves out purposes with less than 1 / _PARTS of the peak."""

ROWS = (
    ("shard", "parameters, this rank's shards"),
    ("whole", "full parameters of gathered blocks and modules"),
    ("gradient", "gradient shards"),
    ("sum", "gradients, until they are reduced to shards"),
    ("optimizer", "optimizer state"),
    ("block", "activations saved by blocks"),
    ("outside", "activations outside blocks"),
    ("logits", "logits and loss"),
    ("recomputation", "activations of the block that is being recomputed"),
    ("backward", "temporary tensors of the backward"),
    ("workspace", "workspace of the operation at the peak"),
    ("cublas", "workspaces of cuBLAS"),
)
"""The rows of a printed prediction: (purpose of memory, label of the row)."""


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a training step on one rank, including the optimizer's state. Its `str` is a table.

    Attributes:
        table: {purpose: bytes at the peak}. A purpose says what memory is used for, such as "gradient" (see `ROWS`).
        mapped: the bytes in `table` that are outside torch's allocator: shards and received gradients in memory that
            other ranks on the host access.
        context: the bytes on the device for the CUDA context and libraries, which belong to no tensor.
        host: the bytes of page-locked host memory.
        phases: the phases of the step, each with its name, the live bytes at its end, and its peak.
        kept: for each block, whether it keeps its activations, which are then not recomputed.
    """

    table: dict[str, int]
    mapped: int
    context: int
    host: int
    phases: list[Phase] = field(repr=False)
    kept: tuple[bool, ...] = field(repr=False)

    @property
    def peak(self) -> int:
        """The bytes of all tensors and workspaces at the peak of the step, also of those outside torch's allocator.

        The CUDA context and libraries are not included; `device` adds them.
        """
        return sum(self.table.values())

    @property
    def allocated(self) -> int:
        """The predicted value of torch.cuda.max_memory_allocated()."""
        return self.peak - self.mapped

    @property
    def device(self) -> int:
        """The bytes used on the device at the peak of the step: `peak` plus `context` (the CUDA context and libraries).

        Fragmentation of torch's allocator may take additional memory.
        """
        return self.peak + self.context

    def __str__(self) -> str:
        lines = [(text, self.table[key]) for key, text in ROWS if self.table.get(key, 0) >= self.peak / _PARTS]
        lines += [("peak of tensors", self.peak), ("CUDA context and libraries", self.context)]
        lines += [("on the device", self.device)]
        lines += [("page-locked host memory", self.host)] if self.host else []
        return "\n".join(f"{text:54} {_size(nbytes)}" for text, nbytes in lines)


def _size(nbytes: int) -> str:
    """Return `nbytes` as text for a column: in GiB, or in MiB if it is less than 0.01 GiB."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 / 100 else (2**20, "MiB")
    return f"{nbytes / unit:9.2f} {name}"


def usable_bytes(total: int, ranks: int) -> int:
    """Return the bytes available for tensors on a device: its memory minus the CUDA context, NCCL and a reserve.

    The reserve is 5 % of the memory, and at least 2 GiB, as in `DeviceMemory.usable`. In a prediction,
    use_checkpoint="auto" and keep_frozen="auto" therefore start from about as many bytes as in training, unless other
    processes use the device.

    Args:
        total: the bytes of memory of the device.
        ranks: the number of ranks. NCCL takes memory if there are several.
    """
    return total - _context(ranks) - max(_SMALLEST_RESERVE, total // 20)


def _context(ranks: int) -> int:
    """Return the bytes on the device that belong to no tensor: those of CUDA and, with several ranks, of NCCL."""
    return CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)


def predict(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    ranks: int,
    total: int,
    micro_batches: int = 1,
    **options: Any,
) -> Prediction:
    """Predict the memory that a training step of `model` takes on one rank, by simulating training.

    The number of ranks and the device's memory are arguments, so this also works without `init_distributed` and
    without a GPU: `python -m hf_bmtrain.memory` uses it to predict the memory on any machine. In a running job,
    `predict_memory` calls this with a copy of the user's model, the number of ranks over which it will be sharded, and
    the memory of this rank's device.

    Args:
        model: a model on the meta device to which `auto_wrap` was not applied. It cannot be used afterwards.
        batch: the keyword arguments of its forward, on any device; the output must have a `loss`.
        make_optimizer: a function that returns the optimizer for a list of parameters.
        ranks: the number of ranks to simulate. This process needs neither a GPU nor other processes.
        total: the bytes of memory of the simulated device. It limits what use_checkpoint="auto" and keep_frozen="auto"
            keep, but a predicted peak above it is not an error.
        micro_batches: the number of backwards per step.
        **options: passed to `auto_wrap`.

    Returns:
        The predicted memory, with the totals `peak` and `device`.
    """
    done = simulate(model, batch, make_optimizer, ranks, usable_bytes(total, ranks), micro_batches, **options)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    shapes = {tuple(p.shape) for p in model.parameters()}
    table = _table(done, vocabulary, shapes) | {"cublas": CUBLAS_BYTES}
    return Prediction(table, done.mapped, _context(ranks), done.host, done.phases, done.kept)


def _table(done: Simulated, vocabulary: int | None, shapes: set[tuple[int, ...]]) -> dict[str, int]:
    """Return the live bytes at the peak of the simulation's last step as {purpose: bytes}.

    A purpose says what memory is used for, such as "gradient" (see `ROWS`).

    done: the result of the simulation.
    vocabulary: the size of the model's vocabulary, by which logits are recognized; None if it is unknown.
    shapes: the shapes of all parameters.
    """
    live = most = 0
    at = 0
    for index, change in enumerate(done.changes):
        live += change.nbytes
        if index >= done.begin and live > most:
            most, at = live, index
    present: dict[int, list[Any]] = {}
    for change in done.changes[: at + 1]:
        entry = present.setdefault(change.number, [0, change.label, change.shape])
        entry[0] += change.nbytes
        if change.nbytes > 0 and change.label:
            entry[1] = change.label
    table: dict[str, int] = {}
    for number, (nbytes, label, shape) in present.items():
        kind = done.kinds.get(number) or _kind(label, shape, vocabulary, shapes)
        table[kind] = table.get(kind, 0) + nbytes
    return {key: nbytes for key, nbytes in table.items() if nbytes}


def _kind(label: str, shape: Sequence[int], vocabulary: int | None, shapes: set[tuple[int, ...]]) -> str:
    """Guess the purpose of a tensor storage that contains no parameters, gradient shards or optimizer state.

    Args:
        label: the part of the step in which the storage was allocated (see `simulation._label`).
        shape: the shape of the first tensor in it.
        vocabulary: the size of the vocabulary, by which logits are recognized; None if it is unknown.
        shapes: the shapes of all parameters.

    Returns:
        The purpose, such as "logits" (see `ROWS`).
    """
    if label in ("backward", "recomputation", "outside"):
        if tuple(shape) in shapes or (label == "backward" and not shape):
            return "sum" if label != "outside" else label
        if vocabulary is not None and len(shape) > 1 and shape[-1] == vocabulary:
            return "logits"
    return {"wrap": "optimizer", "forward": "outside"}.get(label, label)
