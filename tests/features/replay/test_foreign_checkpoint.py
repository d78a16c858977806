"""A model that recomputes by itself (torch.utils.checkpoint in its own forward) trains sharded as it does plain."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import in_full, pairwise
from ranks import on_ranks
from recomputed_models import Recomputing
from twins import check_gradients, check_twins, ids, losses


def loss(model, step, rank):
    torch.manual_seed(step)  # dropout
    return model(ids(step, rank))


PLANS = ("outside", "each layer", "all layers", "everything")


@pytest.mark.parametrize(
    ("plan", "reentrant", "listed", "use_checkpoint", "zero_level"),
    pairwise(
        [
            ("each layer", False, True, True, 3),
            ("all layers", True, False, True, 2),
            ("everything", False, True, False, 3),
        ],
        PLANS,
        (False, True),
        (True, False),
        (True, False),
        (3, 2),
    ),
)
@on_ranks(2, full=(1,))
def test_training(plan, reentrant, listed, use_checkpoint, zero_level):
    check_twins(
        lambda: Recomputing(plan, reentrant, listed), loss, use_checkpoint=use_checkpoint, zero_level=zero_level
    )


def pair(plan, reentrant, use_checkpoint):
    """A sharded model and its plain twin, without dropout."""
    model, twin = Recomputing(plan, reentrant, True), Recomputing(plan, reentrant, True)
    for either in (model, twin):
        either.mixer[2].p = 0.0
    return bmt.auto_wrap(model, use_checkpoint=use_checkpoint), twin


def several_backwards(plan, reentrant, use_checkpoint):
    """Through two forwards at once, one after the other in either order, and twice through one."""
    model, twin = pair(plan, reentrant, use_checkpoint)
    for order in ("sum", [0, 1], [1, 0], "twice"):
        for each in zip(*[losses(model, twin, step) for step in (0, 1)]):
            if order == "sum":
                sum(each).backward()
            elif order == "twice":
                each[0].backward(retain_graph=True)
                each[0].backward()
            else:
                for number in order:
                    each[number].backward()
        check_gradients(model, twin)
        model.zero_grad()
        twin.zero_grad()


def forwards_without_backward(plan, reentrant, use_checkpoint):
    """A forward that recomputes nothing and has a graph, dropped or kept, changes no later step."""
    model, twin = pair(plan, reentrant, use_checkpoint)
    kept = []
    for step in range(3):
        for either in (model, twin):
            either.zero_grad()
            either.plan = ""
            kept += [either(ids(7, 0))] * (step == 2)
            either.plan = plan
        for loss in losses(model, twin, step):
            loss.backward()
        check_gradients(model, twin)


@pytest.mark.parametrize(
    ("size", "plan", "reentrant", "use_checkpoint", "check"),
    pairwise(
        [(2, "everything", False, True, several_backwards), (2, "all layers", True, True, forwards_without_backward)],
        [1, 2],
        PLANS[1:],
        [True, False],
        [True, False],
        [several_backwards, forwards_without_backward],
    ),
)
def test_graphs_of_other_forwards(world, size, plan, reentrant, use_checkpoint, check):
    world(size)(check, plan, reentrant, use_checkpoint)


@pytest.mark.parametrize("listed", [True, *in_full(False)])
@pytest.mark.parametrize("use_checkpoint", [True, *in_full(False)])
@on_ranks(2, full=(1,))
def test_hooks_on_what_is_saved(listed, use_checkpoint):
    """Somebody's hooks take what autograd saves, weights among it."""

    def loss_with_hooks(model, step, rank):
        with torch.autograd.graph.save_on_cpu():
            return loss(model, step, rank)

    check_twins(lambda: Recomputing("", False, listed), loss_with_hooks, use_checkpoint=use_checkpoint)
