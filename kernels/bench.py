"""Times the kernels on one GPU beside torch's pieces, against the speed of a device copy in the same run.

    PYTHONPATH=. python3 kernels/bench.py [part ...] [--json FILE]

Parts: norm, adam, step, cross_entropy, and sweep (the ways to share a row out; not run unless named). A part
that fails prints why and the others go on. About two minutes, most of them torch.compile. GB/s count the
bytes the operation has to move (README.md beside this file): "of copy" is the share of what memory can do.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_bmtrain.ops import adam, cross_entropy, grad_norm
from hf_bmtrain.ops.cross_entropy import CrossEntropy, Plan

ELEMENTS = 1 << 28
SHAPES = ((8192, 32000), (4096, 128256), (2048, 256000), (8192, 50257))


class Line(NamedTuple):
    """One measurement. `least` is what the project asks for, in the unit of the column it names."""

    name: str
    ms: float
    moved: int = 0
    least: str = ""


def measure(
    function: Callable[[], object], setup: Callable[[], object] = lambda: None, repeats: int = 15
) -> float:
    """Median milliseconds on the device. A sleep before lets the host run ahead: its time does not count."""
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


def copy_speed() -> float:
    """GB/s of a device-to-device copy of 1 GiB, reads and writes counted."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / measure(lambda: target.copy_(source)) / 1e6


def bench_norm() -> list[Line]:
    flat = torch.randn(ELEMENTS, device="cuda").bfloat16()
    wide = torch.randn(ELEMENTS // 2, device="cuda")
    out = torch.zeros(2, dtype=torch.float64, device="cuda")
    segments = grad_norm.Segments([i * (ELEMENTS // 300) for i in range(301)], "cuda")
    moved = 2 * ELEMENTS
    return [
        Line("norm bf16", measure(lambda: grad_norm.accumulate_squared_norm(flat, out)), moved, "copy 1.00"),
        Line("norm fp32", measure(lambda: grad_norm.accumulate_squared_norm(wide, out)), moved),
        Line(
            "norm bf16, 300 segments",
            measure(lambda: grad_norm.segmented_squared_norm(flat, segments)),
            moved,
        ),
        Line(
            "  torch vector_norm", measure(lambda: torch.linalg.vector_norm(flat, dtype=torch.float32)), moved
        ),
        Line("  torch isfinite().all()", measure(lambda: torch.isfinite(flat).all()), moved),
    ]


class Step:
    """A flat parameter's tensors, our whole optimizer step, and torch's."""

    def __init__(self, grad: torch.dtype, exp_avg: torch.dtype, weight: torch.dtype | None):
        with torch.device("cuda"):
            self.grad = torch.randn(ELEMENTS).to(grad)
            self.master = torch.randn(ELEMENTS)
            self.exp_avg = torch.zeros(ELEMENTS, dtype=exp_avg)
            self.exp_avg_sq = torch.zeros(ELEMENTS)
            self.weight = None if weight is None else self.master.to(weight)
            self.control = torch.tensor([0, 0, 1.0, 1.0], dtype=torch.float64)
            self.hyper = torch.tensor([[1e-4, 0.9, 0.95, 1e-8, 0.1]], dtype=torch.float64)
            self.steps = torch.zeros(1, dtype=torch.int64)
            self.records = torch.zeros(1, len(adam.RECORD))
            self.norm = torch.zeros(1, dtype=torch.float64)
            self.torch_step = torch.ones(())
        self.prepare()

    def prepare(self) -> None:
        adam.adam_prepare(self.control, self.hyper, self.steps, self.records, self.norm)

    def update(self) -> None:
        adam.adam_update(self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.weight, self.records[0])

    def whole(self) -> None:
        self.control[:2].zero_()
        grad_norm.accumulate_squared_norm(self.grad, self.control[:2])
        self.prepare()
        self.update()

    def torch_update(self, grad: torch.Tensor) -> None:
        torch._fused_adamw_(
            [self.master],
            [grad],
            [self.exp_avg],
            [self.exp_avg_sq],
            [],
            [self.torch_step],
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def torch_whole(self) -> None:
        assert self.weight is not None
        grad = self.grad.float()
        norm = torch.linalg.vector_norm(grad)
        grad.mul_(torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        self.torch_update(grad)
        self.weight.copy_(self.master)


def bench_adam() -> list[Line]:
    lines = []
    half, full = torch.bfloat16, torch.float32
    for name, dtypes, moved, least in (
        ("adam bf16 grad and weight", (half, full, half), 28, "copy 0.95"),
        ("adam bf16, bf16 exp_avg", (half, half, half), 24, ""),
        ("adam fp32 grad, bf16 weight", (full, full, half), 30, ""),
        ("adam fp32", (full, full, None), 28, ""),
    ):
        step = Step(*dtypes)
        lines.append(Line(name, measure(step.update), moved * ELEMENTS, least))
        if dtypes == (full, full, None):
            time_torch = measure(lambda step=step: step.torch_update(step.grad))
            lines.append(Line("  torch _fused_adamw_ fp32", time_torch, moved * ELEMENTS))
        del step
    return lines


def bench_step() -> list[Line]:
    step = Step(torch.bfloat16, torch.float32, torch.bfloat16)
    ours = measure(step.whole)
    pieces = measure(step.torch_whole)
    return [
        Line("whole step: norm, prepare, adam", ours, 30 * ELEMENTS),
        Line(f"  torch pieces ({pieces / ours:.2f} times ours)", pieces, 30 * ELEMENTS, "2.0 times"),
    ]


class Rows:
    """Logits of one shape; `fresh` is what each run begins with."""

    def __init__(self, shape: tuple[int, int]):
        self.shape = shape
        self.fresh = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 2
        self.logits = self.fresh.clone()
        self.targets = torch.randint(shape[1], (shape[0],), device="cuda")
        self.scale = torch.full((1,), 1 / shape[0], device="cuda")
        self.moved = 4 * shape[0] * shape[1]
        self.label = f"cross-entropy {shape[0]}x{shape[1]} bf16"

    def reset(self) -> None:
        self.logits.copy_(self.fresh)

    def time(self, function: Callable[[], object]) -> float:
        return measure(function, self.reset)


def bench_ours(rows: Rows) -> list[Line]:
    loss = CrossEntropy()
    least = "copy 0.76" if rows.shape in SHAPES[:2] else ""
    _, lses = loss.losses(rows.logits, rows.targets)
    fused = rows.time(lambda: loss.losses_and_gradient_(rows.logits, rows.targets, rows.scale))
    return [
        Line(rows.label, fused, rows.moved, least),
        Line("  losses alone", rows.time(lambda: loss.losses(rows.logits, rows.targets)), rows.moved // 2),
        Line(
            "  gradient alone",
            rows.time(lambda: loss.gradient_(rows.logits, rows.targets, lses, rows.scale)),
            rows.moved,
        ),
    ]


def rivals() -> dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]]:
    found = {
        "F.cross_entropy(logits.float())": (lambda x, t: F.cross_entropy(x.float(), t), "10 times"),
        "F.cross_entropy(logits)": (lambda x, t: F.cross_entropy(x, t), "3.5 times"),
        "torch.compile": (
            torch.compile(lambda x, t: F.cross_entropy(x.float(), t), dynamic=False),
            "2 times",
        ),
    }
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss

        found["Liger"] = (LigerCrossEntropyLoss(), "1.3 times")
    except ImportError:
        print("Liger is not installed: left out", flush=True)
    return found


def time_rival(rows: Rows, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Forward and backward, the gradient not zeroed but made anew."""
    logits = rows.logits.detach().requires_grad_()

    def reset() -> None:
        logits.grad = None
        rows.reset()

    return measure(lambda: function(logits, rows.targets).backward(), reset, 8)


def bench_cross_entropy() -> list[Line]:
    lines: list[Line] = []
    for shape in SHAPES:
        rows = Rows(shape)
        lines += bench_ours(rows)
        ours = lines[-3].ms
        for name, (function, least) in rivals().items():
            try:
                ms = time_rival(rows, function)
                lines.append(Line(f"  {name} ({ms / ours:.2f} times ours)", ms, rows.moved, least))
            except Exception as error:
                print(f"{name} {shape}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()
    return lines


@dataclass(frozen=True)
class Planned(CrossEntropy):
    """The plain loss, rows shared out as told."""

    chosen: Plan = Plan(1, 256, 0)

    def _plan(self, logits: torch.Tensor) -> Plan:
        return self.chosen


def sweep_shape(rows: Rows, limit: int) -> list[Line]:
    def line(chosen: Plan) -> Line:
        loss = Planned(chosen=chosen)
        ms = measure(lambda: loss.losses_and_gradient_(rows.logits, rows.targets, rows.scale), rows.reset, 5)
        return Line(f"{rows.label} {tuple(chosen)}", ms, rows.moved)

    lines = []
    for cluster in (1, 2, 4, 8):
        share = -(-(rows.shape[1] * 2 + 16) // (16 * cluster))
        whole = min(share, (limit - cross_entropy.SCRATCH) // 16)
        lines += [line(Plan(cluster, threads, whole)) for threads in (128, 256, 512, 1024)]
        lines.append(line(Plan(cluster, 512, 0)))
    used = line(cross_entropy.plan(rows.shape[1] * 2, True, limit))
    return [*sorted(lines, key=lambda line: line.ms)[:6], used._replace(least="(in use)")]


def bench_sweep() -> list[Line]:
    """The fused kernel over (cluster, threads, stage): all that fits staged, or nothing."""
    limit = cross_entropy.shared_memory_limit(torch.device("cuda", 0))
    return [line for shape in SHAPES for line in sweep_shape(Rows(shape), limit)]


def show(lines: list[Line], copy: float) -> None:
    print(f"{'':58} {'ms':>8} {'GB/s':>7} {'of copy':>7}  at least")
    for line in lines:
        speed = line.moved / line.ms / 1e6
        print(f"{line.name:58} {line.ms:8.3f} {speed:7.0f} {speed / copy:7.2f}  {line.least}")


def main() -> int:
    parts = {
        "norm": bench_norm,
        "adam": bench_adam,
        "step": bench_step,
        "cross_entropy": bench_cross_entropy,
        "sweep": bench_sweep,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(parts))
    parser.add_argument("--json", help="write the measurements to this file")
    options = parser.parse_args()
    chosen = options.parts or list(parts)[:-1]
    if unknown := set(chosen) - set(parts):
        parser.error(f"no part named {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    name = torch.cuda.get_device_name()
    copy = copy_speed()
    lines, failed = [], []
    for part in chosen:
        start = time.monotonic()
        try:
            lines += parts[part]()
        except Exception:
            failed.append(part)
            traceback.print_exc()
        torch.cuda.empty_cache()
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{name}, torch {torch.__version__}; device copy {copy:.0f} GB/s")
    show(lines, copy)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "device": name,
                    "torch": torch.__version__,
                    "copy_gb_s": copy,
                    "lines": [line._asdict() for line in lines],
                },
                file,
                indent=1,
            )
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
