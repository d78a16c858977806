"""save_state and load_state: bit by bit what was saved, on any number of ranks, and the newest that is whole."""

import contextlib
import copy
import logging
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, in_slow, pairwise, rows_in_full
from hf_bmtrain.engine.sharding.state_dict import unexpanded
from ranks import on_ranks
from resumable import OPTIMIZERS, Training, damage, interrupted, three_checkpoints, undisturbed
from state_dicts import check_equal
from tiny_models import build

IN_BF16 = {"family": "gpt2", "dtype": torch.bfloat16, "zero_level": 2}
TIED = {"family": "t5", "optimizer": "adamw", "tied": True}
OFFLOADED = {"family": "gpt2", "optimizer": "offload", "dtype": torch.bfloat16, "tied": True}
CASES = [
    {"family": "llama"},
    IN_BF16,
    {"family": "bert", "dtype": torch.float16},
    TIED,
    {"family": "llama", "optimizer": "sgd", "frozen": True, "use_checkpoint": False},
    OFFLOADED,
]


@pytest.mark.parametrize(
    ("size", "non_blocking", "case"),
    pairwise(
        [(2, True, IN_BF16), (2, False, TIED), (3, True, OFFLOADED)],
        [1, 2, 3],
        [False, True],
        CASES,
    ),
    ids=str,
)
def test_resumed_is_undisturbed(world, tmp_path, size, case, non_blocking):
    truth = world(size)(undisturbed, case)
    for (losses, values), (true_losses, true_values) in zip(
        world(size)(interrupted, str(tmp_path), case, non_blocking), truth
    ):
        assert losses == true_losses
        if true_values:
            check_equal(values, true_values)


def save(folder, case, steps):
    training = Training(**case)
    training.load(folder)
    training.train(training.step + steps)
    training.save(folder)
    training.reshard(folder)
    return training.whole()


def load(folder, case):
    training = Training(**case, seed=1)
    training.load(folder)
    return training.whole()


@pytest.mark.parametrize("case", [OFFLOADED, *in_full(IN_BF16, TIED), *in_slow(CASES[0], CASES[2], CASES[4])], ids=str)
def test_any_number_of_ranks(world, tmp_path, case):
    """2 → 3 → 1 → 4 ranks: every parameter and moment is that of the moment of saving."""
    folder, saved = str(tmp_path), None
    for size in (2, 3, 1, 4):
        if saved is not None:
            check_equal(world(size)(load, folder, case)[0], saved)
        saved = world(size)(save, folder, case, 2)[0]


def whole(folder, family, dtype, tied):
    training = Training(family, dtype=dtype, tied=tied)
    training.train(1)
    training.save(folder)
    return {name: tensor.clone() for name, tensor in training.model.state_dict().items()}


@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), *rows_in_full([(torch.float32, False)])])
@pytest.mark.parametrize("family", ["mixtral", *in_full("llama", "gpt2", "bert", "t5")])
def test_it_is_the_hugging_face_checkpoint(world, tmp_path, family, dtype, tied):
    state = world(2)(whole, str(tmp_path), family, dtype, tied)[0]
    folder = tmp_path / "checkpoint-1"
    opened = type(build(family)).from_pretrained(folder)
    assert isinstance(opened, transformers.PreTrainedModel)
    check_equal({name: opened.state_dict()[name] for name in state}, state)
    published = type(build(family)).from_pretrained(folder)
    published.save_pretrained(tmp_path / "published", save_original_format=False)
    assert (folder / "config.json").read_text() == (tmp_path / "published" / "config.json").read_text()
    moments = safetensors.torch.load_file(folder / "optimizer.safetensors")
    name, tensor = next(iter(state.items()))
    assert moments[f"{name}.exp_avg"].shape == tensor.shape


class Counter(nn.Module):
    """Has extra state, which modules save with `get_extra_state`."""

    count = 0

    def forward(self, hidden):
        return hidden

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def normalized(mean, count):
    model = bmt.auto_wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counter()))
    model[1].running_mean.fill_(mean)
    model[2].count = count
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save_normalized(folder):
    """Running statistics differ between the ranks, as where each sees its own rows."""
    model, optimizer = normalized(10.0 + bmt.rank(), 5)
    bmt.save_state(folder, model, optimizer, step=1)


def load_normalized(folder, weights):
    """The mean and the count after loading, whether another buffer and the weights are unchanged, and the rate."""
    model, optimizer = normalized(-1.0, 7)
    optimizer.param_groups[0]["lr"] = 0.5
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    bmt.load_state(folder, model, optimizer, weights=weights)
    state = model.state_dict()
    same = all(torch.equal(state[name], before[name]) for name in before if name != "1.running_mean")
    return model[1].running_mean.unique().item(), model[2].count, same, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("size", [2, *in_full(1, 3)])
def test_without_weights_nothing_of_the_model_is_loaded(world, tmp_path, size):
    """On any number of ranks; with weights, each rank has its own buffers again, or those of rank 0."""
    world(2)(save_normalized, str(tmp_path))
    assert world(size)(load_normalized, str(tmp_path), False) == [(-1.0, 7, True, 0.1)] * size
    own = [10.0, 11.0] if size == 2 else [10.0] * size
    assert [found[:2] for found in world(size)(load_normalized, str(tmp_path), True)] == [(mean, 5) for mean in own]


@on_ranks(2)
def test_extra_state_that_the_checkpoint_lacks(folder):
    """It is refused before anything is changed, but not where nothing of the model is loaded."""

    def trained(lr, *more):
        model = bmt.auto_wrap(nn.Sequential(nn.Linear(4, 4), *more))
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=lr)
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    def values():
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    bmt.save_state(folder, *trained(0.5), step=1)
    model, optimizer = trained(0.1, Counter())
    before = values()
    with pytest.raises(RuntimeError, match=r"no extra state \(get_extra_state\) of the module '1'"):
        bmt.load_state(folder, model, optimizer)
    torch.testing.assert_close(values(), before, rtol=0, atol=0)
    bmt.load_state(folder, model, optimizer, weights=False)
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- which one is loaded ----------------------------------------------------------------------------------------------


def resumed_step(folder):
    resumed = Training().load(folder)
    return None if resumed is None else resumed.step


@on_ranks(1)
def test_what_is_returned_is_the_step(folder):
    """It counts as an int, is true for step 0, can be unpacked and copied."""
    model = bmt.auto_wrap(nn.Linear(2, 2))
    assert list(range(bmt.load_state(folder, model) or 0, 2)) == [0, 1]
    bmt.save_state(folder, model, step=0, extra={"a": 1})
    assert bmt.load_state(folder, model)
    bmt.save_state(folder, model, step=7, extra={"a": 1})
    with mock.patch.object(logging.getLogger("hf_bmtrain"), "info") as info:
        resumed = bmt.load_state(folder, model)
    text, *values = info.call_args.args
    assert text % tuple(values) == f"load_state has loaded the checkpoint {folder}/checkpoint-7, saved at step 7"
    assert list(range(resumed or 0, 9)) == [7, 8] and resumed + 1 == 8 and resumed == 7 != (7,)
    for each in (resumed, copy.deepcopy(resumed)):
        step, where, extra = each
        assert (step, where.name, extra) == (each.step, "checkpoint-7", {"a": 1}) == (7, each.folder.name, each.extra)
        assert each == (step, where, extra) and not each != (step, where, extra) and each != (step, where, None)


class Strided(torch.nn.Module):
    """A layer with persistent buffers that are not contiguous."""

    def __init__(self, first: float):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        values = torch.arange(first, first + 12)
        self.register_buffer("expanded", values[:1].expand(8))
        self.register_buffer("rows", values[:3, None].expand(3, 4))
        self.register_buffer("strided", values[::2])
        self.register_buffer("transposed", values.clone().view(3, 4).t())

    def forward(self, inputs):
        return self.layer(inputs).sum()


@on_ranks(2)
def test_buffers_that_are_not_contiguous(folder):
    saved, other = (bmt.auto_wrap(Strided(first), blocks=[]) for first in (1.0, 20.0))
    for non_blocking in (False, True):
        for each in saved.buffers():
            unexpanded(each).add_(1 + bmt.rank())  # the ranks have different values
        saving = bmt.save_state(folder, saved, non_blocking=non_blocking)
        if non_blocking:
            saving.wait()
        bmt.load_state(folder, other)
        check_equal(dict(other.named_buffers()), dict(saved.named_buffers()))
    assert other.expanded.stride() == (0,)
    saved.rows = torch.arange(12.0).view(3, 4)
    bmt.save_state(folder, saved)
    with pytest.raises(RuntimeError, match="shape .3, 4. is expanded, so that it stores only 3 elements"):
        bmt.load_state(folder, other)


@on_ranks(1)
def test_iterators_of_optimizers_and_schedulers(folder):
    """Nothing was saved or loaded of them, without an error."""
    training = Training("llama", "sgd", blocks=1)
    training.train(1)
    optimizer, scheduler = training.optimizer, training.scheduler
    bmt.save_state(folder, training.model, (each for each in [optimizer]), iter([scheduler]), step=1)
    state = {name: value.clone() for name, value in training.whole().items()}
    training.train(3)
    count = scheduler.num_iter
    bmt.load_state(folder, training.model, (each for each in [optimizer]), iter([scheduler]))
    check_equal(training.whole(), state)
    assert scheduler.num_iter < count


@on_ranks(2)
def test_extra_of_a_view_is_its_elements(folder):
    """The file had all elements of the larger tensor."""
    big = torch.arange(1_000_000.0)
    extra = {
        "view": big[2:4],
        "nested": [(big[5:8].requires_grad_(),)],
        "strided": big.view(1000, 1000)[:, 0],
        "all": 1,
    }
    model = bmt.auto_wrap(nn.Linear(2, 2))
    bmt.save_state(folder, model, extra=extra, step=1)
    assert os.path.getsize(Path(folder, "checkpoint-1", "state.pt")) < 200_000
    loaded = bmt.load_state(folder, model).extra
    assert torch.equal(loaded["view"], big[2:4])
    assert torch.equal(loaded["strided"], big[::1000])
    assert loaded["nested"][0][0].requires_grad and loaded["nested"][0][0].tolist() == [5, 6, 7]


@on_ranks(1)
def test_numbers_of_numpy(folder):
    """They passed the checks of the arguments, and were then refused by json and torch.load."""
    model = bmt.auto_wrap(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=numpy.float64(0.5))
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, numpy.float32(0.5), numpy.int64(2), numpy.int64(-1))
    optimizer.param_groups[0]["momentum"] = numpy.float32(0.5)
    best = {"best": [numpy.float64(0.25)]}
    bmt.save_state(folder, model, optimizer, scheduler, step=numpy.int64(3), keep=numpy.int64(1), extra=best)
    loaded = bmt.load_state(folder, model, optimizer, scheduler)
    assert (loaded, loaded.extra) == (3, best) and optimizer.param_groups[0]["momentum"] == 0.5


def test_keep(world, tmp_path):
    world(2)(three_checkpoints, str(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-2", "checkpoint-3"]


def kept_of_repeated(folder):
    model = bmt.auto_wrap(torch.nn.Linear(2, 2))
    for step in (1, 2, 2, 2):
        bmt.save_state(folder, model, step=step, keep=2)
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_checkpoint_that_is_saved_again_takes_no_place_of_another(world, tmp_path):
    assert world(1)(kept_of_repeated, str(tmp_path)) == [[".lock", "checkpoint-1", "checkpoint-2"]]


def linked(folder, target):
    """Training that links to its newest checkpoint after each save."""
    training = Training()
    for step in range(1, 5):
        training.train(step)
        training.save(folder, keep=2)
        if bmt.rank() == 0:
            link = Path(folder) / "latest"
            link.unlink(missing_ok=True)
            link.symlink_to(target or f"checkpoint-{step}")
    resumed = training.load(f"{folder}/latest")
    return resumed.step, training.load(folder).step


@full
@pytest.mark.parametrize("target", ["elsewhere", *in_full(None)])
def test_links_do_not_count(world, tmp_path, target):
    world(1)(three_checkpoints, str(tmp_path / "other"))
    folder = tmp_path / "run"
    if target is not None:
        target = str(tmp_path / "other" / "checkpoint-3")
    assert world(2)(linked, str(folder), target) == [(3 if target else 4, 4)] * 2
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "checkpoint-3", "checkpoint-4", "latest"]
    assert (tmp_path / "other" / "checkpoint-3" / "model.safetensors").exists()


def through_broken_links(folder):
    folder, model = Path(folder), bmt.auto_wrap(torch.nn.Linear(2, 2))
    bmt.save_state(folder, model, step=1)
    (folder / "latest").symlink_to("checkpoint-7")
    with pytest.raises(
        RuntimeError, match=r"latest cannot be read.* is a symbolic link to .*checkpoint-7, which does not exist"
    ):
        bmt.load_state(folder / "latest", model)
    (folder / "checkpoint-2").symlink_to("nowhere")
    bmt.save_state(folder, model, step=2)
    assert bmt.load_state(folder, model).step == 2
    for step in (2, 2):  # a link to a checkpoint that is saved again
        (folder / "checkpoint-2").rename(folder / f"moved-{step}")
        (folder / "checkpoint-2").symlink_to(f"moved-{step}")
        bmt.save_state(folder, model, step=step)
        shutil.rmtree(folder / f"moved-{step}")
    return sorted(os.listdir(folder))


@full
def test_links_that_lead_nowhere(world, tmp_path):
    """They are neither no checkpoint at all nor in the way of one."""
    names = [".lock", "checkpoint-1", "checkpoint-2", "latest"]
    assert world(1)(through_broken_links, str(tmp_path)) == [names]


def saved_under(folder, names):
    model = bmt.auto_wrap(torch.nn.Linear(2, 2))
    for name in names:
        with pytest.raises(ValueError, match="must not begin with 'tmp-' or a dot, or contain"):
            bmt.save_state(folder, model, name=name)


@full
def test_names_that_would_be_deleted(world, tmp_path):
    names = ["tmp-1", "tmp-checkpoint-best", ".hidden", "best.replaced-1"]
    world(2)(saved_under, str(tmp_path), names)
    assert not list(tmp_path.iterdir())


@on_ranks(2)
def test_a_name_that_would_hide_all_checkpoints(folder):
    """A folder that contains manifest.json is a checkpoint, and not a folder of checkpoints."""
    model = bmt.auto_wrap(torch.nn.Linear(2, 2))
    bmt.save_state(folder, model, step=1)
    with pytest.raises(ValueError, match=r"name must not be 'manifest.json'.*Pass another name"):
        bmt.save_state(folder, model, step=2, name="manifest.json")
    assert bmt.load_state(folder, model).step == 1


@pytest.mark.parametrize("name", ["complete.json", *in_full("manifest.json")])
def test_added_files_with_names_of_checksums(world, tmp_path, name):
    """The checkpoint would seem damaged."""
    world(2)(with_added_checksums, str(tmp_path), name)


def with_added_checksums(folder, name):
    model = bmt.auto_wrap(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=f"add has written {name} on rank 0.*Give the file another name"):
        bmt.save_state(folder, model, step=1, add=lambda path: (path / name).write_text("{}"))
    assert bmt.load_state(folder, model) is None


def counting(kind, parameters):
    """An optimizer whose state dict has entries of its own: a number, and a tensor of this rank."""

    class Counting(bmt.optim.AdamOptimizer if kind == "adam" else torch.optim.SGD):
        count, own = 0, None

        def state_dict(self):
            return {**super().state_dict(), "count": self.count, "nested": {"own": self.own}}

        def load_state_dict(self, state_dict):
            left = dict(state_dict)
            self.count, self.own = left.pop("count"), left.pop("nested")["own"]
            super().load_state_dict(left)

    def add(optimizer, state_dict):
        return {**state_dict, "count": optimizer.count, "nested": {"own": optimizer.own}}

    def take(optimizer, state_dict):
        assert len(state_dict["state"]) == len(optimizer.param_groups[0]["params"])
        optimizer.count, optimizer.own = state_dict.pop("count"), state_dict.pop("nested")["own"]

    if kind != "hooks":
        return Counting(parameters, lr=0.01, **({} if kind == "adam" else {"momentum": 0.9}))
    optimizer = bmt.optim.AdamOptimizer(parameters, lr=0.01)
    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def counted(folder, kind, saves):
    """The entries and weights after two steps and, if `saves`, a third; otherwise after loading and the third."""
    torch.manual_seed(0)
    model = bmt.auto_wrap(torch.nn.Linear(5, 3), blocks=[])
    optimizer = counting(kind, model.parameters())
    for step in range(3):
        if step == 2 and saves:
            optimizer.count, optimizer.own = 2, torch.tensor([10 + bmt.rank()])
            bmt.save_state(folder, model, optimizer, step=2)
        if step == 2 and not saves:
            bmt.load_state(folder, model, optimizer)
        optimizer.zero_grad()
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([each.flatten() for each in model.state_dict().values()])
    return optimizer.count, optimizer.own.tolist(), weights.tolist()


@pytest.mark.parametrize("kind", ["adam", *in_full("sgd", "hooks")])
@pytest.mark.parametrize(("saving", "loading"), [(2, 2), *rows_in_full([(1, 1), (2, 1), (1, 2)])])
def test_own_entries_of_an_optimizer(world, tmp_path, saving, loading, kind):
    """They follow the rule of `extra`: each rank gets its own or, on another number of ranks, those of rank 0."""
    _, _, weights = world(saving)(counted, str(tmp_path), kind, True)[0]
    for rank, (count, own, resumed) in enumerate(world(loading)(counted, str(tmp_path), kind, False)):
        assert (count, own) == (2, [10 + rank if saving == loading else 10])
        assert resumed == (weights if saving == loading else pytest.approx(weights))


@on_ranks(2)
def test_own_entries_that_torch_refuses_to_load(folder):
    """Before anything is written, an error names the place of the object."""
    model, own = bmt.auto_wrap(torch.nn.Linear(5, 3), blocks=[]), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, **own})
    for refused in Path("a"), contextlib.nullcontext, lambda: None:
        own["fine"], own["nested"] = numpy.float64(1), [1, {"deep": refused}]
        place = rf"SGD has an object of type {type(refused).__name__} at \['nested'\]\[1\]\['deep'\]"
        with pytest.raises(RuntimeError, match=rf"nothing was saved.*rank 1: .*the state_dict\(\) of {place}"):
            bmt.save_state(folder, model, optimizer)
    with pytest.raises(RuntimeError, match=r"Path at \['ranks'\]\[0\]\['extra'\]\['a'\], which"):
        bmt.save_state(folder, model, extra={"a": Path("a")})
    assert not [*Path(folder).glob("*checkpoint*")]


@on_ranks(2, full=(1,))
def test_own_entries_with_sharded_tensors(folder):
    """It is unknown to which parameters they belong. On one rank they are complete."""

    class Slow(torch.optim.SGD):
        def state_dict(self):
            slow = {0: {"slow": [each.detach().clone() for each in self.param_groups[0]["params"]]}}
            return {**super().state_dict(), "slow": slow}

    model = bmt.auto_wrap(torch.nn.Linear(5, 3), blocks=[])
    optimizer, manager = Slow(model.parameters(), lr=0.1), bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    refused = pytest.raises(RuntimeError, match="Slow has sharded tensors in the entry 'slow'")
    for save in (lambda: bmt.save_state(folder, model, optimizer), lambda: manager.state_dict(gather_opt=True)):
        with refused if bmt.world_size() > 1 else contextlib.nullcontext():
            save()


def resumed_in_another_order(folder, kind, order):
    """The last loss, with and without a stop after which a group has its parameters in `order`."""

    def train(model, optimizer, steps):
        for step in steps:
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def make(names):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 3)]
        model = bmt.auto_wrap(torch.nn.Sequential(*layers))
        parameters = dict(model.named_parameters())
        groups = [{"params": [parameters[name] for name in names]}, {"params": [parameters["2.bias"]], "lr": 0.02}]
        return model, OPTIMIZERS[kind](groups)

    names = ["0.weight", "1.weight", "2.weight"]
    model, optimizer = make(names)
    train(model, optimizer, range(3))
    bmt.save_state(folder, model, optimizer, step=3)
    expected = train(model, optimizer, range(3, 7))
    model, optimizer = make([names[number] for number in order])
    bmt.load_state(folder, model, optimizer)
    return expected, train(model, optimizer, range(3, 7))


@pytest.mark.parametrize("kind", ["adam", *in_full("adamw", "sgd")])
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_state_goes_by_names(world, tmp_path, size, kind):
    """Two of the parameters have one shape: by position their state would be exchanged, and nothing would fail."""
    for order in ([1, 0, 2], [2, 1, 0]):
        folder = str(tmp_path / str(order[0]))
        for expected, resumed in world(size)(resumed_in_another_order, folder, kind, order):
            assert resumed == expected


def names_of_parameters(folder):
    def make(*names):
        model = bmt.auto_wrap(torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)))
        parameters = dict(model.named_parameters())
        return model, torch.optim.SGD([(name, parameters[name]) for name in names], lr=0.1, momentum=0.9)

    model, optimizer = make("0.weight", "1.weight")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    bmt.save_state(folder, model, optimizer)
    model, optimizer = make("1.weight", "0.weight")
    bmt.load_state(folder, model, optimizer)
    (group,) = optimizer.param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in group["params"]], group["param_names"]


@full
def test_names_of_parameters_are_those_of_the_optimizer(world, tmp_path):
    for found, told in world(2)(names_of_parameters, str(tmp_path)):
        assert found == told


@full
def test_nothing_to_resume(world, tmp_path):
    assert world(2)(resumed_step, str(tmp_path)) == [None, None]
    assert world(2)(resumed_step, str(tmp_path / "missing")) == [None, None]


def saved_again(folder):
    training = Training()
    training.train(2)
    training.save(folder)
    training.train(4)
    training.step = 2
    training.save(folder, keep=1)
    values = training.whole()
    training.load(folder)
    return values, training.whole()


@full
def test_the_same_step_again(world, tmp_path):
    for mine, loaded in world(2)(saved_again, str(tmp_path)):
        if mine:
            check_equal(mine, loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoint-2"]


def after_a_fall_back(folder):
    """What is saved after an older one was resumed is newer than what was passed over."""
    training = Training()
    assert training.load(folder).step == 2
    training.step = 1
    training.save(folder, keep=1)
    return training.load(folder).step


def test_the_newest_whole_one(world, tmp_path):
    world(2)(three_checkpoints, str(tmp_path))
    damage(tmp_path / "checkpoint-3" / "model.safetensors")
    assert world(2)(resumed_step, str(tmp_path)) == [2, 2]
    assert world(2)(after_a_fall_back, str(tmp_path)) == [1, 1]


def refused(folder, expected, make=Training):
    with pytest.raises(RuntimeError, match=expected):
        make().load(folder)


@full
def test_none_is_whole(world, tmp_path):
    world(2)(three_checkpoints, str(tmp_path))
    damage(tmp_path / "checkpoint-3" / "model.safetensors")
    (tmp_path / "checkpoint-2" / "state.pt").unlink()
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()
    world(2)(
        refused, str(tmp_path), "no checkpoint .* is intact.*manifest.json is missing.*state.pt is missing.*checksum"
    )


def another_model(folder):
    with pytest.raises(RuntimeError, match=r"not fit the model\. \d+ tensors of the checkp.* \d+ tensors of the model"):
        Training("gpt2").load(folder)
    with pytest.raises(RuntimeError, match="parameter groups of"):
        Training(frozen=True).load(folder)
    training = Training()
    with pytest.raises(RuntimeError, match="1 optimizers, but this load_state call passes 2"):
        bmt.load_state(folder, training.model, [training.optimizer, training.optimizer])


def test_another_model(world, tmp_path):
    world(2)(three_checkpoints, str(tmp_path))
    world(2)(another_model, str(tmp_path))


class Masked(nn.Module):
    def __init__(self, mask, persistent):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, x):
        return self.linear(x) * self.mask


@on_ranks(1)
def test_a_buffer_that_is_persistent_under_its_second_name(folder):
    mask = torch.full((4,), 2.0)
    model = nn.Sequential(Masked(mask, False), Masked(mask, True))
    model = bmt.auto_wrap(model, blocks=list(model))
    bmt.save_state(folder, model, step=1)
    mask.zero_()
    assert bmt.load_state(folder, model).step == 1
    assert mask.tolist() == [2] * 4


@on_ranks(2)
def test_a_checkpoint_is_no_folder_of_checkpoints(folder):
    """What is saved in one would not be found: load_state loads the outer one."""
    model = bmt.auto_wrap(build("llama"))
    bmt.save_state(folder, model, step=1)
    inside = f"{folder}/checkpoint-1"
    with pytest.raises(RuntimeError, match=r"checkpoint-1 is itself a checkpoint.*Pass another folder, such as"):
        bmt.save_state(inside, model, step=bmt.load_state(inside, model).step + 1)
    assert bmt.save_state(folder, model, step=2).folder.name == "checkpoint-2"
