"""Residuals are float32 masters in every way that a state is kept, written beside, saved and loaded."""

import itertools
from unittest import mock

import pytest
import torch
from accelerate import Accelerator

import hf_bmtrain as bmt
from cases import by_default, full, in_full, rows_in_full
from float_masters import FloatMasters
from hf_bmtrain.engine.ops import adam_step
from hf_bmtrain.engine.ops.residual import split
from hf_bmtrain.engine.optim.runs import adopt, shown
from offloaded import Trainee, assert_equal, the_same
from ranks import on_ranks
from resumable import Training
from state_dicts import check_equal
from twenty_steps import OPTIONS

KINDS = (FloatMasters, bmt.optim.AdamOptimizer)


def by_kernels():
    return mock.patch.object(adam_step, "kernels_serve", return_value=True)


def tied(masters):
    """Every seventh between two bfloat16 numbers: ties of both kinds."""
    masters = masters.clone()
    masters[::7] = (masters[::7].view(torch.int32) & -65536 | 0x8000).view(torch.float32)
    return masters


# -- one parameter ----------------------------------------------------------------------------------------------------


def kept(masters, squares):
    """(weights, state) as a run with residuals keeps them."""
    weights, residual = torch.empty(len(masters), dtype=torch.bfloat16), torch.empty(len(masters), dtype=torch.int16)
    marked = squares.clone()
    split(masters, weights, residual, marked)
    assert torch.signbit(marked).any()
    return weights, {"step": torch.ones(()), "exp_avg": squares.sin(), "exp_avg_sq": marked, "residual": residual}


def whole(masters, squares):
    return {"step": torch.ones(()), "exp_avg": squares.sin(), "exp_avg_sq": squares.clone(), "master": masters.clone()}


def same(a, b):
    return [*a] == [*b] and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.fixture
def numbers():
    torch.manual_seed(0)
    return tied(torch.randn(3000)), torch.rand(3000)


@pytest.mark.parametrize("loaded", [True, *in_full(False)])
@pytest.mark.parametrize(
    ("before", "after"),
    [("master", "residual"), *rows_in_full([("residual", "master"), ("master", "master"), ("residual", "residual")])],
)
def test_state_moves_between_all_forms(numbers, before, after, loaded):
    masters, squares = numbers
    weights, residuals = kept(masters, squares)
    forms = {"master": whole(masters, squares), "residual": residuals}
    views = {name: torch.full_like(value, 7) for name, value in forms[after].items()}
    adopt(torch.nn.Parameter(weights), views, forms[before], loaded)
    assert same(views, {"master": whole(masters, squares), "residual": kept(masters, squares)[1]}[after])


@pytest.mark.parametrize(
    ("before", "after"),
    [("residual", "master"), *rows_in_full([("master", "residual"), ("master", "master"), ("residual", "residual")])],
)
def test_what_was_written_meanwhile_counts(numbers, before, after):
    """Weights that no step updated were masked and moved: both forms take their masters to the same places."""
    masters, squares = numbers
    weights, residuals = kept(masters, squares)
    expected = whole(masters, squares)
    written = torch.nn.Parameter(weights * (torch.arange(3000) % 3 > 0) + torch.arange(3000) % 2)
    shown(written, expected, False)
    assert not torch.equal(expected["master"], masters)
    views = {name: torch.empty_like(value) for name, value in (residuals if after == "residual" else expected).items()}
    bits = written.detach().clone()
    adopt(written, views, residuals if before == "residual" else whole(masters, squares), False)
    assert same(shown(written, views, False), expected)
    assert torch.equal(written, bits)


@full
def test_a_loaded_master_wins_over_the_weights(numbers):
    masters, squares = numbers
    _, views = kept(masters.flip(0), squares)
    parameter = torch.nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    adopt(parameter, views, whole(masters, squares), True)
    assert torch.equal(parameter, masters.bfloat16())
    assert same(shown(parameter, views, False), whole(masters, squares))


@full
def test_state_without_a_master_leaves_the_weights(numbers):
    """That of another AdamW: the weights are the masters."""
    masters, squares = numbers
    weights = masters.bfloat16()
    views = {"exp_avg_sq": torch.zeros(3000), "residual": torch.zeros(3000, dtype=torch.int16)}
    adopt(torch.nn.Parameter(weights), views, {"exp_avg_sq": squares}, True)
    found = shown(weights, {**views, "step": torch.ones(()), "exp_avg": squares}, False)
    assert torch.equal(found["master"], weights.float()) and torch.equal(found["exp_avg_sq"], squares)


@full
def test_the_shown_state_is_not_the_kept_one(numbers):
    weights, residuals = kept(*numbers)
    found = shown(weights, residuals, False)
    found["master"].zero_()
    found["exp_avg_sq"].zero_()
    assert same(residuals, kept(*numbers)[1])


# -- optimizers -------------------------------------------------------------------------------------------------------


def parameters():
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(n).bfloat16()) for n in (1 << 16, 3001, 0, 1)]


@pytest.mark.parametrize("exp_avg_dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
def test_many_steps(exp_avg_dtype):
    """Ties, a skipped step, a scale, missing gradients, written weights, lr 0: equal weights and states after each."""
    groups = [parameters(), parameters()]
    with by_kernels():
        options = {**OPTIONS, "lr": 1e-2, "exp_avg_dtype": exp_avg_dtype}
        optimizers = [kind(members, **options) for kind, members in zip(KINDS, groups)]
        for step in range(26):
            for members, optimizer in zip(groups, optimizers):
                generator = torch.Generator().manual_seed(step)
                for number, p in enumerate(members):
                    p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                    if number == 1 and step in (6, 7, 12):
                        p.grad = None
                if step == 7:
                    members[1].detach()[::2] *= 2  # while it has no gradient
                if step == 16:
                    members[0].detach().mul_(torch.arange(1 << 16) % 5 > 0)
                if step == 10:
                    state = optimizer.state_dict()
                    for values in state["state"].values():
                        values["master"] = tied(values["master"])
                    optimizer.load_state_dict(state)
                optimizer.param_groups[0]["lr"] = 0.0 if step in (10, 11) else 1e-2 / (1 + step)
                optimizer.grad_scale = torch.tensor(1.0 + step)
                optimizer.found_inf = torch.tensor(float(step == 14))
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(*groups)), step
            states = [optimizer.state_dict()["state"] for optimizer in optimizers]
            assert states[0].keys() == states[1].keys()
            assert all(same(states[0][key], states[1][key]) for key in states[0]), step
            assert not any(torch.signbit(values["exp_avg_sq"]).any() for values in states[1].values())
            marks = sum(int(torch.signbit(held["exp_avg_sq"]).sum()) for held in optimizers[1].state.values())
            assert (marks > 4000) == (step in (10, 11)), (step, marks)  # half of the ties that were loaded
        assert all("residual" in held and "master" not in held for held in optimizers[1].state.values())
        assert all(held["residual"].dtype == torch.int16 for held in optimizers[1].state.values())
        assert all("master" in held and "residual" not in held for held in optimizers[0].state.values())


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cuda", (None, torch.float32, torch.int16)), ("cpu", (None, torch.float32, torch.float32))],
)
def test_residuals_are_for_bfloat16_weights_where_kernels_join_them(device, expected):
    dtypes = torch.float32, torch.float16, torch.bfloat16
    assert tuple(adam_step.master_dtype(dtype, torch.device(device)) for dtype in dtypes) == expected


def trained_alike(**options):
    """On slices: clipping, accumulation, overflow, freezing, a load of the model."""
    with by_kernels():
        the_same(torch.bfloat16, bmt.optim.AdamOptimizer, **options)


def trained_alike_with_a_short_exp_avg():
    trained_alike(exp_avg_dtype=torch.bfloat16, hold_steps=2)


@pytest.mark.parametrize(
    "case", [trained_alike_with_a_short_exp_avg, *in_full(trained_alike)], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_slices(world, size, case):
    world(size)(case)


# -- files ------------------------------------------------------------------------------------------------------------


def pairs():
    """A trainee of each kind after three steps, with one of each kind that is to go on from its state."""
    for source, target in itertools.product(KINDS, KINDS):
        trained = Trainee(source, torch.bfloat16)
        for number in range(3):
            trained.step(number)
        other = Trainee(target, torch.bfloat16)
        other.model.load_state_dict(trained.model.state_dict())
        yield trained, other


def goes_on(trained, other):
    for number in range(3, 6):
        for trainee in (trained, other):
            trainee.step(number)
        assert_equal(trained, other, number)


def through_the_manager(gather_opt):
    with by_kernels():
        for trained, other in pairs():
            state = trained.manager.state_dict(gather_opt=gather_opt)
            trained.step(3)
            trained_on = trained.model.state_dict()
            if gather_opt:
                state = bmt.current_world().gather_objects(state)[0]  # what rank 0 writes, every rank reads
            other.manager.load_state_dict(state)
            other.step(3)
            assert all(torch.equal(a, b) for a, b in zip(trained_on.values(), other.model.state_dict().values()))
            goes_on(trained, other)


def through_accelerate():
    Accelerator(cpu=True)
    with by_kernels():
        for trained, other in pairs():
            state = trained.optimizer.state_dict()
            owners = [p for group in trained.optimizer.param_groups for p in group["params"]]
            assert all(state["state"][key]["master"].shape == p.full_shape for key, p in enumerate(owners))
            assert all(not torch.signbit(values["exp_avg_sq"]).any() for values in state["state"].values())
            other.optimizer.load_state_dict(state)
            goes_on(trained, other)


def saved_anew():
    """Accelerate may save before the first step after a state was loaded: the file has all of it again."""
    Accelerator(cpu=True)
    for trained, other in pairs():
        state = trained.optimizer.state_dict()
        other.optimizer.load_state_dict(state)
        again = other.optimizer.state_dict()["state"]
        for key, values in state["state"].items():
            for name, value in values.items():
                assert again[key][name].shape == value.shape, f"{name} of parameter {key}"
                assert torch.equal(again[key][name], value), f"{name} of parameter {key}"


FILES = [(through_the_manager, False), (through_the_manager, True), (through_accelerate,), (saved_anew,)]


@pytest.mark.parametrize(
    "case",
    by_default(FILES, (through_the_manager, True)),
    ids=lambda case: "-".join(str(getattr(c, "__name__", c)) for c in case),
)
def test_files(world, case):
    world(2)(*case)


@full
@on_ranks(2)
def test_a_checkpoint(folder):
    with by_kernels():
        for number, (trained, other) in enumerate(pairs()):
            bmt.save_state(f"{folder}/{number}", trained.model, trained.optimizer)
            bmt.load_state(f"{folder}/{number}", other.model, other.optimizer)
            goes_on(trained, other)


def loaded_from_a_gpu():
    training = Training(dtype=torch.bfloat16, blocks=1)
    training.train(2)
    expected, saved = training.whole(), training.optimizer.state_dict()
    for state in saved["state"].values():
        masters = state.pop("master")
        state["residual"] = torch.empty_like(masters, dtype=torch.int16)
        split(masters, torch.empty_like(masters, dtype=torch.bfloat16), state["residual"], state["exp_avg_sq"])
    other = Training(dtype=torch.bfloat16, blocks=1, seed=1)
    other.model.load_state_dict(training.model.state_dict())
    other.optimizer.load_state_dict(saved)
    return expected, other.whole()


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_residuals_are_masters_where_there_are_none(world, size):
    for expected, loaded in world(size)(loaded_from_a_gpu):
        check_equal(loaded, expected)
