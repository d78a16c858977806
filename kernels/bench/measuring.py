"""Measure times on one GPU, and print the table of measurements."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch


class Line(NamedTuple):
    """One measurement, a line of the table that `show` prints.

    Attributes:
        name: what was measured.
        ms: the time in milliseconds.
        moved: the bytes that must be read and written, from which `show` computes GB/s; 0 if they are not counted.
        least: a text for the last column, the required speed; "" if none is required. For example, "copy 0.76" requires
            0.76 times the GB/s of a copy. "1.3 times", in a line that measures another implementation, requires our
            kernel to be 1.3 times as fast as that implementation.
    """

    name: str
    ms: float
    moved: int = 0
    least: str = ""


def measure(function: Callable[[], object], setup: Callable[[], object] = lambda: None, repeats: int = 15) -> float:
    """Return the median milliseconds that `function` takes on the device.

    The device sleeps before each repetition, so that the host has queued all work before the device starts it. The time
    of the host is therefore not included. setup: called before each repetition, and not measured.
    """
    times = []
    for _ in range(repeats + 3):
        setup()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


COPY_BYTES = 1 << 30


def copy_speed() -> float:
    """Return the GB/s of a device-to-device copy of COPY_BYTES, counting reads and writes."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / measure(lambda: target.copy_(source)) / 1e6


def show(lines: list[Line], copy: float) -> None:
    """Print the table of measurements. copy: the GB/s of a device-to-device copy, for comparison."""
    print(f"{'':58} {'ms':>8} {'GB/s':>7} {'of copy':>7}  at least")
    for line in lines:
        speed = line.moved / line.ms / 1e6
        print(f"{line.name:58} {line.ms:8.3f} {speed:7.0f} {speed / copy:7.2f}  {line.least}")
