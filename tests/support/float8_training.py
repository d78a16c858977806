"""Training with weights that are gathered in float8, and in their own dtype."""

from unittest import mock

import torch

import hf_bmtrain as bmt
from float8_models import build, rows
from hf_bmtrain.engine.sharding.slots import buffers_of
from hf_bmtrain.features.float8.storage import Float8Storage


def float8_buffers(model):
    return [buffer for buffer in buffers_of(model) if isinstance(buffer.storage, Float8Storage)]


def seen(tensor):
    """The bits of a tensor, as what compares NaN too."""
    return None if tensor is None else tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


def train(family, in_float8, between=None, prepare=None, offload=False, accumulate=1, dtype=torch.float32, **wrap):
    """Return all that four steps show: losses, gradients, weights. between: called with the model after each step."""
    torch._dynamo.reset()
    model = build(family).to(dtype)
    if prepare is not None:
        prepare(model)
    shown, switch = [], Float8Storage.switch if in_float8 else lambda *_: None
    with mock.patch.object(Float8Storage, "switch", switch):
        bmt.auto_wrap(model, float8=True, **wrap)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = (bmt.optim.AdamOffloadOptimizer if offload else bmt.optim.AdamOptimizer)(trained, lr=1e-2)
        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer)
        for step in range(4):
            manager.zero_grad()
            for part in range(accumulate):
                loss = model(**rows(accumulate * step + part, bmt.rank())).loss
                manager.backward(loss)
                shown.append(seen(loss))
            shown += [seen(parameter.gather_gradient()) for parameter in trained]
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
            if between is not None:
                shown += between(model, step)
    buffers = float8_buffers(model)
    assert buffers and all(buffer.storage.in_float8 == in_float8 for buffer in buffers)
    return shown + [seen(value) for value in model.state_dict().values()]


def same_bits(family, options):
    found, expected = (train(family, flag, **options) for flag in (True, False))
    assert len(found) == len(expected) > 20 and any(each is not None for each in found)
    for mine, other in zip(found, expected):
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))
