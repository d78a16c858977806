"""Deep copies of sharded models: plain models with full weights, which can be wrapped."""

import copy

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full
from ranks import on_ranks
from state_dicts import check_equal, same_storage
from tiny_models import build
from twins import Tower, compare_backward, ids, tower_loss


@pytest.mark.parametrize("family", ["gpt2", *in_full("llama", "t5", "mixtral", "bert")])
@on_ranks(2)
def test_a_copy_is_plain(family):
    """Its classes, attributes, ties and hooks are those of a model that was never wrapped; the original stays."""
    plain, model = build(family, tied=True), bmt.auto_wrap(build(family, tied=True))
    copied = copy.deepcopy(model)
    assert not any(isinstance(parameter, bmt.DistributedParameter) for parameter in copied.parameters())
    check_equal(copied.state_dict(), plain.state_dict())
    assert same_storage(copied.state_dict()) == same_storage(plain.state_dict())
    for (name, mine), (_, theirs) in zip(copied.named_modules(), plain.named_modules()):
        assert type(mine) is type(theirs) or isinstance(mine, bmt.TransformerBlockList), name
        assert {*vars(mine)} - {*vars(theirs)} <= {"gradient_checkpointing", "_gradient_checkpointing_func"}, name
        for hooks in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
            assert len(getattr(mine, hooks)) == len(getattr(theirs, hooks)), (name, hooks)
    check_equal(copy.deepcopy(model).state_dict(), model.state_dict())


class Patched(Tower):
    """Forwards that the program has replaced on instances: a closure, and a bound method of the layer."""

    def __init__(self):
        super().__init__()
        layer = self.layers[0]
        own, doubled = type(layer).forward, lambda layer, *inputs: own(layer, *inputs) * 2
        layer.forward = doubled.__get__(layer)
        self.head.weight.data.mul_(2)


class Parametrized(Tower):
    """torch's parametrization gives the head, and a layer inside a block, classes that define `__deepcopy__`."""

    def __init__(self):
        super().__init__()
        for linear in (self.head, self.layers[0].linear):
            torch.nn.utils.parametrizations.weight_norm(linear)


class Shared(torch.nn.Linear):
    """Copies share the attribute `names`."""

    names = ()

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        shared = {id(self.names): self.names}
        copied.__dict__.update(copy.deepcopy(self.__dict__, {**memo, **shared}))
        return copied


class CopiesItself(Tower):
    """The head's class defines `__deepcopy__`."""

    def __init__(self):
        super().__init__()
        self.head = Shared(self.head.in_features, 2)
        self.head.names = ["a", "b"]


@on_ranks(2)
def test_classes_that_define_deepcopy():
    """Copying a model in which such a module is sharded raised KeyError."""
    model = bmt.auto_wrap(CopiesItself())
    copied = copy.deepcopy(model)
    assert type(copied.head) is Shared and copied.head.names is model.head.names
    assert type(copy.deepcopy(model.head).weight) is torch.nn.Parameter
    check_equal(copied.state_dict(), CopiesItself().state_dict())


@pytest.mark.parametrize("make", [Tower, Parametrized, *in_full(Patched, CopiesItself)])
@on_ranks(2, full=(1,))
def test_a_copy_is_wrapped(make):
    """Copied after a step and wrapped, it trains as the twin does, and the model that was copied does."""
    model, twin = bmt.auto_wrap(make()), make()
    compare_backward(model, twin, tower_loss, 0)
    for copied in (bmt.auto_wrap(copy.deepcopy(copy.deepcopy(model))), model):
        again = copy.deepcopy(twin)
        for step in range(2):
            for each in (copied, again):
                each.zero_grad()
            compare_backward(copied, again, tower_loss, step)
            for each in (copied, again):
                torch.optim.SGD(each.parameters(), lr=0.1).step()


@on_ranks(2)
def test_parts():
    """Of a layer inside a block, of a module outside, and of a parameter alone; hooks of the program are kept."""
    model, twin, seen = bmt.auto_wrap(Tower()), Tower(), []
    model.head.register_forward_hook(lambda *args: seen.append(1))
    linear, head, weight = (copy.deepcopy(each) for each in (model.layers[0].linear, model.head, model.head.weight))
    assert torch.equal(linear.weight, twin.layers[0].linear.weight) and torch.equal(weight, twin.head.weight)
    assert type(head) is torch.nn.Linear and isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    head(torch.zeros(1, head.in_features))
    assert seen == [1]
    model(ids(0, 0)).sum().backward()
    assert weight.grad is None and head.weight.grad is None
