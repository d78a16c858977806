"""What must be equal on all ranks is compared, and an error names the ranks and their values."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hf_bmtrain as bmt
from cases import by_default, full, in_full, rows_in_slow
from hf_bmtrain.engine.comm.agreement import contents, fingerprint
from ranks import Ranks, free_port
from twins import WIDTH, Tower, ids


def is_last() -> bool:
    return bmt.rank() == bmt.world_size() - 1


def error_of(function) -> str:
    with pytest.raises(RuntimeError) as raised:
        function()
    return str(raised.value)


def wrapped(**options):
    return bmt.auto_wrap(Tower(), **options)


def train(model, optimizer, steps=1, before=lambda step: None) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(ids(step, bmt.rank())).backward()
        before(step)
        optimizer.step()


def test_contents_have_different_paths():
    """Otherwise one of them would not be compared."""
    found = contents({"a": {"b": 1, "0": 2, 0: 3, True: 4, "True": 5}, "a.b": 6, "a.0": 7, ".a": {"b": 8}})
    assert sorted(found.values()) == [*"12345678"]
    assert found["a.b"] == "1"


def everywhere(ranks, function, *arguments) -> str:
    """The error, which must have the same text on all ranks."""
    told = ranks(function, *arguments)
    assert len(set(told)) == 1
    return told[0]


# -- the comparison itself -------------------------------------------------------------------------------------------


def compare(facts):
    return error_of(
        lambda: bmt.current_world().check_same_on_all_ranks("a test", facts[bmt.rank()], {"file": f"{bmt.rank()}.pt"})
    )


COMPARISONS = {
    "one value": ([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1}], "lr: ranks 0, 2 have 0.1, rank 1 has 0.2;"),
    "a run of ranks": ([{"x": 1}, {"x": 1}, {"x": 2}], "x: ranks 0-1 have 1, rank 2 has 2;"),
    "a name that two lack": ([{}, {"x": 1}, {}], "x: ranks 0, 2 have nothing, rank 1 has 1;"),
    "other names": ([{"x": 1}, {"y": 1}, {"x": 1}], "x: ranks 0, 2 have 1, rank 1 has nothing; y: ranks 0, 2 have no"),
    "another order": (
        [{"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 1, "y": 2}],
        "position 0 (from 0): ranks 0, 2 have x, rank 1",
    ),
    "many": (
        [dict.fromkeys(range(9), 0), dict.fromkeys(range(9), 1), {}],
        "; and 4 more; file: rank 0 has 0.pt, rank 1",
    ),
}


@pytest.mark.parametrize(
    "case", ["other names", "many", *in_full("one value", "a run of ranks", "a name that two lack", "another order")]
)
def test_the_error_groups_the_ranks_by_value(world, case):
    facts, text = COMPARISONS[case]
    told = everywhere(world(3), compare, facts)
    assert told.startswith("a test: the ranks differ") and text in told and len(told) < 1500
    assert "Every rank must run the same program" in told


def equal():
    world = bmt.current_world()
    gathered = []
    gather = world.control.gather
    world.control.gather = lambda value, occasion: gathered.append(value) or gather(value, occasion)
    try:
        world.check_same_on_all_ranks("a test", {f"parameter {number}": float("nan") for number in range(5000)})
    finally:
        del world.control.gather
    return len(gathered), len(str(gathered))


def test_equal_facts_cost_one_small_message(world):
    assert world(1)(equal) == [(0, 2)]
    for count, length in world(2)(equal):
        assert count == 1 and length < 100


def test_a_fingerprint_sees_both_ends_and_the_middle():
    values = torch.arange(1000.0)
    for place in (0, 500, 999):
        other = values.clone()
        other[place] += 1
        assert fingerprint(other) != fingerprint(values)
    for each in (torch.ones(()), torch.ones(0), torch.ones(3, 2).T, torch.ones(2, dtype=torch.complex64).conj()):
        assert fingerprint(each) == fingerprint(each.clone())
    negated = torch.ones(3, dtype=torch.complex64).conj().imag  # a view with torch's lazy negative bit
    assert negated.is_neg() and fingerprint(negated) == fingerprint(negated.clone())
    assert fingerprint(torch.ones(3, dtype=torch.bfloat16)) != fingerprint(torch.ones(3, dtype=torch.bool))


# -- auto_wrap -------------------------------------------------------------------------------------------------------


def other_width():
    model = Tower()
    if is_last():
        model.head = nn.Linear(WIDTH, 3)
    return error_of(lambda: bmt.auto_wrap(model))


def other_name():
    model = Tower()
    if is_last():
        model.output = model._modules.pop("head")
    return error_of(lambda: bmt.auto_wrap(model))


def other_class():
    return error_of(lambda: bmt.auto_wrap(type("Other", (Tower,), {})() if is_last() else Tower()))


def other_dtype():
    model = Tower()
    if is_last():
        model.head.bfloat16()
    return error_of(lambda: bmt.auto_wrap(model))


def frozen():
    model = Tower()
    model.head.bias.requires_grad_(not is_last())
    return error_of(lambda: bmt.auto_wrap(model))


def other_order():
    model = Tower()
    if is_last():
        model.embedding = model._modules.pop("embedding")
    return error_of(lambda: bmt.auto_wrap(model))


def tied():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    if is_last():
        model["b"].weight = model["a"].weight
    return error_of(lambda: bmt.auto_wrap(model))


def other_buffer():
    model = Tower()
    model.register_buffer("mask", torch.ones(2 + is_last()))
    return error_of(lambda: bmt.auto_wrap(model))


def other_level():
    return error_of(lambda: wrapped(zero_level=2 if is_last() else 3))


def other_checkpoint():
    return error_of(lambda: wrapped(use_checkpoint=not is_last()))


def other_blocks():
    model = Tower()
    return error_of(lambda: bmt.auto_wrap(model, blocks=[*model.layers][: 2 + is_last()]))


def refused_on_one():
    model = Tower()
    if is_last():
        model.head.weight.register_hook(print)
    return error_of(lambda: bmt.auto_wrap(model))


def other_addition():
    model = wrapped()
    model.layers[0].adapter = nn.Linear(WIDTH, 2 + is_last())
    return error_of(lambda: bmt.auto_wrap(model))


def addition_on_one():
    model = wrapped()
    if is_last():
        model.layers[0].adapter = nn.Linear(WIDTH, 2)
    return error_of(lambda: bmt.auto_wrap(model))


def other_block():
    return error_of(lambda: bmt.CheckpointBlock(nn.Linear(2, 2 + is_last())))


WRAPPINGS = {
    other_width: "parameter 'head.weight': rank 0 has (2, 6) torch.float32 requires_grad=True, rank 1 has (3, 6) t",
    other_name: "parameter 'head.weight': rank 0 has (2, 6) torch.float32 requires_grad=True, rank 1 has nothing",
    other_class: "class: rank 0 has Tower, rank 1 has Other",
    other_dtype: "'head.weight': rank 0 has (2, 6) torch.float32 requires_grad=True, rank 1 has (2, 6) torch.bf",
    frozen: "parameter 'head.bias': rank 0 has (2,) torch.float32 requires_grad=True, rank 1 has (2,) torch.fl",
    other_order: "position 1 (from 0): rank 0 has parameter 'embedding.weight', rank 1 has parameter 'layers.0.gain'",
    tied: "parameter 'b.weight': rank 0 has (2, 2) torch.float32 requires_grad=True, rank 1 has (2, 2) torch.fl",
    other_buffer: "buffer 'mask': rank 0 has (2,) torch.float32, rank 1 has (3,) torch.float32",
    other_level: "zero_level: rank 0 has 3, rank 1 has 2",
    other_checkpoint: "use_checkpoint: rank 0 has True, rank 1 has False",
    other_blocks: "block 'layers.2': rank 0 has nothing, rank 1 has Layer in list 0",
    refused_on_one: "the reason to refuse the model: rank 0 has None, rank 1 has ValueError(\"auto_wrap: 'head.wei",
    other_addition: "parameter 'layers.0.adapter.weight': rank 0 has (2, 6) torch.float32 requires_grad=True, ra",
    addition_on_one: "the reason to refuse the model: rank 0 has ValueError('auto_wrap: this model is wrap",
    other_block: "parameter 'weight': rank 0 has (2, 2) torch.float32 requires_grad=True, rank 1 has (3, 2) torch.fl",
}


@pytest.mark.parametrize("case", by_default(WRAPPINGS, other_dtype, addition_on_one), ids=lambda case: case.__name__)
def test_another_model_on_one_rank(world, case):
    assert WRAPPINGS[case] in everywhere(world(2), case)


# -- the first step --------------------------------------------------------------------------------------------------


def by_class():
    model = wrapped()
    kind = torch.optim.Adam if is_last() else torch.optim.SGD
    return error_of(lambda: train(model, kind(model.parameters(), lr=0.1)))


def by_rate():
    model = wrapped()
    return error_of(lambda: train(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + is_last()))))


def by_rate_in_a_tensor():
    model = wrapped()
    rate = torch.tensor(0.25 * (1 + is_last()))
    return error_of(lambda: train(model, torch.optim.Adam(model.parameters(), lr=rate, foreach=False)))


def by_option():
    model = wrapped()
    betas = (0.9, 0.99 if is_last() else 0.999)
    return error_of(lambda: train(model, bmt.optim.AdamOptimizer(model.parameters(), lr=0.1, betas=betas)))


def by_dtype_of_moments():
    model = wrapped()
    dtype = torch.bfloat16 if is_last() else torch.float32
    return error_of(lambda: train(model, bmt.optim.AdamOptimizer(model.parameters(), lr=0.1, exp_avg_dtype=dtype)))


def by_groups():
    model = wrapped()
    groups = [{"params": [*model.layers.parameters()]}, {"params": [*model.head.parameters()]}]
    moved = groups[0]["params"].pop() if is_last() else groups[1]["params"].pop()
    groups[is_last()]["params"].append(moved)
    return error_of(lambda: train(model, torch.optim.SGD(groups, lr=0.1)))


def by_requires_grad_of_unsharded():
    """Of the first unsharded parameter of a group, not only of the last group's."""
    model = wrapped()
    parameters = list(model.parameters())
    own = [torch.nn.Parameter(torch.zeros(2), requires_grad=not is_last()), torch.nn.Parameter(torch.zeros(2))]
    groups = [{"params": [parameters[0], own[0]]}, {"params": [*parameters[1:2], own[1]]}]
    return error_of(lambda: train(model, torch.optim.SGD(groups, lr=0.1)))


def by_number_of_groups():
    model = wrapped()
    groups = [{"params": [*model.layers.parameters()]}, {"params": [*model.head.parameters()]}]
    if is_last():
        groups[0]["params"] += groups.pop()["params"]
    return error_of(lambda: train(model, torch.optim.SGD(groups, lr=0.1)))


def by_order_of_parameters():
    model = wrapped()
    parameters = [*model.parameters()]
    return error_of(lambda: train(model, torch.optim.SGD(parameters[:: -1 if is_last() else 1], lr=0.1)))


def managed(model, scheduler=None, **options):
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    manager = bmt.optim.OptimManager(**options)
    manager.add_optimizer(optimizer, scheduler and scheduler(optimizer, start_lr=0.1, warmup_iter=1, end_iter=9))
    return manager, optimizer


def manage(model, manager, steps=1, clip=lambda: None) -> None:
    for step in range(steps):
        manager.zero_grad()
        manager.backward(model(ids(step, bmt.rank())))
        clip()
        manager.step()


def by_scheduler():
    model = wrapped()
    kinds = bmt.lr_scheduler
    return error_of(lambda: manage(model, managed(model, kinds.Linear if is_last() else kinds.Cosine)[0]))


def by_loss_scale():
    model = wrapped()
    return error_of(lambda: manage(model, managed(model, loss_scale=2.0**10 if is_last() else None)[0]))


def by_limit_of_skipped_steps():
    model = wrapped()
    return error_of(lambda: manage(model, managed(model, max_skipped_steps=3 + is_last())[0]))


def by_recorded_delta():
    model = wrapped()
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.1, record_delta=is_last())
    return error_of(lambda: train(model, optimizer))


STEPS = {
    by_class: "optimizer.step: the ranks differ, * class: ranks 0-1 have SGD, rank 2 has Adam",
    by_rate: "lr of group 0: ranks 0-1 have 0.1, rank 2 has 0.2",
    by_rate_in_a_tensor: "lr of group 0: ranks 0-1 have 0.25, rank 2 has 0.5",
    by_option: "betas of group 0: ranks 0-1 have (0.9, 0.999), rank 2 has (0.9, 0.99)",
    by_dtype_of_moments: "exp_avg_dtype: ranks 0-1 have torch.float32, rank 2 has torch.bfloat16",
    by_groups: "parameter 'head.bias' (sharded together with 'embedding.weight' and 2 other parameters of Tower*"
    "): ranks 0-1 have group 0, shape (2,), requires_grad=True, rank 2 has group 1",
    by_requires_grad_of_unsharded: "ordinary parameter 1 of group 0: ranks 0-1 have *requires_grad=True, rank 2 has *",
    by_number_of_groups: "number of parameter groups: ranks 0-1 have 2, rank 2 has 1",
    by_order_of_parameters: ": ranks 0-1 have parameter 'embedding.weight' (sharded together with 'embedding*"
    ", rank 2 has parameter 'head.bias'",
    by_scheduler: "OptimManager.step: the ranks differ, * scheduler 0: ranks 0-1 have Cosine, rank 2 has Linear",
    by_loss_scale: "loss_scale: ranks 0-1 have False, rank 2 has 1024.0",
    by_limit_of_skipped_steps: "OptimManager.step: * max_skipped_steps: ranks 0-1 have 3, rank 2 has 4",
    by_recorded_delta: "optimizer.step: the ranks differ, * record_delta: ranks 0-1 have False, rank 2 has True",
}


SHOWN = by_default(STEPS, by_groups, by_scheduler, by_recorded_delta)


@pytest.mark.parametrize("case", SHOWN, ids=lambda case: case.__name__)
def test_another_optimizer_on_one_rank(world, case):
    told = everywhere(world(3), case)
    assert all(part in told for part in STEPS[case].split("*")), told


# -- later steps: the journals are compared --------------------------------------------------------------------------


def rate_of_one_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, optimizer)

    def change(step):
        optimizer.param_groups[0]["lr"] = 0.25 if step == 1 and is_last() else 0.5

    train(model, optimizer, 3, change)
    bmt.synchronize()


def another_schedule(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if is_last() else 0.25)
    for _ in range(3):
        train(model, optimizer)
        schedule.step()
    bmt.synchronize()


def rate_of_the_second_group(model):
    groups = [{"params": [*model.layers.parameters()]}, {"params": [*model.head.parameters()], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    train(model, optimizer, 2)
    optimizer.param_groups[1]["lr"] = 0.25 if is_last() else 0.5
    train(model, optimizer)
    bmt.synchronize()


def option_of_one_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    train(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.75 if is_last() else 0.25
    train(model, optimizer)
    bmt.synchronize()


def option_on_one_rank(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.125 if is_last() else 0
    train(model, optimizer, 2)
    bmt.synchronize()


def clipped_to_another_norm(model):
    manager, optimizer = managed(model)
    norm = 2.0 if is_last() else 1.0
    manage(model, manager, 2, lambda: manager.clip_grad_norm(optimizer.param_groups, norm))
    bmt.synchronize()


def clipped_on_one_rank(model):
    manager, optimizer = managed(model)
    manage(model, manager)
    manage(model, manager, 2, lambda: is_last() and manager.clip_grad_norm(optimizer.param_groups, 1.0))
    bmt.synchronize()


def clipped_by_another_norm(model):
    manager, optimizer = managed(model)
    order = 1.0 if is_last() else 2.0
    manage(model, manager, 2, lambda: manager.clip_grad_norm(optimizer.param_groups, 1.0, order))
    bmt.synchronize()


def clipped_by_torch(model, norm=1.0, order=2.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    clip = torch.nn.utils.clip_grad_norm_
    train(model, optimizer, 2, lambda step: clip(model.parameters(), norm, order))
    bmt.synchronize()


def clipped_by_torch_to_another_norm(model):
    clipped_by_torch(model, 2.0 if is_last() else 1.0)


def clipped_by_torch_by_another_norm(model):
    clipped_by_torch(model, order=1.0 if is_last() else 3.0)


def frozen_later(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, optimizer)
    model.layers[1].linear.bias.requires_grad_(not is_last())
    train(model, optimizer)
    bmt.synchronize()


def frozen_outside_blocks(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, optimizer)
    model.head.bias.requires_grad_(not is_last())
    train(model, optimizer)
    bmt.synchronize()


def fewer_steps(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train(model, optimizer)
    if not is_last():
        optimizer.step()
    train(model, optimizer)
    bmt.synchronize()


LATER = {
    rate_of_one_step: "rank 0: step with learning rate 0.5*; rank 1: step with learning rate 0.25",
    another_schedule: "rank 0: step with learning rate 0.125*; rank 1: step with learning rate 0.25",
    rate_of_the_second_group: "rank 0: step with learning rate 0.5*; rank 1: step with learning rate 0.25",
    option_of_one_step: "rank 0: step with momentum 0.25*; rank 1: step with momentum 0.75",
    option_on_one_rank: "rank 1: step with weight_decay 0.125",
    clipped_to_another_norm: "rank 0: clipping to the norm 1.0*; rank 1: clipping to the norm 2.0",
    clipped_on_one_rank: "rank 1: clipping by the norm of order 2.0",
    clipped_by_another_norm: "rank 0: clipping by the norm of order 2.0*; rank 1: clipping by the norm of order 1.0",
    clipped_by_torch_to_another_norm: "rank 0: clipping to the norm 1.0*; rank 1: clipping to the norm 2.0",
    clipped_by_torch_by_another_norm: "rank 0: clipping by the norm of order 3.0*; rank 1: clipping by the norm of",
    frozen_later: "change of requires_grad in 'layers.1.",
    frozen_outside_blocks: "rank 1: change of requires_grad in 'embedding.weight'",
    fewer_steps: "rank 0: step with learning rate 0.5*; rank 1: ",
}


def later(case):
    return error_of(lambda: case(wrapped()))


@pytest.mark.parametrize(
    "case",
    by_default(LATER, another_schedule, frozen_later),
    ids=lambda case: case.__name__,
)
def test_another_step_on_one_rank(case):
    ranks = Ranks(2)
    try:
        told = ranks(later, case)
    finally:
        ranks.stop()
    for text in told:
        assert all(part in text for part in ["the ranks issued different operations", *LATER[case].split("*")]), told


# -- two models of equal shapes, called in another order -------------------------------------------------------------


def two_in_another_order(apart):
    models = [wrapped(), wrapped()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

    def train_both():
        for step in range(20):
            losses = [model(ids(step, bmt.rank())) for model in models[:: -1 if is_last() else 1]]
            for loss in losses if apart else [sum(losses)]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        bmt.synchronize()

    return error_of(train_both)


@full
@pytest.mark.parametrize(
    ("gather", "apart"), [("peer", False), *rows_in_slow([("collective", False), ("collective", True), ("peer", True)])]
)
def test_two_models_in_another_order(gather, apart):
    ranks = Ranks(2, gather=gather)
    try:
        told = ranks(two_in_another_order, apart)
    finally:
        ranks.stop()
    assert all("the ranks issued different operations" in text for text in told)
    assert any("of Tower (number 2)" in text for text in told) or "before number" in told[0]


# -- loads -----------------------------------------------------------------------------------------------------------


def saved_at(steps, folder):
    """Files of a training after so many steps: the model's, the optimizer's whole state and its manager's."""
    model = wrapped()
    manager, optimizer = managed(model)
    manage(model, manager, steps)
    bmt.save(model, f"{folder}/model-{steps}.pt")
    state, whole = manager.state_dict(gather_opt=True), optimizer.state_dict(gather=True)
    if bmt.rank() == 0:
        torch.save(state, f"{folder}/manager-{steps}.pt")
        torch.save(whole, f"{folder}/optimizer-{steps}.pt")
    bmt.synchronize()


def number_of_steps() -> int:
    return 3 if is_last() else 2


def loads_model(folder):
    return error_of(lambda: bmt.load(wrapped(), f"{folder}/model-{number_of_steps()}.pt"))


def loads_state_dict(folder):
    state = torch.load(f"{folder}/model-{number_of_steps()}.pt")
    return error_of(lambda: wrapped().load_state_dict(state))


def loads_manager(folder):
    manager, _ = managed(wrapped())
    state = torch.load(f"{folder}/manager-{number_of_steps()}.pt")
    return error_of(lambda: manager.load_state_dict(state))


def loads_optimizer(folder):
    _, optimizer = managed(wrapped())
    state = torch.load(f"{folder}/optimizer-{number_of_steps()}.pt")
    return error_of(lambda: optimizer.load_state_dict(state))


def loads_whole_state(folder, cls=bmt.optim.AdamOptimizer):
    model = wrapped()
    optimizer = cls(model.parameters(), lr=0.1)
    state = torch.load(f"{folder}/optimizer-{number_of_steps()}.pt")
    optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
    return error_of(lambda: train(model, optimizer))


def loads_whole_state_into_torchs(folder):
    return loads_whole_state(folder, torch.optim.AdamW)


def loads_scheduler(folder):
    model = wrapped()
    manager, _ = managed(model, bmt.lr_scheduler.Linear)
    state = manager.state_dict(gather_opt=False)
    state["lr_schedulers"][0]["num_iter"] = number_of_steps()
    del state["checksums"]  # of what was saved
    return error_of(lambda: manager.load_state_dict(state))


def fills_from_files(folder):
    with torch.device("meta"):
        model = Tower()
    return error_of(lambda: bmt.auto_wrap(model, weights=f"{folder}/model-{number_of_steps()}.pt"))


LOADS = {
    loads_model: "model-*.pt does not fit this model. load_state_dict: the ranks differ*'embedding.weight'*"
    ": rank 0 has (11, 6) torch.float32 contents *, rank 1 has (11, 6) torch.float32 contents ",
    loads_state_dict: "load_state_dict: the ranks differ*'embedding.weight': rank 0 has (11, 6)",
    loads_manager: "load_state_dict: the ranks differ*state.0.step: rank 0 has*state.0.exp_avg: rank 0 has (11, 6)",
    loads_optimizer: "load_state_dict: the ranks differ*state.0.exp_avg: rank 0 has (11, 6) torch.float32 contents ",
    loads_whole_state: "optimizer.step after load_state_dict: the ranks differ*'exp_avg' of a parameter of shape (",
    loads_whole_state_into_torchs: "optimizer.step after load_state_dict: the ranks differ*'exp_avg' of a parameter of",
    loads_scheduler: "OptimManager.load_state_dict: the ranks differ*lr_schedulers.0.num_iter: rank 0 has 2, rank 1 ha",
    fills_from_files: "auto_wrap: the ranks differ*parameter 'embedding.weight': rank 0 has (11, 6) *, rank 1 has ",
}


@pytest.fixture(scope="module")
def files(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for steps in (2, 3):
        world(2)(saved_at, steps, str(folder))
    return str(folder)


@pytest.mark.parametrize("case", by_default(LOADS, loads_model, loads_whole_state), ids=lambda case: case.__name__)
def test_other_files_on_one_rank(world, files, case):
    for told in world(2)(case, files):
        assert all(part in told for part in LOADS[case].split("*")), told


# -- the start -------------------------------------------------------------------------------------------------------

STARTS = {
    "bmt.init_distributed(zero_level=2 + rank)": "zero_level: rank 0 has 2, rank 1 has 3",
    "bmt.init_distributed(gather=['auto', 'peer'][rank])": "gather: rank 0 has auto, rank 1 has peer",
    "bmt.init_distributed(timeout=60 + rank)": "timeout: rank 0 has 60.0, rank 1 has 61.0",
    "with environment(HF_BMTRAIN_POISON=str(rank)): bmt.init_distributed()": "HF_BMTRAIN_POISON: rank 0 has False, ran",
    "with version(bmt): bmt.init_distributed()": "hf_bmtrain: rank 0 has 9.0, rank 1 has 9.1",
    "with version(torch): bmt.init_distributed()": "torch: rank 0 has 9.0, rank 1 has 9.1",
}
BEGIN = """
import os, torch, hf_bmtrain as bmt
from unittest import mock
rank = int(os.environ["RANK"])

def environment(**variables):
    return mock.patch.dict(os.environ, variables)

def version(package):
    return mock.patch.object(package, "__version__", f"9.{rank}")

for start in STARTS:
    try:
        exec(start)
    except RuntimeError as error:
        print(error)
bmt.init_distributed()
bmt.synchronize()
torch.distributed.destroy_process_group()
"""


@full
def test_another_start_of_one_rank():
    """And then all start alike."""
    code = BEGIN.replace("STARTS", repr(list(STARTS)))
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **world, "ACCELERATE_USE_CPU": "true", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        told = process.communicate(timeout=120)[0].splitlines()
        assert process.returncode == 0 and len(told) == len(STARTS), told
        for line, text in zip(told, STARTS.values()):
            assert line.startswith("init_distributed: the ranks differ") and text in line


# -- no false alarm --------------------------------------------------------------------------------------------------


def different_but_right():
    """What may differ: random weights, data, buffers' values, rates of groups, and who waits for whom."""
    torch.manual_seed(bmt.rank())
    model = Tower()
    model.register_buffer("mean", torch.randn(3))
    bmt.auto_wrap(model)
    model.mean.fill_(bmt.rank())
    other = bmt.auto_wrap(Tower())
    manager, optimizer = managed(model, bmt.lr_scheduler.Cosine, loss_scale=4.0)
    manage(model, manager, 3, lambda: manager.clip_grad_norm(optimizer.param_groups, torch.tensor(0.5)))
    rate = torch.tensor(0.1)
    second = torch.optim.Adam([{"params": [*other.layers.parameters()]}], lr=rate, betas=(0.5, 0.9), foreach=False)
    train(other, second, 2)
    second.add_param_group({"params": [*other.head.parameters()], "lr": 0.2})
    for step in range(3):
        second.param_groups[1].update(betas=(0.5 + 0.1 * step, 0.9), weight_decay=0.1 * step, note={bmt.rank()})
        train(other, second)
    other.layers[0].requires_grad_(False)
    train(other, second, 2)
    rates = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(rates, 0.1, total_steps=9)
    for _ in range(4):
        train(model, rates)
        schedule.step()
    state = model.state_dict()
    mean = state["mean"].tolist()
    model.load_state_dict(state)
    model.layers[0].adapter = nn.Linear(WIDTH, WIDTH)
    bmt.auto_wrap(model)
    own = manager.state_dict()
    manager.load_state_dict(own)
    bmt.synchronize()
    return mean


@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_legitimate_programs(world, size):
    told = world(size)(different_but_right)
    assert told == [[rank] * 3 for rank in range(size)]
