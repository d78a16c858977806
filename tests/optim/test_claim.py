"""No two optimizers use one gradient, whenever they come; and a step that has nothing to prove proves nothing."""

import gc
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from hf_bmtrain.optim import checks as first_step
from hf_bmtrain.optim import claim
from twins import Tower, ids

BOTH = "both update the same slice"


def sgd(parameters):
    return torch.optim.SGD(list(parameters), lr=0.1)


def backward(model, step=0):
    model(ids(step, bmt.rank())).backward()


def trained(steps=3):
    """A tower whose optimizer has made some steps, and a gradient that it has just used."""
    model = bmt.auto_wrap(Tower())
    optimizer = sgd(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def two_at_once():
    """The first steps of both, also on gradients that were clipped or made by hand."""
    for change in ("none", "clipped", "made by hand"):
        model = bmt.auto_wrap(Tower())
        backward(model)
        if change == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        elif change == "made by hand":
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        first, second = sgd(model.parameters()), sgd(model.head.parameters())
        first.step()
        with pytest.raises(RuntimeError, match=BOTH):
            second.step()


def one_that_joins_later():
    model, first = trained()
    second = bmt.optim.AdamOptimizer(model.head.parameters())
    with pytest.raises(RuntimeError, match=f"AdamOptimizer and SGD {BOTH}"):
        second.step()
    first.zero_grad()
    backward(model, 7)
    second.step()  # a gradient of its own
    with pytest.raises(RuntimeError, match=f"SGD and AdamOptimizer {BOTH}"):
        first.step()


def one_that_joins_after_a_clip():
    """Gradients that were written since they arrived may be meant for the newcomer: it is told in its second step."""
    model, first = trained(1)
    second = sgd(model.head.parameters())
    for step in range(2):
        first.zero_grad()
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        first.step()
        if step == 0:
            second.step()
    with pytest.raises(RuntimeError, match=BOTH):
        second.step()


def gradients_made_by_hand():
    """Each optimizer gets gradients of its own without a backward between them: nothing to refuse."""
    model, first = trained()
    second = sgd(model.parameters())
    for step in range(3):
        for optimizer in (second, first):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5) if step else p.grad * 2
            optimizer.step()


def a_group_that_is_added_later():
    model = bmt.auto_wrap(Tower())
    body, head = sgd(model.layers.parameters()), sgd(model.head.parameters())
    for step in range(3):
        backward(model, step)
        body.step()
        head.step()
        model.zero_grad()
    head.add_param_group({"params": list(model.layers[1].parameters())})
    backward(model)
    body.step()
    with pytest.raises(RuntimeError, match=BOTH):
        head.step()


def replaced_parameters_of_a_group():
    """The list of a group is exchanged for another as long."""
    model = bmt.auto_wrap(Tower())
    one, other = sgd(model.layers[0].parameters()), sgd(model.layers[1].parameters())
    for step in range(2):
        backward(model, step)
        one.step()
        other.step()
        model.zero_grad()
    other.param_groups[0]["params"] = list(model.layers[0].parameters())
    backward(model)
    one.step()
    with pytest.raises(RuntimeError, match=BOTH):
        other.step()


def wrapped_after_steps():
    """An optimizer that has stepped, even beside another wrapped model, does not train what is wrapped since."""
    model, other = Tower(), bmt.auto_wrap(Tower())
    alone, mixed = sgd(model.parameters()), sgd([*model.head.parameters(), *other.parameters()])
    for _ in range(2):
        backward(model)
        backward(other)
        alone.step()
        mixed.step()
    bmt.auto_wrap(model)
    for optimizer, number in ((alone, "12 of 12"), (mixed, "2 of 14")):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"SGD holds {number} parameters from before"):
                optimizer.step()


def costs_nothing_after_the_first_step():
    """What is per parameter is done in the first step, and again where something has changed."""
    model, optimizer = trained(1)
    with mock.patch.object(claim.Claim, "_note") as note, mock.patch.object(first_step, "check") as check:
        for step in range(3):
            backward(model, step)
            optimizer.step()
        assert not note.called and not check.called
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        optimizer.step()
        assert check.call_count == 1 and note.call_count == 1


def a_rival_that_is_gone():
    """Two phases, each with its optimizer: the second is alone once the first is dropped."""
    model, first = trained()
    first.zero_grad()
    second = sgd(model.parameters())
    for step in range(2):
        second.zero_grad()
        backward(model, step)
        second.step()
    assert second.claim._shared
    del first
    gc.collect()
    second.step()
    assert not second.claim._shared


CASES = [
    two_at_once, one_that_joins_later, one_that_joins_after_a_clip, gradients_made_by_hand, a_group_that_is_added_later,
    replaced_parameters_of_a_group, wrapped_after_steps, costs_nothing_after_the_first_step, a_rival_that_is_gone,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_claims(world, size, case):
    world(size)(case)


def test_no_world_no_claim():
    """Optimizers of a program that shards nothing are left as they are."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = sgd([parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert not hasattr(optimizer, "claim")
