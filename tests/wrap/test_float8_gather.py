"""Weights gathered in float8: training has the bits of training with weights that are gathered in their own dtype."""

import logging
from unittest import mock

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from float8_models import build, rows
from hf_bmtrain.blocks.float8_linear import Float8Linear
from hf_bmtrain.diagnose.plain import gather_wholes, shown_plain
from hf_bmtrain.sharding.float8 import Float8Buffer
from hf_bmtrain.sharding.slots import buffers_of
from log_lines import log_lines


def freeze_half(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("s.0." not in name and ".0." not in name and "up_proj" not in name)


def float8_buffers(model):
    return [buffer for buffer in buffers_of(model) if isinstance(buffer, Float8Buffer)]


def seen(tensor):
    """The bits of a tensor, as what compares NaN too."""
    return None if tensor is None else tensor.detach().clone().contiguous().view(-1).view(torch.uint8)


def train(family, in_float8, between=None, prepare=None, offload=False, accumulate=1, dtype=torch.float32, **wrap):
    """Return all that four steps show: losses, gradients, weights. between: called with the model after each step."""
    torch._dynamo.reset()
    model = build(family).to(dtype)
    if prepare is not None:
        prepare(model)
    shown, switch = [], Float8Buffer.use_float8 if in_float8 else lambda buffer: None
    with mock.patch.object(Float8Buffer, "use_float8", switch):
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
    assert buffers and all(buffer.in_float8 == in_float8 for buffer in buffers)
    return shown + [seen(value) for value in model.state_dict().values()]


def same_bits(family, options):
    found, expected = (train(family, flag, **options) for flag in (True, False))
    assert len(found) == len(expected) > 20 and any(each is not None for each in found)
    for mine, other in zip(found, expected):
        assert (mine is None) == (other is None) and (mine is None or torch.equal(mine, other))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("zero_level", [2, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_same_bits(world, size, zero_level, family):
    world(size)(same_bits, family, {"zero_level": zero_level, "use_checkpoint": zero_level == 2})


FROZEN = {"prepare": freeze_half}


@pytest.mark.parametrize(
    "options",
    [
        {"zero_level": 3, "use_checkpoint": True, "accumulate": 2}, {"zero_level": 2, "use_checkpoint": False},
        {"dtype": torch.bfloat16}, {**FROZEN, "keep_frozen": True}, {**FROZEN, "keep_frozen": False},
        {"offload": True, "accumulate": 2},
        pytest.param({"compile": "aot_eager"}, marks=pytest.mark.full),
        pytest.param({"compile": "aot_eager", "use_checkpoint": False, **FROZEN}, marks=pytest.mark.full),
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_same_bits_with_other_options(world, options):
    world(2)(same_bits, "llama", options)


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": True, "zero_level": 2}, {**FROZEN, "keep_frozen": True}],
    ids=lambda options: "-".join(options),
)
def test_same_bits_where_weights_are_pulled(peers, options):
    peers(2)(same_bits, "llama", options)


def read_and_write(model, step):
    """What is read between two steps are the weights themselves, and the next forward sees what is written."""
    weight = model.model.layers[0].mlp.down_proj.weight
    shown = [seen(value) for value in model.state_dict().values()] + [seen(weight.gather())]
    with bmt.gathered(model):
        shown.append(seen(model.model.layers[1].mlp.down_proj.weight))
    if step == 1:
        with bmt.gathered(model, modify=True):
            model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    if step == 2:
        with torch.no_grad():
            weight.mul_(1.5)
        model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        shown.append(seen(model(**rows(50 + step, bmt.rank())).loss))
    model.train()
    bmt.synchronize()
    return shown


@pytest.mark.parametrize("zero_level", [2, 3])
def test_weights_are_read_and_written_between_steps(world, zero_level):
    world(2)(same_bits, "llama", {"between": read_and_write, "zero_level": zero_level})


def test_weights_are_read_and_written_where_they_are_pulled(peers):
    peers(2)(same_bits, "llama", {"between": read_and_write})


def other_parameters():
    """The layers compute with what is in their slots; only the wholes stand for what was gathered."""
    model = bmt.auto_wrap(build("llama"), float8=True)
    for step in range(2):
        model(**rows(step, bmt.rank())).loss.backward()
    assert all(buffer.in_float8 for buffer in float8_buffers(model))
    bmt.synchronize()
    wholes = gather_wholes(model)
    with torch.no_grad():
        expected = model(**rows(2, bmt.rank())).loss
        with shown_plain(model, wholes):
            assert torch.equal(model(**rows(2, bmt.rank())).loss, expected)
    read = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda layer, args, output: read.append(layer.weight.detach().clone()))
    model(**rows(3, bmt.rank())).loss.backward()
    assert read and all(each.isnan().all() and each.shape == layer.weight.full_shape for each in read)


def test_other_parameters_are_computed_with(world):
    world(2)(other_parameters)


class Reader(nn.Module):
    """A layer that is called and one of which only the weight is read, which no rule knows."""

    def __init__(self):
        super().__init__()
        self.called, self.read = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.called(x) + x @ self.read.weight


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Reader(), nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32))])
        self.layers[2][0].weight.data.fill_(1)

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        return self.layers[2](x - x.mean(-1, keepdim=True)).square().mean()


def some_stay(alone):
    model = bmt.auto_wrap(Stack(), float8=True, use_checkpoint=False)
    with log_lines(logging.INFO) as lines:
        for step in range(3):
            loss = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            assert loss.isfinite()
    told = [line for line in lines if "gathered in float8" in line]
    if alone:
        assert not float8_buffers(model) and not told
        return
    assert [buffer.in_float8 for buffer in float8_buffers(model)] == [False, True, False]
    assert len(told) == (bmt.rank() == 0) and all(
        "in 1 buffers, in their own dtype in 2: 1 (read was not called), 1 (0 has left float8)" in line for line in told
    )


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_not_called_or_too_noisy_stays(world, size):
    world(size)(some_stay, size == 1)


def tied_within_a_block():
    model = Stack()
    model.layers[1] = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model.layers[1][1].weight = model.layers[1][0].weight
    bmt.auto_wrap(model, float8=True)
    buffers = {each.weight.buffer for each in model.layers[1] if isinstance(each, Float8Linear)}
    assert [isinstance(buffer, Float8Buffer) for buffer in buffers].count(True) == 1 and len(buffers) == 2
    assert not isinstance(model.layers[1][0].weight.buffer, Float8Buffer)


def test_shared_weights_are_gathered_in_their_own_dtype(world):
    world(2)(tied_within_a_block)
