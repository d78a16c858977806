"""Late streams: `python tests stress [--steps 100]` on two GPUs.

Every cell trains the same steps as they are, a quarter of them once more, which must repeat bitwise, and all of them
with every stream, the computation's and the lanes', pausing at random wherever it has waited for another. Unfilled and
freed buffers hold NaN meanwhile. The losses of every step and the shards after every third are compared bitwise. On
CPU (`--device cpu`) nothing is late.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch import nn

import hf_bmtrain as bmt
from ranks import Ranks

WIDTH, ROWS = 48, 32
PAUSES = (0, 0, 0, 20_000, 400_000)
"""Cycles, up to 0.2 ms: several times what the host needs to queue the next kernel."""


@dataclass(frozen=True)
class Cell:
    zero_level: int
    recompute: bool
    accumulation: int
    frozen: bool
    offload: bool


CELLS = [Cell(*values) for values in itertools.product((2, 3), (False, True), (1, 2), (False, True), (False, True))]
GATHERS = ("collective", "peer")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(7, WIDTH), nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().square().mean()


def train(cell: Cell, steps: int) -> list[torch.Tensor]:
    """`steps` steps from the same beginning, each on data of its own: the bytes of its losses, and of the shards after
    every third."""
    device = bmt.current_world().device
    model = Tower().bfloat16()
    if cell.frozen:
        model.layers[1].requires_grad_(False)
    bmt.auto_wrap(model, zero_level=cell.zero_level, use_checkpoint=cell.recompute)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer_class = bmt.optim.AdamOffloadOptimizer if cell.offload else bmt.optim.AdamOptimizer
    optimizer = optimizer_class(parameters, lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(bmt.rank())
    data = [torch.randn(cell.accumulation, ROWS, 7, generator=generator) for _ in range(steps)]
    record, finite = [], torch.ones((), dtype=torch.bool, device=device)
    for number, batches in enumerate(torch.stack(data).to(device, torch.bfloat16)):
        manager.zero_grad()
        losses = []
        for batch in batches:
            loss = model(batch)
            manager.backward(loss)
            losses.append(loss.detach())
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
        # Reading shards waits for an update that the next forward is otherwise to wait for.
        shards = [parameter.data for parameter in model.parameters()] if number % 3 == 2 else []
        record.append(torch.cat([value.reshape(-1).view(torch.uint8) for value in (*losses, *shards)]))
        finite = finite & torch.stack(losses).isfinite().all()
    assert finite, "what is not filled or freed was computed with"
    return record


@contextmanager
def pausing(seed: int) -> Iterator[None]:
    """A stream that has waited for an event pauses at random before it goes on."""
    chance, wait = random.Random(seed), torch.cuda.Event.wait

    def late(event, stream=None) -> None:
        stream = torch.cuda.current_stream() if stream is None else stream
        wait(event, stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(chance.choice(PAUSES))

    with mock.patch.object(torch.cuda.Event, "wait", late):
        yield


def count_differences(one: list[torch.Tensor], other: list[torch.Tensor]) -> int:
    """Steps of which anything differs in a bit, as far as both runs went."""
    return sum(not torch.equal(*pair) for pair in zip(one, other))


def run_cell(cell: Cell, steps: int, seed: int) -> tuple[int, int]:
    """Steps that differ between two runs as they are, and between one of them and one with pauses."""
    torch.use_deterministic_algorithms(True)
    on_gpu = bmt.current_world().device.type == "cuda"
    first, again = train(cell, steps), train(cell, -(-steps // 4))
    late: AbstractContextManager = pausing(1000 * seed + bmt.rank()) if on_gpu else nullcontext()
    with late:
        paused = train(cell, steps)
    return count_differences(first, again), count_differences(first, paused)


def stress(device: str, steps: int, cells: Sequence[Cell], gathers: Sequence[str], run: Callable = run_cell) -> int:
    """How many steps of all cells and ranks differ; prints those cells, and one line at the end."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for the ranks: what deterministic algorithms ask for
    begin, differing = time.perf_counter(), 0
    for gather in gathers:
        ranks = Ranks(2, device, gather)
        try:
            for number, cell in enumerate(cells):
                for rank, (control, paused) in enumerate(ranks(run, cell, steps, number)):
                    differing += control + paused
                    if control or paused:
                        print(f"{gather}, {cell}, rank {rank}: {control} steps differ without pauses, {paused} with")
        finally:
            ranks.stop()
    seconds = time.perf_counter() - begin
    print(f"{len(cells) * len(gathers)} cells, {steps} repeats, {differing} differ ({seconds:.0f} s)")
    return differing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=100, help="of every run")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="so many cells of each way to gather")
    options = parser.parse_args()
    stride = -(-len(CELLS) // options.cells)
    raise SystemExit(stress(options.device, options.steps, CELLS[::stride], GATHERS) > 0)
