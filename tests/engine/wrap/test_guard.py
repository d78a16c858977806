"""Parameters that come into a sharded model are seen in the next training forward, whichever way and whenever."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import hf_bmtrain as bmt
from cases import by_default, in_full
from ranks import on_ranks
from twins import Tower, ids


class Quiet(Tower):
    """A tower with modules that own nothing, alone and in a layer."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.layers[1].activation = nn.Tanh()
        self.spare = nn.ModuleList()


def plain():
    return nn.Parameter(torch.zeros(6, 6))


def set_item(model, name, parameter):
    model.get_submodule(name)._parameters["weight"] = parameter


CHANGES = {
    "replaced": lambda m: setattr(m.layers[1].linear, "weight", plain()),
    "replaced in the dict": lambda m: set_item(m, "layers.1.linear", plain()),
    "added to a module with parameters": lambda m: m.head.register_parameter("scale", plain()),
    "added to the model itself": lambda m: m.register_parameter("scale", plain()),
    "added to one without": lambda m: m.dropout.register_parameter("rate", plain()),
    "added to one without, in the dict": lambda m: set_item(m, "layers.1.activation", plain()),
    "a module replaced": lambda m: setattr(m, "head", nn.Linear(6, 2)),
    "a module replaced in the dict": lambda m: m.layers[0]._modules.__setitem__("linear", nn.Linear(6, 6)),
    "an adapter beside": lambda m: m.layers[2].linear.add_module("adapter", nn.Linear(6, 6)),
    "an adapter around": lambda m: setattr(m.layers[2], "linear", nn.Sequential(m.layers[2].linear, nn.Linear(6, 6))),
    "a module added last": lambda m: m.layers[2].add_module("late", nn.Linear(6, 6)),
    "appended": lambda m: m.spare.append(nn.Linear(6, 6)),
}


RENAMING = {
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "pruned by nothing": lambda linear: prune.identity(linear, "weight"),
}


@pytest.mark.parametrize("name", ["pruned", *in_full("pruned by nothing")])
@pytest.mark.parametrize("path", ["layers.1.linear", *in_full("head")])
@on_ranks(2)
def test_renamed(name, path):
    """Pruning after wrapping would mask slices by the numbers in them."""
    model = bmt.auto_wrap(Quiet())
    model(ids(0, 0)).backward()

    def prune_and_train():
        RENAMING[name](model.get_submodule(path))
        model(ids(1, 0))

    with pytest.raises(RuntimeError, match=r"'.*weight_orig' .* Prune and parametrize the model before auto_wrap"):
        prune_and_train()


def swaps_back():
    """A parameter that stood elsewhere for a while; a module that owns nothing, which may come and go."""
    model = bmt.auto_wrap(Quiet())
    for step, change in enumerate(
        [lambda: setattr(model, "dropout", nn.Identity()), lambda: delattr(model, "dropout")]
    ):
        model(ids(step, 0)).backward()
        change()
    piece = model.head._parameters["weight"]
    model(ids(5, 0)).backward()
    model.head._parameters["weight"] = plain()
    with pytest.raises(RuntimeError, match=r"'head\.weight' is a Parameter of shape \(6, 6\)"):
        model(ids(5, 0))
    model.head._parameters["weight"] = piece
    model(ids(5, 0)).backward()


def exchanged_for_no_slice():
    """torch refuses, because buffers refer to slices weakly."""
    model = bmt.auto_wrap(Quiet())
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.layers[0].gain, nn.Parameter(torch.ones(1)))
    model(ids(5, 0)).backward()


def walks_once():
    """Names are looked at in the first training forward, and again only when the tree has changed."""
    model = bmt.auto_wrap(Quiet())
    with mock.patch.object(Quiet, "named_modules", autospec=True, side_effect=nn.Module.named_modules) as walk:
        for step in range(3):
            model(ids(step, 0)).backward()
        first = walk.call_count
        assert first > 0
        model.another = nn.Identity()
        model(ids(3, 0)).backward()
        assert walk.call_count == 2 * first
        with torch.no_grad():
            model.another = nn.Linear(6, 6)
            model(ids(3, 0))  # evaluation is nobody's matter
        assert walk.call_count == 2 * first


@pytest.mark.parametrize("forwards", [2, *in_full(0)])
@pytest.mark.parametrize(
    "name",
    by_default(
        CHANGES,
        "replaced in the dict",
        "added to the model itself",
        "added to one without",
        "a module replaced",
        "an adapter around",
    ),
)
@on_ranks(2)
def test_changes(name, forwards):
    """After so many forwards that found nothing; the error comes every time until the model is mended."""
    model = bmt.auto_wrap(Quiet())
    for step in range(forwards):
        model(ids(step, 0)).backward()
    CHANGES[name](model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^'\w.*was added to the model after auto_wrap"):
            model(ids(0, 0))


@pytest.mark.parametrize("case", [swaps_back, exchanged_for_no_slice, walks_once], ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_guard(world, size, case):
    world(size)(case)
