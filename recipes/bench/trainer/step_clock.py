"""Times of the steps inside Trainer, from a callback."""

import resource
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import TrainerCallback

from bench.trace import profiling


class StepClock(TrainerCallback):
    """Notes when the device reaches the end of each step, without waiting for it before the last timed step.

    The host may be several steps ahead of the device, so on a GPU its clock does not tell how long a step takes: events
    on the current stream do. Trainer logs after the first step, after the last but one that is not timed, and after the
    last: the losses. The peak of memory is that of the timed steps. If Trainer makes one step more, it is profiled on
    rank 0.
    mapped_bytes: returns the bytes outside torch's allocator.
    """

    def __init__(self, warmup: int, steps: int, mapped_bytes: Callable[[], int]) -> None:
        self._warmup, self._steps, self._mapped_bytes = warmup, steps, mapped_bytes
        self._marks: list[torch.cuda.Event | float] = []
        self.losses: list[float] = []
        self._peak = self._reserved = 0
        self._profiling = ExitStack()
        self._profile: dict = {}

    def on_step_begin(self, args, state, control, **kwargs):
        if len(self._marks) == self._warmup + self._steps and state.is_world_process_zero:
            self._profile = self._profiling.enter_context(profiling(None))

    def on_step_end(self, args, state, control, **kwargs):
        self._profiling.close()
        self._marks.append(_mark())
        number, cuda = len(self._marks), torch.cuda.is_available()
        if number == self._warmup and cuda:
            torch.cuda.reset_peak_memory_stats()
        if number == self._warmup + self._steps:
            if cuda:
                torch.cuda.synchronize()
                self._reserved = torch.cuda.max_memory_reserved()
                self._peak = torch.cuda.max_memory_allocated() + self._mapped_bytes()
            else:
                self._peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if number in (1, self._warmup - 1, self._warmup + self._steps):
            control.should_log = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def report(self) -> dict:
        """Return the milliseconds of the timed steps, the losses, and the peak of memory."""
        timed = self._marks[self._warmup - 1 : self._warmup + self._steps]
        steps = [_milliseconds(before, after) for before, after in zip(timed, timed[1:])]
        return {
            "ms": statistics.median(steps),
            "mean_ms": statistics.mean(steps),
            "spread_ms": [min(steps), max(steps)],
            "steps_ms": [round(step, 2) for step in steps],
            "first_loss": self.losses[0],
            "loss": self.losses[-1],  # the mean of the timed steps and, if it was not the first, of the one before
            "peak_GB": self._peak / 1e9,
            "reserved_GB": self._reserved / 1e9,
            **self._profile,
        }


def _mark() -> torch.cuda.Event | float:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(before: Any, after: Any) -> float:
    return 1e3 * (after - before) if isinstance(before, float) else before.elapsed_time(after)
