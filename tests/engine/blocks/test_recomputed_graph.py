"""Compiled blocks that their graphs recompute: equal to torch's checkpoint, and without products in vain."""

import contextlib
import functools
import logging
import weakref
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from cases import full
from hf_bmtrain.engine.base.torch_internals import modes_see_compiled, top_saved_tensors_hooks
from hf_bmtrain.engine.blocks.recompute import keep_nothing
from hf_bmtrain.engine.blocks.recomputed_graph import RecomputedGraphs
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


class Eager(Counts):
    """Has a forward of its own, because layers with the same function are refused together."""

    def forward(self, x):
        return super().forward(x)


class Frozen(Layer):
    def forward(self, x):
        return super().forward(x)


class Wide(nn.Linear):
    def forward(self, input):
        return super().forward(input)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


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


def train(layer, compile, kind=Tower, collective_layers=False, around=contextlib.nullcontext, frozen=False):
    """Losses, gradients, buffers and random numbers of some steps, and the products of the last backward."""
    torch._dynamo.reset()
    bmt.current_world().schedule.collective_layers = collective_layers  # also left so by other tests
    model = kind(0)
    torch.manual_seed(1)
    model.layers = nn.ModuleList([layer() for _ in range(3)])
    if frozen:  # the first layer has no backward
        model.embedding.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    bmt.auto_wrap(model.train(), use_checkpoint=True, compile=compile)
    torch.manual_seed(bmt.rank())
    seen, calls = [], products()
    for step in range(3):
        with around():
            loss = tower_loss(model, step, bmt.rank())
            if step == 1:  # the first forward in this mode is recomputed in another way, and no backward follows
                tower_loss(model.eval(), 9, bmt.rank())
                model.train()
        calls = products()
        with calls if modes_see_compiled else contextlib.nullcontext():
            loss.backward()
        seen += [loss.detach(), torch.rand(()), *(p.gather_gradient() for p in model.parameters()), *model.buffers()]
        for parameter in model.parameters():
            parameter.grad = None
    return seen, calls.count, [getattr(each, "calls", 0) for each in model.layers]


@full
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
        reasons = [line for line in lines if "recomputation of a compiled block" in line]
        assert len(reasons) == (whole > 0) or not modes_see_compiled
    _, compiled, _ = train(Layer, "aot_eager", collective_layers=True)
    assert compiled == train(Layer, False)[1] + 3 or not modes_see_compiled
    expected, count, _ = train(Frozen, False, frozen=True)
    found, compiled, _ = train(Frozen, "aot_eager", frozen=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert compiled == count or not modes_see_compiled
    for layer in (Layer, Reads):
        expected, _, _ = train(layer, False, Checkpointed)
        found, _, _ = train(layer, "aot_eager", Checkpointed)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert packed(Layer, "aot_eager") == packed(Layer, False)
    if top_saved_tensors_hooks is not None:  # graphs recompute themselves from torch 2.7 on
        # torch.compile runs these forwards eagerly, but not their recomputations, which must not count again
        expected, _, calls = train(Eager, False)
        for around in (functools.partial(torch.compiler.set_stance, "force_eager"), Mode):
            found, _, others = train(Eager, "aot_eager", around=around)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
            assert calls == others


def packed(layer, compile):
    """The shapes that saved-tensor hooks around the forwards get: not those of full parameters."""
    shapes = []
    train(
        layer,
        compile,
        around=lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x),
    )
    return shapes


def test_sizes_that_differ_between_classes_are_static():
    # torch.compile 2.13 tells the classes apart without our help
    inputs = []

    def backend(graph, examples):
        inputs.extend(examples)
        return graph

    torch._dynamo.reset()
    for layer in (nn.Linear(3, 3), Wide(5, 5)):
        compile = functools.partial(torch.compile, backend=backend, fullgraph=True)
        graphs = RecomputedGraphs(type(layer).forward, weakref.ref(layer), compile)
        graphs.run(keep_nothing, (torch.rand(4 + layer.in_features, layer.in_features),), {})
    assert len(inputs) == 6 and all(isinstance(each, torch.Tensor) for each in inputs)  # no sizes among them
