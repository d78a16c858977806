"""Timing of steps, and of a matrix product to compare them with."""

import time
from collections.abc import Callable

import torch


def timed(step: Callable[[dict], torch.Tensor], batches: list[dict]) -> tuple[list[torch.Tensor], list[float]]:
    """Run a step per batch. Return the losses, scalars on the device, and the seconds of each step."""
    device = batches[0]["input_ids"].device
    losses, marks = [], []
    for batch in batches:
        marks.append(mark(device))
        losses.append(step(batch))
    marks.append(mark(device))
    finish(device)
    return losses, [between(a, b) for a, b in zip(marks, marks[1:])]


def mark(device: torch.device):
    """Record a point in time on the device without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin, end) -> float:
    """Return the seconds from `begin` to `end`. The device must have reached both, see `finish`."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def finish(device: torch.device) -> None:
    """Wait until the device has done all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemm_speed(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """Return the TFLOP/s of a square bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    begin = mark(device)
    for _ in range(repeats):
        torch.mm(a, b)
    end = mark(device)
    finish(device)
    return 2 * size**3 * repeats / between(begin, end) / 1e12
