"""Compute the mean and variance of an optimizer step's update divided by the learning rate (for `record_delta`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...engine.ops.adam_step import Hyper
from ...engine.optim.runs import RunState, stored_numel
from ...engine.runtime.world import current_world

PIECE = 1 << 20  # the largest number of elements of one operation, so that temporary tensors take little memory


def delta_moments(states: Sequence[RunState], settings: Sequence[Hyper]) -> torch.Tensor:
    """Return the mean and variance, over all elements, of δ, the last step's update divided by the learning rate.

    AdamOffloadOptimizer calls this after each step if `record_delta=True`, so that users can inspect the training.
    Collective if any of the parameters is sharded: every rank must then call it.

    With Adam's moments m and v after step t, the decoupled weight decay wd, and the weights w before and w' after the
    step:

        δ = d + wd·w    d = m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + eps)    w' = w − lr·δ

    δ is computed after the step from m, v and the master weights w', with w = (w' + lr·d) / (1 − lr·wd). It is exact up
    to float32 rounding, with two exceptions: if m is stored in bfloat16, the stochastic rounding of m changes d by up
    to 2⁻⁷·|d|; and as lr·wd approaches 1, w becomes inexact.

    Args:
        states: the Adam state of each run (parameters that are updated together), at least one.
        settings: for each run, in the same order, the settings of its parameter group, such as the learning rate.

    Returns:
        (2,) float64 on the weights' device: mean, variance.
    """
    totals = torch.zeros(2, 3, dtype=torch.float64, device=states[0].run.weights.device)
    ordinary, sharded = totals.unbind()  # each contains the number of elements, Σδ and Σδ²
    for state, values in zip(states, settings):
        sums = ordinary if state.run.buffer is None else sharded
        sums[0] += sum(stored_numel(parameter) for parameter in state.run.parameters)
        for delta in _deltas(state, values):
            sums[1:] += torch.stack([x.sum(dtype=torch.float64) for x in (delta, delta * delta)])
    # Add the sums of sharded parameters over the ranks. Ordinary (unsharded) parameters are complete on every rank,
    # and so are their sums.
    if any(state.run.buffer is not None for state in states):
        current_world().shard_group.all_reduce(sharded).wait()
    count, first, second = totals.sum(0)
    mean = first / count
    return torch.stack((mean, (second / count - mean * mean).clamp_min(0)))


def _deltas(state: RunState, settings: Hyper) -> Iterator[torch.Tensor]:
    """Yield δ, the last step's update divided by the learning rate, for one run of parameters, in consecutive pieces.

    `delta_moments` defines δ. Each piece is (n,) float32 with n at most PIECE, on the device of the weights.

    state: the run and its Adam state.
    settings: the settings of the run's parameter group.
    """
    # The last setting, the weight decay that is added to the gradient (L2), is not needed, because m includes it.
    lr, beta1, beta2, eps, weight_decay, hold_steps, _ = settings
    device, t = state.run.weights.device, state.step.double()
    lr = lr * (t > hold_steps)
    for start in range(0, state.run.weights.numel(), PIECE):
        part = slice(start, start + PIECE)
        master, v = state.master.part(part, device).read()
        assert v is not None and isinstance(state.exp_avg, torch.Tensor)
        m = state.exp_avg[part].to(device).float()
        direction = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
        before = (master + lr * direction) / (1 - lr * weight_decay)
        yield direction + weight_decay * before
