"""Whole parameters for a while: what is read is right, what is written lasts, what cannot last raises."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default
from tiny_models import build
from twins import Tower, check_gradients, ids


def read():
    model, twin = bmt.auto_wrap(Tower()), Tower()
    slices = list(model.parameters())
    with bmt.gathered(model) as same:
        assert same is model
        for (name, whole), (_, expected) in zip(model.named_parameters(), twin.named_parameters()):
            assert torch.equal(whole, expected), name
        assert model.head.weight.shape == (2, 6)
    assert all(a is b for a, b in zip(model.parameters(), slices))
    with bmt.gathered([model.head.weight, model.layers[1].gain]) as (head, gain):
        assert torch.equal(head, twin.head.weight)
        assert torch.equal(gain, twin.layers[1].gain)
    with bmt.gathered(model.head.bias) as (bias,):
        assert torch.equal(bias, twin.head.bias)


def written_as_in_plain_torch():
    """nn.init, .data, in-place arithmetic and an average; rank 0's values count; training goes on from there."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    model(ids(0, 0))  # leaves a block whole with the old values
    with bmt.gathered(model, modify=True):
        torch.manual_seed(bmt.rank())
        nn.init.xavier_uniform_(model.head.weight)
        model.embedding.weight.data.copy_(torch.full((11, 6), 0.25 + bmt.rank()))
        model.layers[0].linear.weight.mul_(0.5)
    torch.manual_seed(0)
    nn.init.xavier_uniform_(twin.head.weight)
    with torch.no_grad():
        twin.embedding.weight.fill_(0.25)
        twin.layers[0].linear.weight.mul_(0.5)
        twin.layers[2].gain.lerp_(twin.layers[0].gain * 3, 0.5)
    with bmt.gathered([model.layers[2].gain, model.layers[0].gain], modify=True) as (gain, other):
        gain.lerp_(other * 3, 0.5)
    loss = model(ids(1, bmt.rank()))
    loss.backward()
    losses = torch.stack([twin(ids(1, rank)) for rank in range(bmt.world_size())])
    losses.mean().backward()
    torch.testing.assert_close(loss, losses[bmt.rank()])
    check_gradients(model, twin)


def tied_weights_are_one():
    model = bmt.auto_wrap(build("gpt2", tied=True))
    with bmt.gathered(model, modify=True):
        assert model.lm_head.weight is model.transformer.wte.weight
        model.lm_head.weight.fill_(2.0)
    assert (model.state_dict()["transformer.wte.weight"] == 2).all()


def masters_follow():
    model = bmt.auto_wrap(Tower().to(torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-4)
    model(ids(0, 0)).backward()
    optimizer.step()
    with bmt.gathered(model, modify=True):
        model.head.weight.fill_(3.0)
    optimizer.step()
    assert (model.head.weight.gather() - 3).abs().max() < 0.02


def unchanged_after(model, act, message, error=RuntimeError, **options):
    before = model.state_dict()
    with pytest.raises(error, match=message), bmt.gathered(model, **options):
        act(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[name], value) for name, value in after.items())
    model(ids(0, bmt.rank())).backward()


def what_would_vanish_raises():
    model = bmt.auto_wrap(Tower())
    unchanged_after(model, lambda m: m.head.weight.data.zero_(), "modify=True")
    for modify in (False, True):
        options = {"modify": modify}
        unchanged_after(model, lambda m: setattr(m, "head", nn.Linear(6, 3)), "Resize, tie or replace", **options)
        unchanged_after(
            model, lambda m: setattr(m.layers[0].linear, "weight", m.layers[1].linear.weight), "Resize, tie", **options
        )
        unchanged_after(model, lambda m: m(ids(0, 0)), "after the", **options)
        unchanged_after(model, lambda m: m.layers[0](torch.ones(2, 6)), "after the", **options)
        unchanged_after(model, lambda m: m.state_dict(), "after the", **options)
    unchanged_after(
        model, lambda m: setattr(m.head.bias, "data", torch.zeros(9)), r"\(2,\).*became \(9,\)", modify=True
    )
    with pytest.raises(ValueError, match="full already"), bmt.gathered(torch.ones(3)):
        pass


def an_exception_writes_nothing():
    model = bmt.auto_wrap(Tower())

    def act(model):
        model.head.weight.zero_()
        raise KeyError("mine")

    unchanged_after(model, act, "mine", KeyError, modify=True)


def only_one_rank_writes_without_modify():
    """The rank that did not write is told too, instead of waiting for ever."""
    model = bmt.auto_wrap(Tower())
    with pytest.raises(RuntimeError, match=r"rank 0: shapes \(2, 6\)"), bmt.gathered(model):
        model.head.weight.data.mul_(float(bmt.rank()))  # rank 1 multiplies by 1


CASES = [
    read, written_as_in_plain_torch, tied_weights_are_one, masters_follow, what_would_vanish_raises,
    an_exception_writes_nothing, only_one_rank_writes_without_modify,
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    by_default(CASES, written_as_in_plain_torch, tied_weights_are_one, masters_follow, an_exception_writes_nothing),
    ids=lambda case: case.__name__,
)
def test_gathered(world, case):
    world(2)(case)
