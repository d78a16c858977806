"""What compiled blocks must satisfy: as right as blocks that are not, and compiled once for all layers."""

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


def find_layers(model):
    return [module for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]


def check(graphs, layers, use_checkpoint):
    assert layers > 1
    assert graphs[0] >= 1, "nothing was compiled"
    assert graphs[-1] == graphs[1], "compiled again after step 2"
    assert graphs[-1] <= 1 + use_checkpoint, "the layers do not share a graph"
