"""Measure our cross-entropy, torch's and Liger's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measuring import Line, measure

from hf_bmtrain.features.loss import cross_entropy
from hf_bmtrain.features.loss.cross_entropy import CrossEntropy, Plan

SHAPES = ((8192, 32000), (4096, 128256), (2048, 256000), (8192, 50257))


class Rows:
    """Logits and targets of one shape. fresh: a copy of the logits, to which they are reset before each repetition."""

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
        print("Liger is not installed, and is skipped", flush=True)
    return found


def time_rival(rows: Rows, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    """Return the median milliseconds of the forward and backward of a rival: another implementation of cross-entropy.

    The time includes the allocation of the logits' gradient, if the rival allocates it. Our kernels need no such
    allocation, because they overwrite the logits with the gradient.

    rows: the logits and targets. The logits are reset before each repetition, which is not measured.
    function: the rival: it takes logits and targets, and returns the loss, on which `backward` is called.
    """
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
    """A cross-entropy whose kernels for the losses (and gradient) use a given plan, so that plans can be compared.

    chosen: the plan: (thread blocks per row, threads per block, 16-byte vectors of the row that a block keeps in shared
        memory).
    """

    chosen: Plan = Plan(1, 256, 0)

    def plan(self, logits: torch.Tensor) -> Plan:
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
    """Measure the fused kernel for combinations of thread blocks per row, threads per block, and shared memory.

    A thread block keeps either as much of its row in shared memory as fits, or nothing.
    """
    limit = cross_entropy.shared_memory_limit(torch.device("cuda", 0))
    return [line for shape in SHAPES for line in sweep_shape(Rows(shape), limit)]
