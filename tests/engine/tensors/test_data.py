"""`.data` and `set_`: a tensor that was taken before they are set keeps the old values, as in torch."""

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import in_full

SHAPE = (5, 3)


def restored(p, q):
    """As in evaluation with a mean of the weights; training goes on afterwards, and so does what was saved."""
    saved = p.data
    p.data = p.data * 2
    p.data.add_(1)
    between = saved.clone()
    p.data = saved
    p.data.mul_(3)
    return p, saved, between


def landscape(p, q):
    start, directions = p.data, torch.arange(15.0).view(SHAPE)
    losses = []
    for step in (-0.5, 0.0, 0.5):
        p.data = start + step * directions
        losses.append(p.data.square().sum())
    p.data = start
    p.data.mul_(2)
    return p, start, *losses


def swapped(p, q):
    p.data, q.data = q.data, p.data
    return p, q


def detached(p, q):
    old = p.detach()
    p.data = p.data.sqrt()
    new = p.data.clone()
    with torch.no_grad():
        p.copy_(old)
    return p, new, old


def several(p, q):
    """Aliases of one memory share it afterwards too, and views of it are restored with it."""
    one, flat = p.data, p.data.view(-1)
    third = flat.view(3, 5)
    p.data = q.data * 2
    one.add_(1)
    values = [each.clone() for each in (p.data, one, flat, third)]
    p.data = one
    p.data.mul_(2)
    return p, *values, one, flat, third


def twice(p, q):
    first = p.data
    p.data = first + 1
    second = p.data
    p.data = second * 2
    p.data = first
    second.mul_(3)
    return p, first, second


def same(p, q):
    """Nothing changes, so the alias remains one."""
    alias = p.data
    p.data = p.data
    p.data = alias.view(SHAPE)
    alias.add_(1)
    return p, alias


def on_an_alias(p, q):
    """It moves the alias only."""
    alias, other = p.data, p.detach()
    alias.data = q.data * 2
    alias.add_(1)
    other.mul_(2)
    return p, alias, other


def gradient(p, q):
    saved = p.grad.data
    p.grad.data = p.grad.data * 2
    doubled = p.grad.clone()
    p.grad.data = saved
    p.grad.mul_(3)
    return p.grad, doubled, saved


def as_set(p, q):
    old = p.data
    with torch.no_grad():
        p.set_(q.data * 2)
        p.mul_(3)
    p.grad.set_(torch.ones(SHAPE))
    return p, p.grad, old


@pytest.mark.parametrize(
    "case", [restored, landscape, swapped, detached, several, twice, same, on_an_alias, gradient, as_set]
)
@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_like_torch(world, size, case):
    world(size)(compare, case)


def compare(case):
    outcomes = []
    for plain in (True, False):
        values = torch.arange(15.0).view(SHAPE)
        wrapped = nn.ParameterList([nn.Parameter(values.clone()), nn.Parameter(values + 100)])
        wrapped = wrapped if plain else bmt.auto_wrap(wrapped)
        for each in wrapped:
            each.grad = values + 7
        addresses = [] if plain else [each.part.data_ptr() for each in wrapped]
        outcomes.append([full(each) for each in case(*wrapped)])
        if not plain:
            assert addresses == [each.part.data_ptr() for each in wrapped], "the shard has moved"
    for mine, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert torch.equal(mine, expected)


def full(tensor):
    whole = tensor.read_full() if hasattr(tensor, "read_full") else tensor
    return whole.detach().clone().as_subclass(torch.Tensor)


def complex_parts():
    """The real part shares the memory too, in another dtype and with gaps."""
    values = torch.complex(torch.arange(10.0), torch.arange(10.0) + 20).view(5, 2)
    p = bmt.auto_wrap(nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(values.clone())]))[1]
    with torch.no_grad():
        parts = p.real, p.imag, p.conj(), torch.view_as_real(p), p.conj().imag
        p.data = p.data * 2
        expected = values.real, values.imag, values.conj(), torch.view_as_real(values), values.conj().imag
        for mine, old in zip(parts, expected, strict=True):
            assert torch.equal(mine.read_full().resolve_conj().resolve_neg(), old.resolve_conj().resolve_neg())
        parts[0].fill_(1)
        assert torch.equal(parts[2].read_full().resolve_conj(), torch.complex(torch.ones(5, 2), -values.imag))
        assert torch.equal(p.gather(), values * 2)


def no_copy_without_alias():
    """The memory of an alias that is gone is not copied."""
    p = bmt.auto_wrap(nn.ParameterList([nn.Parameter(torch.ones(SHAPE))]))[0]
    p.data = p.data * 2
    assert not p.aliases
    for _ in range(3):
        p.detach().view(-1)
    assert len(p.aliases) == 0
    kept = p.data
    assert len(p.aliases) == 1
    del kept
    assert len(p.aliases) == 0


def refused_by_set():
    p = bmt.auto_wrap(nn.ParameterList([nn.Parameter(torch.ones(SHAPE))]))[0]
    before = p.part
    with pytest.raises(RuntimeError, match=r"set_ writes in place.*Use torch\.no_grad"):
        p.set_(torch.zeros(SHAPE))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"\(5, 3\) accepts only a tensor of the same shape"):
            p.set_()
        with pytest.raises(RuntimeError, match="accepts only a tensor"):
            p.set_(torch.zeros(15).untyped_storage(), 0, SHAPE)
        with pytest.raises(RuntimeError, match="set to a tensor of shape"):
            p.set_(torch.zeros(2, 3))
    assert p.part.data_ptr() == before.data_ptr()
    assert (p.gather() == 1).all()


@pytest.mark.parametrize("case", [complex_parts, no_copy_without_alias, refused_by_set])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_data(world, size, case):
    world(size)(case)
