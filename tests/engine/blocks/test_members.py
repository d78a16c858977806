"""parameters() and train() of sharded modules read a list, which follows every change of the modules."""

import copy
import itertools
import weakref

import pytest
import torch

import hf_bmtrain as bmt
from float8_models import build
from hf_bmtrain.engine.blocks.members import Members
from ranks import on_ranks


class Trained(torch.nn.Linear):
    """Counts the calls of its own `train`."""

    calls = 0

    def train(self, mode=True):
        self.calls += 1
        return super().train(mode)


def listed(model):
    """The parameters as torch lists them."""
    return [parameter for _, parameter in torch.nn.Module.named_parameters(model)]


def same(one, other):
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))


def add(model):
    model.model.norm.extra = torch.nn.Linear(2, 2)


def tie(model):
    model.model.norm.extra.bias = model.model.norm.extra.weight


def replace(model):
    model.model.norm.extra.weight = torch.nn.Parameter(torch.ones(3, 3))


def register(model):
    model.model.norm.register_parameter("more", torch.nn.Parameter(torch.ones(1)))


def remove(model):
    del model.model.norm.extra


def empty(model):
    model.model.norm.more = None


@on_ranks(2)
def test_the_list_follows_changes():
    model = bmt.auto_wrap(build("llama"))
    for change in (lambda model: None, add, tie, replace, register, remove, empty):
        assert same([*model.parameters()], listed(model))
        change(model)
        assert same([*model.parameters()], listed(model)), change.__name__
        for mode in (False, True):
            model.train(mode)
            assert {module.training for module in model.modules()} == {mode}
    assert same([*model.parameters(recurse=False)], []) and next(model.parameters()) is listed(model)[0]
    copied = copy.deepcopy(model)
    assert not {*copied.parameters()} & {*model.parameters()} and not any(
        name.startswith("_bmt") for name in vars(copied)
    )


@on_ranks(1)
def test_train_sets_each_mode_that_differs_and_calls_methods_of_users():
    model = bmt.auto_wrap(build("llama")).train()
    model.model.layers[1].mlp.eval()
    model.train()
    assert all(module.training for module in model.modules())
    model.model.layers[0].extra = Trained(2, 2)
    before = model.model.layers[0].extra.calls
    model.train()
    model.train()
    assert model.model.layers[0].extra.calls == before + 2
    with pytest.raises(ValueError, match="boolean"):
        model.train(1)
    del model.model.layers[0].extra
    calls = []
    model.train()
    model.model.layers[0].mlp.train = calls.append  # as programs do to keep a frozen part in evaluation mode
    model.train()
    assert calls == [True]


class Filtered(torch.nn.Sequential):
    """Lists only what is trained."""

    def named_parameters(self, *args, **kwargs):
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if p.requires_grad)


class Halved(torch.nn.Sequential):
    """Lists only its first module, if it is told to."""

    halved = False

    def named_modules(self, *args, **kwargs):
        return itertools.islice(super().named_modules(*args, **kwargs), 2 if self.halved else None)


@on_ranks(1)
def test_methods_of_users_list_parameters():
    """Of the class, of what lists modules, and of the object."""
    for cls in (Filtered, torch.nn.Sequential):
        model = bmt.auto_wrap(cls(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
        if cls is not Filtered:
            listed = model.named_parameters
            model.named_parameters = lambda listed=listed, **how: (
                (name, p) for name, p in listed(**how) if p.requires_grad
            )
        assert len([*model.parameters()]) == 4
        model[1].weight.requires_grad_(False)
        assert len([*model.parameters()]) == 3
    model = bmt.auto_wrap(Halved(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    assert len([*model.parameters()]) == 4
    model.halved = True
    assert len([*model.parameters()]) == 2


def test_members_keep_nothing_alive():
    module, members = torch.nn.Sequential(torch.nn.Linear(2, 2)), Members()
    assert members.update(module) and not members.update(module)
    assert same(members.parameters(), [*module.parameters()])
    module.append(torch.nn.ReLU())
    assert members.update(module) and not members.are_in(False) and members.are_in(True)
    module.append(torch.jit.script(torch.nn.ReLU()))
    assert members.update(module) and not members.are_in(True)
    died = weakref.ref(module)
    del module
    assert died() is None


def test_removed_modules_are_freed_at_once():
    """Without a call of `update`, and with what their attributes refer to."""

    class Held:
        pass

    module, members = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Members()
    module[1].held = Held()
    members.update(module)
    died = [weakref.ref(each) for each in (module[1].held, module[1].weight)]
    del module[1]
    assert [each() for each in died] == [None, None]
    assert members.update(module) and len(members.parameters()) == 2


@on_ranks(2)
def test_full_parameters_are_freed_after_gathered():
    model = bmt.auto_wrap(build("llama"))
    with bmt.gathered(model):
        full = [*map(weakref.ref, model.parameters())]
        assert all(ref().numel() == parameter.numel() for ref, parameter in zip(full, build("llama").parameters()))
    assert not any(ref() is not None for ref in full)
    assert all(isinstance(parameter, bmt.DistributedParameter) for parameter in model.parameters())
