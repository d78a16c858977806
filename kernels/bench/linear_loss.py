"""Measure a linear layer with its cross-entropy, forward and backward in bfloat16, on one GPU.

    python kernels/bench/linear_loss.py [--rows N --width H --classes V] [--json FILE]

It compares hf_bmtrain, torch and, if they are installed, Liger and cut-cross-entropy. TFLOP/s count three matrix
products (6 N H V). Memory is the peak in addition to the inputs; it includes both gradients. The error of a gradient is
that of its first rows: the norm of their difference from a float32 gradient, divided by the norm of the latter. Then
the cross-entropy alone is measured, with logits as its input. If a case fails, its error is printed and the next one
runs; no case starts after 80 seconds.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from measuring import measure

from hf_bmtrain.loss import cross_entropy, linear_cross_entropy

SECONDS = 80
SHAPES = ((8192, 32000), (4096, 128256))
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of (hidden, weight, targets)
LogitLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Result(NamedTuple):
    """The measurement of one implementation of a linear layer with its cross-entropy, forward and backward.

    Attributes:
        name: the name of the implementation.
        ms: the time in milliseconds.
        tflops: the speed in TFLOP/s, counting three matrix products.
        gb: the peak memory in GB, without the inputs; nan if it was not measured.
        weight_error: the error of the weight's gradient: the norm of its difference from a float32 gradient, divided by
            the norm of the float32 gradient. Only the first rows are compared; nan if it was not measured.
        hidden_error: the same for the gradient of the hidden states.
    """

    name: str
    ms: float
    tflops: float
    gb: float
    weight_error: float
    hidden_error: float


class Problem:
    """Random bfloat16 inputs of a linear layer with its cross-entropy, with which `measure` measures implementations.

    To find the errors of an implementation, `measure` compares its gradients with float32 gradients, which the
    constructor computes. It computes only the first rows (at most 256) of the weight's and of the hidden states'
    gradient, and only these are compared, so that the float32 logits are never needed all at once.

    Args:
        rows: the number of hidden states, each with a target class.
        width: the number of elements of a hidden state.
        classes: the number of classes. The layer's weight has the shape (classes, width).
    """

    def __init__(self, rows: int, width: int, classes: int) -> None:
        torch.manual_seed(0)
        self.flops = 6 * rows * width * classes
        self.hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
        self.weight = (torch.randn(classes, width, device="cuda") * width**-0.5).bfloat16().requires_grad_()
        self.targets = torch.randint(classes, (rows,), device="cuda")
        self.targets[::3] = self.targets[::3] % 100  # some classes are frequent, as in language
        self.some = min(256, rows, classes)
        self.weight_gradient, self.hidden_gradient = self._exact()

    @torch.no_grad()
    def _exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight, some, rows = self.hidden.float(), self.weight.float(), self.some, len(self.targets)
        lses = torch.cat([(part @ weight.t()).logsumexp(1) for part in hidden.split(1024)])
        few_classes = torch.exp(hidden @ weight[:some].t() - lses[:, None])
        few_classes -= (self.targets[:, None] == torch.arange(some, device="cuda")).float()
        few_rows = torch.exp(hidden[:some] @ weight.t() - lses[:some, None])
        few_rows[torch.arange(some, device="cuda"), self.targets[:some]] -= 1
        return few_classes.t() @ hidden / rows, few_rows @ weight / rows

    def forget(self) -> None:
        self.hidden.grad = self.weight.grad = None

    def measure(self, name: str, loss: Loss) -> Result:
        def step() -> None:
            loss(self.hidden, self.weight, self.targets).backward()

        step()  # compiles, and allocates workspaces
        self.forget()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        gb = (torch.cuda.max_memory_allocated() - before) / 1e9
        assert self.weight.grad is not None and self.hidden.grad is not None
        errors = [
            float((gradient[: self.some].float() - exact).norm() / exact.norm())
            for gradient, exact in (
                (self.weight.grad, self.weight_gradient),
                (self.hidden.grad, self.hidden_gradient),
            )
        ]
        ms = measure(step, self.forget, 5)
        self.forget()
        return Result(name, ms, self.flops / ms / 1e9, gb, *errors)


def products(problem: Problem) -> Result:
    """Measure only the three matrix products of a linear layer's forward and backward."""
    hidden, weight = problem.hidden.detach(), problem.weight.detach()

    def step() -> None:
        logits = hidden @ weight.t()
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    ms = measure(step, repeats=5)
    nan = float("nan")
    return Result("three matrix products alone", ms, problem.flops / ms / 1e9, nan, nan, nan)


def linear_losses() -> Iterator[tuple[str, Callable[[], Loss]]]:
    """Yield (name, make) for each implementation of a linear layer with its cross-entropy.

    `make()` returns the implementation, a function of (hidden, weight, targets) that returns the mean loss. It raises
    ImportError if the package with the implementation is not installed.
    """
    for mib in (1024, 512, 2048):
        yield (
            f"linear_cross_entropy, {mib} MiB of logits",
            lambda b=mib << 20: lambda h, w, t: linear_cross_entropy(h, w, t, chunk_bytes=b),
        )
    yield "F.linear, F.cross_entropy(float)", lambda: lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t)
    yield "Liger", lambda: _liger()
    yield "Liger, sums in float32", lambda: _liger(accum_dtype=torch.float32)
    yield "cut-cross-entropy", lambda: _cut()
    yield "cut-cross-entropy, no filter", lambda: _cut(filter_eps=None)
    if hasattr(F, "linear_cross_entropy"):
        yield "F.linear_cross_entropy", lambda: lambda h, w, t: F.linear_cross_entropy(h, w, t)


def _liger(**options) -> Loss:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(**options)
    return lambda h, w, t: loss(w, h, t)


def _cut(**options) -> Loss:
    from cut_cross_entropy import linear_cross_entropy as cut

    return lambda h, w, t: cut(h, w, t, **options)


def logit_losses() -> Iterator[tuple[str, Callable[[], LogitLoss]]]:
    yield "cross_entropy(inplace=True)", lambda: lambda x, t: cross_entropy(x, t, inplace=True)
    yield "cross_entropy", lambda: cross_entropy
    yield "F.cross_entropy(float)", lambda: lambda x, t: F.cross_entropy(x.float(), t)
    yield "Liger", _liger_of_logits


def _liger_of_logits() -> LogitLoss:
    from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()


class Logits(torch.autograd.Function):
    """Returns given logits as if a layer had computed them, so that a loss may overwrite them. Drops their gradient."""

    @staticmethod
    def forward(ctx, leaf: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):
        return None, None


def time_logits(shape: tuple[int, int], loss: LogitLoss) -> float:
    """Return the milliseconds of the loss's forward and backward. The logits are reset before each repetition."""
    torch.manual_seed(0)
    fresh = torch.randn(shape, device="cuda").bfloat16() * 2
    logits, targets = fresh.clone(), torch.randint(shape[1], shape[:1], device="cuda")
    leaf = torch.zeros((), device="cuda", requires_grad=True)
    return measure(lambda: loss(Logits.apply(leaf, logits), targets).backward(), lambda: logits.copy_(fresh), 7)


class Clock:
    """Runs the cases of this benchmark, even if some fail, but starts none later than SECONDS after its creation.

    `attempt` runs a case and returns its result. If the case raises an exception, `attempt` prints it and returns None.
    If it is too late to start the case, `attempt` prints that the case is skipped, and returns None.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()

    def attempt(self, name: str, function: Callable[[], Result | float]) -> Result | float | None:
        elapsed = time.monotonic() - self._start
        if elapsed > SECONDS:
            print(f"{name}: skipped, because {elapsed:.0f} s have passed and the limit is {SECONDS} s", flush=True)
            return None
        try:
            return function()
        except ImportError as error:
            print(f"{name}: not installed ({error})", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        finally:
            torch.cuda.empty_cache()
        return None


def bench_linear(clock: Clock, problem: Problem) -> list[Result]:
    found = [clock.attempt("matrix products", lambda: products(problem))]
    for name, make in linear_losses():
        found.append(clock.attempt(name, lambda: problem.measure(name, make())))  # noqa: B023  (called at once)
        problem.forget()
    return [result for result in found if isinstance(result, Result)]


def bench_logits(clock: Clock) -> list[tuple[str, float, float]]:
    """Return (name, milliseconds, time relative to our in-place loss) of each implementation and shape."""
    lines = []
    for shape in SHAPES:
        ours = float("nan")
        for name, make in logit_losses():
            ms = clock.attempt(name, lambda: time_logits(shape, make()))  # noqa: B023  (called at once)
            if isinstance(ms, float):
                ours = ms if ours != ours else ours
                lines.append((f"{shape[0]}x{shape[1]} {name}", ms, ms / ours))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in (("rows", 8192), ("width", 4096), ("classes", 128256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", help="write the measurements to this file")
    options = parser.parse_args()
    clock = Clock()
    linear = bench_linear(clock, Problem(options.rows, options.width, options.classes))
    logits = bench_logits(clock)
    device = torch.cuda.get_device_name()
    print(f"\n{device}, torch {torch.__version__}; {options.rows}x{options.width}x{options.classes} bfloat16")
    print(f"{'':44} {'ms':>8} {'TFLOP/s':>8} {'peak GB':>8} {'dW error':>9} {'dh error':>9}")
    for r in linear:
        print(f"{r.name:44} {r.ms:8.2f} {r.tflops:8.0f} {r.gb:8.2f} {r.weight_error:9.1e} {r.hidden_error:9.1e}")
    print(f"\n{'cross-entropy alone':44} {'ms':>8} {'of ours':>8}")
    for name, ms, ratio in logits:
        print(f"{name:44} {ms:8.3f} {ratio:8.2f}")
    if options.json:
        with open(options.json, "w") as file:
            measured = {"linear": [r._asdict() for r in linear], "logits": logits}
            json.dump({"device": device, "torch": torch.__version__, **measured}, file, indent=1)


if __name__ == "__main__":
    main()
