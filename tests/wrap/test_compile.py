"""Compiled blocks: equal to those that are not, and compiled once for all layers."""

import pytest
import torch
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from tiny_models import batch, build

STEPS = 4


def train(model, family, graphs=None, length=lambda step: 7):
    """Steps, of which none after the second may recompile."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = bmt.current_world().device
    losses = []
    for step in range(STEPS):
        inputs = {
            key: value.to(device) for key, value in batch(family, 10 * step + bmt.rank(), 2, length(step)).items()
        }
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            loss = model(**inputs).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(bmt.sum_loss(loss.detach()))
        if graphs is not None:
            graphs.append(counters["stats"]["unique_graphs"])
    return torch.stack(losses)


def compiled_once(family, use_checkpoint, backend="aot_eager", rtol=2e-6):
    torch._dynamo.reset()
    counters.clear()
    graphs = []
    model = bmt.auto_wrap(build(family).train(), use_checkpoint=use_checkpoint, compile=backend)
    losses = train(model, family, graphs)
    plain = train(bmt.auto_wrap(build(family).train(), use_checkpoint=use_checkpoint), family)
    torch.testing.assert_close(losses, plain, rtol=rtol, atol=0)
    return graphs, len(find_layers(model))


def a_recompilation_raises():
    """What the other cases rely on: a longer batch in step 3 compiles again."""
    torch._dynamo.reset()
    model = bmt.auto_wrap(build("llama").train(), compile="aot_eager")
    with pytest.raises(torch._dynamo.exc.RecompileError):
        train(model, "llama", length=lambda step: 7 if step < 2 else 9)


def the_whole_model():
    """Nobody is told to compile it; where it is done, its blocks break the graph and stay right."""
    torch._dynamo.reset()
    model, plain = (bmt.auto_wrap(build("llama").train()) for _ in range(2))
    losses = train(torch.compile(model, backend="eager"), "llama")
    torch.testing.assert_close(losses, train(plain, "llama"), rtol=2e-6, atol=0)


def find_layers(model):
    return [module for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_once_for_all_layers(world, size, family, use_checkpoint):
    check(*world(size)(compiled_once, family, use_checkpoint)[0], use_checkpoint)


def check(graphs, layers, use_checkpoint):
    assert layers > 1
    assert graphs[0] >= 1, "nothing was compiled"
    assert graphs[-1] == graphs[1], "compiled again after step 2"
    assert graphs[-1] <= 1 + use_checkpoint, "the layers do not share a graph"


def test_a_recompilation_is_seen(world):
    world(1)(a_recompilation_raises)


def test_the_whole_model(world):
    world(2)(the_whole_model)
