"""What a training script prints."""

from __future__ import annotations

import resource
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from .runtime.world import current_world, print_rank

__all__ = ["AverageRecorder", "print_block", "print_dict", "print_rank", "see_memory"]

_WIDTH = 60
_GIB = 2**30


class AverageRecorder:
    """Exponential moving average, unbiased from the first value on (Kingma & Ba 2015, section 3).

    After n values it is Σ α^(n-i) v_i / Σ α^(n-i). alpha: in [0, 1), the share that stays. start_value: before any.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha is the share of the old average that stays, in [0, 1), got {alpha}")
        self.alpha, self._start = alpha, start_value
        self._sum, self._weight = 0.0, 0.0

    def record(self, value: float) -> None:
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(value)
        self._weight = self.alpha * self._weight + (1 - self.alpha)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else self._start


def see_memory(message: str, detail: bool = False) -> None:
    """Rank 0 prints `message` and its device's allocated memory, now and at the peak since the last call, in GiB.

    detail: the allocator's own table. On CPU it is the process's resident memory and its peak since the start.
    """
    world = current_world()
    device = torch.get_device_module(world.device)
    if world.device.type == "cpu":
        pages = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print_rank(f"{message}: resident {pages / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
    elif detail:
        print_rank(f"{message}\n{device.memory_summary(world.device)}")
    else:
        now, peak = device.memory_allocated(world.device), device.max_memory_allocated(world.device)
        print_rank(f"{message}: allocated {now / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
    if world.device.type != "cpu":
        device.reset_peak_memory_stats(world.device)


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print `title` centred in a line of 60 `=` and `content` below it, to `file` (standard output)."""
    print(f" {title} ".center(_WIDTH, "="), file=file or sys.stdout)
    if content is not None:
        print(content, file=file or sys.stdout)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print `content` as a block of aligned `key : value` lines; long values go on below themselves."""
    left = max((len(str(key)) for key in content), default=0) + 1
    lines = []
    for key, value in content.items():
        wrapped = textwrap.wrap(str(value), max(10, _WIDTH - left - 2), drop_whitespace=False) or [""]
        lines += [f"{key if number == 0 else '':<{left}}{':' if number == 0 else ' '} {part}"
                  for number, part in enumerate(wrapped)]  # fmt: skip
    print_block(title, "\n".join(lines), file)
