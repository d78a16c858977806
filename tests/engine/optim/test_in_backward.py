"""update_in_backward(): the same bits, made early, or refused; by streams that lag at random."""

import logging
from contextlib import nullcontext
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from float_masters import FloatMasters
from hf_bmtrain.engine.sharding.parameter import DistributedParameter
from inner import note_parts
from log_lines import log_lines
from offloaded import DTYPES, as_on_a_gpu
from ranks import on_ranks
from twenty_steps import OPTIONS, groups
from twins import WIDTH, Tower, ids


class Early:
    """A tower and an ordinary parameter, updated while the last backward of a step runs, or after it."""

    def __init__(self, make, dtype, early, **options):
        self.model = bmt.auto_wrap(Tower().to(dtype))
        self.ordinary = torch.nn.Parameter(torch.ones(3))
        split = groups([*self.model.named_parameters(), ("ordinary", self.ordinary)])
        self.optimizer = make(split, **OPTIONS, **options)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer, bmt.lr_scheduler.Linear(self.optimizer, 1e-2, 0, 50))
        self._early = early
        self.parts = note_parts(self.optimizer)  # (inside a backward, how many runs) of each part of a step

    def updating(self):
        return self.optimizer.update_in_backward() if self._early else nullcontext()

    def backward(self, number, micro=0):
        self.manager.backward(self.model(ids(100 * micro + number, bmt.rank())))

    def step(self, number, backwards=1):
        self.manager.zero_grad()
        for micro in range(backwards - 1):
            self.backward(number, micro)
        with self.updating():
            self.backward(number, backwards - 1)
        self.ordinary.grad = self.ordinary.detach().sin()
        self.manager.step()

    def result(self):
        states = self.optimizer.state_dict()["state"].values()
        held = [value for state in states for _, value in sorted(state.items())]
        return [*self.model.state_dict().values(), self.ordinary.detach().clone(), *held]


def the_same(dtype, **options):
    """With and without accumulation, freezing, a written weight and a load; compared now and then.

    The late one keeps float32 masters, whatever is done early."""
    late = Early(FloatMasters, dtype, False, **options)
    early = Early(bmt.optim.AdamOffloadOptimizer, dtype, True, **options)
    for number in range(10):
        for trainee in (late, early):
            trainee.model.layers[1].linear.requires_grad_(number not in (4, 5))
            trainee.step(number, backwards=1 + number % 2)
            if number == 6:
                with torch.no_grad():
                    trainee.model.head.weight.data.mul_(2)
            if number == 7:
                trainee.optimizer.load_state_dict(trainee.optimizer.state_dict())
        if number in (0, 1, 5, 6, 9):
            assert all(torch.equal(a, b) for a, b in zip(late.result(), early.result(), strict=True)), number
    assert not any(inside for inside, _ in late.parts)
    inside = sum(runs for inside, runs in early.parts if inside)
    assert inside > sum(runs for _, runs in late.parts) / 3  # four of the ten steps are arranged anew
    assert inside + sum(runs for inside, runs in early.parts if not inside) == sum(runs for _, runs in late.parts)


def lagging(dtype, seed, short=False):
    options = {"exp_avg_dtype": torch.bfloat16, "hold_steps": 2} if short else {}
    with as_on_a_gpu(seed) as clock:
        the_same(dtype, **options)
    assert clock.lag > 6, "the streams were never far behind"


def recorded():
    """The moments of a step that the backward has made are those of a step that it has not."""
    late, early = (Early(bmt.optim.AdamOffloadOptimizer, torch.float32, on, record_delta=True) for on in (False, True))
    for number in range(4):
        for trainee in (late, early):
            trainee.step(number)
        a, b = late.optimizer, early.optimizer
        assert a.get_avg_delta() == b.get_avg_delta() and a.get_var_delta() == b.get_var_delta() > 0
    assert sum(inside for inside, _ in early.parts) > 3


def blocks_are_updated_while_others_still_run_backward():
    """When the first layer's gradient is reduced, the last layer's update has begun; after `step` nothing is open."""
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.bfloat16, True)
    trainee.step(0)
    layers = [layer.linear._parameters["weight"] for layer in trainee.model.layers]
    before = layers[2].buffer.version
    seen = []
    handle = layers[0].register_post_accumulate_grad_hook(lambda p: seen.append(layers[2].buffer.version))
    trainee.parts.clear()
    trainee.step(1)
    handle.remove()
    assert seen[0] > before
    buffers = {p.buffer for p in trainee.model.parameters()}
    assert [inside for inside, _ in trainee.parts] == [True] * len(buffers) + [False]
    assert trainee.parts[-1][1] == 1  # the ordinary parameter
    assert not trainee.optimizer.updated_in_backward


def downloads_come_last(seed):
    """State that is still on its way home is not fetched again, whatever the order of the buffers was."""
    results = []
    for alternating in (False, True):
        with as_on_a_gpu(seed) as clock:
            clock.pass_some_time = lambda: None
            clock._random.choice = lambda ready: ready[0]  # uploads first, then updates
            model = bmt.auto_wrap(Tower())
            optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.1)
            for number in range(6):
                with optimizer.update_in_backward() if alternating and number % 2 else nullcontext():
                    model(ids(number, bmt.rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def two_optimizers(seed):
    """Each updates its part of every block."""
    with as_on_a_gpu(seed):
        results = []
        for early in (False, True):
            model = bmt.auto_wrap(Tower())
            decayed, rest = groups(model.named_parameters())
            optimizers = [bmt.optim.AdamOffloadOptimizer([part]) for part in (decayed, rest)]
            for number in range(4):
                contexts = [o.update_in_backward() if early else nullcontext() for o in optimizers]
                with contexts[0], contexts[1]:
                    model(ids(number, bmt.rank())).backward()
                assert [o.updated_in_backward for o in optimizers] == [early and number > 0] * 2
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(model.state_dict())
        assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def a_part_that_is_new_waits_for_the_step():
    """A gradient that comes by hand after the backward is used by `step`, beside what was updated early."""
    results = []
    for early in (False, True):
        trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, early)
        trainee.model.layers[1].gain.requires_grad_(False)
        for number in range(5):
            trainee.manager.zero_grad()
            with trainee.updating():
                trainee.backward(number)
            gain = trainee.model.layers[1].gain
            if number in (2, 3):
                gain.grad = torch.full_like(gain, 0.5)
            trainee.optimizer.step()
        results.append(trainee.result())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def a_neighbour_with_as_many_steps_is_not_taken_for_updated():
    """A gain one step ahead of its neighbour gets a gradient by hand in a step in which that was updated early."""
    results = []
    for early in (False, True):
        model = bmt.auto_wrap(Tower())
        optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.1)
        layer = model.layers[1]
        for number, (gain, linear) in enumerate([(1, 1), (1, 0), (1, 0), (1, 0), (0, 1), (0, 1), (0, 1), (0, 1)]):
            layer.gain.requires_grad_(bool(gain))
            layer.linear.requires_grad_(bool(linear))
            with optimizer.update_in_backward() if early else nullcontext():
                model(ids(number, bmt.rank())).backward()
            if number == 6:
                layer.gain.grad = torch.full_like(layer.gain, 0.5)
                assert (layer.linear.weight in optimizer._early.parameters) is early
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def begun():
    """After a first step, at the end of a backward that has updated."""
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    trainee.step(0)
    trainee.manager.zero_grad()
    with trainee.optimizer.update_in_backward():
        trainee.backward(1)
    assert trainee.optimizer.updated_in_backward
    return trainee


def clipping_comes_too_late():
    trainee = begun()
    with pytest.raises(RuntimeError, match="the optimizer used these gradients during the backward"):
        trainee.manager.clip_grad_norm(trainee.optimizer.param_groups, 1.0)
    torch.nn.utils.clip_grad_norm_(trainee.model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="gradients were changed .* too late"):
        trainee.optimizer.step()


def a_replaced_gradient_comes_too_late():
    trainee = begun()
    weight = trainee.model.head.weight
    weight.grad = weight.grad * 2
    with pytest.raises(RuntimeError, match="gradients were changed"):
        trainee.optimizer.step()


def a_new_lr_comes_too_late():
    trainee = begun()
    trainee.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="lr or another setting .* was changed before step"):
        trainee.optimizer.step()


def a_scaler_comes_too_late():
    trainee = begun()
    trainee.optimizer.grad_scale = torch.tensor(8.0)
    with pytest.raises(RuntimeError, match="received a loss scale or a clip factor"):
        trainee.optimizer.step()


def a_second_backward_is_refused():
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    trainee.step(0)
    trainee.manager.zero_grad()
    with trainee.optimizer.update_in_backward():
        trainee.backward(1)
        with pytest.raises(RuntimeError, match="A second backward inside update_in_backward"):
            trainee.backward(2)
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    trainee.step(0)
    with trainee.optimizer.update_in_backward():
        losses = [trainee.model(ids(number, bmt.rank())) for number in (3, 4)]
        losses[0].backward()
        with pytest.raises(RuntimeError, match="changed between its forward and its backward|changed between the"):
            losses[1].backward()


def twice_before_a_step_is_refused():
    trainee = begun()
    with pytest.raises(RuntimeError, match="entered again before step"):
        with trainee.optimizer.update_in_backward():
            pass


def a_loss_scale_is_refused():
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    bmt.optim.OptimManager(loss_scale=8.0).add_optimizer(trainee.optimizer)
    with pytest.raises(ValueError, match="with a loss scale"):
        with trainee.optimizer.update_in_backward():
            pass


def spoilt_weights_are_told():
    """An inf on one rank is in the weights: every rank says so."""
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    trainee.step(0)
    trainee.manager.zero_grad()
    with trainee.optimizer.update_in_backward():
        loss = trainee.model(ids(0, 0)) * (float("inf") if bmt.rank() == 0 else 1.0)
        trainee.manager.backward(loss)
    with pytest.raises(RuntimeError, match="The weights are wrong now"):
        trainee.manager.step()


def an_error_in_backward_leaves_no_hooks():
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    trainee.step(0)
    handles, register = [], DistributedParameter.register_post_accumulate_grad_hook

    def noting(*arguments):
        handles.append(register(*arguments))
        return handles[-1]

    with pytest.raises(ZeroDivisionError), mock.patch.object(DistributedParameter, register.__name__, noting):
        with trainee.optimizer.update_in_backward():
            raise ZeroDivisionError
    assert handles
    assert not any(handle.id in handle.hooks_dict_ref() for handle in handles), "hooks are left"


class Failing(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("no memory")


@on_ranks(1)
def test_training_goes_on_after_an_error_in_backward():
    """The batch is left out, except in the blocks that were updated before the error: the log says so."""
    trainee = Early(bmt.optim.AdamOffloadOptimizer, torch.float32, True)
    for number in range(2):
        trainee.step(number)
    handle = trainee.model.layers[0].register_forward_hook(lambda *arguments: Failing.apply(arguments[-1]))
    trainee.manager.zero_grad()
    with log_lines(logging.WARNING) as lines, pytest.raises(torch.OutOfMemoryError):
        with trainee.optimizer.update_in_backward():
            trainee.backward(2)
    handle.remove()
    assert not trainee.optimizer.updated_in_backward
    assert any("had updated 3 parameters" in line for line in lines), lines
    assert trainee.model.layers[2].linear.weight.grad is None  # its gradient was used
    for early in (True, False):
        trainee._early = early
        trainee.step(3 + early)
    counts = [int(trainee.optimizer.state[layer.gain]["step"]) for layer in trainee.model.layers]
    assert counts == [4, 4, 5]


class TwoTowers(torch.nn.Module):
    """Two lists of layers, which `order` names: a rank may need one after the other rank's gradients are reduced."""

    def __init__(self):
        super().__init__()
        self.towers = torch.nn.ModuleDict({name: Tower(2).layers for name in "ab"})

    def forward(self, x, order):
        for layer in (layer for name in order for layer in self.towers[name]):
            x = layer(x)
        return x.square().mean()


def uneven():
    """Where ranks enter blocks in different orders, or not at all, `step` updates; one line says so."""
    trained = []
    for early in (False, True):
        model = bmt.auto_wrap(TwoTowers())
        optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
        with log_lines(level=logging.INFO) as lines:
            for step, orders in enumerate([("ab", "ba"), ("a", "ab"), ("ba", "ab")]):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + bmt.rank()))
                with optimizer.update_in_backward() if early else nullcontext():
                    model(x, orders[bmt.rank()]).backward()
                optimizer.step()
                optimizer.zero_grad()
        told = [line for line in lines if "leaves 4 of 4 groups of parameters" in line]
        assert len(told) == (early and bmt.rank() == 0)
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


@pytest.mark.parametrize("dtype", by_default(DTYPES, torch.bfloat16), ids=str)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_lagging_is_the_same(world, size, dtype):
    world(size)(lagging, dtype, 5)


@full
def test_on_cpu_it_is_the_same(world):
    world(2)(the_same, torch.float32)


@full
def test_a_short_exp_avg_and_held_steps_are_the_same(world):
    world(2)(lagging, torch.bfloat16, 6, True)


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("case", [two_optimizers, downloads_come_last], ids=lambda case: case.__name__)
def test_lagging(world, size, case):
    world(size)(case, 2)


CASES = [
    a_part_that_is_new_waits_for_the_step, a_neighbour_with_as_many_steps_is_not_taken_for_updated,
    clipping_comes_too_late, a_replaced_gradient_comes_too_late,
    a_new_lr_comes_too_late, a_scaler_comes_too_late, a_second_backward_is_refused, twice_before_a_step_is_refused,
    a_loss_scale_is_refused, spoilt_weights_are_told, an_error_in_backward_leaves_no_hooks, recorded,
    blocks_are_updated_while_others_still_run_backward, uneven,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(
        CASES,
        a_neighbour_with_as_many_steps_is_not_taken_for_updated,
        clipping_comes_too_late,
        an_error_in_backward_leaves_no_hooks,
        uneven,
    ),
    ids=lambda case: case.__name__,
)
def test_in_backward(world, case):
    world(2)(case)
