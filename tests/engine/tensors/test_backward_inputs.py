"""Gradients of named parameters alone: as plain torch's, or refused."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full, pairwise
from ranks import on_ranks
from twins import Tower, ids, losses

NAMES = {
    "all": None,
    "in a block": ["layers.1.linear.weight"],
    "outside": ["embedding.weight"],
    "some": ["layers.0.gain", "layers.2.linear.bias", "head.weight"],
}


@pytest.mark.parametrize(
    ("name", "use_checkpoint"),
    pairwise([("in a block", True), ("some", False)], list(NAMES), [True, False]),
)
@on_ranks(2)
def test_backward(name, use_checkpoint):
    model, twin = bmt.auto_wrap(Tower(), use_checkpoint=use_checkpoint), Tower()
    mine, twins = dict(model.named_parameters()), dict(twin.named_parameters())
    names = NAMES[name] or list(mine)
    for step in range(2):  # two accumulate
        loss, plain = losses(model, twin, step)
        loss.backward(inputs=[mine[each] for each in names])
        plain.backward(inputs=[twins[each] for each in names])
    for each, parameter in mine.items():
        gradient = parameter.gather_gradient()
        if each in names:
            torch.testing.assert_close(gradient, twins[each].grad, rtol=5e-6, atol=1e-7)
        else:
            assert gradient is None or not gradient.any()
    model.zero_grad()
    twin.zero_grad()
    loss, plain = losses(model, twin, 7)
    loss.backward()
    plain.backward()
    for each, parameter in mine.items():
        torch.testing.assert_close(parameter.gather_gradient(), twins[each].grad, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["layers.1.linear.weight", *in_full("embedding.weight")])
@on_ranks(2, full=(1,))
def test_gathered(name):
    """A loss that depends on a parameter in a forward, and through the result of `gather`."""
    model, twin = bmt.auto_wrap(Tower()), Tower()
    mine, twins = dict(model.named_parameters())[name], dict(twin.named_parameters())[name]
    loss, plain = losses(model, twin, 0)
    (loss + mine.gather().pow(2).sum()).backward(inputs=[mine])
    (plain + twins.pow(2).sum()).backward(inputs=[twins])
    torch.testing.assert_close(mine.gather_gradient(), twins.grad, rtol=5e-6, atol=1e-7)
    mine.gather().pow(2).sum().backward(inputs=[mine])
    twins.pow(2).sum().backward(inputs=[twins])
    torch.testing.assert_close(mine.gather_gradient(), twins.grad, rtol=5e-6, atol=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters() if parameter is not mine)


@on_ranks(2, full=(1,))
def test_a_frozen_parameter_raises():
    model = bmt.auto_wrap(Tower())
    frozen = model.get_parameter("layers.1.linear.weight").requires_grad_(False)
    loss = model(ids(0, 0))
    with pytest.raises(RuntimeError, match="requires_grad=False|does not require grad"):
        loss.backward(inputs=[frozen])
    loss.backward()


@on_ranks(2, full=(1,))
def test_a_backward_cannot_begin_at_a_parameter():
    parameter = bmt.auto_wrap(Tower()).head.weight
    with pytest.raises(RuntimeError, match="cannot start at a sharded parameter"):
        torch.autograd.backward([parameter], [torch.ones(2, 6)])


@on_ranks(2, full=(1,))
def test_grad():
    model = bmt.auto_wrap(Tower())
    for allow in (True, False):
        with pytest.raises(RuntimeError, match=r"loss.backward\(inputs=parameters\)"):
            torch.autograd.grad(model(ids(0, 0)), list(model.parameters()), allow_unused=allow)
    (gradient,) = torch.autograd.grad((x := torch.ones(2, requires_grad=True)).sum(), x)
    assert gradient.tolist() == [1, 1]
