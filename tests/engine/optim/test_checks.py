"""Which optimizers may update slices, found out by trying them; and those from before the wrapping, which may not."""

import copy
from unittest import mock

import pytest
import torch
from torch import optim

import hf_bmtrain as bmt
from cases import by_default, full, in_full, rows_by_default, rows_in_full
from hf_bmtrain.engine.optim import compat as checks
from ranks import on_ranks
from twins import Tower, ids

ELEMENT_WISE = [
    (optim.SGD, {"lr": 0.1}), (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True}), (optim.Adam, {"lr": torch.tensor(1e-3)}), (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True, "lr": 0.0}), (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {}), (optim.Adadelta, {}), (optim.NAdam, {}), (optim.RAdam, {}), (optim.Adamax, {}),
    (optim.Rprop, {}), (optim.ASGD, {}),
]  # fmt: skip


class Lamb(optim.Optimizer):
    """Steps as long as the weights of a whole parameter: not the same on a part of it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                direction = p.grad.as_subclass(torch.Tensor)
                if p.numel():
                    p.sub_(group["lr"] * direction * p.norm() / direction.norm().clamp_min(1e-9))


class WithoutClosure(Lamb):
    def step(self):
        Lamb.step(self)


class NeedsAGpu(optim.SGD):
    def step(self, closure=None):
        if all(type(p) is torch.nn.Parameter for group in self.param_groups for p in group["params"]):
            raise RuntimeError("no kernel for the CPU")
        return super().step(closure)


class NeedsPlainParameters(optim.SGD):
    """Steps by functions that a sharded parameter lacks, as one that torch compiles does."""

    def step(self, closure=None):
        if any(type(p) is not torch.nn.Parameter for group in self.param_groups for p in group["params"]):
            raise RuntimeError("unknown class of tensor\nin a long trace")
        return super().step(closure)


class ScheduleFree(optim.SGD):
    """Steps in its train mode alone."""

    in_training = False

    def train(self):
        self.in_training = True

    def step(self, closure=None):
        if not self.in_training:
            raise RuntimeError("not in train mode")
        return super().step(closure)


def step(model, optimizer):
    model(ids(0, bmt.rank())).backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(lambda: torch.zeros(()))
    return any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))


def refused(make, match):
    model = bmt.auto_wrap(Tower())
    with pytest.raises((TypeError, ValueError), match=match):
        step(model, make(model.parameters()))


def lamb_in_one_of_two_groups():
    """Every parameter group is tried with its own options, also after one that could not be tried."""

    class Half(Lamb):
        fails = False

        def __init__(self, params, lr=0.1, lamb=None):
            super().__init__(params, lr)

        def step(self, closure=None):
            lamb, sgd = ([g for g in self.param_groups if g["lamb"] is on] for on in (True, False))
            for group in sgd:
                for p in group["params"]:
                    if self.fails and type(p) is torch.nn.Parameter:
                        raise RuntimeError("no kernel for the CPU")
                    p.data.sub_(p.grad.as_subclass(torch.Tensor))
            kept, self.param_groups = self.param_groups, lamb
            super().step(closure)
            self.param_groups = kept

    model = bmt.auto_wrap(Tower())
    groups = [
        {"params": list(model.layers.parameters()), "lamb": False},
        {"params": list(model.head.parameters()), "lamb": True},
    ]
    for Half.fails in (False, True):
        with pytest.raises(TypeError, match="Half depends on the shapes"):
            step(model, Half(groups))


def lamb_in_a_group_that_is_added_later():
    class Chosen(optim.Optimizer):
        """Steps as SGD does or, in groups with the option `lamb`, in the gradient's direction."""

        def __init__(self, params, lr=0.1, lamb=False):
            super().__init__(params, {"lr": lr, "lamb": lamb})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    length = p.grad.as_subclass(torch.Tensor).norm() if group["lamb"] else 1.0
                    p.sub_(group["lr"] * p.grad / length)

    model = bmt.auto_wrap(Tower())
    optimizer = Chosen(model.layers.parameters())
    assert step(model, optimizer)
    with mock.patch.object(checks, "_movement", wraps=checks._movement) as trial:
        optimizer.param_groups[0]["params"].pop()
        assert step(model, optimizer) and not trial.called  # the group was tried already
    optimizer.add_param_group({"params": list(model.head.parameters()), "lamb": True})
    for _ in range(2):
        with pytest.raises(TypeError, match="Chosen depends on the shapes"):
            step(model, optimizer)
    # a group in the place of another one
    optimizer.param_groups = [{**optimizer.param_groups[0], "lamb": True}]
    with pytest.raises(TypeError, match="Chosen depends on the shapes"):
        step(model, optimizer)


def unknown_is_let_through_with_a_warning():
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hf_bmtrain").addHandler(handler)
    model = bmt.auto_wrap(Tower())
    assert step(model, NeedsAGpu(model.parameters(), lr=0.1))
    logging.getLogger("hf_bmtrain").removeHandler(handler)
    assert "NeedsAGpu could not be tested on a small matrix (no kernel for the CPU)" in records[0].getMessage()


def tried_in_its_train_mode():
    model = bmt.auto_wrap(Tower())
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    optimizer.train()
    with mock.patch.object(checks, "_log") as log:
        assert step(model, optimizer)
    log.warning.assert_not_called()


class CountsInItsGroup(optim.SGD):
    """Counts its steps in a tensor of its group, as StableAdamW does, which also acts."""

    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("count", torch.zeros(())).add_(1)
            group["lr"] = 0.1 / group["count"].item()
        return super().step(closure)


def a_counter_in_the_group_is_not_touched():
    model = bmt.auto_wrap(Tower())
    optimizer = CountsInItsGroup(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["count"] = torch.tensor(4.0)  # as after a load
    assert step(model, optimizer)
    assert optimizer.param_groups[0]["count"] == 5


def one_that_fails_on_sharded_parameters_is_named():
    model = bmt.auto_wrap(Tower())
    message = (
        r"NeedsPlainParameters does not work with sharded parameters \(.*unknown class of tensor\)\. .*state_bits=8"
    )
    with pytest.raises(TypeError, match=message):
        step(model, NeedsPlainParameters(model.parameters(), lr=0.1))


def scheduled_optimizer():
    """A scheduler wraps `step`; the trial does not go through it."""
    model = bmt.auto_wrap(Tower())
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    assert step(model, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def sgd(parameters):
    return optim.SGD(list(parameters), lr=0.1)


def wrapped_after_steps():
    """An optimizer that has stepped, even alongside another wrapped model, does not train what is wrapped since."""
    model, other = Tower(), bmt.auto_wrap(Tower())
    alone, mixed = sgd(model.parameters()), sgd([*model.head.parameters(), *other.parameters()])
    for _ in range(2):
        for each in (model, other):
            each(ids(0, 0)).backward()
        alone.step()
        mixed.step()
    bmt.auto_wrap(model)
    for optimizer, number in ((alone, "12 of 12"), (mixed, "2 of 14")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"SGD has parameters from before .*{number}"):
                optimizer.step()


def checked_once():
    """What is per parameter is done in the first step, and again where groups have changed."""
    model = bmt.auto_wrap(Tower())
    optimizer = sgd(model.parameters())
    step(model, optimizer)
    with mock.patch.object(checks, "check", wraps=checks.check) as check:
        for _ in range(3):
            step(model, optimizer)
        assert not check.called
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        step(model, optimizer)
        assert check.call_count == 1
        optimizer.param_groups[0]["params"] = list(model.layers.parameters())
        step(model, optimizer)
        step(model, optimizer)
        assert check.call_count == 2


@full
@on_ranks(2)
def test_ordinary_parameters():
    """Alongside slices they must have the same gradient on every rank, also nan."""
    for value, alike in ((1.0, True), (float("nan"), True), (float(bmt.rank()), False)):
        model, plain = bmt.auto_wrap(Tower()), torch.nn.Parameter(torch.ones(2))
        optimizer = sgd([*model.parameters(), plain])
        plain.grad = torch.full((2,), value)
        model(ids(0, bmt.rank())).backward()
        if alike:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="nothing averages"):
                optimizer.step()


@pytest.mark.parametrize(
    ("cls", "options"),
    rows_by_default(ELEMENT_WISE, (optim.AdamW, {"fused": True}), (optim.AdamW, {"foreach": True, "lr": 0.0})),
)
@on_ranks(2)
def test_element_wise_ones_are_accepted(cls, options):
    model = bmt.auto_wrap(Tower())
    optimizer = cls(model.parameters(), **options)
    state = set(optimizer.__dict__)
    step(model, optimizer)
    assert set(optimizer.__dict__) - state <= {"full_state", "checked"}
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}  # nothing of the trial is left
    assert all(group["lr"] == options.get("lr", group["lr"]) for group in optimizer.param_groups)


def factored(parameters):
    return optim.Adafactor(parameters, lr=0.1)


def hugging_face_adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=None, relative_step=True, scale_parameter=True, warmup_init=True)


def hugging_face_adafactor_with_a_rate(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=0.1, relative_step=False, scale_parameter=False)


def muon(parameters):
    return optim.Muon([p for p in parameters if p.dim() == 2], lr=0.1)


def lbfgs(parameters):
    return optim.LBFGS(parameters, lr=0.1, max_iter=3)


SHAPE_AWARE = [factored, hugging_face_adafactor, hugging_face_adafactor_with_a_rate, lbfgs]


@pytest.mark.parametrize(
    "make", by_default(SHAPE_AWARE, factored, hugging_face_adafactor), ids=lambda make: make.__name__
)
@on_ranks(2)
def test_shape_aware_ones(make):
    """A parameter and its gradient have the whole's shape, and what is not element-wise is computed on wholes."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    optimizer, plain = make(model.parameters()), make(twin.parameters())
    size = bmt.world_size()

    @torch.enable_grad()
    def mine(step):
        optimizer.zero_grad()
        loss = model(ids(step, bmt.rank()))
        loss.backward()
        return bmt.sum_loss(loss.detach())

    @torch.enable_grad()
    def expected(step):
        plain.zero_grad()
        loss = torch.stack([twin(ids(step, rank)) for rank in range(size)]).mean()
        loss.backward()
        return loss.detach()

    for step in range(4):
        optimizer.step(lambda step=step: mine(step))
        plain.step(lambda step=step: expected(step))
    for parameter, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(parameter.gather().detach(), other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", [1, 2])
@on_ranks(2)
def test_lbfgs_continues_from_its_state(parameters):
    """Its vectors over all parameters are kept whole."""
    model = bmt.auto_wrap(torch.nn.Linear(3, 4, bias=parameters == 2))
    x = torch.arange(6.0).view(2, 3) / 10

    def train(optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return [p.gather().detach() for p in model.parameters()]

    first = lbfgs(model.parameters())
    before = train(first)
    state = copy.deepcopy(first.state_dict())
    expected = train(first)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), before):
            parameter.copy_(values)
    second = lbfgs(model.parameters())
    second.load_state_dict(state)
    torch.testing.assert_close(train(second), expected)


@full
@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 brought it")
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_bfloat16_inside_is_refused(world, size):
    """Muon iterates in bfloat16, from a norm that is rounded otherwise: its steps differ by over 1 %."""
    world(size)(refused, muon, "Muon depends on the shapes")


@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_reductions_of_a_part_are_refused(world, size):
    """On one rank a slice is all of its parameter."""
    world(size)(refused, Lamb, "Lamb depends on the shapes")
    world(size)(refused, WithoutClosure, "WithoutClosure depends on the shapes")
    world(size)(lamb_in_one_of_two_groups)
    world(size)(lamb_in_a_group_that_is_added_later)


@pytest.mark.parametrize(
    "case",
    [
        unknown_is_let_through_with_a_warning, tried_in_its_train_mode, one_that_fails_on_sharded_parameters_is_named,
        a_counter_in_the_group_is_not_touched, scheduled_optimizer, wrapped_after_steps, checked_once,
    ],
    ids=lambda case: case.__name__,
)  # fmt: skip
def test_trial(world, case):
    world(1)(case)
    world(2)(case)


@pytest.mark.parametrize(
    ("kind", "level"),
    [(optim.AdamW, 3), (optim.SGD, 2), *rows_in_full([(optim.Adam, 2), (optim.Adagrad, 3)])],
    ids=lambda value: getattr(value, "__name__", value),
)
@on_ranks(2, full=(1,))
def test_a_fused_step_is_seen(kind, level):
    """Blocks that another forward has left unsharded are all-gathered again: fused optimizers count no writes."""
    model, twin = bmt.auto_wrap(Tower(), zero_level=level, use_checkpoint=False), Tower()
    optimizers = [kind(either.parameters(), lr=0.5, fused=True) for either in (model, twin)]
    versions = [p._version for p in model.parameters()]
    for either, optimizer in zip((model, twin), optimizers):
        either(ids(0, 0)).backward()
        either(ids(1, 0))
        optimizer.step()
    torch.testing.assert_close(model(ids(1, 0)), twin(ids(1, 0)))
    assert all(p._version > version for p, version in zip(model.parameters(), versions))
