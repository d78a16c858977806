"""Compiled blocks that their graphs recompute: equal to torch's checkpoint, and without products in vain."""

import contextlib
import logging
from unittest import mock

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from hf_bmtrain.engine.base.torch_internals import modes_see_compiled
from log_lines import log_lines
from operator_calls import OperatorCalls
from ranks import on_ranks
from twins import WIDTH, Tower, tower_loss


def products():
    return OperatorCalls(lambda function, args: "mm" in str(function))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.middle(self.up(x)), 0.3, self.training))

    def middle(self, y):
        return torch.tanh(y)


class Writes(Layer):
    """Recomputed with the new mean, its gradients would be others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(2 * WIDTH))

    def middle(self, y):
        z = torch.tanh(y - self.mean)
        self.mean.lerp_(y.detach().mean(0).mean(0) + 1, 0.5)
        return z


class Reads(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(2 * WIDTH))

    def middle(self, y):
        return torch.tanh(y - self.mean)


class Counts(Layer):
    """Changes an attribute, which torch.compile does not allow inside a checkpoint."""

    calls = 0

    def middle(self, y):
        self.calls += 1
        return torch.tanh(y)


class InPlace(Layer):
    def middle(self, y):
        return torch.tanh(y.relu_()).add(1).mul_(2)


class Checkpointed(Tower):
    """Puts torch's checkpoint around each layer."""

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


def train(layer, compile, kind=Tower, collective_layers=False):
    """Losses, gradients, buffers and random numbers of some steps, and the products of the last backward."""
    torch._dynamo.reset()
    bmt.current_world().schedule.collective_layers = collective_layers  # also left so by other tests
    model = kind(0)
    torch.manual_seed(1)
    model.layers = nn.ModuleList([layer() for _ in range(3)])
    bmt.auto_wrap(model.train(), use_checkpoint=True, compile=compile)
    torch.manual_seed(bmt.rank())
    seen, calls = [], products()
    for step in range(3):
        loss = tower_loss(model, step, bmt.rank())
        calls = products()
        with calls if modes_see_compiled else contextlib.nullcontext():
            loss.backward()
        seen += [loss.detach(), torch.rand(()), *(p.gather_gradient() for p in model.parameters()), *model.buffers()]
        for parameter in model.parameters():
            parameter.grad = None
    return seen, calls.count, [getattr(each, "calls", 0) for each in model.layers]


@on_ranks(2)
def test_equal_to_torchs_checkpoint():
    with mock.patch.object(bmt.current_world().schedule, "collective_layers"):
        compare()


def compare():
    for layer, whole in ((Layer, 0), (Reads, 0), (InPlace, 0), (Writes, 3), (Counts, 3)):
        expected, count, calls = train(layer, False)
        with log_lines(level=logging.INFO) as lines:
            found, compiled, others = train(layer, "aot_eager")
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert calls == others
        # torch's checkpoint ends a recomputation before the last product, which it cannot do inside compiled code
        assert compiled == count + whole or not modes_see_compiled, (layer, compiled, count, lines)
        assert len([line for line in lines if "recomputation of compiled blocks" in line]) == (whole > 0)
    _, compiled, _ = train(Layer, "aot_eager", collective_layers=True)
    assert compiled == train(Layer, False)[1] + 3 or not modes_see_compiled
    expected, count, _ = train(Layer, False, Checkpointed)
    found, compiled, _ = train(Layer, "aot_eager", Checkpointed)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
