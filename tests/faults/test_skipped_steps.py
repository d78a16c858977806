"""Steps that are skipped: the line that says in which block and parameter, on which rank, and when training ends."""

import logging
import re
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full, rows_in_full
from hf_bmtrain.engine.optim.manager import HostFlag
from ranks import on_ranks
from twins import Layer, Tower, ids


class Spoil(torch.autograd.Function):
    """The identity, whose backward adds `value` to one element of the gradient."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] += ctx.value
        return gradient, None


class SpoiledLayer(Layer):
    value = 0.0

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        return x + Spoil.apply(y, self.value) * self.gain


class SpoiledTower(Tower):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([SpoiledLayer() for _ in range(3)])


class Lines(logging.Handler):
    """Collects the library's log under `with`."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))

    def __enter__(self):
        log = logging.getLogger("hf_bmtrain")
        self.level = log.level
        log.addHandler(self)
        log.setLevel(logging.INFO)
        return self

    def __exit__(self, *exception):
        log = logging.getLogger("hf_bmtrain")
        log.removeHandler(self)
        log.setLevel(self.level)

    @property
    def skips(self):
        return [(level, text) for level, text in self.lines if "was skipped" in text]


def make(optimizer_class=None, model_class=SpoiledTower, **options):
    model = bmt.auto_wrap(model_class())
    cls = optimizer_class or bmt.optim.AdamOptimizer
    manager = bmt.optim.OptimManager(**options)
    manager.add_optimizer(cls(model.parameters(), lr=1e-2))
    return model, manager


def take_step(model, manager, spoiled=None, value=float("nan"), rank=0, factor=1.0):
    for number, layer in enumerate(model.layers):
        layer.value = value if number == spoiled and bmt.rank() == rank else 0.0
    manager.zero_grad()
    manager.backward(model(ids(0, bmt.rank())) * factor)
    manager.step()


def names_block_and_rank(name):
    """The first skip names the block; the second, whose backward was watched, the rank as well."""
    guilty, size = bmt.world_size() - 1, bmt.world_size()
    model, manager = make({"sgd": torch.optim.SGD, "adam": None}[name])
    with Lines() as log:
        take_step(model, manager)
        assert not log.skips
        take_step(model, manager, 1, rank=guilty)
        take_step(model, manager, 1, float("inf"), rank=guilty)
        take_step(model, manager)
    if bmt.rank():
        return log.skips
    (first_level, first), (_, second) = log.skips
    assert first_level == "WARNING"
    assert first.startswith("step 2 was skipped: a gradient was inf or nan, first in block layers.1: ")
    assert re.search(r"linear.weight \(\d+ of 36 elements nan\)", first), first
    assert "layers.2" not in first
    assert "more gradients, nearer to the model's inputs" in first
    assert first.endswith("there is no loss scale")
    assert second.startswith("step 3 was skipped, 2 in a row: ")
    if size > 1:
        assert "which rank computed it cannot be told from the mean" in first
        assert f"computed by rank {guilty};" in second + ";", second
    return log.skips


def watching_ends():
    """After as many clean steps nothing watches any more, and the trained weights are as without."""
    model, manager = make()
    plain, other = make()
    take_step(model, manager, 0, rank=0)
    observers = bmt.current_world().schedule.observers
    assert len(observers.before_reduce) == 1
    for _ in range(17):
        take_step(model, manager)
        take_step(plain, other)
    assert not observers.before_reduce
    expected = plain.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key


class Late(HostFlag):
    """As on a GPU: the host reads the flag in the next step; whether it has arrived by then differs between ranks."""

    arrives_on = 0

    def __init__(self, flag):
        super().__init__(flag)
        self.immediate = False

    @property
    def arrived(self):
        return bmt.rank() < self.arrives_on


def flag_is_late(arrives_on):
    """The gradients of the skipped step are known to the ranks where the flag came before they were freed."""
    model, manager = make()
    with (
        Lines() as log,
        mock.patch("hf_bmtrain.engine.optim.manager.HostFlag", Late),
        mock.patch.object(Late, "arrives_on", arrives_on),
    ):
        for spoiled in (1, 1, None, None):
            take_step(model, manager, spoiled, rank=bmt.world_size() - 1)
    if bmt.rank() == 0:
        (_, first), (_, second) = log.skips
        if arrives_on == 0:
            assert "which one is unknown, because the gradients were freed before the skip was noticed" in first
        else:
            least = "at least " if arrives_on < bmt.world_size() else ""
            assert re.search(rf"first in block layers.1: .*linear.weight \({least}\d+ of 36 elements nan\)", first), (
                first
            )
        assert "first in block layers.1: " in second
        assert bmt.world_size() == 1 or f"computed by rank {bmt.world_size() - 1}" in second


def names_the_loss():
    model, manager = make()
    with Lines() as log:
        take_step(model, manager, factor=float("nan") if bmt.rank() == 0 else 1.0)
    if bmt.rank() == 0:
        ((_, text),) = log.skips
        assert "first outside the blocks: head.bias" in text
        assert "no gradient is finite, so look at the loss" in text


def scale_search_is_quiet():
    """A loss scale that falls is no warning, but for each eighth in a row and at its minimum."""
    model, manager = make(loss_scale=2.0**12, min_loss_scale=4.0)
    with Lines() as log:
        for _ in range(14):
            take_step(model, manager, 1)
    if bmt.rank() == 0:
        levels = [level for level, _ in log.skips]
        assert levels == ["INFO"] * 7 + ["WARNING"] + ["INFO"] + ["WARNING"] * 5
        assert log.skips[0][1].endswith("the loss scale is now 2048")
        assert log.skips[13][1].endswith("the loss scale is now 4")


def no_limit():
    model, manager = make(max_skipped_steps=None)
    for _ in range(30):
        take_step(model, manager, 2)
    with pytest.raises(ValueError, match="max_skipped_steps must be positive"):
        bmt.optim.OptimManager(max_skipped_steps=0)


@pytest.mark.parametrize(("size", "name"), [(3, "sgd"), *rows_in_full([(1, "adam"), (1, "sgd"), (2, "adam")])])
def test_a_skip_names_block_and_rank(world, size, name):
    assert world(size)(names_block_and_rank, name)[1:] == [[]] * (size - 1)  # one rank logs


@pytest.mark.parametrize("size", [2, *in_full(1)])
@pytest.mark.parametrize("function", [watching_ends, names_the_loss, scale_search_is_quiet, no_limit])
def test_skipped_steps(world, size, function):
    world(size)(function)


@pytest.mark.parametrize("loss_scale", [8.0, *in_full(None)])
@on_ranks(2)
def test_training_stops(loss_scale):
    """Only steps that a lower scale cannot have avoided count, and only in a row."""
    model, manager = make(loss_scale=loss_scale, max_skipped_steps=3)
    for _ in range(2 + (0 if loss_scale is None else 3)):  # 8 -> 4 -> 2 -> 1, and twice at 1
        take_step(model, manager, 2)
    take_step(model, manager)
    before = model.state_dict()
    for _ in range(2 + (loss_scale is not None)):  # that scale is at its minimum is known of the first
        take_step(model, manager, 2)
    with pytest.raises(RuntimeError, match=r"3 steps in a row were skipped.*layers\.2.*max_skipped_steps=None"):
        take_step(model, manager, 2)
    after = model.state_dict()
    assert all(torch.equal(before[key], value) for key, value in after.items())
    take_step(model, manager)  # and goes on if the user does


@pytest.mark.parametrize("loss_scale", [8.0, *in_full(None)])
@on_ranks(2)
def test_steps_before_a_state_was_loaded_do_not_count(loss_scale):
    """A program that continues from an earlier state, as the error advises, may skip as many steps as a new one."""
    model, manager = make(loss_scale=loss_scale, max_skipped_steps=2)
    earlier = manager.state_dict()
    for _ in range(1 + (0 if loss_scale is None else 3)):
        take_step(model, manager, 2)
    with pytest.raises(RuntimeError, match="2 steps in a row were skipped"):
        take_step(model, manager, 2)
    manager.load_state_dict(earlier)
    take_step(model, manager, 2)
    assert loss_scale is None or manager.loss_scale == loss_scale / 2


@on_ranks(3)
def test_a_mean_that_overflows():
    """Each rank's gradient is finite; their sum, of which the mean is made, is not."""
    model, manager = make()
    with Lines() as log:
        for _ in range(2):
            for layer in model.layers:
                layer.value = 0.0
            model.layers[1].value = 1.3e38
            manager.zero_grad()
            manager.backward(model(ids(0, 0)))
            manager.step()
    if bmt.rank() == 0:
        assert "every rank's own gradient was finite, but their mean overflowed" in log.skips[1][1], log.skips


@pytest.mark.parametrize(("size", "arrives_on"), [(2, 1), *rows_in_full([(1, 0), (1, 1), (2, 0), (2, 2)])])
def test_a_flag_that_is_late(world, size, arrives_on):
    world(size)(flag_is_late, arrives_on)
