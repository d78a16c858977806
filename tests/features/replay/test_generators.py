"""Layers that draw from random generators other than torch's default one draw the same numbers when recomputed."""

import random

import numpy
import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full
from hf_bmtrain.features.replay.replay import Generators
from ranks import on_ranks
from twins import Layer, Tower, check_twins, ids

DRAWS = {
    "python": lambda layer: random.random(),
    "numpy": lambda layer: float(numpy.random.rand()),
    "random.Random": lambda layer: layer.own.random(),
    "numpy.Generator": lambda layer: float(layer.own.random()),
    "numpy.RandomState": lambda layer: float(layer.own.rand()),
    "torch.Generator": lambda layer: float(torch.rand((), generator=layer.own)),
}
OWN = {
    "random.Random": lambda: random.Random(3),
    "numpy.Generator": lambda: numpy.random.default_rng(3),
    "numpy.RandomState": lambda: numpy.random.RandomState(3),
    "torch.Generator": lambda: torch.Generator().manual_seed(3),
}


class Drawing(Layer):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.own = kind, OWN.get(kind, lambda: None)()

    def forward(self, x, *args, **kwargs):
        factor = torch.full_like(
            x, 1 + DRAWS[self.kind](self)
        )  # autograd saves a tensor, whose numbers are drawn again
        return super().forward(x * factor, *args, **kwargs)


@pytest.mark.parametrize("kind", by_default(DRAWS, "numpy", "torch.Generator"))
@on_ranks(1)
def test_recomputed(kind):
    """Model and twin draw in turn, so each starts every forward at the same seed."""

    class Seeded(Tower):
        def forward(self, *args, **kwargs):
            random.seed(7)
            numpy.random.seed(7)
            return super().forward(*args, **kwargs)

    def make():
        model = Seeded()
        model.layers = torch.nn.ModuleList([Drawing(kind) for _ in model.layers])
        torch.manual_seed(0)
        for parameter in model.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model

    check_twins(make, lambda model, step, rank: model(ids(step, 0)), use_checkpoint=True)


class Changing(Layer):
    """Draws in another way from one step to the next, by its attribute `step`."""

    step = 0

    def begin(self, step):
        self.step = step

    def factor(self, given):
        raise NotImplementedError

    def forward(self, x, given=None):
        return super().forward(x * torch.full_like(x, 1 + self.factor(given)))


class Late(Changing):
    def factor(self, given):
        return numpy.random.rand() if self.step else 0


class LateGauss(Changing):
    """Draws the second of a pair of normal numbers, which leaves the state of the bits as it is."""

    def factor(self, given):
        return numpy.random.randn() + random.gauss(0, 1) if self.step else 0


class Guarded(Changing):
    def factor(self, given):
        return numpy.random.rand() if random.random() < 0.5 else 0


class Given(Changing):
    def factor(self, given):
        return torch.rand((), generator=given["of the step"][0]).item()


class Replaced(Changing):
    def begin(self, step):
        self.own = torch.Generator().manual_seed(step)

    def factor(self, given):
        return torch.rand((), generator=self.own).item()


class Held(Changing):
    """Its generators are inside an attribute."""

    def begin(self, step):
        self.held = {"noise": (numpy.random.default_rng(step), [random.Random(step)])}

    def factor(self, given):
        return self.held["noise"][0].random() + self.held["noise"][1][0].random()


@pytest.mark.parametrize("kind", [Late, LateGauss, Guarded, Given, Replaced, Held])
@on_ranks(1)
def test_other_draws_later(kind):
    """Which generators a layer uses may change from one forward to the next."""

    class Changes(Tower):
        def forward(self, ids, step):
            random.seed(7 + step)
            numpy.random.seed(7 + step)
            numpy.random.randn(), random.gauss(0, 1)
            given = {"of the step": (torch.Generator().manual_seed(step),)}
            x = self.embedding(ids)
            for layer in self.layers:
                layer.begin(step)
                x = layer(x, given)
            return self.head(x).square().mean()

    def make():
        model = Changes()
        model.layers = torch.nn.ModuleList([kind() for _ in model.layers])
        torch.manual_seed(0)
        for parameter in model.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model

    check_twins(make, lambda model, step, rank: model(ids(step, 0), step), steps=4, use_checkpoint=True)


@on_ranks(1)
def test_unused_generators_are_left():
    """A recomputation leaves generators alone from which its forward did not draw: other threads may be drawing."""
    model, seen = bmt.auto_wrap(Tower(), use_checkpoint=True), []
    model.layers[1].linear.register_forward_hook(lambda *_: seen.append((random.getstate(), numpy.random.get_state())))
    loss = model(ids(0, 0))
    seen.clear()  # what follows is what the recomputation sees
    random.random(), numpy.random.rand()
    present = random.getstate(), numpy.random.get_state()
    loss.backward()
    assert len(seen) == 1
    for python, numpys in seen:
        assert python == present[0] and (numpys[1] == present[1][1]).all() and numpys[2] == present[1][2]


@full
@pytest.mark.parametrize("kind", by_default(DRAWS, "numpy.Generator"))
def test_states(kind):
    layer = Drawing(kind)
    before = Generators([random, numpy.random, *([] if layer.own is None else [layer.own])])
    drawn = DRAWS[kind](layer)
    before.keep_moved()
    assert len(before._states) == 1
    present = before.restore()
    assert DRAWS[kind](layer) == drawn
    present.restore()
    assert DRAWS[kind](layer) != drawn
    unused = Generators([random, numpy.random])
    unused.keep_moved()
    assert unused._states == []


def test_a_normal_number_that_numpy_keeps():
    """It is set, changed and dropped, while the rest of the state stays."""
    numpy.random.seed(7)
    state = numpy.random.get_state()[:3]
    for kept in ((1, 0.25), (1, 0.5), (0, 0.0)):
        before = Generators([numpy.random])
        numpy.random.set_state((*state, *kept))
        following = Generators([numpy.random])
        numpy.random.randn()
        following.restore()
        assert numpy.random.get_state()[3:] == kept
        before.keep_moved()
        assert len(before._states) == 1


@on_ranks(1)
def test_a_generator_without_state():
    """Plain torch takes a layer that has one, too."""
    model = Tower()
    for layer in model.layers:
        layer.own = random.SystemRandom()
    bmt.auto_wrap(model, use_checkpoint=True)(ids(0, 0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
