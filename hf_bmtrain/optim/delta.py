"""The mean and the variance of an optimizer step's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..ops.adam_step import Hyper
from ..runtime.world import current_world
from .runs import RunState

PIECE = 1 << 20  # elements at once, so that intermediate results take little memory


class DeltaRecord:
    """Mean and variance, over the elements of all ranks, of a step's update in units of the learning rate:

        δ = d + wd·w    d = m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + eps)    w' = w − lr·δ

    computed after the step from m, v and the new masters w', which give w = (w' + lr·d) / (1 − lr·wd). m and v hold the
    step's gradient, so d is the update's except for the rounding of the stored m: none in float32; in bfloat16 up to
    2⁻⁸ of d, stochastic and unbiased. w is exact to a few units in the last place of float32 as long as lr·wd is well
    below 1 (at 1 it cannot be recovered). Sums are float64. Ordinary parameters count once, not once per rank. A
    skipped step leaves the values of the last one.
    """

    def __init__(self) -> None:
        self._moments = torch.zeros(2, dtype=torch.float64)

    @property
    def mean(self) -> float:
        """The mean of the last step, 0 before the first. Reading it waits for the device."""
        return self._moments[0].item()

    @property
    def variance(self) -> float:
        """The variance of the last step, 0 before the first. Reading it waits for the device."""
        return self._moments[1].item()

    def record(self, states: Sequence[RunState], settings: Sequence[Hyper], found_inf: torch.Tensor | None) -> None:
        """Compute the mean and the variance of the step that `states`, each with its `settings`, have just made.

        found_inf: a scalar, not 0 if the step was skipped. Collective if there are slices among the parameters.
        """
        if not states:
            return
        totals = torch.zeros(2, 3, dtype=torch.float64, device=states[0].run.weights.device)
        ordinary, sliced = totals.unbind()  # the number of elements, Σδ, Σδ²
        for state, values in zip(states, settings):
            sums = ordinary if state.run.buffer is None else sliced
            sums[0] += sum(parameter.numel() for parameter in state.run.parameters)
            for delta in _deltas(state, values):
                sums[1:] += torch.stack([x.sum(dtype=torch.float64) for x in (delta, delta * delta)])
        if any(state.run.buffer is not None for state in states):
            current_world().reduce.all_reduce(sliced).wait()
        count, first, second = totals.sum(0)
        mean = first / count
        moments = torch.stack((mean, (second / count - mean * mean).clamp_min(0)))
        earlier = self._moments.to(moments.device)
        self._moments = moments if found_inf is None else torch.where(found_inf != 0, earlier, moments)


def _deltas(state: RunState, settings: Hyper) -> Iterator[torch.Tensor]:
    """Yield δ of the last step for parts of a run, (≤ _PIECE,) float32 on the device of its weights."""
    lr, beta1, beta2, eps, weight_decay, hold_steps = settings
    device, t = state.run.weights.device, state.step.double()
    lr = lr * (t > hold_steps)
    for start in range(0, state.run.weights.numel(), PIECE):
        part = slice(start, start + PIECE)
        master, v = state.master.part(part, device).read()
        m = state.exp_avg[part].to(device).float()
        direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        before = (master + lr * direction) / (1 - lr * weight_decay)
        yield direction + weight_decay * before
