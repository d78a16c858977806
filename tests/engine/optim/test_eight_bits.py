"""AdamOptimizer(state_bits=8): independent of the number of ranks, saved and resumed, near AdamW; on a CPU and as on a
GPU, where bfloat16 weights have residuals."""

import copy
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full, pairwise
from hf_bmtrain.engine.ops import adam_step
from ranks import on_ranks
from tiny_models import build
from twins import Tower, ids


def as_on(device):
    """The state is laid out as on a GPU, with residuals, or as on the CPU."""
    return mock.patch.object(adam_step, "kernels_serve", return_value=True) if device == "gpu" else nullcontext()


class Training:
    """A tiny model that gets the same gradients on any number of ranks."""

    def __init__(self, dtype, seed=0, bits=8, **options):
        self.model = bmt.auto_wrap(build("llama", seed=seed).to(dtype))
        self.optimizer = bmt.optim.AdamOptimizer(
            self.model.parameters(), lr=3e-3, betas=(0.8, 0.95), weight_decay=0.1, state_bits=bits, **options
        )

    def train(self, first, last):
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for parameter in self.model.parameters():
                full_gradient = torch.randn(parameter.full_shape, generator=generator) * 0.01
                parameter.grad = parameter.take(full_gradient.to(parameter.dtype)).clone()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self):
        state = self.optimizer.state_dict(gather=True)["state"]
        values = {f"{key} {name}": torch.as_tensor(v) for key, each in state.items() for name, v in each.items()}
        return {**self.model.state_dict(), **values}


def trained(dtype, device, steps):
    with as_on(device):
        training = Training(dtype)
        training.train(0, steps)
        return training.values()


@pytest.mark.parametrize(
    ("dtype", "device"),
    pairwise([(torch.bfloat16, "gpu"), (torch.float32, "cpu")], [torch.float32, torch.bfloat16], ["cpu", "gpu"]),
)
def test_the_bits_do_not_depend_on_the_ranks(world, dtype, device):
    expected = world(2)(trained, dtype, device, 4)[0]
    for size in (1, 3):
        found = world(size)(trained, dtype, device, 4)[0]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def saved(folder, dtype, device):
    """Saved, by save_state and by each rank, after three of six steps; both resumed as if nothing had been."""
    with as_on(device):
        training = Training(dtype)
        training.train(0, 3)
        bmt.save_state(folder, training.model, training.optimizer, step=3)
        state = copy.deepcopy(training.optimizer.state_dict())
        weights = training.model.state_dict()
        training.train(3, 6)
        expected = training.values()
        again = Training(dtype, seed=1)
        again.model.load_state_dict(weights)
        again.optimizer.load_state_dict(state)
        again.train(3, 6)
        found = again.values()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        return expected


def resumed(folder, dtype, device, bits=8):
    with as_on(device):
        training = Training(dtype, seed=2, bits=bits)
        assert bmt.load_state(folder, training.model, training.optimizer).step == 3
        training.train(3, 6)
        return training.values()


@pytest.mark.parametrize(
    ("dtype", "device", "other"),
    pairwise(
        [(torch.bfloat16, "gpu", "gpu"), (torch.float32, "cpu", "cpu")],
        [torch.float32, torch.bfloat16],
        ["cpu", "gpu"],
        ["cpu", "gpu"],
    ),
)
def test_saved_on_two_ranks_and_resumed_on_two_and_three(world, folder, dtype, device, other):
    """Also where masters are kept in another form."""
    expected = world(2)(saved, folder, dtype, device)[0]
    for size in (2, 3):
        found = world(size)(resumed, folder, dtype, other)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if dtype == torch.bfloat16 and device != other:  # residuals miss a last bit
                torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-5, msg=name)
            else:
                assert torch.equal(found[name], value), name


def moved(folder):
    """A checkpoint of one number of bits is resumed with the other."""
    for bits, other in ((8, 32), (32, 8)):
        place = f"{folder}/{bits}"
        first = Training(torch.float32, bits=bits)
        first.train(0, 20)
        bmt.save_state(place, first.model, first.optimizer, step=20)
        before = first.values()
        second = Training(torch.float32, seed=1, bits=other)
        bmt.load_state(place, second.model, second.optimizer)
        second.train(20, 21)
        first.train(20, 21)
        for name, value in first.model.state_dict().items():
            step = (value - before[name]).norm()
            apart = (second.model.state_dict()[name] - value).norm()
            assert apart < 0.2 * step, (bits, name, apart / step)


def test_the_number_of_bits_may_change(world, folder):
    world(2)(moved, folder)


def near_adamw(dtype, device):
    """Accumulated, scaled and clipped, with a skipped step, a frozen layer and a regrouping: updates as AdamW's."""
    with as_on(device):
        model, twin = bmt.auto_wrap(Tower().to(dtype)), Tower().to(dtype)
        options = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), **options, state_bits=8)
        exact = bmt.optim.AdamOptimizer(twin.parameters(), **options)
        manager = bmt.optim.OptimManager(loss_scale=64.0)
        manager.add_optimizer(optimizer)
        start = {name: p.detach().clone() for name, p in twin.named_parameters()}
        for step in range(12):
            for either in (model, twin):
                either.layers[1].linear.requires_grad_(step not in (5, 6))
            scale, bad = manager.loss_scale, step == 3 and bmt.rank() == 0
            for micro in range(2):
                manager.backward(model(ids(10 * micro + step, bmt.rank())) * (float("inf") if bad else 1.0))
            named = dict(model.named_parameters())
            for name, parameter in twin.named_parameters():
                gradient = named[name].gather_gradient()
                parameter.grad = None if gradient is None else (gradient.float() / scale).to(dtype)
            manager.clip_grad_norm(optimizer.param_groups, 1e9)
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            manager.step()
            manager.zero_grad()
            if step == 3:
                assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
            else:
                exact.step()
    movement = [(model.state_dict()[name].float(), twin_p.detach().float(), start[name].float())
                for name, twin_p in twin.named_parameters()]  # fmt: skip
    apart, whole = (
        torch.cat([each.flatten() for each in tensors]).norm()
        for tensors in ([a - b for a, b, _ in movement], [b - c for _, b, c in movement])
    )
    assert apart < 0.1 * whole, apart / whole


@pytest.mark.parametrize(
    ("size", "dtype", "device"),
    pairwise([(2, torch.bfloat16, "gpu")], [1, 2, 3], [torch.float32, torch.float16, torch.bfloat16], ["cpu", "gpu"]),
)
def test_near_adamw(world, size, dtype, device):
    world(size)(near_adamw, dtype, device)


def without_eps(dtype, device):
    """With eps=0 and L2 regularization, elements whose gradients are all 0, as of padding, do not make others nan."""
    with as_on(device):
        model = torch.nn.Linear(5, 7).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(0.2, 0.4)
            model.weight[3] = 0.0
        start = {name: value.clone() for name, value in model.state_dict().items()}
        bmt.auto_wrap(model)
        options = {"lr": 1e-2, "eps": 0.0, "weight_decay": 0.1, "decoupled": False}
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), **options, state_bits=8)
        for _ in range(4):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        for name, value in model.state_dict().items():  # L2 alone: each step moves a weight by about lr towards 0
            expected = start[name] - 0.04 * start[name].sign()
            torch.testing.assert_close(value, expected, rtol=0, atol=0.01, msg=name)


@pytest.mark.parametrize(
    ("dtype", "device"), pairwise([(torch.float32, "cpu")], [torch.float32, torch.bfloat16], ["cpu", "gpu"])
)
def test_without_eps(world, dtype, device):
    world(2)(without_eps, dtype, device)


@full
@on_ranks(2)
def test_deep_copy():
    training = Training(torch.float32)
    training.train(0, 2)
    model, optimizer = copy.deepcopy((training.model, training.optimizer))
    for parameter, twin in zip(training.model.parameters(), model.parameters()):
        gradient = torch.ones(parameter.full_shape)
        parameter.grad, twin.grad = parameter.take(gradient).clone(), gradient
    assert not any(torch.equal(a.gather(), b) for a, b in zip(training.model.parameters(), [*model.parameters()][1:]))
    training.optimizer.step()
    optimizer.step()
    full_values = dict(model.named_parameters())
    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(value, full_values[name].detach(), rtol=0, atol=1e-6)


def test_refusals():
    weights = [torch.nn.Parameter(torch.ones(2))]
    for cls, options, message in (
        (bmt.optim.AdamOptimizer, {"state_bits": 4}, "state_bits must be 32 or 8, got 4"),
        (bmt.optim.AdamOptimizer, {"state_bits": 8, "exp_avg_dtype": torch.bfloat16}, "Leave out exp_avg_dtype"),
        (bmt.optim.AdamOffloadOptimizer, {"state_bits": 8}, "AdamOffloadOptimizer supports only state_bits=32"),
    ):
        with pytest.raises(ValueError, match=message):
            cls(weights, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_bytes(dtype):
    """An element of a float32 weight takes 2.06 bytes, of a bfloat16 weight as on a GPU 4.06."""
    with as_on("gpu"):
        weight = torch.nn.Parameter(torch.ones(64, 32, dtype=dtype))
        optimizer = bmt.optim.AdamOptimizer([weight], state_bits=8)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        (state,) = optimizer.state.values()
        taken = sum(value.nbytes for name, value in state.items() if name != "step") / weight.numel()
    assert taken == (2 + 2 / 32 + (2 if dtype == torch.bfloat16 else 0))
