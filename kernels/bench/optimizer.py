"""Measure the gradient norm, AdamW and a full optimizer step, ours and torch's."""

import torch
from measuring import COPY_BYTES, Line, measure

from hf_bmtrain.engine.ops import adam, eight_bits, grad_norm

ELEMENTS = 1 << 28


def bench_norm() -> list[Line]:
    """Measure the norm of a buffer of COPY_BYTES bytes, the size for which the speed of a copy is measured."""
    moved = COPY_BYTES
    flat, wide = torch.randn(moved // 2, device="cuda").bfloat16(), torch.randn(moved // 4, device="cuda")
    out = torch.zeros(2, dtype=torch.float64, device="cuda")
    segments = grad_norm.Segments([i * (flat.numel() // 300) for i in range(301)], "cuda")
    return [
        Line("norm bf16", measure(lambda: grad_norm.accumulate_squared_norm(flat, out)), moved, "copy 1.00"),
        Line("norm fp32", measure(lambda: grad_norm.accumulate_squared_norm(wide, out)), moved),
        Line(
            "norm bf16, 300 segments",
            measure(lambda: grad_norm.segmented_squared_norm(flat, segments)),
            moved,
        ),
        Line("  torch vector_norm", measure(lambda: torch.linalg.vector_norm(flat, dtype=torch.float32)), moved),
        Line("  torch isfinite().all()", measure(lambda: torch.isfinite(flat).all()), moved),
    ]


class Step:
    """The tensors of one flat parameter, with our AdamW step and torch's. torch's step needs a float32 master."""

    def __init__(
        self,
        grad: torch.dtype,
        exp_avg: torch.dtype,
        weight: torch.dtype | None,
        master: torch.dtype = torch.float32,
    ):
        with torch.device("cuda"):
            self.grad = torch.randn(ELEMENTS).to(grad)
            values = torch.randn(ELEMENTS)
            self.master = values if master == torch.float32 else torch.zeros(ELEMENTS, dtype=master)
            self.exp_avg = torch.zeros(ELEMENTS, dtype=exp_avg)
            self.exp_avg_sq = torch.zeros(ELEMENTS)
            self.weight = None if weight is None else values.to(weight)
            self.squares = torch.zeros(2, dtype=torch.float64)
            self.grad_scale, self.found_inf = torch.ones(1), torch.zeros(1)
            self.hyper = torch.tensor([[1e-4, 0.9, 0.95, 1e-8, 0.1, 0, 0]], dtype=torch.float64)
            self.steps = torch.zeros(1)
            self.records = torch.zeros(1, len(adam.RECORD))
            self.torch_step = torch.ones(())
        self.prepare()

    def prepare(self) -> None:
        adam.adam_prepare(self.grad_scale, self.found_inf, self.hyper, self.steps, self.records)

    def update(self) -> None:
        adam.adam_update(self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.weight, self.records[0])

    def whole(self) -> None:
        self.squares.zero_()
        grad_norm.accumulate_squared_norm(self.grad, self.squares)
        self.grad_scale.copy_((self.squares[:1].sqrt() + 1e-6).clamp(min=1.0))  # clips the gradient to a norm of 1
        self.found_inf.copy_(self.squares[1:])
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
    """Measure AdamW for several dtypes of gradient, exp_avg, weight and master."""
    lines = []
    half, full = torch.bfloat16, torch.float32
    for name, dtypes, moved, least in (
        ("adam bf16 grad and weight", (half, full, half, torch.int16), 26, "copy 0.95"),
        ("adam bf16, bf16 exp_avg", (half, half, half, torch.int16), 22, ""),
        ("adam fp32 grad, bf16 weight", (full, full, half, torch.int16), 28, ""),
        ("adam bf16, float32 master", (half, full, half), 28, ""),
        ("adam fp32", (full, full, None), 28, ""),
    ):
        step = Step(*dtypes)
        lines.append(Line(name, measure(step.update), moved * ELEMENTS, least))
        if dtypes == (full, full, None):
            time_torch = measure(lambda step=step: step.torch_update(step.grad))
            lines.append(Line("  torch _fused_adamw_ fp32", time_torch, moved * ELEMENTS))
        del step
    return lines


def bench_adam8() -> list[Line]:
    """Measure AdamW with 8-bit moments. The bytes of the moments' exponents, 0.125 per element, are not counted."""
    lines = []
    half, full = torch.bfloat16, torch.float32
    for name, dtypes, moved, least in (
        ("8-bit adam, bf16 grad and weight", (half, full, half, torch.int16), 14, "copy 0.9"),
        ("8-bit adam, fp32 grad, bf16 weight", (full, full, half, torch.int16), 16, ""),
        ("8-bit adam, fp32", (full, full, None), 16, ""),
    ):
        step = Step(*dtypes)
        step.exp_avg = step.exp_avg_sq = torch.empty(0)
        moments = eight_bits.Moments.zeros(ELEMENTS, torch.device("cuda"))

        def update(step: Step = step, moments: eight_bits.Moments = moments) -> None:
            eight_bits.adam8_update(step.grad, step.master, moments, step.weight, step.records[0])

        lines.append(Line(name, measure(update), moved * ELEMENTS, least))
        del step, moments, update
    return lines


def bench_step() -> list[Line]:
    """Measure a full step: norm, clipping and AdamW. All GB/s count the bytes that our step must move."""
    half, full, moved = torch.bfloat16, torch.float32, 28 * ELEMENTS
    ours = measure(Step(half, full, half, torch.int16).whole)
    pieces = measure(Step(half, full, half).torch_whole)
    return [
        Line("whole step: norm, prepare, adam", ours, moved),
        Line(f"  torch's operations ({pieces / ours:.2f} times ours)", pieces, moved, "2.0 times"),
    ]
