"""Report optimizer steps that were skipped because of inf or nan, and stop training after too many in a row."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..base.arguments import expect_number
from ..runtime.world import current_world

if TYPE_CHECKING:  # at run time, the import would be circular
    from .manager import OptimManager

_log = logging.getLogger("hf_bmtrain")
_WARN_EVERY = 8


@torch.no_grad()
def count_not_finite(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Count nan and inf in this rank's elements of each of k gradients. The host does not wait for the device.

    Args:
        gradients: the k gradients. Some may be None.
        device: the device of the gradients and of the result.

    Returns:
        (k, 2) int64 on `device`: for each gradient the number of nan and the number of inf, or -1 and -1 if it is None.
    """
    counts = torch.full((len(gradients), 2), -1, dtype=torch.int64, device=device)
    for row, gradient in zip(counts, gradients):
        if gradient is not None:
            part = gradient.as_subclass(torch.Tensor)
            row[0], row[1] = part.isnan().sum(), part.isinf().sum()
    return counts


class SkippedSteps:
    """Logs every skipped step in one line on rank 0, with its cause, and stops training after too many in a row.

    With dynamic loss scaling, skipped steps are normal, because the scale is lowered after each of them. They are
    logged at INFO, and every eighth in a row as a warning. Without a loss scale, or when it is at its minimum, every
    skipped step is logged as a warning.

    limit: the number of skipped steps in a row after which `report` raises RuntimeError; None for no limit. With a loss
        scale, a skipped step counts only if the step just before it was also skipped and left the scale at its minimum.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None:
            wanted = "positive, or None for no limit"
            expect_number("max_skipped_steps", limit, wanted, lambda steps: steps >= 1, integer=True)
        self.limit = limit
        self._last = 0  # the number of the last step that was skipped
        # _in_row: the number of skipped steps in a row, up to the last one. _lost: how many of these count towards
        # `limit`. Without a loss scale, all of them count. With one, a step counts only if the step just before it was
        # also skipped and left the scale at its minimum.
        self._in_row = self._lost = 0
        self._at_minimum = False  # whether the last skipped step has left the loss scale at the minimum
        self._looked = 0  # the number of the step whose nan and inf are counted in `_counts`
        self._counts: torch.Tensor | None = None

    def start_anew(self) -> None:
        """Restart the counts of skipped steps in a row. Called when a state is loaded: earlier steps do not count."""
        self._last = 0

    def look(self, step: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Count nan and inf in the gradients of a skipped step, so that `report` can find the cause.

        Call this before the gradients are dropped. Further calls for the same step do nothing.

        Args:
            step: the number of the step; the first is 1.
            gradients: the gradient of each parameter that is passed to `report`, in the same order; None if there is
                no gradient.
        """
        if self._looked != step:
            self._looked, self._counts = step, count_not_finite(gradients, current_world().device)

    def report(
        self,
        step: int,
        manager: OptimManager,
        parameters: Sequence[torch.nn.Parameter],
        scale: float | None,
        minimum: float,
    ) -> None:
        """Log that a step was skipped, and why. Collective: every rank must call it.

        Args:
            step: the number of the step; the first is 1.
            manager: the OptimManager that skipped it.
            parameters: the parameters of all its optimizers, whose gradients were passed to `look`.
            scale: the loss scale after the step; None if there is no loss scale.
            minimum: the minimum loss scale.

        Raises:
            RuntimeError: the number of skipped steps in a row has reached `limit`. With a loss scale, a skipped step
                counts only if the step just before it was also skipped and left the scale at its minimum.
        """
        assert self._counts is not None and self._looked == step, "call look() first"
        world = current_world()
        if step != self._last + 1:  # the step before was not skipped, so a new series of skipped steps begins
            self._in_row = self._lost = 0
            self._at_minimum = False
        self._last = step
        lost = scale is None or self._at_minimum
        self._in_row, self._lost = self._in_row + 1, self._lost + 1 if lost else 0
        self._at_minimum = scale is not None and scale <= minimum
        observers = world.schedule.observers.explain_skip
        causes = [observer.explain_skip(manager, parameters, self._counts) for observer in observers]
        cause = next((text for text in causes if text is not None), "a gradient was inf or nan")
        after = "there is no loss scale" if scale is None else f"the loss scale is now {scale:g}"
        row = f", {self._in_row} in a row" if self._in_row > 1 else ""
        warn = lost or self._at_minimum or self._in_row % _WARN_EVERY == 0
        if world.rank == 0:
            level = logging.WARNING if warn else logging.INFO
            _log.log(level, "step %d was skipped%s: %s; %s", step, row, cause, after)
        if self.limit is not None and self._lost >= self.limit:
            raise RuntimeError(
                f"{self._lost} steps in a row were skipped, up to step {step}, and "
                f"{'there is no loss scale' if scale is None else f'the loss scale is at its minimum, {scale:g}'}. "
                f"Cause of the last one: {cause}. The weights have not changed in these steps. If a rank or a "
                "block is named, check that rank's data or that block (bmt.check_parity compares blocks with plain "
                "torch). You can also lower the learning rate, or continue from an earlier checkpoint. "
                "OptimManager(max_skipped_steps=None) never stops."
            )
