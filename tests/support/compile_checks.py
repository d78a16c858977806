"""What compiled blocks must satisfy: as right as blocks that are not, and compiled once for all layers."""

import torch
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from float8_models import build as build_for_float8
from float8_models import rows
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


def float8_gradients(family, use_checkpoint, backend, dtype=torch.bfloat16):
    """How far gradients of compiled float8 blocks are from those of blocks that are not compiled, by parameter.

    Both round, so the share of a gradient's norm is some 0.05; what is not its gradient is off by 1 and more.
    """
    found = []
    for compile in (False, backend):
        torch._dynamo.reset()
        counters.clear()
        model = build_for_float8(family, width=256).to(dtype)
        model = bmt.auto_wrap(model, use_checkpoint=use_checkpoint, compile=compile, float8=True)
        device = bmt.current_world().device
        loss = model(**{key: ids.to(device) for key, ids in rows(0, bmt.rank(), number=4, length=64).items()}).loss
        loss.backward()
        bmt.synchronize()
        found.append({name: p.gather_gradient().double() for name, p in model.named_parameters() if p.grad is not None})
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"], counters["graph_break"]
    return {name: float((found[1][name] - plain).norm() / plain.norm()) for name, plain in found[0].items()}
