"""On two GPUs: gathers and reductions run beside the neighbour's computation, as the profiler's events tell."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from overlap import find_problems
from ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
BLOCKS, WIDTH, ROWS = 8, 2048, 8192
MARK, HEAD_START = 20_000, 100_000_000  # cycles: 10 µs and 50 ms


class _MarkBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(MARK)
        return gradient


class Layer(nn.Module):
    """67 MB in bfloat16, some 0.4 ms of GEMMs; marks where its forward and its backward begin."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        torch.cuda._sleep(MARK)
        return _MarkBackward.apply(x + self.down(torch.relu(self.up(x))))


def trace(step: Callable[[], None]) -> list[dict]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def overlap_of_a_step() -> list[str]:
    object.__setattr__(bmt.current_world(), "poison", False)  # fills are computation too
    layers = bmt.TransformerBlockList(
        [bmt.CheckpointBlock(Layer().bfloat16(), use_checkpoint=False) for _ in range(BLOCKS)]
    )
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def head_start() -> None:
        """What is measured is the device, not how fast the host feeds it, nor how late the other rank is."""
        torch.cuda._sleep(HEAD_START)
        bmt.current_world().reduce.all_reduce(torch.zeros(1, device="cuda")).wait()

    def step() -> None:
        head_start()
        y = layers(x)
        head_start()
        y.backward(x.detach())
        layers.zero_grad()

    for _ in range(2):
        step()
    return find_problems(trace(step), BLOCKS)


@pytest.fixture(params=["collective", "peer"])
def two(request) -> Iterator[Ranks]:
    ranks = Ranks(2, "cuda", request.param)
    yield ranks
    ranks.stop()


def test_transfers_run_beside_the_next_block(two: Ranks) -> None:
    for rank, problems in enumerate(two(overlap_of_a_step)):
        assert problems == [], f"rank {rank}"
