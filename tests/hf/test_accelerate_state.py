"""save_state and load_state of an Accelerator: parts of every rank, published by one rename, resumed exactly."""

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

import hf_bmtrain as bmt
import jobs
from cases import full, in_full, pairwise, rows_in_full
from log_lines import log_lines
from ranks import Ranks, on_ranks
from resumable import damage
from tiny_models import build

OPTIMIZERS = {
    "bmt": jobs.bmt_adam,
    "torch": jobs.torch_adam,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
}


class Count:
    """A user's object that is registered for checkpointing."""

    def __init__(self):
        self.epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


class Loop:
    """A user's loop; 5 steps an epoch, shuffled if there is dropout."""

    def __init__(self, folder, optimizer="bmt", dropout=0.1, limit=None, sharded=True, accumulate=1):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulate,
            dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=1),
            project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit),
        )  # fmt: skip
        if sharded:
            assert bmt.hf.shard_checkpoints(self.accelerator) is self.accelerator
        torch.manual_seed(0)
        model = bmt.auto_wrap(build("llama", dropout=dropout, blocks=1).train())
        optimizer = OPTIMIZERS[optimizer](model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        rows = [{"input_ids": row, "labels": row} for row in jobs.Rows(30).ids]
        loader = torch.utils.data.DataLoader(rows, batch_size=6, shuffle=dropout > 0)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)
        torch.manual_seed(1 + bmt.rank())

    def epochs(self, until):
        """Train up to an epoch. Returns the mean losses of all ranks."""
        losses = []
        while self.count.epochs < until:
            self.loader.set_epoch(self.count.epochs)
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
            self.count.epochs += 1
        return losses

    def checkpoints(self):
        bmt.synchronize()
        names = sorted(path.name for path in Path(self.accelerator.project_dir, "checkpoints").iterdir())
        bmt.synchronize()
        return names


def gathers(*args, **options):
    raise AssertionError("something was gathered")


def halfway(folder, options, own=None):
    """Two epochs, a save, two more epochs. own: the folder's name, if it is the caller's."""
    loop = Loop(folder, **options)
    if own:
        loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    before = loop.epochs(2)
    with (
        mock.patch("hf_bmtrain.engine.sharding.buffer.ShardedBuffer.gather_like_local", gathers),
        mock.patch.object(type(loop.model), "state_dict", gathers),
    ):
        saved = loop.accelerator.save_state(own)
    assert saved == Path(own or f"{folder}/checkpoints/checkpoint_0")
    return before + loop.epochs(4)


def resumed(folder, options, own=None):
    loop = Loop(folder, **options)
    loop.accelerator.load_state(own)
    assert loop.count.epochs == 2 and loop.scheduler.scheduler.last_epoch == 10
    return loop.epochs(4)


@pytest.mark.parametrize(
    ("size", "optimizer", "own"), pairwise([(2, "bmt", False)], [1, 2], list(OPTIMIZERS), [False, True])
)
def test_resume_is_exact(world, tmp_path, size, optimizer, own):
    """10 steps, new objects and 10 more are 20 steps, bit by bit: dropout, shuffled rows and a schedule."""
    options, place = {"optimizer": optimizer}, str(tmp_path / "own") if own else None
    whole = world(size)(halfway, str(tmp_path), options, place)
    assert len(whole[0]) == 20 and whole[0] == whole[-1]
    assert world(size)(resumed, str(tmp_path), options, place) == [losses[10:] for losses in whole]


@full
@pytest.mark.parametrize("sizes", [(3, 2), *in_full((2, 1), (1, 2), (2, 3))])
def test_another_number_of_ranks(world, tmp_path, sizes):
    before, after = sizes
    options = {"dropout": 0.0}
    whole = world(before)(halfway, str(tmp_path), options)[0]
    for losses in world(after)(resumed, str(tmp_path), options):
        assert losses == pytest.approx(whole[10:], abs=1e-6)


def two_saved(folder, limit=None):
    loop = Loop(folder, limit=limit)
    for epoch in (1, 2):
        loop.epochs(epoch)
        loop.accelerator.save_state()
    return loop.checkpoints(), loop.epochs(3)


@full
@pytest.mark.parametrize(("size", "limit"), [(2, 1), (2, 0), *rows_in_full([(1, 1)])])
def test_total_limit(world, tmp_path, size, limit):
    """kill_points.py shows that the older checkpoint is there until the newer one is whole."""
    assert world(size)(two_saved, str(tmp_path), limit)[0][0] == [".lock", "checkpoint_1"]


def passed_over(folder, name):
    loop = Loop(folder)
    with log_lines() as lines:
        loop.accelerator.load_state()
    assert loop.count.epochs == 1 and loop.accelerator.save_iteration == 2
    loop.epochs(2)
    after = loop.epochs(3)
    loop.accelerator.save_state()
    assert loop.checkpoints() == [".lock", "checkpoint_0", "checkpoint_1", "checkpoint_2"]
    if bmt.rank() == 0:
        (line,) = lines
        assert line.startswith("load_state skipped the checkpoint ") and "checkpoint_1: " in line and name in line
    return after


@pytest.mark.parametrize(
    "name", ["random_states_1.pkl", *in_full("model.safetensors", "scheduler.bin", "custom_checkpoint_0.pkl")]
)
def test_a_damaged_checkpoint_is_passed_over(world, tmp_path, name):
    ahead = [losses for _, losses in world(2)(two_saved, str(tmp_path))]
    damage(tmp_path / "checkpoints" / "checkpoint_1" / name)
    assert world(2)(passed_over, str(tmp_path), name) == ahead


@full
@on_ranks(2, full=(1,))
def test_a_renamed_checkpoint(folder):
    """The only checkpoint, whose name is not one of Accelerate's any more."""
    loop = Loop(folder)
    loop.count.epochs = 1
    saved = loop.accelerator.save_state()
    if bmt.rank() == 0:
        saved.rename(saved.with_name("best"))
    bmt.synchronize()
    other = Loop(folder)
    other.accelerator.load_state()
    assert other.count.epochs == 1
    assert other.accelerator.save_state().name == "checkpoint_0"
    assert other.checkpoints() == [".lock", "best", "checkpoint_0"]


def is_refused(folder, match):
    loop = Loop(folder)
    with pytest.raises((RuntimeError, ValueError), match=match):
        loop.accelerator.load_state()


@full
def test_without_a_whole_checkpoint(world, tmp_path):
    world(2)(is_refused, str(tmp_path), "there is no checkpoint in .*checkpoints")
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir(parents=True)
    world(2)(is_refused, str(tmp_path), "checkpoint_7: manifest.json is missing")


def fails(folder, rank, function):
    """A full disk on one rank, at its parts or at its random state."""
    loop = Loop(folder, limit=1)
    loop.epochs(1)
    loop.accelerator.save_state()
    loop.epochs(2)

    module = os if function == "pwrite" else torch
    original = getattr(module, function)

    def full(first, second, *arguments, **options):
        if module is torch and not isinstance(second, Path):  # torch.save pickles tensors for other ranks as well
            return original(first, second, *arguments, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(module, function, full) if bmt.rank() == rank else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match=rf"nothing was saved to .*rank {rank}: .*OSError: .*No space left"):
            loop.accelerator.save_state()
    assert loop.checkpoints() == [".lock", "checkpoint_0"] and loop.accelerator.save_iteration == 1
    again = Loop(folder, limit=1)
    again.accelerator.load_state()
    again.epochs(2)
    again.accelerator.save_state()
    assert again.checkpoints() == [".lock", "checkpoint_1"]


def old_one_stays(folder):
    loop = Loop(folder, limit=1)
    loop.epochs(1)
    loop.accelerator.save_state()
    listed = os.listdir

    def unlisted(path="."):
        if Path(path, "checkpoint_1").exists() and bmt.rank() == 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return listed(path)

    with mock.patch.object(os, "listdir", unlisted):
        assert loop.accelerator.save_state().name == "checkpoint_1"
    bmt.synchronize()
    assert loop.checkpoints() == [".lock", "checkpoint_0", "checkpoint_1"]
    bmt.synchronize()
    loop.accelerator.save_state()
    return loop.checkpoints()


@full
def test_an_older_checkpoint_that_cannot_be_deleted(world, tmp_path):
    """The error set the iteration back, so that the next save failed too: its folder existed."""
    assert world(2)(old_one_stays, str(tmp_path)) == [[".lock", "checkpoint_2"]] * 2


def fails_in_a_new_folder(folder):
    loop = Loop(folder)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    loop.count.state_dict = None
    with pytest.raises(RuntimeError, match="nothing was saved to .*TypeError"):
        loop.accelerator.save_state(f"{folder}/own")
    for method in (loop.accelerator.save_state, loop.accelerator.load_state):
        with pytest.raises(ValueError, match="automatic.checkpoint.naming"):
            method()
    bmt.synchronize()
    return os.listdir(folder)


@full
def test_a_failure_in_a_new_folder(world, tmp_path):
    assert world(2)(fails_in_a_new_folder, str(tmp_path)) == [[], []]


@pytest.mark.parametrize("function", ["save", *in_full("pwrite")])
def test_a_failure_on_one_rank_withdraws_it_on_all(world, tmp_path, function):
    world(2)(fails, str(tmp_path), 1, function)


@full
@on_ranks(2)
def test_a_folder_is_saved_to_again(folder):
    """A folder of the caller's, saved to twice; what else is in it stays."""
    loop = Loop(folder)
    loop.accelerator.project_configuration.automatic_checkpoint_naming = False
    own = Path(folder) / "own"
    for epoch in (1, 2):
        loop.epochs(epoch)
        assert loop.accelerator.save_state(str(own)) == own
        bmt.synchronize()
        if bmt.rank() == 0:
            (own / "notes.txt").write_text("the user's")
    bmt.synchronize()
    assert sorted(path.name for path in own.iterdir()) == [".lock", "checkpoint-2", "notes.txt"]
    assert sorted(path.name for path in Path(folder).iterdir()) == ["own"]
    loop.count.epochs = 0
    loop.accelerator.load_state(str(own))
    assert loop.count.epochs == 2


@full
@on_ranks(2, full=(1,))
def test_several_models(folder):
    """Each with its optimizer; the first is loaded as well, and trained on."""
    loop = Loop(folder)
    second = bmt.auto_wrap(build("gpt2", seed=2, blocks=1))
    _, optimizer = loop.accelerator.prepare(second, bmt.optim.AdamOptimizer(second.parameters(), lr=1e-2))
    batch = next(iter(loop.loader))

    def step():
        loss = second(**batch).loss
        loop.accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(2):
        step()
    loop.accelerator.save_state()
    ahead = [step() for _ in range(3)], loop.epochs(1)
    loop.accelerator.load_state()
    assert ([step() for _ in range(3)], loop.epochs(1)) == ahead


class Adding:
    """A wrapper that adds an entry."""

    def __init__(self, optimizer):
        self.optimizer, self.own = optimizer, 5

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def state_dict(self):
        return {**self.optimizer.state_dict(), "own": self.own}

    def load_state_dict(self, state_dict):
        self.own = state_dict["own"]
        self.optimizer.load_state_dict({name: value for name, value in state_dict.items() if name != "own"})


@on_ranks(2)
def test_a_wrapper_that_was_prepared(folder):
    loop = Loop(folder, "bmt", dropout=0.0)
    loop.epochs(1)
    wrapper = loop.optimizer.optimizer = Adding(loop.optimizer.optimizer)
    loop.accelerator.save_state()
    wrapper.own = 0
    loop.accelerator.load_state()
    assert wrapper.own == 5


@pytest.mark.parametrize("optimizer", ["bmt", *in_full("sgd")])
@on_ranks(2, full=(1,))
def test_states_of_prepared_optimizers(folder, optimizer):
    """With the entries that the optimizer inside Accelerate's wrapper adds, by each of our functions."""
    loop, own = Loop(folder, optimizer, dropout=0.0), {}
    manager, inner = bmt.optim.OptimManager(), loop.optimizer.optimizer
    manager.add_optimizer(loop.optimizer)
    inner.register_state_dict_post_hook(lambda _, state_dict: {**state_dict, "own": 5})
    inner.register_load_state_dict_pre_hook(lambda _, state_dict: own.update(own=state_dict.pop("own", None)))
    loop.epochs(1)
    bmt.save_state(f"{folder}/own", loop.model, loop.optimizer, step=1)
    kept, scheduler = manager.state_dict(), {**loop.scheduler.state_dict()}
    expected = loop.epochs(2)
    for state in None, kept:
        own.clear()
        assert bmt.load_state(f"{folder}/own", loop.model, None if state else loop.optimizer).step == 1
        if state:
            manager.load_state_dict(state)
        assert own == {"own": 5}
        loop.count.epochs = 1
        loop.scheduler.load_state_dict(scheduler)
        assert loop.epochs(2) == expected


@full
@on_ranks(2, full=(1,))
def test_hooks_of_the_user(folder):
    """Hooks of the user's are called as Accelerate calls them; what they write is a part of the checkpoint."""
    loop, seen = Loop(folder), []

    def save(models, weights, output_dir):
        assert models == [loop.model] and weights[0].keys() == loop.model.state_dict().keys()
        path = Path(output_dir) / "mine" / f"rank{bmt.rank()}.txt"
        path.parent.mkdir()
        path.write_text("of a hook")

    def load(models, input_dir):
        assert models == [loop.model]
        seen.append((Path(input_dir) / "mine" / f"rank{bmt.rank()}.txt").read_text())

    loop.accelerator.register_save_state_pre_hook(save)
    loop.accelerator.register_load_state_pre_hook(load)
    loop.epochs(1)
    saved = loop.accelerator.save_state()
    ahead = loop.epochs(2)
    loop.accelerator.load_state(str(saved))
    assert seen == ["of a hook"] and loop.epochs(2) == ahead
    assert len(loop.accelerator._save_model_state_pre_hook) == len(loop.accelerator._load_model_state_pre_hook) == 1


def without_the_line(folder):
    loop = Loop(folder, sharded=False)
    loop.epochs(1)
    with log_lines() as lines:
        loop.accelerator.save_state()
    assert any("bmt.hf.shard_checkpoints(accelerator)" in line for line in lines)
    bmt.synchronize()
    ahead = loop.epochs(2)
    other = Loop(folder)
    other.accelerator.load_state(f"{folder}/checkpoints/checkpoint_0")
    assert other.epochs(2) == ahead


@full
def test_a_script_without_the_line(tmp_path):
    """Without the one line: Accelerate's own files, a line in the log, and they can still be loaded.

    On ranks of its own, since a process logs the line once.
    """
    ranks = Ranks(2)
    ranks(without_the_line, str(tmp_path))
    ranks.stop()


def accumulating(folder, resume):
    """The count of Accelerate's accumulation is restored on ranks that did not exist."""
    loop = Loop(folder, dropout=0.0, accumulate=2)
    if resume:
        loop.accelerator.load_state()
        assert loop.accelerator.step == 3
    else:
        loop.accelerator.step = 3
        loop.accelerator.save_state()


@full
def test_accumulation_on_more_ranks(world, tmp_path):
    world(2)(accumulating, str(tmp_path), False)
    world(3)(accumulating, str(tmp_path), True)
