"""Which steps a manager skips: read without a synchronization, counted, and too many of them end the training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..base.arguments import expect_number
from ..runtime.world import current_world

if TYPE_CHECKING:  # it owns the class of this file
    from .manager import OptimManager

_log = logging.getLogger("hf_bmtrain")
_WARN_EVERY = 8


class HostFlag:
    """An asynchronous copy to the host of the value that `flag` (1,) has at this point of the current stream."""

    def __init__(self, flag: torch.Tensor) -> None:
        self.immediate = not flag.is_cuda
        if self.immediate:
            self._value = flag.clone()
        else:
            self._value = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True)
        self._event: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._value.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """True if `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> float:
        """Return the value. Waits for the device if it has not reached that point yet."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


@torch.no_grad()
def count_not_finite(gradients: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return the numbers of nan and of inf in this rank's part of each gradient, (k, 2) int64 on `device`.

    They are -1 for None. The host does not wait.
    """
    counts = torch.full((len(gradients), 2), -1, dtype=torch.int64, device=device)
    for row, gradient in zip(counts, gradients):
        if gradient is not None:
            part = gradient.as_subclass(torch.Tensor)
            row[0], row[1] = part.isnan().sum(), part.isinf().sum()
    return counts


class SkippedSteps:
    """Reports each skipped step in one line of rank 0, with what observers say of its cause.

    While a loss scale is sought skips are normal: one is logged as info, and each eighth in a row as a warning. Without
    a loss scale, or with one at its minimum, no lower scale could have avoided the skip: every one is a warning, and
    after `limit` of these in a row `report` raises RuntimeError. limit: None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None:
            wanted = "positive, or None for no limit"
            expect_number("max_skipped_steps", limit, wanted, lambda steps: steps >= 1, integer=True)
        self._limit = limit
        self._steps = self._in_row = self._lost = 0
        self._at_minimum = False
        self._counts: torch.Tensor | None = None

    def end_step(self) -> None:
        """Count a step, skipped or not."""
        self._steps += 1
        self._counts = None

    def look(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Look at the gradients of the step that was skipped, which are about to be dropped."""
        if self._counts is None:
            self._counts = count_not_finite(gradients, current_world().device)

    def clear(self) -> None:
        """Note that the last step was not skipped."""
        self._in_row = self._lost = 0
        self._at_minimum = False

    def report(
        self, manager: OptimManager, parameters: Sequence[torch.nn.Parameter], scale: float | None, minimum: float
    ) -> None:
        """Log that the last step of `manager` was skipped, and why. Collective.

        parameters: of all optimizers; `look` was given their gradients. scale: the loss scale after the step, None
        without one. Raises RuntimeError if training has not advanced for `limit` steps.
        """
        assert self._counts is not None, "look first"
        world = current_world()
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
            _log.log(level, "step %d was skipped%s: %s; %s", self._steps, row, cause, after)
        if self._limit is not None and self._lost >= self._limit:
            raise RuntimeError(
                f"{self._lost} steps in a row were skipped, the last one step {self._steps}, and "
                f"{'there is no loss scale' if scale is None else f'the loss scale is at its minimum, {scale:g}'}: "
                f"{cause}. The weights are those from before these steps. Look at the data of the rank and at the "
                "block that are named (bmt.check_parity compares the blocks with plain torch), lower the learning "
                "rate, or go on from an earlier checkpoint. OptimManager(max_skipped_steps=None) never stops."
            )
