"""SkippedSteps: counts the steps that a manager skips, says why, and ends a training that no longer advances."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...faults.bad_gradients import WATCHED_STEPS, OwnGradients, count_not_finite, explain
from ..base.arguments import expect_number
from ..runtime.world import current_world

_log = logging.getLogger("hf_bmtrain")
_WARN_EVERY = 8
_UNKNOWN = (
    "a gradient was inf or nan; which one is unknown, because the gradients were freed before this was known (the next "
    f"{WATCHED_STEPS} steps are watched)"
)


class SkippedSteps:
    """Reports each skipped step in one line of rank 0, with the first block and parameter and the rank.

    While a loss scale is sought skips are normal: one is logged as info, and each eighth in a row as a warning. Without
    a loss scale, or with one at its minimum, no lower scale could have avoided the skip: every one is a warning, and
    after `limit` of these in a row `report` raises RuntimeError. limit: None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None:
            wanted = "positive, or None for no limit"
            expect_number("max_skipped_steps", limit, wanted, lambda steps: steps >= 1, whole=True)
        self._limit = limit
        self._steps = self._in_row = self._lost = 0
        self._at_minimum = False
        self._counts: torch.Tensor | None = None
        self._own: OwnGradients | None = None

    def end_step(self) -> None:
        """Count a step, skipped or not."""
        self._steps += 1
        self._counts = None
        if self._own is not None:
            self._own.end_step()

    def look(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Look at the gradients of the step that was skipped, which are about to be dropped."""
        if self._counts is None:
            self._counts = count_not_finite(gradients, current_world().device)

    def clear(self) -> None:
        """Note that the last step was not skipped."""
        self._in_row = self._lost = 0
        self._at_minimum = False
        if self._own is not None and self._own.steps <= 0:
            self._own.stop()
            self._own = None

    def report(self, parameters: Sequence[torch.nn.Parameter], scale: float | None, minimum: float) -> None:
        """Log that the last step was skipped, and why. Collective.

        parameters: of all optimizers; `look` was given their gradients. scale: the loss scale after the step, None
        without one. Raises RuntimeError if training has not advanced for `limit` steps.
        """
        assert self._counts is not None, "look first"
        world = current_world()
        lost = scale is None or self._at_minimum
        self._in_row, self._lost = self._in_row + 1, self._lost + 1 if lost else 0
        self._at_minimum = scale is not None and scale <= minimum
        cause = explain(parameters, self._counts, self._own, world) or _UNKNOWN
        if self._own is not None:
            self._own.stop()
        self._own = OwnGradients(parameters)
        after = "there is no loss scale" if scale is None else f"the loss scale is now {scale:g}"
        row = f", {self._in_row} in a row" if self._in_row > 1 else ""
        warn = lost or self._at_minimum or self._in_row % _WARN_EVERY == 0
        if world.rank == 0:
            level = logging.WARNING if warn else logging.INFO
            _log.log(level, "step %d was skipped%s: %s; %s", self._steps, row, cause, after)
        if self._limit is not None and self._lost >= self._limit:
            raise RuntimeError(
                f"{self._lost} steps in a row were skipped, the last one step {self._steps}, and "
                f"{'there is no loss scale' if scale is None else f'the loss scale is at its minimum, {scale:g}'}: "
                f"{cause}. The weights are those from before these steps. Look at the data of the rank and at the "
                "block that are named (bmt.check_parity compares the blocks with plain torch), lower the learning "
                "rate, or go on from an earlier checkpoint. OptimManager(max_skipped_steps=None) never stops."
            )
