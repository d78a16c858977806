"""What AdamW keeps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops.adam_step import Elements
from ..ops.residual import follow
from ..sharding.buffer import ShardedBuffer
from .runs import Run

_PIECE = 1 << 20  # elements at once, for the sake of memory


@dataclass(eq=False)
class RunState:
    """What the optimizer keeps of one run.

    master, exp_avg_sq: float32 (n,); master is the weights themselves where those are float32. Or, for bfloat16
    weights, master is their int16 residuals and exp_avg_sq carries the marks (ops/residual.py). exp_avg: float32 or
    bfloat16 (n,). step: float32 (), steps taken. index_base: the number of element 0 among all of the optimizer's,
    the same for any number of ranks. version: of the weights, when the optimizer last wrote them.
    """

    run: Run
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    index_base: int
    version: int = -1

    @property
    def weight(self) -> torch.Tensor | None:
        """The half-precision weights that are the master's rounding, None where there are none."""
        return None if self.master is self.run.weights else self.run.weights

    @property
    def stale(self) -> bool:
        """Whether someone else has written the weights of float32 masters (a load, an average) since the last step.

        Residuals lie on the weights, whichever those are."""
        beside = self.weight is not None and self.master.dtype == torch.float32
        return beside and self.version not in (-1, self.run.weights._version)

    def heed_writes(self) -> None:
        """The float32 master follows the weights where they are no longer its rounding."""
        follow_writes(self.master, self.run.weights)

    def elements(self) -> Elements:
        """All of the run, for one step with the gradient that lies there."""
        gradient = self.run.gradient()
        return Elements(gradient, self.master, self.exp_avg, self.exp_avg_sq, self.weight, self.index_base)

    def views(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """One parameter's part, under the names of torch's AdamW."""
        part = slice(self.run.begin(parameter), self.run.begin(parameter) + parameter.numel())
        views = {"step": self.step, "exp_avg": self.exp_avg[part], "exp_avg_sq": self.exp_avg_sq[part]}
        if self.weight is None:
            return views
        return {**views, "master" if self.master.dtype == torch.float32 else "residual": self.master[part]}


def new_state(
    run: Run, master: torch.dtype | None, exp_avg: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(master, exp_avg, exp_avg_sq) of a run before its first step, where its weights are.

    master: float32; int16 for residuals; None where the weights are their own.
    """
    weights = run.weights
    if master is None:
        first = weights
    elif master == torch.float32:
        first = weights.float()
    else:
        first = torch.zeros_like(weights, dtype=master)  # the residual of a master that is the weight
    return first, torch.zeros_like(weights, dtype=exp_avg), torch.zeros_like(weights, dtype=torch.float32)


def follow_writes(master: torch.Tensor, weights: torch.Tensor) -> None:
    """`master` (float32, in place) follows half-precision `weights`, of any device, that are no longer its rounding.

    A bfloat16 weight takes its master along, at the distance that it had from its rounding: at most half a unit in the
    last place, and the master rounds to the weight. (A residual is nothing but that distance, which does not tell
    which weights were written; so this is what both forms do.) The master of a float16 weight is the weight.
    """
    weights = weights.to(master.device)
    if weights.dtype == torch.bfloat16:
        return follow(master, weights)
    for p, w in zip(master.split(_PIECE), weights.split(_PIECE)):
        p.copy_(torch.where(w == p.to(w.dtype), p, w.float()))


def by_owner(
    states: Sequence[RunState], numbers: Sequence[int]
) -> dict[ShardedBuffer | torch.nn.Parameter, dict[int, RunState]]:
    """The states with these numbers by whose elements they hold, in the order of the elements."""
    owners: dict[ShardedBuffer | torch.nn.Parameter, dict[int, RunState]] = {}
    for number in sorted(numbers, key=lambda number: states[number].index_base):
        owners.setdefault(states[number].run.owner, {})[number] = states[number]
    return owners
