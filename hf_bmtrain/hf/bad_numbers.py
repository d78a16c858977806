"""BadNumbers: says where inf and nan come from while Trainer trains, and ends a training that they have spoilt."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch

from ..engine.optim.skipped_steps import count_not_finite
from ..engine.runtime.world import current_world
from ..faults.bad_gradients import GradientWatcher, explain

_log = logging.getLogger("hf_bmtrain")
LIMIT = 3
LEAST_SCALE = 2.0**-24


class BadNumbers:
    """Reads what Trainer logs. It never waits for the device while the gradient norm and the loss scale are sound.

    Trainer without a GradScaler applies gradients that are inf or nan, as torch does; with one it skips these steps for
    ever. A logged gradient norm that is not finite, or a loss scale below 1, is a warning, and the ranks' gradients are
    looked at in the next steps, to name the first block and parameter and the rank. All methods are collective.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._logs = 0

    def end_step(self, step: int) -> None:
        """Look at the gradients of step number `step`, if they were watched."""
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
        """Look at the gradient norm and the loss scale (None without one) that are logged after step number `step`.

        Raises RuntimeError if the norm was not finite in three logs in a row without a loss scale, or if the scale has
        fallen so far that gradients vanish.
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
            problem = f"the loss scale has fallen to {scale:g} at step {step}: gradients overflow again and again"
        if self._logs >= LIMIT if scale is None else scale < LEAST_SCALE:
            raise RuntimeError(
                f"Training no longer advances: {problem}. Go on from a checkpoint from before, with a lower learning "
                "rate or without the data that do this (the log names block and rank), or with OptimManager, which "
                "skips such steps."
            )
        if current_world().rank == 0:
            _log.warning("%s; the next steps are watched", problem)
        if _watcher().watch_of(self) is None:
            _watcher().watch(self, self._parameters)

    def _spoilt(self) -> str:
        """Return in words how many parameters are not finite."""
        world = current_world()
        parts = [p.detach().as_subclass(torch.Tensor) for p in self._parameters]
        flags = torch.stack([part.isfinite().all().logical_not() for part in parts]).float().to(world.device)
        world.reduce.all_reduce(flags, maximum=True).wait()
        return f"{int(flags.sum())} of {len(parts)} parameters hold inf or nan"

    def close(self) -> None:
        """Stop watching."""
        _watcher().stop(self)


def _watcher() -> GradientWatcher:
    watcher = current_world().schedule.observer(GradientWatcher)
    assert watcher is not None, "init_distributed adds it"
    return watcher
