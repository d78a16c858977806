"""The helpers of BMTrain's module `utils`: averages, printing, a version check, and memory."""

from __future__ import annotations

import math
import re
import resource
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from ..engine.base.arguments import expect_kind, expect_number, expect_tensor
from ..engine.runtime.world import current_world, print_rank

__all__ = [
    "AverageRecorder", "check_torch_version", "has_inf_nan", "print_block", "print_dict", "print_rank", "round_up",
    "see_memory",
]  # fmt: skip

_WIDTH = 60
_GIB = 2**30


class AverageRecorder:
    """Exponential moving average with bias correction (Kingma & Ba 2015, section 3).

    After n values v_i the average is Σ α^(n-i) v_i / Σ α^(n-i).

    Args:
        alpha: the weight α of the previous average, in [0, 1).
        start_value: the average (`value`) before the first call of `record`.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        wanted = "in [0, 1) (the weight of the previous average)"
        expect_number("alpha", alpha, wanted, lambda share: 0 <= share < 1)
        expect_number("start_value", start_value, "finite", math.isfinite)
        self.alpha, self._start = alpha, start_value
        self._sum, self._weight = 0.0, 0.0

    def record(self, value: float) -> None:
        """Include a number, or the number in a tensor of one element, in the running average."""
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            expect_number("value", value, "or a tensor of one element")
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(value)
        self._weight = self.alpha * self._weight + (1 - self.alpha)

    @property
    def value(self) -> float:
        """The bias-corrected exponential moving average of the recorded values; `start_value` if there are none."""
        return self._sum / self._weight if self._weight else self._start


def round_up(x: int, d: int) -> int:
    """Return the smallest multiple of `d` that is at least `x`.

    Args:
        x: an integer of any sign.
        d: an integer of at least 1.
    """
    expect_number("x", x, "of any sign", integer=True)
    expect_number("d", d, "at least 1", lambda step: step >= 1, integer=True)
    return -(-x // d) * d


def check_torch_version(version_str: str) -> int:
    """Compare the installed torch with a version. Only the first three numbers count, so "2.6.0rc1" equals "2.6.0".

    Args:
        version_str: a version such as "2.6.0".

    Returns:
        A negative number if the installed torch is older, 0 if it is equal, a positive number if it is newer.

    Raises:
        ValueError: `version_str` is not a version.
    """
    if not isinstance(version_str, str) or not re.match(r"v?\d+(\.\d+)*", version_str):
        raise ValueError(f"version_str must be a version such as '2.6.0', got {version_str!r:.80}")
    # Remove endings such as "rc1" and "+cu130", whose numbers do not count.
    releases = (re.sub(r"[^v\d.].*", "", version) for version in (torch.__version__, version_str))
    mine, other = ([int(n) for n in re.findall(r"\d+", release + ".0.0")[:3]] for release in releases)
    return sum((a - b) * weight for a, b, weight in zip(mine, other, (10000, 100, 1)))


@torch.no_grad()
def has_inf_nan(x: torch.Tensor, out: torch.Tensor) -> None:
    """Set a flag if a tensor contains inf or nan, without waiting for the device or for other ranks.

    Args:
        x: (...), a floating-point dtype.
        out: the flag, a uint8 tensor of one element on the device of `x`. It is set to 1 if `x` contains inf or nan,
            and otherwise not changed, so that one flag can serve several tensors.

    Raises:
        TypeError: `x` or `out` is not a tensor.
        ValueError: `out` is not a uint8 tensor of one element on the device of `x`.
    """
    expect_tensor("x", x)
    expect_tensor("out", out)
    if out.dtype != torch.uint8 or out.numel() != 1 or out.device != x.device:
        raise ValueError(
            f"has_inf_nan writes to out, which must be a uint8 tensor of one element on {x.device}, but got "
            f"{out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    out.bitwise_or_(x.isfinite().all().logical_not().view(torch.uint8).view_as(out))


def see_memory(message: str, detail: bool = False) -> None:
    """Print the memory that torch has allocated on rank 0's device, in GiB: now, and the peak since the last call.

    Only rank 0 prints. Each call resets torch's statistics of the peak (`torch.cuda.reset_peak_memory_stats`) for this
    rank's device, so that the next call shows a new peak. On the CPU, the resident memory of rank 0's process is
    printed instead: now, and the peak since the process started.

    Args:
        message: a string to print before the numbers.
        detail: whether to print `torch.cuda.memory_summary` instead; ignored on the CPU.
    """
    device = current_world().device
    if device.type == "cpu":
        resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print_rank(f"{message}: resident {resident / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
        return
    module = torch.get_device_module(device)
    if detail:
        print_rank(f"{message}\n{module.memory_summary(device)}")
    else:
        now, peak = module.memory_allocated(device), module.max_memory_allocated(device)
        print_rank(f"{message}: allocated {now / _GIB:.2f} GiB, peak {peak / _GIB:.2f} GiB")
    module.reset_peak_memory_stats(device)


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Print a title, centered in a line of 60 `=` characters, and text below it.

    Args:
        title: the title.
        content: the text; None for the title alone.
        file: where to print; None for standard output.

    Raises:
        TypeError: `file` cannot be written to.
    """
    if file is not None and not callable(getattr(file, "write", None)):
        raise TypeError(f"file must be open for writing text, or None (standard output), got {type(file).__name__}")
    print(f" {title} ".center(_WIDTH, "="), file=file)
    if content is not None:
        print(content, file=file)


def print_dict(title: str, content: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print a dict as a block of aligned `key : value` lines. Long values are wrapped.

    Args:
        title: the title of the block.
        content: the dict.
        file: where to print; None for standard output.
    """
    expect_kind("content", content, Mapping, "a dict")
    left = max((len(str(key)) for key in content), default=0) + 1
    lines = []
    for key, value in content.items():
        wrapped = textwrap.wrap(str(value), max(10, _WIDTH - left - 2), drop_whitespace=False) or [""]
        lines += [f"{key if number == 0 else '':<{left}}{':' if number == 0 else ' '} {part}"
                  for number, part in enumerate(wrapped)]  # fmt: skip
    print_block(title, "\n".join(lines), file)
