"""Measure one cell: times, losses, memory, and milliseconds by kind of work."""

import contextlib
import statistics
import time
from pathlib import Path

import torch

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.clock import finish, gemm_speed, timed
from bench.engines.registry import ENGINES
from bench.models import make_batch, make_config
from bench.ranks import mapped_bytes
from bench.trace import profile_step


def measure(cell: Cell, name: str, device: torch.device) -> dict:
    """Return the report of a cell. Collective; propagates the engine's errors."""
    ignored = {
        "--profile": cell.profile is not None, "--no-trace": not cell.trace, "--memory-limit": cell.memory_limit > 0,
        "--cuda-graphs": cell.cuda_graphs,
    }  # fmt: skip
    if device.type != "cuda" and any(ignored.values()):
        raise ValueError(f"{next(option for option, given in ignored.items() if given)} works on GPUs only")
    config = make_config(cell.model, cell.seq, cell.layers)
    watch = Stopwatch(device)
    limit_memory(cell.memory_limit, device)
    engine = ENGINES[cell.engine](cell, config, device)
    watch.lap("build")
    try:
        group, count = bmt.rank() // cell.sequence_parallel, cell.warmup + cell.steps
        batches = [make_batch(config, cell.batch, cell.seq, 1000 * step + group, device) for step in range(count)]
        losses = []
        if cell.warmup:
            losses += timed(engine.step, batches[:1])[0]
            watch.lap("first step")
        if cell.warmup > 1:
            losses += timed(engine.step, batches[1 : cell.warmup])[0]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        received = received_bytes()
        more, seconds = timed(engine.step, batches[cell.warmup :])
        received = received_bytes() - received
        watch.lap("other steps")
        report = {
            "engine": name,
            "described": engine.described,
            "job": cell.job(bmt.world_size()),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            **speed(seconds, cell.batch * cell.seq // cell.sequence_parallel, engine.flops_a_token),
            "network_GB": received / cell.steps / 1e9,
            "losses": [bmt.sum_loss(loss).item() for loss in losses + more],
        }
        if device.type == "cuda":
            report["peak_GB"] = (torch.cuda.max_memory_allocated(device) + mapped_bytes()) / 1e9
            report["gemm_TFLOPs"] = gemm_speed(device)
            if cell.trace:
                report |= profiled(lambda: engine.step(batches[-1]), cell)
                watch.lap("profile")
    finally:
        with contextlib.suppress(Exception):  # or it would hide the engine's own error
            engine.close()
    return report | {"seconds": watch.laps}


def received_bytes() -> int:
    """Return the bytes that this machine's network interfaces, the loopback device too, have received; 0 if unknown."""
    statistics_file = Path("/proc/net/dev")
    lines = statistics_file.read_text().splitlines()[2:] if statistics_file.exists() else []
    return sum(int(line.partition(":")[2].split()[0]) for line in lines)


def limit_memory(gigabytes: float, device: torch.device) -> None:
    """Let torch's allocator use at most so many GB of the GPU; 0 for all of it."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * gigabytes / total) if gigabytes else 1.0, device)


def speed(seconds: list[float], tokens: int, flops_a_token: float) -> dict:
    """Return the median step and its speed.

    seconds: of each step. tokens: of a step on one rank. TFLOPs: the model's, per GPU.
    """
    median = statistics.median(seconds)
    return {
        "ms": 1e3 * median,
        "spread_ms": [1e3 * min(seconds), 1e3 * max(seconds)],
        "tokens_a_second_a_rank": tokens / median,
        "TFLOPs": flops_a_token * tokens / median / 1e12,
    }


def profiled(step, cell: Cell) -> dict:
    """Run one more step, on rank 0 under the profiler. Return the account of the trace there, {} elsewhere."""
    if bmt.rank() == 0:
        return profile_step(step, cell.profile)
    step()
    torch.cuda.synchronize()
    return {}


class Stopwatch:
    """Seconds of consecutive phases. laps: by name."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._last = device, time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        finish(self._device)
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 2)
        self._last = now
