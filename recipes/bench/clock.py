"""Times of steps, and of a matrix product to compare them with."""

import time
from collections.abc import Callable

import torch


def timed(step: Callable[[dict], torch.Tensor], batches: list[dict]) -> tuple[list[torch.Tensor], list[float]]:
    """Losses of the steps on `batches`, scalars on the device, and seconds of each step."""
    device = batches[0]["input_ids"].device
    losses, marks = [], []
    for batch in batches:
        marks.append(mark(device))
        losses.append(step(batch))
    marks.append(mark(device))
    finish(device)
    return losses, [between(a, b) for a, b in zip(marks, marks[1:])]


def mark(device: torch.device):
    """A point in time on the device, which the host does not wait for."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin, end) -> float:
    """Seconds from `begin` to `end`, once the device has come there."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemm_speed(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a square bf16 product of random numbers: the ceiling of this machine, now."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    begin = mark(device)
    for _ in range(repeats):
        torch.mm(a, b)
    end = mark(device)
    finish(device)
    return 2 * size**3 * repeats / between(begin, end) / 1e12
