"""Trainer's checkpoints of a sharded model: written by all ranks, read by plain transformers, resumed exactly."""

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy
import pytest
import safetensors.torch
import torch
import transformers

import hf_bmtrain as bmt
import jobs
from cases import full, in_full, rows_in_full
from hf_bmtrain.checkpoint.__main__ import verify
from hf_bmtrain.checkpoint.folder import find
from hf_bmtrain.checkpoint.manifest import Damaged, Manifest
from hf_bmtrain.hf import checkpoints
from hf_bmtrain.hf.calling_trainer import calling_trainer
from hf_bmtrain.hf.checkpoints import set_aside_incomplete
from hf_bmtrain.hf.termination import Termination
from jobs import bmt_adam, losses, torch_adam
from log_lines import log_lines
from state_dicts import check_equal
from tiny_models import VOCABULARY, build

SIZES = [2, *in_full(1)]
MOSTLY_TWO = [pytest.param(1, marks=pytest.mark.slow), 2]


def run(folder, given, options, resume=None):
    """Train (or resume) on every rank; returns log, final weights and the names of what was written."""
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), **options)
    with log_lines() as said:
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")  # rank 0 enters it alone
    bmt.synchronize()
    state = trainer.state
    return {
        "history": state.log_history, "weights": jobs.weights(trainer.model), "best": state.best_model_checkpoint,
        "metric": state.best_metric, "said": said,
    }  # fmt: skip


def check_opens(folder, weights, family="llama"):
    """`folder` opens with from_pretrained and holds `weights`."""
    model = type(build(family)).from_pretrained(folder)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("make_optimizer", [bmt_adam, *in_full(torch_adam), pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", MOSTLY_TWO)
def test_resume_is_exact(world, tmp_path, size, make_optimizer):
    """Dropout on, schedule running: the losses after a resume are those of the run that went on."""
    options = {"make_optimizer": make_optimizer, "dropout": 0.1}
    given = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 1, "lr_scheduler_type": "linear",
        "learning_rate": 1e-3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    folder = tmp_path / "run"
    whole = world(size)(run, str(folder), given, options)
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    check_opens(folder / "final", whole[0]["weights"])
    check_opens(folder / "checkpoint-6", whole[0]["weights"])
    for name in ("checkpoint-6", "final"):
        shutil.rmtree(folder / name)
    resumed = world(size)(run, str(folder), given, options, True)
    for here, there in zip(resumed, whole):
        assert losses(here["history"], "grad_norm", "learning_rate") == losses(
            there["history"], "grad_norm", "learning_rate"
        )
        for name, value in there["weights"].items():
            assert torch.equal(here["weights"][name], value), name
    moved = tmp_path / "elsewhere" / "moved-4"
    moved.parent.mkdir()
    (folder / "checkpoint-4").rename(moved)
    again = world(size)(run, str(tmp_path / "again"), given, options, str(moved))
    assert losses(again[0]["history"]) == losses(whole[0]["history"])


class Killed(Exception):
    pass


class DiesOnceSaved(transformers.Trainer):
    """Killed at step 4, where Trainer has written its files; the older checkpoint goes when all ranks have."""

    def _save_checkpoint(self, *args, **kwargs):
        super()._save_checkpoint(*args, **kwargs)
        if self.state.global_step == 4:
            raise Killed


class DiesInEvaluation(transformers.Trainer):
    def evaluate(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise Killed
        return super().evaluate(*args, **kwargs)


def killed(folder, given, options):
    with pytest.raises(Killed):
        run(folder, given, options)


@pytest.mark.parametrize(("cls", "left"), [(DiesOnceSaved, {2, 4}), *rows_in_full([(DiesInEvaluation, {2})])])
def test_one_checkpoint_is_whole_at_any_time(world, tmp_path, cls, left):
    """With save_total_limit=1: the older one goes when all of the newer one, every rank's file too, is there."""
    options = {"make_optimizer": bmt_adam, "eval_dataset": jobs.Rows(seed=3)}
    given = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "eval_strategy": "steps",
        "eval_steps": 2, "learning_rate": 1e-3,
    }  # fmt: skip
    whole = world(2)(run, str(tmp_path / "whole"), given, options)
    world(2)(killed, str(tmp_path / "run"), given, {**options, "cls": cls})
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {f"checkpoint-{step}" for step in left}
    resumed = world(2)(run, str(tmp_path / "run"), given, options, True)
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-6"}
    assert losses(resumed[0]["history"], "grad_norm") == losses(whole[0]["history"], "grad_norm")


HOLDER = """
import fcntl, sys
file = open(sys.argv[1] + "/.lock", "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_folders_that_are_no_checkpoints(world, tmp_path):
    for name in ("checkpoint-\u00b2", "checkpoint-", "checkpoint-a", "checkpoint--1"):
        (tmp_path / name).mkdir()
    world(1)(set_aside_incomplete, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_checkpoint_that_another_job_is_saving_is_left_alone(world, tmp_path):
    """A Trainer created meanwhile, to evaluate or predict, renamed it: the training failed and lost the checkpoint."""
    for name in ("checkpoint-2", "earlier-checkpoint-4"):
        (tmp_path / name).mkdir()
    torch.save({"ranks": [{"extra": {"id": "of the other job"}}]}, tmp_path / "checkpoint-2" / "state.pt")
    found = []
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1, text=True) as job:
        assert job.stdout.readline() == "locked\n"
        world(1)(set_aside_incomplete, str(tmp_path))
        found.append(sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock"))
        job.stdin.close()
    world(1)(set_aside_incomplete, str(tmp_path))
    found.append(sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock"))
    assert found == [["checkpoint-2", "earlier-checkpoint-4"], ["checkpoint-4", "incomplete-checkpoint-2"]]


class ChangesItsMind(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2


def not_saved_after_all(folder):
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), make_optimizer=bmt_adam)
    trainer.add_callback(ChangesItsMind())  # after BMTrainCallback, which still sees the request for step 4
    trainer.train()
    bmt.synchronize()


@full
def test_a_save_that_does_not_come_leaves_nothing(world, tmp_path):
    world(2)(not_saved_after_all, str(tmp_path))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]


def identity(checkpoint):
    """Changes if a checkpoint is saved again."""
    found = Path(checkpoint, "manifest.json").stat()
    return found.st_ino, found.st_mtime_ns


class DiesBeforeItsFiles(transformers.Trainer):
    """Killed in the save of step 4, before Trainer writes its own files."""

    def _save_checkpoint(self, *args, **kwargs):
        if self.state.global_step == 4:
            raise Killed
        super()._save_checkpoint(*args, **kwargs)


def saved_again_in_vain(folder, again):
    """Step 4 was saved, and training resumes from step 2; with `again`, the same Trainer trains once more."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    options = {"make_optimizer": bmt_adam, "size": bmt.world_size()}
    jobs.make_trainer(folder, True, given, **options).train()
    before = identity(f"{folder}/checkpoint-4")
    trainer = jobs.make_trainer(folder, True, given, **options, cls=DiesBeforeItsFiles)
    with pytest.raises(Killed):
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    bmt.synchronize()
    if again:
        trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    else:
        jobs.make_trainer(folder, True, given, **options)
    bmt.synchronize()
    assert identity(f"{folder}/checkpoint-4") == before
    trainer = jobs.make_trainer(folder, True, given, **options)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    bmt.synchronize()
    assert identity(f"{folder}/checkpoint-4") != before


@pytest.mark.parametrize("again", [False, *in_full(True)])
def test_the_earlier_checkpoint_of_a_step_stays_until_the_new_one_is_complete(world, tmp_path, capsys, again):
    """It was deleted before Trainer had written its files, so that neither of the two was whole."""
    world(2)(saved_again_in_vain, str(tmp_path), again)
    assert "intact" in verified(tmp_path / "checkpoint-4", capsys)
    assert not any(tmp_path.glob("earlier-*")) and not any(tmp_path.glob("*.replaced-*"))


def evaluated_on_start(folder, given):
    """The run that resumes scores better."""
    options = {"make_optimizer": bmt_adam, "size": bmt.world_size(), "eval_dataset": jobs.Rows()}
    given = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **given}
    jobs.make_trainer(folder, True, given, **options, compute_metrics=lambda found: {"score": 1.0}).train()
    before = identity(f"{folder}/checkpoint-2")
    given |= {"max_steps": 3, "eval_on_start": True}
    trainer = jobs.make_trainer(folder, True, given, **options, compute_metrics=lambda found: {"score": 2.0})
    trainer.train(resume_from_checkpoint=True)
    bmt.synchronize()
    assert identity(f"{folder}/checkpoint-2") == before


@full
@pytest.mark.parametrize(
    "given",
    [
        {"save_strategy": "best", "metric_for_best_model": "score", "greater_is_better": True},
        *in_full({"save_strategy": "steps", "save_steps": 2, "restore_callback_states_from_checkpoint": True}),
    ],
    ids=lambda given: given["save_strategy"],
)
def test_an_evaluation_on_start_leaves_the_checkpoint(world, tmp_path, capsys, given):
    """Trainer never saves after it. The checkpoint was replaced by one that Trainer did not finish, and deleted."""
    world(2)(evaluated_on_start, str(tmp_path), given)
    assert "intact" in verified(tmp_path / "checkpoint-2", capsys)


def full_disk_on_one_rank(folder):
    """Every rank hears of it before Trainer writes, and so before it deletes what is older."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), make_optimizer=bmt_adam)
    write = os.pwrite

    def full(*args):
        if any(Path(folder).glob("tmp-checkpoint-4-*")) and bmt.rank() == 1:
            raise OSError(28, "No space left on device")
        return write(*args)

    with mock.patch.object(os, "pwrite", full):
        with pytest.raises(RuntimeError, match=r"nothing was saved to .*rank 1: .*No space left"):
            trainer.train()


@full
def test_a_full_disk_is_told_everywhere(world, tmp_path):
    world(2)(full_disk_on_one_rank, str(tmp_path))
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").is_file()
    assert not (tmp_path / "checkpoint-4").exists()


def old_ones_stay(folder):
    """An older checkpoint cannot be deleted, and then the folder cannot be listed for more."""
    given = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), make_optimizer=bmt_adam)
    rename, listed = os.rename, os.listdir

    def stuck(source, target):
        if str(source).endswith("checkpoint-1"):
            raise PermissionError(13, "Permission denied", str(source))
        return rename(source, target)

    def unlisted(path="."):
        if str(path) == folder and Path(folder, "checkpoint-3", "complete.json").exists():
            raise OSError(116, "Stale file handle", str(path))
        return listed(path)

    with mock.patch.object(os, "rename", stuck), mock.patch.object(os, "listdir", unlisted), log_lines() as said:
        trainer.train()
    bmt.synchronize()
    return [line for line in said if "is complete" in line], trainer.state.global_step


def test_training_goes_on_if_an_older_checkpoint_cannot_be_deleted(world, tmp_path):
    """The error was raised on every rank, and said that the new checkpoint could not be completed."""
    (said, steps), others = world(2)(old_ones_stay, str(tmp_path))
    assert others == ([], 3) and steps == 3
    assert said[0].startswith(
        f"the checkpoint {tmp_path}/checkpoint-2 is complete, but the older checkpoint {tmp_path}/checkpoint-1 could"
    )
    assert said[-1].startswith(
        f"the checkpoint {tmp_path}/checkpoint-3 is complete, but finding and deleting outdated checkpoints"
    )
    assert len(said) == 2


def resume_errors(folder, given, options, resume, match):
    with pytest.raises(RuntimeError, match=match):
        run(folder, given, options, resume)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


OURS = {"make_optimizer": bmt_adam, "cls": bmt.hf.Trainer}
"""`bmt.hf.Trainer` verifies what it resumes from."""


def test_resume_that_cannot_be_right_raises(world, tmp_path):
    folder, given, options = tmp_path / "run", {"save_strategy": "steps", "save_steps": 2}, {"make_optimizer": bmt_adam}
    world(2)(run, str(folder), given, options)
    checkpoint = folder / "checkpoint-2"
    flip(checkpoint / "model.safetensors")
    world(2)(
        resume_errors, str(folder), given, options, str(checkpoint), r"in model.safetensors: .* the saved checksum"
    )
    flip(checkpoint / "model.safetensors")  # back
    flip(checkpoint / "optimizer.safetensors")
    world(2)(resume_errors, str(folder), given, options, str(checkpoint), "optimizer.safetensors.* the saved checksum")
    world(2)(resume_errors, str(folder), given, OURS, str(checkpoint), "checkpoint-2 is damaged: optimizer.safetensors")
    (checkpoint / "state.pt").unlink()
    world(2)(resume_errors, str(folder), given, options, str(checkpoint), "damaged: .*state.pt is missing")


TRAINERS_FILES = ["rng_state_1.pth", "scheduler.pt", "optimizer.pt", "trainer_state.json", "training_args.bin"]


def verified(checkpoint, capsys):
    """What the command `verify` prints."""
    (found,), _ = find(checkpoint)
    assert verify(found) == ("intact" in (printed := capsys.readouterr().out))
    return printed


def test_damage_to_trainers_own_files(world, tmp_path, capsys):
    """Stock Trainer loads them without a look: an error names the file, also if nothing refers to the checkpoint."""
    folder, given, options = tmp_path / "run", {"save_strategy": "steps", "save_steps": 2}, {"make_optimizer": bmt_adam}
    world(2)(run, str(folder), given, options)
    checkpoint = folder / "checkpoint-2"
    for name in TRAINERS_FILES:
        path = checkpoint / name
        data = path.read_bytes()
        if name == "rng_state_1.pth":  # a bit of the generator's state, which is no tensor of zeros
            state = torch.load(path, weights_only=False)
            state["cpu"][100] ^= 1
            torch.save(state, path)
        elif name == "optimizer.pt":
            reference = torch.load(path, weights_only=False)["param_groups"][0]["hf_bmtrain"]
            path.write_bytes(data.replace(reference["id"].encode(), reference["id"][::-1].encode()))
        elif name == "scheduler.pt":
            state = torch.load(path, weights_only=True)
            torch.save({**state, "last_epoch": 1}, path)
        else:
            path.write_bytes(
                data.replace(b'"global_step": 2', b'"global_step": 3') if name.endswith("json") else data + b"0"
            )
        world(2)(resume_errors, str(folder), given, options, str(checkpoint), f"checkpoint-2 is damaged: {name}")
        assert f"damaged: {name}" in verified(checkpoint, capsys)
        path.write_bytes(data)
    assert "intact, 11 files" in verified(checkpoint, capsys)
    (checkpoint / "notes.txt").touch()
    assert verified(checkpoint, capsys).strip().endswith("no checksums: notes.txt")
    (checkpoint / "complete.json").write_text("{")
    found = verified(checkpoint, capsys)
    assert "damaged: complete.json, which contains only checksums" in found and "delete complete.json" in found


WITHOUT_CALLBACK = """
import sys
import jobs
import hf_bmtrain as bmt
trainer = jobs.make_trainer(sys.argv[1], False, {"max_steps": 4}, make_optimizer=None)
if sys.argv[3] == "wrapped":
    bmt.init_distributed()
    bmt.auto_wrap(trainer.model)
trainer.train(resume_from_checkpoint=sys.argv[2])
"""


@pytest.mark.parametrize("model", ["plain", *in_full("wrapped")])
def test_resuming_without_the_callback(world, tmp_path, model):
    """A Trainer that would start with an empty optimizer state is stopped by an error that names the callback."""
    given = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    world(2)(run, str(tmp_path), given, {"make_optimizer": bmt_adam})
    program = [sys.executable, "-c", WITHOUT_CALLBACK, str(tmp_path), str(tmp_path / "checkpoint-2"), model]
    paths = os.pathsep.join([*filter(None, sys.path), str(Path(jobs.__file__).parent)])
    ended = subprocess.run(program, capture_output=True, text=True, timeout=80, env=os.environ | {"PYTHONPATH": paths})
    assert ended.returncode != 0 and "optimizer_state_needs_BMTrainCallback" in ended.stderr, ended.stderr


def loaded_by_hand(folder, given, options, checkpoint):
    """Whether a program that loads the optimizer itself, without resuming, trains with the state of the checkpoint."""
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), **options)
    trainer.create_optimizer()
    trainer.optimizer.load_state_dict(torch.load(f"{checkpoint}/optimizer.pt"))
    trainer.args.max_steps = 1
    trainer.train()
    return {int(state["step"]) for state in trainer.optimizer.state_dict()["state"].values()} == {3}


@full
def test_a_checkpoint_that_was_copied(world, tmp_path):
    """What is verified and loaded is the folder that Trainer resumes from, not the one that was saved."""
    folder, given, options = tmp_path / "run", {"save_strategy": "steps", "save_steps": 2}, {"make_optimizer": bmt_adam}
    world(2)(run, str(folder), given, options)
    saved, copied = folder / "checkpoint-2", tmp_path / "elsewhere" / "checkpoint-2"
    shutil.copytree(saved, copied)
    for name in ("rng_state_1.pth", "model.safetensors", "state.pt"):
        whole = (copied / name).read_bytes()
        flip(copied / name)
        world(2)(resume_errors, str(folder), given, options, str(copied), f"elsewhere.*{name}")
        (copied / name).write_bytes(whole)
    resumed = world(2)(run, str(folder), given, options, str(saved))[0]
    assert all(world(2)(loaded_by_hand, str(folder), given, options, str(saved)))
    shutil.rmtree(saved)
    moved = world(2)(run, str(folder), given, options, str(copied))[0]
    assert losses(moved["history"], "grad_norm") == losses(resumed["history"], "grad_norm")


@pytest.mark.parametrize("how", ["flipped", *in_full("killed in Trainer's files")])
def test_a_damaged_checkpoint_is_passed_over(world, tmp_path, how):
    given = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    whole = world(2)(run, str(tmp_path), given, OURS)[0]
    shutil.rmtree(tmp_path / "checkpoint-6")
    if how == "flipped":
        flip(tmp_path / "checkpoint-4" / "model.safetensors")
        options = OURS
    else:
        (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch":')
        options = {"make_optimizer": bmt_adam}  # also with stock Trainer
    resumed = world(2)(run, str(tmp_path), given, options, True)[0]
    assert losses(resumed["history"], "grad_norm") == losses(whole["history"], "grad_norm")
    assert (tmp_path / "incomplete-checkpoint-4").is_dir() == (how != "flipped")


def resumed_where(folder, given, options, resume, hidden):
    """Rank 1 does not see files of these names yet, as on a network file system that caches what a folder lacks."""
    exists = Path.exists
    unseen = hidden if bmt.rank() == 1 else ()
    with mock.patch.object(Path, "exists", lambda path: path.name not in unseen and exists(path)):
        return run(folder, given, options, resume)


@pytest.mark.parametrize(
    ("resume", "only_model"), [("newest", False), *rows_in_full([("given", False), ("newest", True), ("given", True)])]
)
def test_ranks_that_do_not_see_all_files_yet(world, tmp_path, resume, only_model):
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "save_only_model": only_model}
    world(2)(run, str(tmp_path), given, OURS)
    shutil.rmtree(tmp_path / "checkpoint-4")
    start = True if resume == "newest" else str(tmp_path / "checkpoint-2")
    whole = world(2)(run, str(tmp_path), given, OURS, start)[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    late = world(2)(resumed_where, str(tmp_path), given, OURS, start, ("manifest.json", "optimizer.pt"))[0]
    assert losses(late["history"], "grad_norm") == losses(whole["history"], "grad_norm")


def resumed_without(folder, given, options, resume):
    isfile = os.path.isfile
    lost = "optimizer.pt" if bmt.rank() == 1 else None
    with mock.patch.object(os.path, "isfile", lambda path: os.path.basename(path) != lost and isfile(path)):
        resume_errors(folder, given, options, resume, r"optimizer.pt .* loaded on 1 of 2 ranks, but not on rank 1\.")


def unread(checkpoint):
    """The file is lost on one rank after it was verified."""
    read = mock.Mock(side_effect=Damaged("it is gone")) if bmt.rank() == 0 else Manifest.read
    with mock.patch.object(checkpoints, "Manifest", mock.Mock(read=read)):
        with pytest.raises(RuntimeError, match="checkpoint-2 could not be read. rank 0: Damaged: it is gone$"):
            checkpoints._weights_were_replaced(Path(checkpoint))


def test_one_rank_cannot_read_what_another_reads(world, tmp_path):
    given, options = {"save_strategy": "steps", "save_steps": 2}, {"make_optimizer": bmt_adam}
    world(2)(run, str(tmp_path), given, options)
    world(2)(resumed_without, str(tmp_path), given, options, str(tmp_path / "checkpoint-2"))
    world(2)(unread, str(tmp_path / "checkpoint-2"))


class Table:
    """Learning rates of one's own. LambdaLR saves the array, which torch.load(weights_only=True) refuses."""

    def __init__(self):
        self.rates = numpy.linspace(1, 0, 10)

    def __call__(self, step):
        return float(self.rates[step])


def train_by_table(folder):
    """Two jobs with the same output folder: the second one leaves the checkpoint of the first one alone."""
    for _ in range(2):
        model = bmt.auto_wrap(build("llama"))
        optimizer = bmt_adam(model)
        args = transformers.TrainingArguments(folder, max_steps=2, save_steps=2, report_to=[], use_cpu=True)
        transformers.Trainer(
            model, args, train_dataset=jobs.Rows(), callbacks=[bmt.hf.BMTrainCallback()],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, Table())),
        ).train()  # fmt: skip


@full
def test_a_scheduler_that_torch_refuses_to_load(world, tmp_path):
    world(1)(train_by_table, str(tmp_path))
    assert [path.name for path in tmp_path.glob("*checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("sizes", [(2, 3), *in_full((2, 1), (1, 2), (3, 1))])
def test_another_number_of_ranks(world, tmp_path, sizes):
    """The optimizer's state is in the parameters' shapes, for any number of ranks."""
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    before, after = sizes
    for make_optimizer in (bmt_adam, torch_adam):
        options = {"make_optimizer": make_optimizer}
        whole = world(before)(run, str(tmp_path / "run"), given, options)[0]
        here = world(after)(run, str(tmp_path / "run"), given, options, str(tmp_path / "run" / "checkpoint-2"))[0]
        assert any("rows per step, but this run has" in line for line in here["said"]) == (3 in sizes)
        if 3 not in sizes:  # the rows of a step are the same
            for (mine,), (theirs,) in zip(losses(here["history"]), losses(whole["history"])):
                assert mine == pytest.approx(theirs, rel=1e-5)
        shutil.rmtree(tmp_path / "run")


@pytest.mark.parametrize(
    "family", [*in_full("mixtral"), *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "t5"))]
)
def test_resume_of_weights_that_the_hub_names_otherwise(world, tmp_path, family):
    """Checkpoints hold the model's own names, so that Trainer reads every tensor back; what is published, the hub's."""
    options = {"family": family, "tied": family != "mixtral", "make_optimizer": bmt_adam}
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    whole = world(2)(run, str(tmp_path), given, options)[0]
    shutil.rmtree(tmp_path / "checkpoint-4")
    resumed = world(2)(run, str(tmp_path), given, options, True)[0]
    assert losses(resumed["history"], "grad_norm") == losses(whole["history"], "grad_norm")
    reopened = type(build(family)).from_pretrained(tmp_path / "final")
    for name, value in reopened.state_dict().items():
        assert torch.equal(value, resumed["weights"][name]), name


class Terminates(transformers.TrainerCallback):
    """The scheduler's signal reaches one rank, in the middle of a step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and bmt.rank() == bmt.world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(folder, given, options):
    callbacks = [Terminates(), bmt.hf.BMTrainCallback(save_on_sigterm=True)]
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        run(folder, given, {**options, "callbacks": callbacks})
    assert signal.getsignal(signal.SIGTERM) is before


class Fails(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise ValueError("a bad row")


def failed(folder):
    callbacks = [Fails(), bmt.hf.BMTrainCallback(save_on_sigterm=True)]
    trainer = jobs.make_trainer(folder, True, {}, size=bmt.world_size(), callbacks=callbacks)
    before = signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad row"):
            trainer.train()
        assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_after_an_error(world, tmp_path):
    """It ends the process, as before training."""
    world(1)(failed, str(tmp_path))


@pytest.mark.parametrize("size", SIZES)
def test_sigterm(world, tmp_path, size):
    """Every rank saves after the same step and exits; the resumed run is the one that was not stopped."""
    given, options = {"max_steps": 5, "save_strategy": "no", "learning_rate": 1e-3}, {"make_optimizer": bmt_adam}
    whole = world(size)(run, str(tmp_path / "whole"), given, options)[0]
    world(size)(terminated, str(tmp_path / "run"), given, options)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-3"]
    resumed = world(size)(run, str(tmp_path / "run"), given, options, True)[0]
    assert losses(resumed["history"], "grad_norm") == losses(whole["history"], "grad_norm")


def handled_in_c(folder, told):
    """faulthandler's handler, of which signal.getsignal knows nothing, or knows (`told`) that it is not from Python."""
    replace = signal.signal
    with open(f"{folder}/stacks", "w") as stacks:
        faulthandler.register(signal.SIGTERM, stacks, chain=False)
        try:
            with mock.patch.object(signal, "signal", lambda *given: (replace(*given), None)[told]):
                termination = Termination()
            termination.close()
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            faulthandler.unregister(signal.SIGTERM)
    assert "handled_in_c" in Path(f"{folder}/stacks").read_text()


@pytest.mark.parametrize("told", [False, True])
def test_a_handler_of_sigterm_that_python_did_not_set_is_back_after_training(world, tmp_path, told):
    world(1)(handled_in_c, str(tmp_path), told)


class SavesWhenItLikes(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2


class SavesWhenItLogs(transformers.TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 2


class SavesItself(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            calling_trainer()._save_checkpoint(model, trial=None)


class TellsNobodyOfEvaluations(bmt.hf.Trainer):
    def evaluate(self, *args, **kwargs):
        self.log({"eval_score": 1.0})
        return {"eval_score": 1.0}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def saved_unexpectedly(folder, cls, given, late):
    """What BMTrainCallback cannot see in its own events; the callback `late` runs after it."""
    options = {"cls": cls, "make_optimizer": bmt_adam, "eval_dataset": jobs.Rows()}
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), **options)
    if late is not None:
        trainer.add_callback(late())
    trainer.train()


@pytest.mark.parametrize(
    ("cls", "given", "late"),
    [
        (bmt.hf.Trainer, {}, SavesWhenItLikes),
        *rows_in_full(
            [
                (bmt.hf.Trainer, {}, SavesWhenItLogs),
                (bmt.hf.Trainer, {}, SavesItself),
                (TellsNobodyOfEvaluations, EVALUATED, None),
            ]
        ),
    ],
)
def test_a_save_that_no_event_announces(world, tmp_path, capsys, cls, given, late):
    """Rank 0 saved alone, and the ranks issued different operations."""
    world(2)(saved_unexpectedly, str(tmp_path), cls, given, late)
    assert "intact" in verified(tmp_path / "checkpoint-2", capsys)


class SavesOnOneRank(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = bmt.rank() == 1 and state.global_step == 3


@full
def test_a_late_request_on_one_rank_is_named(world, tmp_path):
    with pytest.raises(AssertionError, match="rank 1: decision for should_.* and should_save .* before a save"):
        world(2)(saved_unexpectedly, str(tmp_path), bmt.hf.Trainer, {}, SavesOnOneRank)


def two_trainers(folder, adapted):
    """Both are made before either trains."""
    model = build("llama")
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model = bmt.auto_wrap(model)
    trainers = [
        transformers.Trainer(
            model=model, args=jobs.arguments(f"{folder}/{name}", save_strategy="steps", save_steps=3),
            train_dataset=jobs.Rows(), optimizers=(jobs.sgd(model), None), callbacks=[bmt.hf.BMTrainCallback()],
        )
        for name in ("first", "second")
    ]  # fmt: skip
    for trainer in trainers:
        trainer.train()
    trainers[0].save_model(f"{folder}/saved")
    bmt.synchronize()


@pytest.mark.parametrize("adapted", [False, *in_full(True)])
def test_two_trainers_of_one_model(world, tmp_path, capsys, adapted):
    """The second took the model's save_pretrained, and the first could not save."""
    if adapted:
        pytest.importorskip("peft")
    world(2)(two_trainers, str(tmp_path), adapted)
    for name in ("first", "second"):
        assert "intact" in verified(tmp_path / name / "checkpoint-3", capsys)
    assert any((tmp_path / "saved").glob("*.safetensors"))


def saved_on_demand(folder):
    """A user's callback asks for a save; afterwards weights change, and saving is what it was: collective."""
    trainer = jobs.make_trainer(folder, True, {}, size=bmt.world_size(), callbacks=[SavesWhenItLikes()])
    trainer.train()
    state = trainer.model.state_dict()  # all ranks: whole tensors everywhere
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(0.5)
    trainer.model.save_pretrained(f"{folder}/halved")  # all ranks
    trainer.model.extra = torch.nn.Linear(2, 2)
    trainer.model.save_pretrained(f"{folder}/extended")  # all ranks; with what was added after the training
    bmt.synchronize()
    return state


@full
@pytest.mark.parametrize("size", SIZES)
def test_a_save_on_demand(world, tmp_path, size):
    states = world(size)(saved_on_demand, str(tmp_path))
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()
    for state in states:
        check_opens(tmp_path / "halved", {name: value / 2 for name, value in state.items()})
    assert "extra.weight" in safetensors.torch.load_file(tmp_path / "extended" / "model.safetensors")


def without_norm(module, state, prefix, metadata):
    del state["base_model.model.model.norm.weight"]


def saved_modules(folder, leaves_out):
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = bmt.auto_wrap(peft.get_peft_model(build("llama"), config))
    if leaves_out:
        model.register_state_dict_post_hook(without_norm)
    rows = jobs.Rows()
    trainer = transformers.Trainer(
        model=model, train_dataset=rows, eval_dataset=rows, optimizers=(jobs.sgd(model), None),
        callbacks=[bmt.hf.BMTrainCallback()],
        args=jobs.arguments(
            folder, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end=True,
        ),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    return peft.get_peft_model_state_dict(model), trainer.state.best_model_checkpoint


@full
@pytest.mark.parametrize("leaves_out", [True, *in_full(False)])
@pytest.mark.parametrize("size", SIZES)
def test_modules_to_save_of_adapters(world, tmp_path, size, leaves_out):
    """Rank 0 saves alone, and PEFT asks the modules themselves for the names of their weights."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    for expected, best in world(size)(saved_modules, str(tmp_path), leaves_out):
        saved = load_file(Path(best) / "adapter_model.safetensors")
        assert saved.keys() == expected.keys() and any("lm_head" in name for name in saved)
        for name, value in saved.items():
            assert torch.equal(value, expected[name]), name


def beside_adapters(folder, kind, resume):
    """The trained parameters after training or, with `resume`, at its beginning."""
    import peft

    configs = {
        "thawed": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "prompts": lambda: peft.PromptEncoderConfig(num_virtual_tokens=2, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    }
    torch.manual_seed(0 if resume is None else 1)
    model = peft.get_peft_model(build("llama"), configs[kind]())
    if kind == "thawed":
        model.base_model.model.lm_head.weight.requires_grad_(True)
    model = bmt.auto_wrap(model)
    beginning = TrainedAtTheBeginning()
    trainer = transformers.Trainer(
        model=model, train_dataset=jobs.Rows(), optimizers=(jobs.sgd(model), None),
        callbacks=[bmt.hf.BMTrainCallback(), beginning],
        args=jobs.arguments(folder, save_strategy="steps", save_steps=3),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trained_parameters(model) if resume is None else beginning.parameters


class TrainedAtTheBeginning(transformers.TrainerCallback):
    """Takes the trained parameters when everything is loaded."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.parameters = trained_parameters(model)


def trained_parameters(model):
    return {name: p.gather().detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["prompts", *in_full("thawed")])
@pytest.mark.parametrize("size", SIZES)
def test_weights_that_peft_does_not_save(world, tmp_path, size, kind):
    """Weights of the base that are trained beside adapters, and the network behind prompts, are resumed, too."""
    pytest.importorskip("peft")
    saved = world(size)(beside_adapters, str(tmp_path), kind, None)
    resumed = world(size)(beside_adapters, str(tmp_path), kind, str(tmp_path / "checkpoint-3"))
    for here, there in zip(resumed, saved):
        check_equal(here, there)


def best_beside_adapters(folder):
    """The losses of three evaluations, of which the highest counts as the best, and of the loaded best model."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama"), config)
    model.base_model.model.lm_head.weight.requires_grad_(True)
    model = bmt.auto_wrap(model)
    rows = jobs.Rows()
    trainer = transformers.Trainer(
        model=model, train_dataset=rows, eval_dataset=rows, optimizers=(jobs.sgd(model), None),
        callbacks=[bmt.hf.BMTrainCallback()],
        args=jobs.arguments(
            folder, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
        ),
    )  # fmt: skip
    trainer.train()
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return evaluated, trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("size", SIZES)
def test_the_best_weights_beside_adapters(world, tmp_path, size):
    """Trainer loads the best adapters, and would leave the unfrozen weights of the base as they were at the end."""
    pytest.importorskip("peft")
    for evaluated, loaded in world(size)(best_beside_adapters, str(tmp_path)):
        assert loaded == max(evaluated) and evaluated[-1] < loaded


def adapters_replaced(folder):
    """The adapters at the beginning of a resumed training, after the user has doubled those in the checkpoint."""
    from safetensors.torch import load_file, save_file

    beside_adapters(folder, "thawed", None)
    checkpoint = Path(folder, "checkpoint-3")
    if bmt.rank() == 0:
        file = checkpoint / "adapter_model.safetensors"
        save_file({name: 2 * value for name, value in load_file(file).items()}, file, {"format": "pt"})
        (checkpoint / "complete.json").unlink()
    bmt.synchronize()
    with log_lines() as said:
        beginning = beside_adapters(folder, "thawed", str(checkpoint))
    return beginning, load_file(checkpoint / "adapter_model.safetensors"), said


@full
@pytest.mark.parametrize("size", SIZES)
def test_replaced_adapters_stay(world, tmp_path, size):
    pytest.importorskip("peft")
    results = world(size)(adapters_replaced, str(tmp_path))
    for beginning, replaced, _ in results:
        for name, value in beginning.items():
            if "lora_" in name:
                assert torch.equal(value, replaced[name.replace(".default", "")]), name
    assert any("has no complete.json" in line for line in results[0][2])


def sixteen_bits(folder, resume):
    """Adapters in bfloat16; the losses of the steps, and their dtype in the end."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build("llama").bfloat16(), config, autocast_adapter_dtype=False)
    trainer = transformers.Trainer(
        model=bmt.auto_wrap(model), train_dataset=jobs.Rows(), eval_dataset=jobs.Rows(),
        optimizers=(jobs.sgd(model), None), callbacks=[bmt.hf.BMTrainCallback()],
        args=jobs.arguments(
            folder, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
            load_best_model_at_end=True,
        ),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return losses(trainer.state.log_history), {p.dtype for p in model.parameters()}


@full
@pytest.mark.parametrize("size", SIZES)
def test_adapters_in_16_bits(world, tmp_path, size):
    """They are resumed, and the best are loaded in the end, in the dtype in which they were sharded."""
    pytest.importorskip("peft")
    first = world(size)(sixteen_bits, str(tmp_path), None)
    resumed = world(size)(sixteen_bits, str(tmp_path), str(tmp_path / "checkpoint-2"))
    assert resumed == first and first[0][1] == {torch.bfloat16}


class Plain(torch.nn.Module):
    """A model that is no PreTrainedModel."""

    def __init__(self):
        super().__init__()
        self.inner = build("llama")

    def forward(self, input_ids, labels):
        return {"loss": self.inner(input_ids=input_ids, labels=labels).loss}


def plain_module(folder):
    model = bmt.auto_wrap(Plain())
    trainer = transformers.Trainer(
        model=model, args=jobs.arguments(folder, save_strategy="steps", save_steps=3), train_dataset=jobs.Rows(),
        optimizers=(jobs.sgd(model), None), callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.train()
    return type(model).state_dict(model)


@full
@pytest.mark.parametrize("size", SIZES)
def test_a_model_without_save_pretrained(world, tmp_path, size):
    from safetensors.torch import load_file

    expected = world(size)(plain_module, str(tmp_path))[0]
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


class Normalized(torch.nn.Module):
    """Not a PreTrainedModel; its running statistics differ between the ranks, each of which sees its own rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = torch.nn.Embedding(VOCABULARY, 8), torch.nn.BatchNorm1d(8)
        self.linear = torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels):
        hidden = self.norm(self.embedding(input_ids).flatten(0, 1))
        return {"loss": torch.nn.functional.cross_entropy(self.linear(hidden), labels.flatten())}


class AtTheBeginning(transformers.TrainerCallback):
    """Takes the model's buffers when everything is loaded."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.buffers = copies_of_buffers(model)


def copies_of_buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def segformer():
    """A PreTrainedModel with batch norm, and rows for it."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[1, 1], hidden_sizes=[16, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 1], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(bmt.rank())
    rows = [{"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": torch.ones(16, 16).long()}] * 8
    return transformers.SegformerForSemanticSegmentation(config), rows


def saved_with_new_buffers(folder, named):
    """The buffers when the model was saved, after they had changed since the end of training."""
    model, rows = segformer() if named else (Normalized(), jobs.Rows())
    model = bmt.auto_wrap(model)
    trainer = transformers.Trainer(
        model=model, args=jobs.arguments(folder, per_device_train_batch_size=4), train_dataset=rows,
        optimizers=(jobs.sgd(model), None), callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    trainer.train()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean.fill_(3.0 + bmt.rank())
            module.running_var = torch.full_like(module.running_var, 4.0)
    trainer.save_model(f"{folder}/saved")  # rank 0 enters it alone
    bmt.synchronize()
    return copies_of_buffers(model)


@pytest.mark.parametrize("named", [True, *in_full(False)])
def test_buffers_that_changed_since_the_end_of_training(world, tmp_path, named):
    """`update_bn` of torch.optim.swa_utils changes them."""
    from safetensors.torch import load_file

    expected = world(2)(saved_with_new_buffers, str(tmp_path), named)[0]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert expected and all(torch.equal(saved[name], value) for name, value in expected.items())


def normalized(folder, adapted, resume):
    """The buffers after training or, with `resume`, at its beginning."""
    beginning, model = AtTheBeginning(), Normalized()
    if adapted:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["linear"]))
    model = bmt.auto_wrap(model)
    if resume is not None:
        next(buffer for buffer in model.buffers() if buffer.dtype.is_floating_point).fill_(9.0)
    trainer = transformers.Trainer(
        model=model, args=jobs.arguments(folder, save_strategy="steps", save_steps=3), train_dataset=jobs.Rows(),
        optimizers=(jobs.sgd(model), None), callbacks=[bmt.hf.BMTrainCallback(), beginning],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return copies_of_buffers(model) if resume is None else beginning.buffers


@pytest.mark.parametrize("adapted", [True, *in_full(False)])
@pytest.mark.parametrize("sizes", [(2, 2), *in_full((2, 1))])
def test_buffers_of_models_whose_weights_trainer_loads(world, tmp_path, sizes, adapted):
    """Each rank has its own again; with other ranks those of rank 0. With adapters, rank 0's were not loaded."""
    if adapted:
        pytest.importorskip("peft")
    before, after = sizes
    saved = world(before)(normalized, str(tmp_path), adapted, None)
    name = next(name for name in saved[0] if name.endswith("running_mean"))
    assert not torch.equal(saved[0][name], saved[1][name])
    resumed = world(after)(normalized, str(tmp_path), adapted, str(tmp_path / "checkpoint-3"))
    for here, there in zip(resumed, saved):
        check_equal(here, there)
