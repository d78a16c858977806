"""BadNumbers: find the source of inf and nan in Trainer's gradients, and end training that cannot recover."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch

from ..engine.optim.skipped_steps import count_not_finite
from ..engine.runtime.world import current_world
from ..faults.bad_gradients import GradientWatcher, explain

_log = logging.getLogger("hf_bmtrain")
LIMIT = 3  # training ends with an error after this many entries in a row of Trainer's log have a bad gradient norm
LEAST_SCALE = 2.0**-24  # training ends with an error if the loss scale falls below this value


class BadNumbers:
    """Checks the gradient norm and loss scale that Trainer logs, and finds the source of inf and nan in gradients.

    Without loss scaling, Trainer applies gradients with inf or nan. With loss scaling, Trainer skips each step with
    such gradients, and never ends training because too many steps were skipped.

    A log entry is bad if its gradient norm is not finite (without loss scaling), or if its loss scale is below 1 (with
    loss scaling). After a bad entry, `look` logs a warning, and `end_step` examines the gradients of the next steps and
    logs the rank, layer and parameter where inf or nan first occurred. If training cannot recover, `look` raises an
    error. As long as no entry is bad, no method of this class makes the host wait for the device. `end_step` and `look`
    are collective: every rank must call them.

    Args:
        parameters: the model's parameters, whose gradients are examined.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._logs = 0

    def end_step(self, step: int) -> None:
        """Examine the gradients of step `step`, and log the rank, layer and parameter where inf or nan first occurred.

        Called after each step, and once more after each epoch. This method does nothing unless an examination is
        running. `look` starts an examination when Trainer's log contains a bad gradient norm or loss scale. The
        examination ends when the cause is found, or after 16 calls of this method. Collective: every rank must call it.

        step: the number of the step, for the message.
        """
        own = _watcher().watch_of(self)
        if own is None:
            return
        own.end()
        world = current_world()
        unknown = count_not_finite([None] * len(self._parameters), world.device)
        cause = explain(self._parameters, unknown, own, world)
        if cause is not None and world.rank == 0:
            _log.warning("step %d: %s", step, cause)
        if cause is not None or own.steps <= 0:
            self.close()

    def look(self, step: int, norm: float | None, scale: float | None) -> None:
        """Check the gradient norm or, with loss scaling, the loss scale in Trainer's log entry of a step.

        If the norm is not finite, or the scale is below 1, log a warning, and examine the gradients of the next steps.
        Called for each log entry that contains the loss. Collective: every rank must call it.

        Args:
            step: the number of the step.
            norm: the logged gradient norm; None if it was not logged. It is not checked if there is a loss scale.
            scale: the logged loss scale; None without loss scaling.

        Raises:
            RuntimeError: training cannot recover. Without loss scaling, the norm was not finite in three log entries in
                a row. With loss scaling, the scale is below 2⁻²⁴.
        """
        bad = scale < 1 if scale is not None else norm is not None and not math.isfinite(norm)
        if not bad:
            self._logs = 0
            return
        self._logs += 1
        if scale is None:
            problem = (
                f"the gradient norm is {norm} at step {step}, and without a loss scale Trainer applies such gradients: "
                f"{self._spoilt()}"
            )
        else:
            problem = f"the loss scale has fallen to {scale:g} at step {step}: gradients overflow repeatedly"
        if self._logs >= LIMIT if scale is None else scale < LEAST_SCALE:
            raise RuntimeError(
                f"Training no longer makes progress: {problem}. Resume from an earlier checkpoint with a lower "
                "learning rate, or without the data that cause this (see the log). If you write the "
                "training loop yourself, OptimManager skips the steps whose gradients are inf or nan."
            )
        if current_world().rank == 0:
            _log.warning("%s. The gradients of the next steps will be examined for the cause", problem)
        if _watcher().watch_of(self) is None:
            _watcher().watch(self, self._parameters)

    def _spoilt(self) -> str:
        """Return how many parameters contain inf or nan on at least one rank, as a clause of a message.

        Collective: every rank must call it.
        """
        world = current_world()
        parts = [p.detach().as_subclass(torch.Tensor) for p in self._parameters]
        flags = torch.stack([part.isfinite().all().logical_not() for part in parts]).float().to(world.device)
        world.reduce.all_reduce(flags, maximum=True).wait()
        return f"{int(flags.sum())} of {len(parts)} parameters contain inf or nan"

    def close(self) -> None:
        """Stop examining gradients, if an examination is running. Not collective.

        Called when the cause of inf or nan has been found, and when training ends.
        """
        _watcher().stop(self)


def _watcher() -> GradientWatcher:
    watcher = current_world().schedule.observer(GradientWatcher)
    assert watcher is not None, "init_distributed adds a GradientWatcher"
    return watcher
