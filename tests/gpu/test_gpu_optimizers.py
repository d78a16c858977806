"""AdamOptimizer and OptimManager on one GPU: against torch.optim.AdamW, without waiting."""

import gc
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from float_masters import FloatMasters
from hf_bmtrain.engine.base import launch
from ranks import Ranks
from trainee import Trainee
from twenty_steps import OPTIONS, groups, train
from twins import Tower

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Twin(Trainee):
    """A tower with AdamOptimizer."""

    def __init__(self, dtype, loss_scale=None, cls=bmt.optim.AdamOptimizer, **options):
        model = bmt.auto_wrap(Tower().to(dtype))
        optimizer = cls(groups(model.named_parameters()), **OPTIONS, **options)
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


def a_tensor_lr_on_the_device():
    """It is read there at every step, as the number would be."""
    lr = torch.tensor(1e-2, device="cuda")
    by_number, by_tensor = Twin(torch.bfloat16), Twin(torch.bfloat16)
    by_tensor.optimizer.param_groups[0]["lr"] = lr
    for step, rate in enumerate((1e-2, 5e-2, 1e-3)):
        lr.fill_(rate)
        by_number.optimizer.param_groups[0]["lr"] = lr.item()
        for twin in (by_number, by_tensor):
            twin.backward(step)
            twin.end_step()
        assert all(torch.equal(a, b) for a, b in zip(by_number.state(), by_tensor.state()))


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
    twin.model.head.weight.grad[1, 3] = float("inf")
    twin.end_step()
    assert all(torch.equal(a, b) for a, b in zip(twin.state(), before))
    assert twin.manager.loss_scale == 512.0


def slice_norms(dtype):
    twin = Twin(dtype)
    for step in range(3):
        twin.backward(step)
        for name, p in twin.model.named_parameters():
            expected = p.gather_gradient().float().norm()
            torch.testing.assert_close(p.grad.norm(), expected, rtol=1e-2, atol=0, msg=name)
        total = torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 1.0)
        torch.testing.assert_close(twin.end_step(), torch.ones_like(total).float(), rtol=1e-2, atol=0)


def shown(optimizer) -> list[torch.Tensor]:
    held = sorted(optimizer.state_dict()["state"].items())
    return [value.cpu() for _, state in held for _, value in sorted(state.items())]


def as_by_float32_masters(exp_avg_dtype):
    """Slices: a skipped step, masked weights, a frozen layer; weights and states bit by bit."""
    twins = [
        Twin(torch.bfloat16, 1024.0, cls=cls, exp_avg_dtype=exp_avg_dtype)
        for cls in (FloatMasters, bmt.optim.AdamOptimizer)
    ]
    for step in range(24):
        for twin in twins:
            twin.model.layers[1].linear.requires_grad_(step not in (9, 10, 16))
            twin.backward(step)
            if step == 5:
                twin.model.head.weight.grad[1, 3] = float("inf")
            twin.end_step()
            if step in (7, 9):
                for p in twin.model.parameters():
                    p.data.mul_(torch.arange(p.numel(), device="cuda") % 3 > 0)
        results = [[p.detach().cpu() for p in twin.model.parameters()] + shown(twin.optimizer) for twin in twins]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), step
    assert all("residual" in held for held in twins[1].optimizer.state.values())


def as_by_torch(exp_avg_dtype):
    """Four million elements, ties among them: the bits of float32 masters, and torch's masters but for rounding."""
    torch.manual_seed(0)
    start = torch.randn(1 << 22, device="cuda").bfloat16()
    kinds = bmt.optim.AdamOptimizer, FloatMasters
    weights = [torch.nn.Parameter(start.clone()) for _ in kinds]
    optimizers = [kind([w], lr=1e-2, **OPTIONS, exp_avg_dtype=exp_avg_dtype) for kind, w in zip(kinds, weights)]
    master = torch.nn.Parameter(start.float())
    plain = torch.optim.AdamW([master], lr=1e-2, **OPTIONS)
    ties = 0
    for _ in range(20):
        gradient = torch.randn_like(start)
        for w, optimizer in zip(weights, optimizers):
            w.grad = gradient
            optimizer.step()
        master.grad = gradient.float()
        plain.step()
        ties += int(torch.signbit(optimizers[0].state[weights[0]]["exp_avg_sq"]).sum())
        assert torch.equal(*weights)
    assert ties > 100
    ours, floats = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert ours["master"].device.type == ours["exp_avg_sq"].device.type == "cpu"
    assert [*ours] == [*floats] and all(torch.equal(ours[name].cpu(), floats[name].cpu()) for name in ours)
    if exp_avg_dtype == torch.float32:
        torch.testing.assert_close(ours["master"].cuda(), master.detach(), rtol=1e-5, atol=1e-6)
        ulp = torch.finfo(torch.bfloat16).eps * master.abs()
        assert bool(((weights[0].float() - master).abs() <= 0.51 * ulp + 1e-6).all())


def bytes_of_state(cls, exp_avg_dtype, expected):
    """On the device an element: at rest; while a state dict is made; and while one is loaded and taken over."""
    gc.collect()  # nothing of an earlier case goes meanwhile
    n = 1 << 26
    weight = torch.nn.Parameter(torch.ones(n, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    start = torch.cuda.memory_allocated()
    optimizer = cls([weight], exp_avg_dtype=exp_avg_dtype)
    optimizer.step()
    rest = torch.cuda.memory_allocated()
    assert expected <= (rest - start) / n < expected + 0.01
    if cls is FloatMasters:
        return
    torch.cuda.reset_peak_memory_stats()
    state = optimizer.state_dict()
    assert (torch.cuda.max_memory_allocated() - rest) / n < 1.5
    saved = {**state, "state": torch.utils._pytree.tree_map(lambda value: value.cpu(), state["state"])}
    del optimizer, state
    gc.collect()
    assert torch.cuda.memory_allocated() == start
    optimizer = cls([weight], exp_avg_dtype=exp_avg_dtype)
    optimizer.load_state_dict(saved)
    assert torch.cuda.memory_allocated() == start
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    assert (torch.cuda.max_memory_allocated() - start) / n < expected + 4 + 2 + 1.5  # a master on its way, its weight


def a_state_moves_between_devices():
    """From the GPU to the CPU and back: with learning rate 0 a step keeps the masters."""
    weight = torch.nn.Parameter(torch.linspace(-3, 3, 10_001, device="cuda").bfloat16())
    optimizer = bmt.optim.AdamOptimizer([weight], lr=1e-2)
    for step in range(3):
        weight.grad = weight.detach().cos() * (step + 1)
        optimizer.step()
    state = optimizer.state_dict()
    master = state["state"][0]["master"]
    assert not torch.equal(master, master.bfloat16().float())
    for device in ("cpu", "cuda", "cpu"):
        other = torch.nn.Parameter(weight.detach().to(device))
        optimizer = bmt.optim.AdamOptimizer([other])
        optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] = 0.0
        other.grad = torch.zeros_like(other)
        optimizer.step()
        assert torch.equal(other.cpu(), weight.cpu())
        assert ("residual" in optimizer.state[other]) == (device == "cuda")
        state = optimizer.state_dict()
        assert torch.equal(state["state"][0]["master"], master)


def clipping_by_torch(dtype):
    """Gradients of torch's clipping have the bits that it gives plain tensors, by one kernel for many of them."""
    twin = Twin(dtype)
    twin.backward(0)
    gradients = [p.grad for p in twin.model.parameters()]
    plain = [gradient.part.clone() for gradient in gradients]
    factor = torch.tensor(0.3, device="cuda")
    torch._foreach_mul_(plain, factor)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler, torch.no_grad():
        torch._foreach_mul_(gradients, factor)
        torch.cuda.synchronize()
    assert all(torch.equal(gradient.part, expected) for gradient, expected in zip(gradients, plain))
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("multi_tensor_apply" in name for name in kernels) == 1 and len(kernels) <= 2, kernels


CASES = [
    *((clipping_by_torch, dtype) for dtype in DTYPES), *((twenty_steps, dtype) for dtype in DTYPES),
    (a_tensor_lr_on_the_device,), (never_waits, None), (never_waits, 1024.0),
    (settings_travel_in_order,), *((overflow_is_skipped, dtype) for dtype in DTYPES),
    *((slice_norms, dtype) for dtype in DTYPES),
    *((case, m) for case in (as_by_float32_masters, as_by_torch) for m in (torch.float32, torch.bfloat16)),
    (bytes_of_state, bmt.optim.AdamOptimizer, torch.float32, 10), (bytes_of_state, FloatMasters, torch.float32, 12),
    (bytes_of_state, bmt.optim.AdamOptimizer, torch.bfloat16, 8), (a_state_moves_between_devices,),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case))
def test_one_gpu(gpu: Ranks, case) -> None:
    gpu(*case)
