"""TorchScript functions in recomputed layers: their first calls, later ones, and those at a layer's end."""

import warnings

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default
from twins import WIDTH, Layer, Tower, check_twins, ids


def scale(hidden: torch.Tensor, weight: torch.Tensor, eps: float):
    variance = hidden.pow(2).mean(dim=-1, keepdim=True)
    return hidden * torch.rsqrt(variance + eps) * weight


def new_script():
    """A TorchScript function that nothing has run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(scale)


class Scaled(Layer):
    """A root mean square norm by TorchScript, before or after the layer."""

    def __init__(self, script, last):
        super().__init__()
        self.script, self.last = script, last
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x, shift=None):
        if self.last:
            return self.script(super().forward(x), self.weight, 1e-6)
        return super().forward(self.script(x, self.weight, 1e-6))


class AlsoOutside(Tower):
    """The function of the layers runs outside them too, where nothing is recomputed."""

    def forward(self, ids, plan=None):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        for _ in range(3):
            x = self.layers[0].script(x, torch.ones(WIDTH), 1e-6)
        return self.head(x).square().mean()


def make(script, last, tower=Tower):
    model = tower()
    for index in range(len(model.layers)):
        torch.manual_seed(index)
        model.layers[index] = Scaled(script, last)
    return model


def scripted(last, tower=Tower):
    script = new_script()
    check_twins(lambda: make(script, last, tower), lambda model, step, rank: model(ids(step, rank)))


def failing():
    """An error of the function itself in a recomputation is raised."""
    script = new_script()
    calls = iter(range(100))  # a forward of three layers, then recomputations, whose inputs no longer fit

    def call(x, weight, eps):
        return script(x if next(calls) < 3 else x[..., :2], weight, eps)

    loss = bmt.auto_wrap(make(call, False))(ids(0, 0))
    with pytest.raises(RuntimeError, match="must match the size"):
        loss.backward()


CASES = [(scripted, False), (scripted, True), (scripted, False, AlsoOutside), (failing,)]


@pytest.mark.parametrize(
    "case",
    by_default(CASES, (scripted, True), (scripted, False, AlsoOutside)),
    ids=["first", "last", "outside", "failing"],
)
def test_scripts(world, case):
    world(2)(*case)
