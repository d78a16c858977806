"""Weights gathered in float8: training has the bits of training with weights that are gathered in their own dtype."""

import copy
import gc
import io
import logging
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, in_slow, rows_in_full
from float8_models import build, rows
from float8_training import float8_buffers, same_bits, seen, train
from hf_bmtrain.engine.sharding.slots import buffers_of
from hf_bmtrain.features.float8.linear import Float8Linear
from hf_bmtrain.features.float8.storage import Float8Requantizer, Float8Storage
from hf_bmtrain.features.parity.plain import gather_full_params, shown_plain
from log_lines import log_lines
from offloaded import as_on_a_gpu
from ranks import on_ranks


def freeze_half(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("s.0." not in name and ".0." not in name and "up_proj" not in name)


def buffers_a_block(family, width):
    model = build(family, width=width)
    bmt.auto_wrap(model, float8=True)
    blocks = [each for each in model.modules() if isinstance(each, bmt.CheckpointBlock)]
    return [[isinstance(buffer.storage, Float8Storage) for buffer in buffers_of(block)] for block in blocks]


@full
@pytest.mark.parametrize(
    ("family", "width", "expected"),
    [("gpt2", 32, [True, False]), *rows_in_full([("llama", 32, [True]), ("gpt2", 256, [True])])],
    ids=["many", "few", "few biases"],
)
def test_norms_and_biases_are_gathered_with_the_weights_if_they_are_few(world, family, width, expected):
    for found in world(2)(buffers_a_block, family, width):
        assert [sorted(each, reverse=True) for each in found] == [expected] * 2


@pytest.mark.parametrize("zero_level", [3, *in_full(2)])
@pytest.mark.parametrize("family", ["gpt2", *in_full("llama")])
def test_same_bits(world, zero_level, family):
    world(2)(same_bits, family, {"zero_level": zero_level, "use_checkpoint": zero_level == 2})


FROZEN = {"prepare": freeze_half}


@pytest.mark.parametrize(
    "options",
    [
        {"zero_level": 3, "use_checkpoint": True, "accumulate": 2}, {**FROZEN, "keep_frozen": True},
        *in_full({"dtype": torch.bfloat16}, {"zero_level": 2, "use_checkpoint": False}),
        *in_full({"offload": True, "accumulate": 2}, {"compile": "aot_eager"}),
        *in_slow({**FROZEN, "keep_frozen": False}, {"compile": "aot_eager", "use_checkpoint": False, **FROZEN}),
    ],
    ids=lambda options: "-".join(options),
)  # fmt: skip
def test_same_bits_with_other_options(world, options):
    world(2)(same_bits, "llama", options)


@pytest.mark.parametrize(
    "options",
    [{"offload": True, "zero_level": 2}, *in_full({}, {**FROZEN, "keep_frozen": True})],
    ids=lambda options: "-".join(options),
)
def test_same_bits_where_weights_are_pulled(peers, options):
    peers(2)(same_bits, "llama", options)


def roundings(offload):
    """How many exchanges of magnitudes each step makes, and the number of buffers."""
    counts, calls = [], []
    original = Float8Requantizer.round

    def counted(self, gathered):
        calls.append(gathered)
        original(self, gathered)

    def count(model, step):
        counts.append(len(calls))
        calls.clear()
        return [len(float8_buffers(model))]

    with mock.patch.object(Float8Requantizer, "round", counted), as_on_a_gpu(0) if offload else nullcontext():
        shown = train("llama", True, between=count, offload=offload)
    return counts, next(each for each in shown if isinstance(each, int))


@pytest.mark.parametrize("offload", [True, *in_full(False)])
def test_shards_are_rounded_together_unless_they_are_updated_alongside(world, offload):
    for counts, buffers in world(2)(roundings, offload):
        assert counts == [0, buffers] + [buffers if offload else 1] * 2 and buffers > 1  # the second step switches


def updated_alongside(seed):
    with as_on_a_gpu(seed):
        same_bits("llama", {"offload": True, "accumulate": 2})


@pytest.mark.parametrize("seed", [0, *in_full(1, 2)])
def test_shards_are_rounded_behind_their_updates(world, peers, seed):
    world(2)(updated_alongside, seed)
    peers(2)(updated_alongside, seed)


class Trainer:
    """Trains for as long as it is alive, which is until Python's collector runs: it refers to itself."""

    def __init__(self, model):
        self.optimizer, self.step = torch.optim.SGD(model.parameters(), lr=1e-2), self.train

    def train(self, model, number):
        loss = model(**rows(number, bmt.rank())).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def prune(collects):
    """A layer is cut off, and its slices live on, on one rank longer than on the other."""
    gc.collect()
    gc.disable()
    try:
        model = bmt.auto_wrap(build("llama", blocks=3), float8=True)
        trainer = Trainer(model)
        for number in range(3):
            trainer.step(model, number)
        del model.model.layers[-1]
        model.config.num_hidden_layers = 2
        trainer = Trainer(model)
        if bmt.rank() == collects:
            gc.collect()
        return [trainer.step(model, number) for number in range(3, 5)]
    finally:
        gc.enable()


@full
@pytest.mark.parametrize("collects", [-1, *in_full(1)])
def test_a_layer_that_is_cut_off_is_not_rounded_any_more(world, peers, collects):
    for ranks in (world(2), peers(2)):
        for losses in ranks(prune, collects):
            assert len(losses) == 2 and all(loss == loss for loss in losses)


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


@pytest.mark.parametrize("zero_level", [3, *in_full(2)])
def test_weights_are_read_and_written_between_steps(world, zero_level):
    world(2)(same_bits, "llama", {"between": read_and_write, "zero_level": zero_level})


@full
def test_weights_are_read_and_written_where_they_are_pulled(peers):
    peers(2)(same_bits, "llama", {"between": read_and_write})


@on_ranks(2)
def test_other_parameters_are_computed_with():
    """The layers compute with what is in their slots; only the wholes stand for what was gathered."""
    model = bmt.auto_wrap(build("llama"), float8=True)
    for step in range(2):
        model(**rows(step, bmt.rank())).loss.backward()
    assert all(buffer.storage.in_float8 for buffer in float8_buffers(model))
    bmt.synchronize()
    full_params = gather_full_params(model)
    with torch.no_grad():
        expected = model(**rows(2, bmt.rank())).loss
        with shown_plain(model, full_params):
            assert torch.equal(model(**rows(2, bmt.rank())).loss, expected)
    read = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda layer, args, output: read.append(layer.weight.detach().clone()))
    model(**rows(3, bmt.rank())).loss.backward()
    assert read and all(each.isnan().all() and each.shape == layer.weight.full_shape for each in read)


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
    assert [buffer.storage.in_float8 for buffer in float8_buffers(model)] == [False, True, False]
    assert len(told) == (bmt.rank() == 0) and all(
        "1 groups of weights (usually one per block) are all-gathered in float8, 2 in their own dtype: "
        "1 because read was not called, 1 because 0 has too much rounding noise" in line
        for line in told
    )


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_what_is_not_called_or_too_noisy_stays(world, size):
    world(size)(some_stay, size == 1)


@on_ranks(2)
def test_shared_weights_are_gathered_in_their_own_dtype():
    model = Stack()
    model.layers[1] = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model.layers[1][1].weight = model.layers[1][0].weight
    bmt.auto_wrap(model, float8=True)
    buffers = {each.weight.buffer for each in model.layers[1] if isinstance(each, Float8Linear)}
    assert [isinstance(buffer.storage, Float8Storage) for buffer in buffers].count(True) == 1 and len(buffers) == 2
    assert not isinstance(model.layers[1][0].weight.buffer.storage, Float8Storage)


@pytest.mark.parametrize("steps", [0, *in_full(3)])
@on_ranks(2, full=(1,))
def test_copies_of_a_model_in_float8(steps):
    """A copy computes as its original does."""
    model = bmt.auto_wrap(Stack(), float8=True)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        model(x).backward()
    with torch.no_grad():
        copied, expected = copy.deepcopy(model), model(x)
        assert any(isinstance(each, Float8Linear) for each in copied.modules())
        torch.testing.assert_close(copied(x), expected, rtol=1e-2, atol=0)


@on_ranks(2)
def test_copies_of_a_wrapped_model_are_ordinary_and_gathered_in_float8():
    copied = copy.deepcopy(bmt.auto_wrap(Stack()))
    file = io.BytesIO()
    torch.save([*copied.parameters()], file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    bmt.auto_wrap(copied, float8=True)
    assert any(isinstance(buffer.storage, Float8Storage) for buffer in buffers_of(copied))
