"""Buffers that a program changes between a forward and its backward, or that a layer registers late."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import pairwise
from ranks import on_ranks
from twins import Layer, check_gradients, ids, tower_of


class Scaled(Layer):
    """Reads a buffer that others change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(torch.sin(x + self.scale))


class Late(Layer):
    """Has a buffer that is None at first, and registers another one later."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x):
        for name in ("scale", "extra"):
            if getattr(self, name, None) is None:
                self.register_buffer(name, torch.zeros(()))
        self.extra.add_(0.5)
        self.scale = self.scale + 0.25
        return super().forward(torch.sin(x + self.scale) + self.extra)


class Alternating(Layer):
    """Replaces its buffer in every second forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 2 == 0:
            self.scale = self.scale + 0.5
        return super().forward(torch.sin(x + self.scale))


class Moving(Layer):
    """Replaces a buffer in each forward, and counts in another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.scale = self.scale + 0.25
        return super().forward(torch.sin(x + self.scale))


class Halves(Layer):
    """Its buffers are parts of one memory that do not overlap. One of them is written, and one holds NaN."""

    def __init__(self):
        super().__init__()
        memory = torch.ones(3)
        for index, name in enumerate(("scale", "mean", "other")):
            self.register_buffer(name, memory[index : index + 1])
        self.other.fill_(torch.nan)

    def forward(self, x):
        self.mean.add_(0.5)
        return super().forward(torch.sin(x + self.scale + self.mean))


class FromZero(Layer):
    """The statistics of its norm do not change in the first forward, whose input is zero."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3, affine=False)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + self.norm(x * (self.calls > 1)) * self.norm.running_mean.sum()


class Shared(Layer):
    """One tensor is a buffer of two modules: one writes it, and the other one reads it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.linear.register_buffer("scale", self.scale)

    def forward(self, x):
        self.scale.add_(0.5)
        return super().forward(torch.sin(x + self.linear.scale))


class Overlapping(Layer):
    """Two of its buffers are views of the same memory."""

    def __init__(self):
        super().__init__()
        memory = torch.zeros(3)
        self.register_buffer("whole", memory)
        self.register_buffer("part", memory[:1])

    def forward(self, x):
        self.whole.add_(1)
        return super().forward(torch.sin(x + self.part))


class Hidden(Layer):
    """Writes a buffer so that torch does not notice it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale.data.add_(0.5)
        return super().forward(torch.sin(x + self.scale))


class Growing(Layer):
    """Gives a buffer another shape, so that torch does not notice it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale.data = torch.cat([self.scale, torch.ones(1)])
        return super().forward(torch.sin(x + self.scale.sum()))


class Asking(Layer):
    """Asks a buffer for what is not its values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        assert self.scale.is_floating_point() and self.scale.shape == self.scale.size()
        return super().forward(x + self.scale.new_ones(6) * torch.zeros_like(self.scale))


def recording(module, args, output):
    """A hook that writes statistics to a buffer of the layer, after each forward."""
    module.scale.mul_(0.9).add_(0.01)


def assign(model, value):
    for layer in model.layers:
        layer.scale = torch.tensor(value)


def fill(model, value):
    for layer in model.layers:
        layer.scale.fill_(value)


def register(model, value):
    for layer in model.layers:
        layer.register_buffer(f"other{value}".replace(".", "_"), torch.zeros(()))
        layer.scale = torch.tensor(value)


def keep(model, value):
    """Sets the buffers back to what they were before, and counts in a buffer that no forward reads."""
    for layer in model.layers:
        old, layer.scale = layer.scale, layer.__dict__.setdefault("first", layer.scale)
        layer.last = old
        if value > 2:
            layer.calls.add_(1)


def count(model, value):
    if value > 2:
        for layer in model.layers:
            layer.scale.add_(1)


def hook(model, value):
    for layer in model.layers:
        if not layer._forward_hooks:
            layer.register_forward_hook(recording)


def nothing(model, value):
    pass


CASES = [
    (Scaled, assign),
    (Scaled, fill),
    (Scaled, register),
    (Scaled, hook),
    (Late, nothing),
    (Alternating, nothing),
    (Shared, nothing),
    (Moving, keep),
    (Halves, nothing),
    (FromZero, nothing),
    (Overlapping, nothing),
    (Hidden, nothing),
    (Growing, nothing),
    (Asking, count),
]


@pytest.mark.parametrize(
    ("case", "forwards"),
    pairwise([(case, 2) for case in CASES], CASES, [1, 2]),
    ids=lambda value: "-".join(each.__name__ for each in value) if isinstance(value, tuple) else str(value),
)
@on_ranks(2)
def test_gradients(case, forwards):
    """Gradients, losses and buffers are those of plain torch, where the buffer is also changed after the forwards."""
    layer, change = case
    model, twin = bmt.auto_wrap(tower_of(layer)), tower_of(layer)
    for step in range(4):
        losses = [torch.zeros(()), torch.zeros(())]
        for number in range(forwards):
            for index, each in enumerate((model, twin)):
                change(each, 0.5 + step + 0.3 * number)
                losses[index] = losses[index] + each(ids(step + 5 * number, 0))
        torch.testing.assert_close(*losses)
        for each in (model, twin):
            change(each, 9.0)
        for loss in losses:
            loss.backward()
        check_gradients(model, twin)
        for (name, mine), (_, plain) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
            torch.testing.assert_close(mine, plain, equal_nan=True, msg=name)
        for each in (model, twin):
            each.zero_grad()


class Normed(Layer):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return super().forward(torch.sin(self.norm(x)))


class Uncounted(Normed):
    """Its norm does not count batches."""

    def __init__(self):
        super().__init__()
        self.norm.num_batches_tracked = None


class PartlyCompiled(Normed):
    """A part of it is compiled, and so has no mode of its own."""

    def __init__(self):
        super().__init__()
        self.linear = torch.compile(self.linear, backend="eager")


def evaluate_between(model, step, training):
    """The backward of a forward in eval mode, before (`training` is None) or after a forward in training mode."""
    model.eval()
    loss = model(ids(step, 0))
    if training is None:
        loss.backward()
    model.train()
    with torch.set_grad_enabled(bool(training)):
        model(ids(step + 5, 0))
    if training is not None:
        loss.backward()


@pytest.mark.parametrize(
    ("training", "layer"), [(True, Normed), (False, Normed), (True, Uncounted), (True, PartlyCompiled)]
)
@on_ranks(2)
def test_statistics_of_norms(training, layer):
    """A forward in eval mode is recomputed with its statistics. (Plain torch computes with those that came later.)"""
    model, twin = bmt.auto_wrap(tower_of(layer)), tower_of(layer)
    for step in range(3):
        if step == 0:
            for each in (model, twin):
                each.eval()(ids(9, 0)).backward()
        evaluate_between(model, step, training)
        evaluate_between(twin, step, None)
        check_gradients(model, twin)
        for each in (model, twin):
            each.zero_grad()


@on_ranks(2)
def test_late_writes_are_refused():
    """Values that nothing has copied, because no write was expected, cannot be recomputed from."""
    model = bmt.auto_wrap(tower_of(Scaled))
    model(ids(0, 0)).backward()
    loss = model(ids(1, 0))
    fill(model, 2.0)
    with pytest.raises(RuntimeError, match="buffer 'scale' of a block was written to in place after a forward"):
        loss.backward()
    model.zero_grad()
    loss = model(ids(1, 0))  # from now on the buffer is copied
    fill(model, 3.0)
    loss.backward()
