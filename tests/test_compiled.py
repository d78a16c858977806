"""Compiled blocks: equal to those that are not, and compiled once for all layers."""

import pytest
import torch
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from tiny_models import batch, build

STEPS = 4


def train(model, family, graphs=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(family, 10 * step + bmt.rank())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bmt.sum_loss(loss.detach()))
        if graphs is not None:
            graphs.append(counters["stats"]["unique_graphs"])
    return torch.stack(losses)


def compiled_once(family, use_checkpoint):
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    model = bmt.auto_wrap(build(family).train(), use_checkpoint=use_checkpoint, compile="aot_eager")
    losses = train(model, family, graphs)
    plain = train(bmt.auto_wrap(build(family).train(), use_checkpoint=use_checkpoint), family)
    torch.testing.assert_close(losses, plain, rtol=2e-6, atol=0)
    return graphs, len(find_layers(model))


def find_layers(model):
    return [module for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_once_for_all_layers(world, size, family, use_checkpoint):
    graphs, layers = world(size)(compiled_once, family, use_checkpoint)[0]
    assert layers > 1
    assert graphs[0] >= 1, "nothing was compiled"
    assert graphs[-1] == graphs[1], "compiled again after step 2"
    assert graphs[-1] <= 1 + use_checkpoint, "the layers do not share a graph"
