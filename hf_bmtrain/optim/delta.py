"""The mean and the variance of what a step moves the parameters by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..ops.adam_step import Elements, KernelSteps, TorchSteps
from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter

_PIECE = 1 << 20


class DeltaRecord:
    """Mean and variance, over the elements of all ranks, of a step's update in units of the learning rate:

        δ = m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + eps) + wd·w,    w ← w − lr·δ

    where m and v hold this step's gradient. δ is computed beside the update, a million elements at a time, and
    summed in float64; nothing but the sums is kept. Ordinary parameters count once, not once a rank. A skipped step
    leaves the numbers of the last one.
    """

    def __init__(self) -> None:
        self._sums = torch.zeros(2, 2, dtype=torch.float64)  # Σδ, Σδ² of ordinary parameters, then of slices
        self._moments = torch.zeros(2, dtype=torch.float64)

    @property
    def mean(self) -> float:
        """Of the last step, 0 before the first. Reading it waits for the device."""
        return self._moments[0].item()

    @property
    def variance(self) -> float:
        """Of the last step, 0 before the first. Reading it waits for the device."""
        return self._moments[1].item()

    def begin(self, device: torch.device) -> None:
        """Before the first `add` of a step, whose arithmetic is done on `device`."""
        self._sums = torch.zeros(2, 2, dtype=torch.float64, device=device)

    def add(self, steps: KernelSteps | TorchSteps, run: int, elements: Elements, sliced: bool) -> None:
        """Count elements of run number `run`, of slices or not, which `steps` is about to update."""
        inverse_scale, beta1, beta2, eps, weight_decay, t = steps.numbers(run)
        e = elements
        for start in range(0, e.master.numel(), _PIECE):
            part = slice(start, start + _PIECE)
            g, m = e.grad[part].float() * inverse_scale, e.exp_avg[part].float()
            master, v = e.numbers(part)
            m = m + (g - m) * (1 - beta1)
            v = v * beta2 + g * g * (1 - beta2)
            delta = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps) + weight_decay * master
            self._sums[int(sliced)] += torch.stack([x.sum(dtype=torch.float64) for x in (delta, delta * delta)])

    def end(self, parameters: Sequence[torch.nn.Parameter], found_inf: torch.Tensor | None) -> None:
        """After the last `add`. Collective where there are slices.

        parameters: those that the step updates. found_inf: a scalar, not 0 where it is skipped.
        """
        if not parameters:
            return
        slices = [p.numel() for p in parameters if isinstance(p, DistributedParameter)]
        totals = torch.zeros(2, 3, dtype=torch.float64, device=self._sums.device)
        totals[0, 0], totals[1, 0] = sum(p.numel() for p in parameters) - sum(slices), sum(slices)
        totals[:, 1:] = self._sums
        totals = totals.to(parameters[0].device)
        if slices:
            current_world().schedule.reduce.all_reduce(totals[1]).wait()
        count, first, second = totals.sum(0)
        mean = first / count
        moments = torch.stack((mean, (second / count - mean * mean).clamp_min(0)))
        earlier = self._moments.to(moments.device)
        self._moments = moments if found_inf is None else torch.where(found_inf != 0, earlier, moments)
