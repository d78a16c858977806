"""Layers that draw from random generators other than torch's default one draw the same numbers when recomputed."""

import random

import numpy
import pytest
import torch

from cases import by_default, full
from hf_bmtrain.features.replay.generators import generators_of
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


@full
@pytest.mark.parametrize("kind", by_default(DRAWS, "numpy.Generator"))
def test_states(kind):
    layer = Drawing(kind)
    before = Generators(generators_of(layer))
    assert before.moved() == []
    drawn = DRAWS[kind](layer)
    assert len(before.moved()) == 1
    present = before.restore()
    assert DRAWS[kind](layer) == drawn
    present.restore()
    assert DRAWS[kind](layer) != drawn
