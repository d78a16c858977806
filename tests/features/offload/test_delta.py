"""`record_delta`: the mean and variance of an update over all elements of all ranks, against Adam written out."""

from contextlib import nullcontext

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, pairwise
from hf_bmtrain.features.offload import delta
from offloaded import Trainee, as_on_a_gpu, assert_equal
from ranks import on_ranks
from twenty_steps import OPTIONS
from twins import Tower, ids

WAYS = {
    "on cpu": (nullcontext, {}),
    "short exp_avg": (nullcontext, {"exp_avg_dtype": torch.bfloat16}),
    "streamed": (lambda: as_on_a_gpu(5), {}),
}


def plain_delta(parameter, master, state, gradient, group):
    """δ of one parameter, whole, in float64, from the state before the step."""
    (beta1, beta2), t = group["betas"], float(state["step"]) + 1 if state else 1.0
    m, v = (parameter.placement.gather(state[n]).double() if state else torch.zeros(()).double()
            for n in ("exp_avg", "exp_avg_sq"))  # fmt: skip
    m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
    return (m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"]) + group["weight_decay"] * master).view(-1)


def recorded(way, dtype):
    """Two groups, a loss scale, clipping, a skipped step, a layer that is frozen for a while, held steps, lr 0."""
    patch, options = WAYS[way]
    with patch():
        trainee = Trainee(bmt.optim.AdamOffloadOptimizer, dtype, record_delta=True, hold_steps=1, **options)
        optimizer, model = trainee.optimizer, trainee.model
        assert optimizer.get_avg_delta() == optimizer.get_var_delta() == 0
        seen = []
        for number in range(7):
            model.layers[1].linear.requires_grad_(number not in (4, 5))
            optimizer.param_groups[1]["lr"] = 0.0 if number == 2 else 1e-2
            trainee.manager.zero_grad()
            bad = number == 3 and bmt.rank() == 0
            trainee.manager.backward(model(ids(number, bmt.rank())) * (float("inf") if bad else 1.0))
            norm = trainee.manager.clip_grad_norm(optimizer.param_groups, 0.1)
            scale = min(1.0, 0.1 / (norm.item() + 1e-6)) / 8.0  # the loss scale, before the overflow
            scale = scale * 2 if number > 3 else scale
            expected = []
            optimizer.wait()
            saved = optimizer.state_dict()
            for group, packed in zip(optimizer.param_groups, saved["param_groups"]):
                for parameter, key in zip(group["params"], packed["params"]):
                    if parameter.grad is None:
                        continue
                    state = saved["state"].get(key, {})
                    held = state["master"] if "master" in state else parameter.detach().as_subclass(torch.Tensor)
                    master = parameter.placement.gather(held).double()
                    gradient = parameter.gather_gradient().double() * scale
                    expected.append(plain_delta(parameter, master, state, gradient, group))
            trainee.manager.step()
            seen.append((optimizer.get_avg_delta(), optimizer.get_var_delta()))
            if number == 3:
                assert seen[3] == seen[2]
                continue
            whole = torch.cat(expected)
            assert (whole.numel() < sum(p.full_shape.numel() for p in model.parameters())) == (number in (4, 5))
            expected = whole.mean().item(), whole.var(unbiased=False).item()
            # A bfloat16 exp_avg is rounded at random, without bias, by up to 2⁻⁸ of itself: less in a sum over many.
            rounding = 4 * 2**-8 * whole.numel() ** -0.5 * ("exp_avg_dtype" in options)
            allowed = rounding * whole.square().mean().sqrt().item(), 2 * rounding * expected[1]
            for found, value, margin in zip(seen[-1], expected, allowed):
                assert found == pytest.approx(value, rel=2e-4, abs=margin), number
        assert len({*seen}) == 6
        return seen


@pytest.mark.parametrize(
    ("way", "dtype"),
    pairwise([("on cpu", torch.bfloat16), ("streamed", torch.bfloat16)], list(WAYS), [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_recorded(world, way, dtype):
    results = world(2)(recorded, way, dtype)
    assert all(result == results[0] for result in results)  # over all ranks, and so everyone's


@pytest.mark.parametrize(
    ("way", "dtype"),
    pairwise([("streamed", torch.bfloat16)], list(WAYS), [torch.float32, torch.bfloat16]),
    ids=str,
)
@on_ranks(2)
def test_changes_nothing(way, dtype):
    """The same bits with and without it; without it the answers are 0, as BMTrain's."""
    patch, options = WAYS[way]
    with patch():
        trainees = [Trainee(bmt.optim.AdamOffloadOptimizer, dtype, record_delta=on, **options) for on in (True, False)]
        for number in range(4):
            for trainee in trainees:
                trainee.step(number, backwards=1 + number % 2)
        assert_equal(*trainees, "recorded")
        assert trainees[1].optimizer.get_avg_delta() == trainees[1].optimizer.get_var_delta() == 0
        assert trainees[0].optimizer.get_var_delta() > 0


@full
@on_ranks(2, full=(1,))
def test_ordinary_parameters_count_once():
    torch.manual_seed(0)
    model, values = bmt.auto_wrap(Tower()), torch.randn(3, 2000)
    ordinary = torch.nn.Parameter(values.clone())
    optimizer = bmt.optim.AdamOffloadOptimizer([*model.parameters(), ordinary], **OPTIONS, record_delta=True)
    model(ids(0, 0)).backward()
    ordinary.grad = torch.ones_like(ordinary)
    expected = [ordinary.detach().double().view(-1) * OPTIONS["weight_decay"] + 1 / (1 + OPTIONS["eps"])]
    for p in model.parameters():
        expected.append(
            plain_delta(p, p.gather().double(), {}, p.gather_gradient().double(), optimizer.param_groups[0])
        )
    optimizer.step()
    whole = torch.cat(expected)
    assert optimizer.get_avg_delta() == pytest.approx(whole.mean().item(), rel=1e-5)
    assert optimizer.get_var_delta() == pytest.approx(whole.var(unbiased=False).item(), rel=1e-5)


def test_pieces_are_put_together(monkeypatch):
    """Without a world: nothing but ordinary parameters, in pieces of seven elements."""
    monkeypatch.setattr(delta, "PIECE", 7)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 100))
    optimizer = bmt.optim.AdamOffloadOptimizer([parameter], lr=0.1, eps=1e-3, weight_decay=0.5, record_delta=True)
    parameter.grad = torch.linspace(-2, 2, 100)
    expected = parameter.grad / (parameter.grad.abs() + 1e-3) + 0.5 * parameter.detach()
    optimizer.step()
    assert optimizer.get_avg_delta() == pytest.approx(expected.mean().item(), abs=1e-6)
    assert optimizer.get_var_delta() == pytest.approx(expected.var(unbiased=False).item(), rel=1e-5)
