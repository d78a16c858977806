"""AdamOptimizer and OptimManager on one GPU: against torch.optim.AdamW, in a CUDA graph, without waiting."""

from unittest import mock

import pytest
import torch
from trainee import Trainee

import hf_bmtrain as bmt
from hf_bmtrain.ops import launch
from ranks import Ranks
from twenty_steps import OPTIONS, groups, train
from twins import Tower

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Twin(Trainee):
    """A tower with AdamOptimizer."""

    def __init__(self, dtype, loss_scale=None, **options):
        model = bmt.auto_wrap(Tower().to(dtype))
        optimizer = bmt.optim.AdamOptimizer(groups(model.named_parameters()), **OPTIONS, **options)
        super().__init__(model, optimizer, loss_scale, max_norm=1.0)

    def state(self) -> list[torch.Tensor]:
        held = [value.clone() for state in self.optimizer.state.values() for value in state.values()]
        return [*(p.detach().clone() for p in self.model.parameters()), *held]


def twenty_steps(dtype):
    names = []
    original = launch.Kernel.__call__

    def counting(self, *values, **options):
        names.append(self.name)
        return original(self, *values, **options)

    with mock.patch.object(launch.Kernel, "__call__", counting):
        train(dtype, bmt.optim.AdamOptimizer)
    assert {"adam_prepare", "adam_update", "squared_norm_partials"} <= set(names)
    assert names.count("adam_prepare") == 20


def captured(dtype, loss_scale, exp_avg_dtype):
    eager, graphed = (Twin(dtype, loss_scale, exp_avg_dtype=exp_avg_dtype) for _ in range(2))
    for twin in (eager, graphed):
        twin.backward(0)
        twin.end_step()
        twin.backward(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = graphed.end_step()
    for lr in (1e-2, 1e-2, 3e-3, 2e-2):
        eager.optimizer.param_groups[0]["lr"] = graphed.optimizer.param_groups[0]["lr"] = lr
        expected = eager.end_step()
        graphed.optimizer.send_hyper_parameters()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(norm, expected)
        assert all(torch.equal(a, b) for a, b in zip(eager.state(), graphed.state()))
    assert {float(s["step"]) for s in graphed.optimizer.state.values()} == {5.0}


def captured_with_a_tensor_lr():
    lr = torch.tensor(1e-2, device="cuda")
    eager, graphed = Twin(torch.bfloat16), Twin(torch.bfloat16)
    for twin in (eager, graphed):
        twin.optimizer.param_groups[0]["lr"] = lr
        twin.backward(0)
        twin.end_step()
        twin.backward(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.end_step()
    for rate in (1e-2, 5e-2):
        lr.fill_(rate)
        eager.end_step()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager.state(), graphed.state()))


def a_changed_lr_is_refused_in_a_capture():
    twin = Twin(torch.bfloat16)
    twin.backward(0)
    twin.end_step()
    twin.backward(1)
    twin.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="send_hyper_parameters"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            twin.end_step()


def never_waits(loss_scale):
    Twin(torch.bfloat16, loss_scale).check_never_waits()


def settings_travel_in_order():
    """The host runs 30 steps ahead, each with another lr: as if it had waited after every one."""
    ahead, waiting = Twin(torch.bfloat16), Twin(torch.bfloat16)
    for twin in (ahead, waiting):
        twin.backward(0)
        twin.optimizer.step()
        if twin is ahead:
            torch.cuda._sleep(500_000_000)
        for step in range(30):
            twin.optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            twin.optimizer.step()
            if twin is waiting:
                torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(ahead.state(), waiting.state()))


def overflow_is_skipped(dtype):
    twin = Twin(dtype, 1024.0)
    twin.backward(0)
    twin.end_step()
    before = twin.state()
    twin.backward(1)
    twin.model.head.weight.grad[3] = float("inf")
    twin.end_step()
    assert all(torch.equal(a, b) for a, b in zip(twin.state(), before))
    assert twin.manager.loss_scale == 512.0


def slice_norms(dtype):
    twin = Twin(dtype)
    for step in range(3):
        twin.backward(step)
        for name, p in twin.model.named_parameters():
            torch.testing.assert_close(p.grad.norm(), p.gather_gradient().norm(), rtol=1e-2, atol=0, msg=name)
        total = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
        torch.testing.assert_close(twin.end_step(), torch.ones_like(total).float(), rtol=1e-2, atol=0)


CASES = [
    *((twenty_steps, dtype) for dtype in DTYPES),
    *((captured, d, s, m) for d in DTYPES for s in (None, 1024.0) for m in (torch.float32, torch.bfloat16)),
    (captured_with_a_tensor_lr,), (a_changed_lr_is_refused_in_a_capture,), (never_waits, None), (never_waits, 1024.0),
    (settings_travel_in_order,), *((overflow_is_skipped, dtype) for dtype in DTYPES),
    *((slice_norms, dtype) for dtype in DTYPES),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case))
def test_one_gpu(gpu: Ranks, case) -> None:
    gpu(*case)
