"""Measure AdamOffloadOptimizer, compared with PCIe and the CPU, and the time that it adds to a training step."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from measuring import Line, measure

import hf_bmtrain as bmt
from hf_bmtrain.engine.base.pinned import pinned_bytes

ELEMENTS = 1 << 28
KINDS = {10: (torch.bfloat16, torch.float32), 8: (torch.bfloat16, torch.bfloat16), 12: (torch.float16, torch.float32)}
"""{bytes of state per element that are transferred in each direction: (dtype of weights, dtype of exp_avg)}."""
WIDTH, LAYERS, VOCABULARY = 2048, 28, 32000  # 1.48 B parameters; with the head 1.54 B
BATCH, LENGTH = 4, 1024


def duplex_speed() -> float:
    """Return the GB/s in each direction of simultaneous copies between page-locked memory and the device."""
    size = 1 << 30
    device = torch.device("cuda", torch.cuda.current_device())
    hosts = [pinned_bytes(size, device, "the bench") for _ in range(2)]
    here = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(4):
            with torch.cuda.stream(streams[0]):
                here[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                hosts[1].copy_(here[1], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return 4 * size / measure(both, repeats=5) / 1e6


def time_offload(weight: torch.dtype, exp_avg: torch.dtype) -> float:
    """Return the milliseconds, by the host's clock, of a step of AdamOffloadOptimizer that updates ELEMENTS weights.

    This is the fastest of five steps. The time ends when the GPU has received the last updated weight.

    Args:
        weight: the dtype of the weights and their gradients.
        exp_avg: the dtype of Adam's first moment.
    """
    parameter = torch.nn.Parameter(torch.randn(ELEMENTS, device="cuda").to(weight))
    parameter.grad = torch.randn_like(parameter)
    optimizer = bmt.optim.AdamOffloadOptimizer([parameter], lr=1e-4, weight_decay=0.1, exp_avg_dtype=exp_avg)
    return best(optimizer.step, 5)


def torch_adamw(master: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    """Run torch's fused AdamW in float32 on all cores of the CPU."""
    torch._fused_adamw_(
        [master], [grad], [exp_avg], [exp_avg_sq], [], [torch.ones(())], lr=1e-4, beta1=0.9, beta2=0.95,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def time_torch_on_cpu() -> float:
    """Return the milliseconds of torch's AdamW on ELEMENTS weights in host memory, without copies."""
    tensors = [torch.zeros(ELEMENTS).uniform_(0, 1) for _ in range(4)]
    return best(lambda: torch_adamw(*tensors), 3)


def time_torch_with_copies() -> float:
    """Return the milliseconds of torch's AdamW on the CPU, with copies of gradients from and weights to the GPU."""
    master, wide, exp_avg, exp_avg_sq = (torch.zeros(ELEMENTS).uniform_(0, 1) for _ in range(4))
    gradient, weight = (torch.randn(ELEMENTS, device="cuda").bfloat16() for _ in range(2))
    down, up = (torch.empty(ELEMENTS, dtype=torch.bfloat16, pin_memory=True) for _ in range(2))

    def step() -> None:
        down.copy_(gradient)
        wide.copy_(down)
        torch_adamw(master, wide, exp_avg, exp_avg_sq)
        up.copy_(master)
        weight.copy_(up)

    return best(step, 3)


def best(function: Callable[[], object], repeats: int) -> float:
    """Return the minimum milliseconds, by the host's clock, until the device has finished the work of `function`."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times[1:])


def bench_offload() -> list[Line]:
    """Measure the offloaded update, and torch's AdamW on the CPU. GB/s count both directions.

    torch's times are printed as multiples of ours with bfloat16 weights, for a float32 and for a bfloat16 exp_avg.
    """
    duplex, lines, streamed = duplex_speed(), [], {}
    for size, kind in KINDS.items():
        streamed[size] = time_offload(*kind)
        gc.collect()
        share = size * ELEMENTS / streamed[size] / 1e6 / duplex
        name = f"offload, {size} bytes an element ({share:.2f} of duplex PCIe)"
        lines.append(Line(name, streamed[size], 2 * size * ELEMENTS, "duplex 0.85"))
        lines.append(Line("  PCIe, both ways at once", size * ELEMENTS / duplex / 1e6, 2 * size * ELEMENTS))
    threads = torch.get_num_threads()
    others = {
        f"torch's AdamW on {threads} threads and its copies": time_torch_with_copies(),
        f"torch's AdamW on {threads} threads, nothing copied": time_torch_on_cpu(),
    }
    for name, ms in others.items():
        lines.append(Line(f"{name} ({ms / streamed[10]:.2f} and {ms / streamed[8]:.2f} times)", ms))
    return lines


class Model(torch.nn.Module):
    """A model of pre-norm transformer layers between an embedding and a head. Its forward returns the loss."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, width // 128, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@contextmanager
def training(make: Callable, width: int, layers: int, vocabulary: int, device: str) -> Iterator[tuple]:
    """Create a sharded bfloat16 `Model` and its optimizer, for `time_steps`.

    The context manager yields (model, optimizer, manager), where `manager` is the OptimManager. At exit, it drops its
    own references to them, and runs Python's garbage collector. Their memory is not freed before the caller drops the
    tuple.

    Args:
        make: the optimizer's class, such as bmt.optim.AdamOptimizer.
        width: the model's number of features.
        layers: the number of transformer layers.
        vocabulary: the number of tokens in the vocabulary.
        device: the device on which the model is created, such as "cuda".
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(width, layers, vocabulary).bfloat16()
    model = bmt.auto_wrap(model)
    optimizer = make(model.parameters(), lr=1e-4)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    yield model, optimizer, manager
    del model, optimizer, manager
    gc.collect()


def without_update(model, optimizer, manager, ids: torch.Tensor) -> None:
    """Run a training step without its update: forward, backward and gradient clipping."""
    manager.zero_grad()
    manager.backward(model(ids))
    manager.clip_grad_norm(optimizer.param_groups, 1.0)


def clipped(model, optimizer, manager, ids: torch.Tensor) -> None:
    without_update(model, optimizer, manager, ids)
    manager.step()


def in_backward(model, optimizer, manager, ids: torch.Tensor) -> None:
    """Run a training step that updates the weights during the backward, without gradient clipping.

    The gradient norm is still computed, to check that it is finite.
    """
    manager.zero_grad()
    with optimizer.update_in_backward():
        manager.backward(model(ids))
    manager.step()


def time_steps(step: Callable, trained: tuple, ids: torch.Tensor, steps: int) -> float:
    """Return the mean milliseconds per step of `steps` consecutive training steps, after three that are not measured.

    Args:
        step: the function that runs a step, such as `in_backward`. It gets (model, optimizer, manager, ids).
        trained: the tuple (model, optimizer, manager) that `training` yields.
        ids: (batch, length), the token ids of each step's batch.
        steps: the number of measured steps.
    """
    for number in range(steps + 3):
        if number == 3:
            bmt.synchronize()
            start = time.perf_counter()
        step(*trained, ids)
    bmt.synchronize()
    return 1e3 * (time.perf_counter() - start) / steps


def exposed(sizes: tuple[int, int, int], shape: tuple[int, int], device: str, steps: int = 10) -> list[Line]:
    """Measure a training step without an update, and then with each of three kinds of update.

    The step without an update consists of forward, backward and gradient clipping. The updates are those of
    AdamOptimizer and AdamOffloadOptimizer after clipping, and that of AdamOffloadOptimizer during the backward, without
    clipping.

    Args:
        sizes: (width, layers, vocabulary) of the model.
        shape: (batch, length) of the token ids.
        device: the device of the model and the token ids, such as "cuda".
        steps: the number of steps that are measured each time.

    Returns:
        One Line (of the printed table) for each of the four steps. The name of each line with an update contains the
        exposed time: how much longer the step takes than without an update.
    """
    adam, offload = bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer
    ways = {
        "with the resident update": (adam, clipped),
        "with the offloaded update": (offload, clipped),
        "with the offloaded update during the backward, not clipped": (offload, in_backward),
    }
    ids = torch.randint(sizes[-1], shape, device=device)
    with training(adam, *sizes, device) as trained:
        count = sum(p.full_shape.numel() for p in trained[0].parameters())
        bare = time_steps(without_update, trained, ids, steps)
    lines = [Line(f"step of {count / 1e9:.2f} B parameters without the update", bare)]
    for name, (make, step) in ways.items():
        with training(make, *sizes, device) as trained:
            taken = time_steps(step, trained, ids, steps)
        lines.append(Line(f"  {name} ({taken - bare:.1f} ms exposed)", taken))
    return lines


def bench_exposed() -> list[Line]:
    bmt.init_distributed()
    return exposed((WIDTH, LAYERS, VOCABULARY), (BATCH, LENGTH), "cuda")
