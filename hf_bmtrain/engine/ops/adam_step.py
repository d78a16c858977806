"""AdamW steps over many runs (ranges of elements that are updated together), by kernels or by torch's functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .adam import HYPER, RECORD, adam_prepare, adam_update
from .eight_bits import Moments, adam8_update
from .residual import Master

_CHUNK = 1 << 20
"""The number of elements that the CPU updates at once, which limits the memory of temporary tensors."""
_L2 = HYPER.index("l2")
Hyper = Sequence[float | torch.Tensor]
"""The hyper-parameters of one parameter group (lr, beta1, …) in the order of HYPER, as numbers or scalar tensors."""


@dataclass(frozen=True)
class Elements:
    """The gradients, weights and optimizer state of n adjacent elements, for an AdamW step.

    Pass this object to `KernelSteps.update` or `TorchSteps.update`, which makes the step. The step updates the weights,
    master weights and moments in place.

    Attributes:
        grad: (n,), the gradients, only read.
        master: a Master, an object with up to three tensors (n,). `master.weight` contains the weights. `master.stored`
            contains the master weights (full-precision copies of half-precision weights, which the optimizer updates),
            in float32 or as 16-bit differences from the weights. It is None for float32 weights, which need no copies.
            `master.exp_avg_sq` is the second moment. It is None if both moments are stored in 8 bits.
        exp_avg: the first moment, a tensor (n,). If both moments are stored in 8 bits, a Moments, which contains both.
        index_base: the position of element 0 among all elements of the optimizer. Stochastic rounding computes an
            element's random bits from its position and the number of the step.
    """

    grad: torch.Tensor
    master: Master
    exp_avg: torch.Tensor | Moments
    index_base: int

    @property
    def master_and_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The arguments `master` and `weight` to pass to `adam_update` for these elements.

        Float32 weights need no master weights (full-precision copies). For them, `master` is the weights themselves,
        and `weight` is None.
        """
        stored, weight = self.master.stored, self.master.weight
        return (weight, None) if stored is None else (stored, weight)


class KernelSteps:
    """AdamW by this package's own functions (`adam_prepare`, `adam_update`), mainly for GPUs.

    The functions launch CUDA kernels on a GPU. On the CPU they compute the same with torch. They are used there only
    for a first moment in bfloat16 or 8 bits (see `adam_steps`).

    In each step, call `begin`, then `advance`, then `update` for each range of elements. None of these calls makes the
    host wait for the device: hyper-parameters, step counts, gradient scale and skip flag are read on the device. A
    hyper-parameter that is a tensor on the device is read in every step. Hyper-parameters that are numbers are copied
    to the device only when one of them has changed.

    Args:
        groups: for each parameter group, its number of runs. A run is a range of adjacent elements that are updated
            together. Runs are numbered from 0, group by group.
        device: the device on which the runs are updated.

    Attributes:
        counts: (runs,) float32, the number of steps that each run has taken.
    """

    def __init__(self, groups: Sequence[int], device: torch.device) -> None:
        self._groups, runs = list(groups), sum(groups)
        self.counts = torch.zeros(runs, dtype=torch.float32, device=device)
        self._hyper = torch.zeros(runs, len(HYPER), dtype=torch.float64, device=device)
        self._records = torch.zeros(runs, len(RECORD), dtype=torch.float32, device=device)
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self._zero = torch.zeros_like(self._one)
        self._scale, self._flag = self._one, self._zero
        # The hyper-parameters last copied to the device, one row for each parameter group. A hyper-parameter that the
        # user has passed as a tensor on the device is None here.
        self._sent: list[list[float | None]] = []
        self._coupled = [False] * runs

    def begin(self, hyper: Sequence[Hyper], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Begin an optimizer step: set the hyper-parameters, the gradient scale and the skip flag for all elements.

        Args:
            hyper: for each parameter group, its hyper-parameters in the order of HYPER (lr, beta1, …).
            grad_scale: a float32 scalar by which gradients are divided, or None for 1.
            found_inf: a float32 scalar; the step is skipped if it is nonzero. None if the step must not be skipped.
        """
        rows = [[None if self._on_device(value) else float(value) for value in group] for group in hyper]
        if rows != self._sent:
            expanded = [[value or 0.0 for value in row] for row, runs in zip(rows, self._groups) for _ in range(runs)]
            if expanded:
                # Allocate new pinned memory each time, because the previous copy to the device may still be running.
                # Torch's allocator reuses the previous memory only after that copy.
                host = torch.tensor(expanded, dtype=torch.float64, device="cpu", pin_memory=self._hyper.is_cuda)
                self._hyper.copy_(host, non_blocking=True)
            self._sent = rows
        coupled = [isinstance(l2, torch.Tensor) or bool(l2) for l2 in (group[_L2] for group in hyper)]
        self._coupled = [each for each, runs in zip(coupled, self._groups) for _ in range(runs)]
        start = 0
        for values, runs in zip(hyper, self._groups):
            for column, value in enumerate(values):
                if isinstance(value, torch.Tensor) and self._on_device(value):
                    self._hyper[start : start + runs, column].copy_(value)
            start += runs
        self._scale = self._one if grad_scale is None else grad_scale.reshape(1)
        self._flag = self._zero if found_inf is None else found_inf.reshape(1)

    def advance(self, runs: Sequence[int]) -> None:
        """Increment the step counts of runs, and compute the factors that `update` needs.

        If `begin` got a nonzero `found_inf`, the step is skipped, and the counts stay as they are.

        Args:
            runs: the indices of the runs (ranges of elements that are updated together), in ascending order. A kernel
                is launched for each sequence of consecutive indices.
        """
        for _, group in itertools.groupby(enumerate(runs), lambda pair: pair[1] - pair[0]):
            numbers = [run for _, run in group]
            rows = slice(numbers[0], numbers[-1] + 1)
            adam_prepare(self._scale, self._flag, self._hyper[rows], self.counts[rows], self._records[rows])

    def update(self, run: int, elements: Elements) -> None:
        """Update `elements` in place, with the step that `begin` and `advance` have prepared.

        This is an AdamW step. If `l2` of the parameter group is nonzero or a tensor, it is an Adam step with L2
        regularization instead. If `begin` got a nonzero `found_inf`, nothing changes.

        Args:
            run: the index of the run (a range of elements that are updated together) to which the elements belong.
            elements: the tensors of the whole run, or of a part of it.
        """
        e, (master, weight) = elements, elements.master_and_weight
        record, coupled = self._records[run], self._coupled[run]
        if isinstance(e.exp_avg, Moments):
            return adam8_update(e.grad, master, e.exp_avg, weight, record, e.index_base, coupled)
        assert e.master.exp_avg_sq is not None
        adam_update(e.grad, master, e.exp_avg, e.master.exp_avg_sq, weight, record, e.index_base, coupled)

    def _on_device(self, value: float | torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and value.device == self._hyper.device


class TorchSteps:
    """AdamW by torch's own functions, for weights that are updated on the CPU with a float32 first moment.

    In all other cases, `adam_steps` chooses KernelSteps, which has the same methods. In each step, call `begin`, then
    `advance`, then `update` for each range of elements.

    All optimizer state is float32. For float32 weights, the results are identical to those of torch.optim.AdamW on the
    CPU, which calls the same functions. If the hyper-parameter l2 is set instead of weight_decay, they are identical to
    those of torch.optim.Adam.

    Args:
        groups: for each parameter group, its number of runs. A run is a range of adjacent elements that are updated
            together. Runs are numbered from 0, group by group.
        device: the device on which the runs are updated, the CPU.
    """

    def __init__(self, groups: Sequence[int], device: torch.device) -> None:
        self._groups = list(groups)
        self.counts = torch.zeros(sum(groups), dtype=torch.float32, device=device)
        self._rows: list[list[float]] = []
        self._taken: list[float] = []  # `counts` as Python numbers
        self._grad_scale: torch.Tensor | None = None
        self._skip = False

    def begin(self, hyper: Sequence[Hyper], grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        rows = [[float(value) for value in group] for group in hyper]
        self._rows = [row for row, runs in zip(rows, self._groups) for _ in range(runs)]
        self._grad_scale = None if grad_scale is None else grad_scale.to(self.counts.device)
        self._skip = found_inf is not None and bool(found_inf)

    def advance(self, runs: Sequence[int]) -> None:
        if not self._skip:
            self.counts[list(runs)] += 1
            self._taken = self.counts.tolist()

    def update(self, run: int, elements: Elements) -> None:
        e, (master, weight) = elements, elements.master_and_weight
        if self._skip or master.numel() == 0:
            return
        assert isinstance(e.exp_avg, torch.Tensor) and e.master.exp_avg_sq is not None
        lr, beta1, beta2, eps, weight_decay, hold_steps, l2 = self._rows[run]
        steps = self._taken[run]
        wide = e.grad.float()
        if self._grad_scale is not None:
            wide = wide / self._grad_scale  # not in place, because `wide` may be the gradient itself
        if l2:
            wide = wide.add(master, alpha=l2)
        if steps <= hold_steps:
            lr = 0.0
        step_size, root = lr / (1 - beta1**steps), (1 - beta2**steps) ** 0.5
        for start in range(0, master.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            p, g, m, v = master[part], wide[part], e.exp_avg[part], e.master.exp_avg_sq[part]
            if weight_decay:
                p.mul_(1 - lr * weight_decay)
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            p.addcdiv_(m, (v.sqrt() / root).add_(eps), value=-step_size)
        if weight is not None:
            weight.copy_(master)


def kernels_serve(device: torch.device) -> bool:
    """Return whether updates on `device` use CUDA kernels.

    The result is also True for the meta device, on which the package simulates a GPU to predict memory use.
    """
    return device.type != "cpu"


def master_dtype(weight: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype in which float32 master weights (full-precision copies of half-precision weights) are stored.

    Args:
        weight: the dtype of the weights.
        device: the device on which the weights are updated.

    Returns:
        * None for float32 weights, which need no master weights.
        * int16 for bfloat16 weights on a GPU (or on the meta device, which simulates a GPU): the master weights are
          stored as residuals, their differences from the weights (see residual.py). These represent the same float32
          numbers in 2 bytes less per element.
        * float32 for bfloat16 weights on the CPU, and for float16 weights on any device.
    """
    if weight == torch.float32:
        return None
    return torch.int16 if weight == torch.bfloat16 and kernels_serve(device) else torch.float32


def adam_steps(groups: Sequence[int], device: torch.device, exp_avg_dtype: torch.dtype) -> KernelSteps | TorchSteps:
    """Return an object that makes AdamW steps on `device`.

    The object is a KernelSteps on CUDA, and on the meta device, on which the package simulates a GPU to predict memory
    use. It is also a KernelSteps for a bfloat16 or 8-bit first moment, which torch's AdamW does not support. In all
    other cases, it is a TorchSteps.

    Args:
        groups: for each parameter group, its number of runs. A run is a range of adjacent elements that are updated
            together.
        device: the device on which the runs are updated.
        exp_avg_dtype: the dtype of the first moment; uint8 if both moments are stored in 8 bits.
    """
    if kernels_serve(device) or exp_avg_dtype != torch.float32:
        return KernelSteps(groups, device)
    return TorchSteps(groups, device)
