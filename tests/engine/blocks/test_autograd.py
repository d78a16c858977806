"""The two boundaries find and replace differentiable tensors wherever they stand, and tell their owner in time."""

from typing import NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from cases import by_default, full, pairwise
from hf_bmtrain.engine.blocks.autograd import enter_backward, leave_backward


class Pair(NamedTuple):
    first: object
    second: object


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


class Owner:
    def __init__(self):
        self.told = []

    def before_backward(self, token):
        self.told.append(("before", token))

    def after_backward(self):
        self.told.append("after")


def leaf():
    return torch.ones(2, requires_grad=True)


SHAPES = {
    "tensor": lambda x, plain: x,
    "tuple": lambda x, plain: (x, plain, None, 3),
    "list": lambda x, plain: [plain, "name", x],
    "dict": lambda x, plain: {"b": x, "a": plain, "c": None},
    "nested": lambda x, plain: ({"k": [plain, (x, torch.float32)]}, 1.5),
    "named tuple": lambda x, plain: Pair(plain, x),
    "model output": lambda x, plain: BaseModelOutput(last_hidden_state=x, hidden_states=(plain, plain)),
    "in a tuple": lambda x, plain: (plain, BaseModelOutput(last_hidden_state=x)),
}


def tensors(value):
    """(tensor, its place) of everything in `value`."""
    if isinstance(value, torch.Tensor):
        return [((), value)]
    if isinstance(value, dict):
        items = value.items()
    else:
        items = enumerate(value) if isinstance(value, (tuple, list)) else ()
    return [((key, *place), tensor) for key, item in items for place, tensor in tensors(item)]


def assert_replaced(before, old, after, x):
    """old: the tensors of `before` before the call, which modifies lists and dicts in place."""
    assert type(before) is type(after)
    assert before is after or isinstance(before, (torch.Tensor, tuple))
    new = tensors(after)
    assert [place for place, _ in old] == [place for place, _ in new]
    for (_, a), (_, b) in zip(old, new):
        assert (b is not a and torch.equal(a, b) and b.requires_grad) if a is x else b is a


@pytest.mark.parametrize("name", by_default(SHAPES, "nested", "model output", "in a tuple"))
def test_outputs(name):
    shape = SHAPES[name]
    owner, x = Owner(), leaf()
    before = shape(x, torch.zeros(3))
    old = tensors(before)
    after, differentiable = enter_backward(owner.before_backward, "token", before)
    assert differentiable
    assert_replaced(before, old, after, x)
    next(tensor for _, tensor in tensors(after) if tensor.requires_grad).sum().backward()
    assert owner.told == [("before", "token")]
    assert torch.equal(x.grad, torch.ones(2))


@pytest.mark.parametrize(
    ("name", "by_keyword"),
    pairwise([("nested", False), ("named tuple", True), ("model output", True)], list(SHAPES), [False, True]),
)
def test_inputs(name, by_keyword):
    shape = SHAPES[name]
    owner, x = Owner(), leaf()
    before, rest = shape(x, torch.zeros(3)), [torch.zeros(1)]
    old = tensors(before)
    args, kwargs, inputs, filled = leave_backward(
        owner.after_backward, *(((rest,), {"it": before}) if by_keyword else ((before,), {"it": rest}))
    )
    after, same = (kwargs["it"], args[0]) if by_keyword else (args[0], kwargs["it"])
    assert same is rest, "a layer may fill a list that it is given"
    assert_replaced(before, old, after, x)
    (found,) = inputs
    found.sum().backward()
    assert owner.told == ["after"]
    if filled is not None:
        filled.restore()
    assert all(a is b for (_, a), (_, b) in zip(old, tensors(before)))


@full
def test_two_in_order():
    owner, x, y = Owner(), leaf(), leaf()
    args, kwargs, inputs, _ = leave_backward(owner.after_backward, (x, (y,)), {"again": x})
    assert [args[0], args[1][0], kwargs["again"]] == list(inputs)
    (args[0] + 2 * args[1][0] + 4 * kwargs["again"]).sum().backward()
    assert (x.grad[0], y.grad[0]) == (5, 2)
    assert owner.told == ["after"]


@full
def test_one_tensor_and_one_list_twice():
    owner, x, y = Owner(), leaf(), [leaf()]
    args, kwargs, inputs, _ = leave_backward(owner.after_backward, (x, y), {"again": (x, y)})
    assert args[1] is kwargs["again"][1] is y
    assert [args[0], y[0]] == list(inputs)
    assert kwargs["again"][0] is args[0]


@full
def test_without_a_differentiable_tensor():
    given = (torch.zeros(2), 3), {"cache": object()}
    args, kwargs, inputs, _ = leave_backward(Owner().after_backward, *given)
    assert (args, kwargs, list(inputs)) == (*given, [])
    assert enter_backward(Owner().before_backward, None, given[0]) == (given[0], False)


@pytest.mark.parametrize("wrap", [lambda o: o, lambda o: (torch.zeros(1), o), lambda o: {"o": Pair(o, None)}])
def test_objects_are_searched_unless_they_have_slots(wrap):
    owner, x, inside = Owner(), leaf(), Opaque(leaf())
    _, differentiable = enter_backward(owner.before_backward, "token", wrap(inside))
    assert differentiable
    (inside.tensor + x).sum().backward()
    assert owner.told == [("before", "token")]
    with pytest.raises(RuntimeError, match="returned a Slotted"):
        enter_backward(owner.before_backward, None, wrap(Slotted(leaf())))
    enter_backward(owner.before_backward, None, wrap(Slotted(torch.zeros(1))))


def test_transforms_of_functorch_are_refused():
    def through(x):
        (x,), _, _, _ = leave_backward(Owner().after_backward, (x,), {})
        return x.sum()

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(through)(leaf())
