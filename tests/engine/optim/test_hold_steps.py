"""`hold_steps` steps gather moments and move nothing: against Adam written out, in every way a step is made."""

from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full, pairwise
from hf_bmtrain.engine.ops import adam_step
from offloaded import as_on_a_gpu, the_same
from ranks import on_ranks
from twins import Tower, ids

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-6, 0.1
OPTIONS = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
HOLD = 3


class Plain:
    """Adam in plain torch, float32; the first `hold` steps change the moments only."""

    def __init__(self, values, hold):
        self.values = {name: value.detach().to(torch.float32, copy=True) for name, value in values.items()}
        self.m, self.v = ({name: torch.zeros_like(w) for name, w in self.values.items()} for _ in range(2))
        self.t = dict.fromkeys(self.values, 0)
        self.hold = hold

    def step(self, gradients):
        for name, g in gradients.items():
            w, m, v = self.values[name], self.m[name], self.v[name]
            self.t[name] += 1
            m.mul_(BETAS[0]).add_((1 - BETAS[0]) * g)
            v.mul_(BETAS[1]).add_((1 - BETAS[1]) * g * g)
            if self.t[name] > self.hold:
                m_hat, v_hat = m / (1 - BETAS[0] ** self.t[name]), v / (1 - BETAS[1] ** self.t[name])
                w.copy_(w - LR * DECAY * w - LR * m_hat / (v_hat.sqrt() + EPS))


def by_torch():
    return mock.patch.object(adam_step, "kernels_serve", return_value=False)


def by_kernels():
    return mock.patch.object(adam_step, "kernels_serve", return_value=True)


def resident(**options):
    return bmt.optim.AdamOptimizer, options


def offloaded(**options):
    return bmt.optim.AdamOffloadOptimizer, options


WAYS = {
    "torch": (by_torch, resident()),
    "kernels": (by_kernels, resident()),
    "short exp_avg": (by_torch, resident(exp_avg_dtype=torch.bfloat16)),
    "offload on cpu": (by_torch, offloaded()),
    "streamed": (lambda: as_on_a_gpu(3), offloaded()),
}


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def part(parameter, whole):
    return parameter.take(whole).as_subclass(torch.Tensor)


def compare(parameter, state, plain, name, weight, options):
    """Weights (a rounding away in half precision), v and, where it is float32, m."""
    close = {"rtol": 1e-5, "atol": 1e-6, "msg": lambda m: f"{name}: {m}"}
    short = options.get("exp_avg_dtype") == torch.bfloat16
    torch.testing.assert_close(state["exp_avg_sq"], part(parameter, plain.v[name]), **close)
    if short:
        return
    torch.testing.assert_close(state["exp_avg"], part(parameter, plain.m[name]), **close)
    master = plain.values[name]
    if weight.dtype == torch.float32:
        torch.testing.assert_close(weight, master, **close)
    else:
        torch.testing.assert_close(state["master"], part(parameter, master), **close)
        assert ((weight.float() - master).abs() <= 0.51 * torch.finfo(weight.dtype).eps * master.abs() + 1e-6).all()


def make(model, hold):
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), **OPTIONS, hold_steps=hold))
    return manager


def state_without_hold_steps():
    """That of torch's AdamW, or of an earlier version: the optimizer's own number counts, with the loaded steps."""
    parameter, twin = (torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    plain = torch.optim.AdamW([twin], **OPTIONS)
    twin.grad = torch.ones(5)
    plain.step()
    optimizer = bmt.optim.AdamOptimizer([parameter], **OPTIONS, hold_steps=2)
    optimizer.load_state_dict(plain.state_dict())
    start = parameter.detach().clone()
    for held in (True, False):
        parameter.grad = torch.ones(5)
        optimizer.step()
        assert torch.equal(parameter, start) == held
    assert float(optimizer.state[parameter]["step"]) == 3


def of_each_group_and_parameter():
    """A group's own number; a parameter that joins later is held for its own first steps."""
    late, early, free = parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = bmt.optim.AdamOptimizer([{"params": [late, early]}, {"params": [free], "hold_steps": 0}], hold_steps=2)
    moved = []
    for step in range(5):
        for parameter in parameters:
            parameter.grad = None if parameter is late and step < 2 else torch.ones(4)
        before = [parameter.detach().clone() for parameter in parameters]
        optimizer.step()
        moved.append([not torch.equal(a, b) for a, b in zip(before, parameters)])
    assert moved == [[False, False, True]] * 2 + [[False, True, True]] * 2 + [[True, True, True]]


def streamed_bits(dtype, seed):
    """Streamed and resident, by the kernels' references: the same bits, while steps are held and after."""
    with as_on_a_gpu(seed):
        the_same(dtype, hold_steps=4)


@pytest.mark.parametrize(
    ("way", "dtype", "hold"),
    pairwise(
        [
            ("torch", torch.float16, 1),
            ("short exp_avg", torch.float32, HOLD),
            ("streamed", torch.float16, HOLD),
        ],
        list(WAYS),
        [torch.float32, torch.float16, torch.bfloat16],
        [0, 1, HOLD],
    ),
    ids=str,
)
@on_ranks(2)
def test_holds(way, dtype, hold):
    """Eight steps: while held, weights and masters keep their bits; m, v and everything after it are the loop's."""
    patch, (cls, options) = WAYS[way]
    with patch():
        model = bmt.auto_wrap(Tower().to(dtype))
        start = weights(model)
        plain = Plain(dict(Tower().to(dtype).named_parameters()), hold)
        optimizer = cls(model.parameters(), **OPTIONS, hold_steps=hold, **options)
        for step in range(8):
            optimizer.zero_grad()
            model(ids(step, bmt.rank())).backward()
            plain.step({name: p.gather_gradient().float() for name, p in model.named_parameters()})
            optimizer.step()
            state, now = optimizer.state_dict()["state"], weights(model)
            for key, (name, parameter) in enumerate(model.named_parameters()):
                if step < hold:
                    assert torch.equal(now[name], start[name]), (step, name)
                    if dtype != torch.float32:
                        whole = start[name].float()
                        assert torch.equal(state[key]["master"], part(parameter, whole)), (step, name)
                assert float(state[key]["step"]) == step + 1
                compare(parameter, state[key], plain, name, now[name], options)
        assert not torch.equal(now["head.weight"], start["head.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, *in_full(torch.float32)], ids=str)
@pytest.mark.parametrize("way", by_default(WAYS, "torch", "streamed"))
@on_ranks(2)
def test_skipped_steps_are_not_held(way, dtype):
    """The manager skips the second and the fourth of six steps: those held are the other three of the first five."""
    patch, (cls, options) = WAYS[way]
    with patch():
        model = bmt.auto_wrap(Tower().to(dtype))
        optimizer = cls(model.parameters(), **OPTIONS, hold_steps=HOLD, **options)
        manager = bmt.optim.OptimManager(loss_scale=8.0)
        manager.add_optimizer(optimizer)
        start, counts = weights(model), []
        for step in range(6):
            manager.zero_grad()
            bad = step in (1, 3) and bmt.rank() == 0
            manager.backward(model(ids(step, bmt.rank())) * (float("inf") if bad else 1.0))
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
            same = [torch.equal(value, start[name]) for name, value in weights(model).items()]
            assert all(same) if step < 5 else not any(same), step
            counts.append({float(state["step"]) for state in optimizer.state_dict()["state"].values()})
        assert counts == [{1.0}, {1.0}, {2.0}, {2.0}, {3.0}, {4.0}]


@pytest.mark.parametrize("whole", [True, *in_full(False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
@on_ranks(2)
def test_goes_on(dtype, whole):
    """Saved while held and loaded by an optimizer that was told another number: the saved one counts."""
    torch.manual_seed(0)
    models = [bmt.auto_wrap(Tower().to(dtype)) for _ in range(2)]
    managers = [make(model, hold) for model, hold in zip(models, (HOLD, 0))]
    for step in range(6):
        if step == 2:
            state = managers[0].state_dict(gather_opt=whole)
            if whole:
                state = bmt.current_world().control.broadcast_object(state)
            managers[1].load_state_dict(state)
            assert managers[1].optimizers[0].param_groups[0]["hold_steps"] == HOLD
        for model, manager in zip(models, managers):
            if step < 2 and manager is managers[1]:
                continue
            manager.zero_grad()
            manager.backward(model(ids(step, bmt.rank())))
            manager.step()
        same = [torch.equal(a, b) for a, b in zip(*(weights(model).values() for model in models))]
        assert all(same), step
    assert not torch.equal(models[0].state_dict()["head.weight"], Tower().to(dtype).head.weight)


@full
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_streamed_is_the_same(world, size, dtype):
    world(size)(streamed_bits, dtype, 11)


@full
@pytest.mark.parametrize("case", [state_without_hold_steps, of_each_group_and_parameter], ids=lambda c: c.__name__)
def test_ordinary_parameters(case):
    case()


@full
def test_settings_are_checked():
    for cls in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer):
        with pytest.raises(ValueError, match="hold_steps must be finite and at least 0.* hold_steps=-1"):
            cls([torch.nn.Parameter(torch.ones(1))], hold_steps=-1)
