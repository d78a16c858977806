"""Layers with state in Python (counters, schedules, memories): recomputed as their forwards ran, which counts once."""

import gc
import types
import weakref

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full, pairwise
from ranks import on_ranks
from twins import Layer, Tower, check_gradients, ids, tower_of


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)


class Late(Layer):
    """Begins in its third forward, with attributes that it did not have."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            self.extra = 0.5 + getattr(self, "extra", 0.0)
        return super().forward(x) * (1 + getattr(self, "extra", 0.0))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        now = x.detach().mean()
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return x * self.mean


class Averaging(Layer):
    """In a module inside."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return x + self.inner(super().forward(x))


class Remembering(Layer):
    """In containers and objects that are attributes."""

    def __init__(self):
        super().__init__()
        self.history, self.table, self.state = [], {"inner": {}}, types.SimpleNamespace(scale=1.0, seen={0})

    def forward(self, x):
        self.history.append(x.detach().mean())
        self.table["inner"][len(self.history)] = 1
        self.state.scale *= 0.9
        self.state.seen.add(len(self.history))
        y = super().forward(x) * self.state.scale + len(self.table["inner"]) + len(self.state.seen)
        return y + sum(self.history)


class Scheduled(Layer):
    """Its caller sets what a forward reads, before each."""

    scale = 1.0
    rows: list

    def forward(self, x):
        return super().forward(x * (self.scale + sum(self.rows)))


class ScheduledTower(Tower):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Scheduled()])

    def forward(self, ids):
        x = self.embedding(ids)
        for scale in (1.0, 0.5, 0.25):
            self.layers[0].scale, self.layers[0].rows = scale, []
            self.layers[0].rows.append(scale)
            x = self.layers[0](x)
        return self.head(x).square().mean()


class Swapping(Layer):
    """Exchanges modules without parameters."""

    def __init__(self):
        super().__init__()
        self.activation, self.other = nn.Tanh(), nn.ReLU()

    def forward(self, x):
        self.activation, self.other = self.other, self.activation
        return self.activation(super().forward(x))


class Hooked(Layer):
    """A hook on a module of torch's counts there."""

    def __init__(self):
        super().__init__()
        self.linear.calls = 0
        self.linear.register_forward_hook(count)


def count(module, args, output):
    module.calls += 1
    return output * module.calls


LAYERS = [Counting, Late, Averaging, Remembering, Swapping, Hooked, Scheduled]


@pytest.mark.parametrize(
    ("layer", "use_checkpoint", "together"),
    pairwise(
        [(Counting, True, True), (Swapping, True, True), (Hooked, False, True)],
        LAYERS,
        [True, False],
        [False, True],
    ),
)
@on_ranks(2)
def test_state(layer, use_checkpoint, together):
    """Every rank has the same rows, so that its layers have the state of the twin's."""

    def make():
        return ScheduledTower() if layer is Scheduled else tower_of(layer)

    model, twin = bmt.auto_wrap(make(), use_checkpoint=use_checkpoint), make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.001) for each in (model, twin)]
    for step in range(4):
        losses = [each(ids(step, 0)) for each in (model, twin)]
        if together:
            losses = [loss + each(ids(step + 5, 0)) for loss, each in zip(losses, (model, twin))]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for loss in losses:
            loss.backward()
        check_gradients(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, plain in zip(model.modules(), twin.modules()):
        if hasattr(plain, "calls"):
            assert mine.calls == plain.calls
        if isinstance(plain, Remembering):
            assert (mine.history, mine.table, mine.state) == (plain.history, plain.table, plain.state)


@full
@on_ranks(2, full=(1,))
def test_dropped():
    """What is kept of the attributes makes no circle: a dropped model is freed at once."""
    model = bmt.auto_wrap(tower_of(Remembering))
    model(ids(0, 0)).backward()
    references = [weakref.ref(layer) for layer in model.layers]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
