"""What fails while a checkpoint is saved or loaded is an error on every rank, and nothing is lost."""

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.checkpoint import folder as folders
from hf_bmtrain.checkpoint import load_state, ranges
from hf_bmtrain.checkpoint.header import Damaged
from hf_bmtrain.checkpoint.manifest import Checked, Manifest
from hf_bmtrain.checkpoint.save_state import _Posts
from hf_bmtrain.faults.status import Status
from hf_bmtrain.faults.watch import Watch
from log_lines import log_lines
from processes import environment
from resumable import Training


@contextlib.contextmanager
def failing(function: str, code: int, ranks: tuple[int, ...] | None = None, after: int = 0, path: str = ""):
    """Let a function of os raise OSError on some ranks, from its call number `after` with such a path on."""
    original, calls = getattr(os, function), 0

    def fail(where, *arguments, **options):
        nonlocal calls
        calls += path in str(where)
        if path in str(where) and calls > after and (ranks is None or bmt.rank() in ranks):
            raise OSError(code, os.strerror(code), where if isinstance(where, (str, Path)) else None)
        return original(where, *arguments, **options)

    with mock.patch.object(os, function, fail):
        yield


def names(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def saved_before(folder):
    training = Training(blocks=1)
    training.train(1)
    training.save(folder)
    training.train(7)
    return training


# -- saving -----------------------------------------------------------------------------------------------------------

FAULTS = [
    ("pwrite", errno.ENOSPC, (0,), 0), ("pwrite", errno.ENOSPC, (1,), 3), ("pwrite", errno.EIO, None, 5),
    ("ftruncate", errno.ENOSPC, None, 0), ("open", errno.EROFS, (0,), 0), ("open", errno.EACCES, (1,), 0),
    ("fsync", errno.EIO, (1,), 0), ("mkdir", errno.EACCES, None, 0), ("rename", errno.EACCES, None, 0),
]  # fmt: skip


def fails(folder, faults, non_blocking):
    training = saved_before(folder)
    for function, code, ranks, after in faults:
        with failing(function, code, ranks, after):
            with pytest.raises(RuntimeError, match=os.strerror(code)) as error:
                training.save(folder, keep=1, non_blocking=non_blocking).wait()
        assert f"nothing was saved to {folder}, and earlier checkpoints were not changed. rank" in str(error.value)
        bmt.synchronize()
        left = [name for name in names(folder) if function != "open" or not name.startswith("tmp-")]
        assert left == [".lock", "checkpoint-1"], (function, code)
        bmt.synchronize()
    training.save(folder, keep=1, non_blocking=non_blocking).wait()
    assert names(folder) == [".lock", "checkpoint-7"]
    values = training.whole()
    resumed = Training(blocks=1, seed=1)
    assert resumed.load(folder).step == 7
    return all(torch.equal(value, values[name]) for name, value in resumed.whole().items())


@pytest.mark.parametrize("non_blocking", [True, *in_full(False)])
def test_faults_of_the_disk(world, tmp_path, non_blocking):
    """Full, read-only, faulty; on one rank or all; each names its cause, and the next save succeeds."""
    assert world(2)(fails, str(tmp_path), FAULTS, non_blocking) == [True, True]


def other_folders(folder, non_blocking):
    """Each rank names a folder of its own, as where the name has the time in it."""
    training = saved_before(folder)
    own = f"{folder}/{bmt.rank()}"
    with pytest.raises(
        RuntimeError, match=rf"rank 1: {folder}/1 lacks .*, which rank 0 has created in {folder}/0\. All"
    ):
        training.save(own, keep=1, non_blocking=non_blocking)
    bmt.synchronize()
    assert not Path(folder, "1").exists() and names(f"{folder}/0") == [".lock"]
    bmt.synchronize()
    saving = training.save(folder, non_blocking=non_blocking)
    if non_blocking:  # the ranks would otherwise wait for it at different places
        with pytest.raises(RuntimeError, match=r"save_state: the ranks differ.*checkpoint-7.*folder: .*/1"):
            training.save(folder if bmt.rank() == 0 else own)
    saving.wait()
    return [names(folder), training.load(folder).step]


@full
@pytest.mark.parametrize("non_blocking", [True, False])
def test_another_folder_on_each_rank(world, tmp_path, non_blocking):
    """Every rank is told of it, and what was saved before or is being saved remains."""
    saved = [[".lock", "0", "checkpoint-1", "checkpoint-7"], 7]
    assert world(2)(other_folders, str(tmp_path), non_blocking) == [saved, saved]


OPTIONS = {
    "step": ((2, None), "2, rank 1 has None"),
    "keep": ((1, 2), "1, rank 1 has 2"),
    "name": ((None, "best"), "None, rank 1 has 'best'"),
    "trained_only": ((False, True), "False, rank 1 has True"),
    "non_blocking": ((True, False), "True, rank 1 has False"),
    "add": ((os.listdir, None), "a function, rank 1 has no function"),
}


def other_options(folder):
    training, rank = saved_before(folder), bmt.rank()
    for name, (values, told) in OPTIONS.items():
        with pytest.raises(RuntimeError, match=f"save_state: the ranks differ.*{name}: rank 0 has {told}; folder: "):
            bmt.save_state(folder, training.model, training.manager, **{name: values[rank]})
        assert names(folder) == [".lock", "checkpoint-1"], name
        bmt.synchronize()
    for name, manager, schedulers in (("optimizers", training.manager, ()), ("schedulers", None, training.scheduler)):
        with pytest.raises(RuntimeError, match=f"number of {name}: rank 0 has 1, rank 1 has 0; folder: "):
            bmt.save_state(folder, training.model, *((manager, schedulers) if rank == 0 else ()))
        with pytest.raises(RuntimeError, match=f"load_state: the ranks differ.*number of {name}: rank 0 has 1, rank 1"):
            bmt.load_state(folder, training.model, *((manager, schedulers) if rank == 0 else ()))
    for name in ("weights", "random"):
        with pytest.raises(
            RuntimeError, match=f"load_state: the ranks differ.*{name}: rank 0 has True, rank 1 has Fals"
        ):
            bmt.load_state(folder, training.model, training.manager, **{name: rank == 0})
    numbers = {"step": 7, "keep": 1} if rank == 0 else {"step": numpy.int64(7), "keep": numpy.int64(1)}
    bmt.save_state(
        folder, training.model, training.manager, extra={"rank": rank}, trained_only=(0, None)[rank], **numbers
    )
    return names(folder), training.load(folder).extra["rank"]


def test_options_that_differ_between_ranks(world, tmp_path):
    """Rank 0's would be used without a word, or the ranks would wait for each other; `extra` may differ."""
    saved = [".lock", "checkpoint-7"]
    assert world(2)(other_options, str(tmp_path)) == [(saved, 0), (saved, 1)]


def too_little_space(folder):
    training = saved_before(folder)
    with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=10_000)):
        with pytest.raises(RuntimeError, match=r"rank 0: .*No space left on device: the checkpoint takes 0\.\d+ GB"):
            training.save(folder, keep=1)
    bmt.synchronize()
    return names(folder)


@full
def test_too_little_space(world, tmp_path):
    assert world(2)(too_little_space, str(tmp_path)) == [[".lock", "checkpoint-1"]] * 2


def raised_later(folder):
    training = saved_before(folder)
    for calls in ("save", "load", "wait"):
        with failing("pwrite", errno.ENOSPC, (1,), 3):
            saving = training.save(folder, non_blocking=True)
            for thread in threading.enumerate():
                if thread.name.startswith("save "):
                    thread.join()
        with pytest.raises(RuntimeError, match="nothing was saved to .*rank 1: OSError.*No space left"):
            saving.wait() if calls == "wait" else getattr(training, calls)(folder)
    bmt.synchronize()
    return names(folder)


def test_errors_of_a_background_save_are_raised_on_all_ranks(world, tmp_path):
    assert world(2)(raised_later, str(tmp_path)) == [[".lock", "checkpoint-1"]] * 2


def removed(folder):
    training = saved_before(folder)
    original = os.pwrite

    def remove(*arguments):
        if bmt.rank() == 1:
            shutil.rmtree(folder, ignore_errors=True)
        return original(*arguments)

    with (
        mock.patch.object(os, "pwrite", remove),
        pytest.raises(RuntimeError, match="nothing was saved to .*No such file"),
    ):
        training.save(folder)
    training.save(folder)  # makes it anew
    return names(folder)


@full
def test_a_folder_that_is_removed_during_the_save(world, tmp_path):
    assert world(2)(removed, str(tmp_path / "it")) == [[".lock", "checkpoint-7"]] * 2


def on_the_folder(function, code, folder):
    """Let a function of os fail on rank 0 for the folder itself, once it has the new checkpoint."""
    original = getattr(os, function)

    def fail(where, *arguments, **options):
        name = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        if name == folder and Path(folder, "checkpoint-7").exists() and bmt.rank() == 0:
            raise OSError(code, os.strerror(code), folder)
        return original(where, *arguments, **options)

    return mock.patch.object(os, function, fail)


UNDELETED = {
    "the name": (
        lambda folder: failing("rename", errno.EACCES, path=f"{folder}/checkpoint-1"),
        "but the older checkpoint {folder}/checkpoint-1 could not be deleted and still takes space. The next save",
    ),
    "its files": (
        lambda folder: failing("rmdir", errno.EACCES),
        "but the older checkpoint {folder}/checkpoint-1 could not be deleted completely. The rest of it, in tmp",
    ),
    "a link": (
        lambda folder: failing("unlink", errno.EACCES, path=".replaced-1"),
        "but the older checkpoint {folder}/checkpoint-3.replaced-1, a symbolic link, could not be deleted. The next",
    ),
    "the list": (
        lambda folder: on_the_folder("listdir", errno.ESTALE, folder),
        "but finding and deleting outdated checkpoints beside it failed, so they may still take space. The next save "
        "tries again. The error was: OSError",
    ),
    "a flush": (
        lambda folder: on_the_folder("fsync", errno.EIO, folder),
        "but its folder could not be flushed to disk, so it may be lost if the machine fails soon. Check the disk.",
    ),
}
"""What fails after the new checkpoint has its name, and what the warning says after "is complete"."""


def cannot_delete(folder, what, non_blocking):
    training = saved_before(folder)
    fault, told = UNDELETED[what]
    if what == "a link" and bmt.rank() == 0:
        Path(folder, "checkpoint-3.replaced-1").symlink_to("checkpoint-1")
    bmt.synchronize()
    with log_lines() as lines, fault(folder):
        training.save(folder, keep=1, non_blocking=non_blocking).wait()
    expected = f"{folder}/checkpoint-7 is complete, {told.format(folder=folder)}"
    assert [expected in line for line in lines] == [True] * (bmt.rank() == 0), lines
    bmt.synchronize()
    assert Path(folder, "checkpoint-1").exists() == (what not in ("its files", "a link"))
    assert training.load(folder).step == 7
    training.train(8)
    training.save(folder, keep=1)
    return names(folder)


@pytest.mark.parametrize("non_blocking", [True, *in_full(False)])
@pytest.mark.parametrize("what", by_default(UNDELETED, "the name", "a link", "a flush"))
def test_old_checkpoints_that_cannot_be_deleted(world, tmp_path, what, non_blocking):
    """The new one is saved all the same, on every rank; a warning names both, and the next save deletes the old."""
    assert world(2)(cannot_delete, str(tmp_path), what, non_blocking) == [[".lock", "checkpoint-8"]] * 2


def cannot_replace(folder):
    training = saved_before(folder)
    training.step = 1
    with failing("rename", errno.EACCES, path="/tmp-checkpoint-1"):
        with pytest.raises(RuntimeError, match="nothing was saved .*earlier checkpoints were not changed.* Permission"):
            training.save(folder)
    bmt.synchronize()
    return names(folder)


def test_a_checkpoint_that_cannot_be_replaced_keeps_its_name(world, tmp_path):
    assert world(2)(cannot_replace, str(tmp_path)) == [[".lock", "checkpoint-1"]] * 2


def not_told(folder, point):
    """Rank 1 loses the store while it waits to learn what became of the checkpoint."""
    training = saved_before(folder)
    control = bmt.current_world().control
    look = control.look

    def lost(key):
        if bmt.rank() == 1 and point in key:
            raise RuntimeError("the store is gone")
        return look(key)

    with log_lines() as lines, mock.patch.object(control, "look", lost):
        training.save(folder, non_blocking=True).wait()
    told = (
        f"{folder}/checkpoint-7 may not have been saved: this rank did not learn from rank 0 whether it was. "
        "The error was: RuntimeError"
    )
    assert [told in line for line in lines] == [True] * bmt.rank(), lines
    return training.load(folder).step


@pytest.mark.parametrize("point", ["publication", *in_full("parts all")])
def test_a_rank_that_does_not_learn_that_it_is_saved(world, tmp_path, point):
    """Its log does not claim that it was not, and `wait` raises nothing."""
    assert world(2)(not_told, str(tmp_path), point) == [7, 7]


def beside_closed_folder(folder):
    """Like `lost+found` on a disk of its own, for a user who is not root."""
    training = Training(blocks=1)
    for name in ("lost+found", "checkpoint-3") if bmt.rank() == 0 else ():
        Path(folder, name).mkdir()
    bmt.synchronize()
    with log_lines() as lines, failing("stat", errno.EACCES, path="lost+found/"), closed(f"{folder}/checkpoint-3/"):
        training.save(folder, keep=1)
        step = training.load(folder).step
    told = "checkpoint-3: manifest.json cannot be read: PermissionError"
    assert [told in line for line in lines] == [True] * (bmt.rank() == 0), lines
    return step


@contextlib.contextmanager
def closed(path):
    read = Path.read_bytes

    def refuse(self):
        if str(self).startswith(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return read(self)

    with mock.patch.object(Path, "read_bytes", refuse):
        yield


def test_folders_that_may_not_be_read(world, tmp_path):
    assert world(2)(beside_closed_folder, str(tmp_path)) == [0, 0]


@full
def test_a_file_that_cannot_be_looked_at_is_not_called_missing(tmp_path):
    manifest = Manifest(1, 1, 1, {}, {"a": [Checked(0, 1, 0)]})
    with pytest.raises(Damaged, match="a is missing"):
        manifest.check_sizes(tmp_path)
    with failing("stat", errno.EACCES), pytest.raises(Damaged, match="a cannot be read: Permission denied"):
        manifest.check_sizes(tmp_path)


def changed_meanwhile(folder):
    training = saved_before(folder)
    values = {name: value.clone() for name, value in training.whole().items()}
    original, go = os.pwrite, threading.Event()

    def wait(*arguments):
        assert threading.current_thread() is threading.main_thread() or go.wait(60)
        return original(*arguments)

    with mock.patch.object(os, "pwrite", wait):
        saving = training.save(folder, non_blocking=True)
        training.train(9)
        go.set()
        saving.wait()
    resumed = Training(blocks=1, seed=1)
    assert resumed.load(folder) == (7, Path(folder) / "checkpoint-7", {"rank": bmt.rank(), "position": 7})
    loaded = resumed.whole()
    return all(torch.equal(value, values[name]) for name, value in loaded.items()) and resumed.train(9) != []


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_values_of_a_background_save_are_those_of_the_call(world, tmp_path, size):
    assert all(world(size)(changed_meanwhile, str(tmp_path)))


LAST_LINE = """
import sys, torch, hf_bmtrain as bmt
bmt.init_distributed()
model = torch.nn.Linear(300, 3000)
bmt.save_state(sys.argv[1], model, step=1, non_blocking=True)
"""


@full
def test_a_background_save_at_the_end_of_the_script(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LAST_LINE, str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert names(tmp_path) == [".lock", "checkpoint-1"], done.stderr


@full
def test_nothing_is_written_after_a_failure(tmp_path):
    """A thread that writes later would find the handle closed, or another file under its number."""
    (tmp_path / "a").write_bytes(bytes(1000))
    original, late = os.pwrite, []

    def pwrite(handle, data, start):
        if start == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(0.05)
        try:
            return original(handle, data, start)
        except OSError as error:
            late.append(error)
            raise

    parts = [ranges.Part("a", at, torch.ones(10, dtype=torch.uint8)) for at in range(0, 1000, 10)]
    with mock.patch.object(os, "pwrite", pwrite), pytest.raises(OSError, match="No space left"):
        ranges.write_parts(tmp_path, parts)
    assert not late


def test_a_background_save_does_not_wait_for_a_rank_that_was_killed():
    """The thread kept the process of the other rank, whose program had failed, for half an hour."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    watch = Watch()
    watch._board = mock.Mock(neighbours=[1], **{"read.return_value": Status(pid=child, place="a.py:3").to_text()})
    world = mock.Mock(size=2, rank=0, monitor=watch, **{"control.look": lambda key: "" if key.endswith(" 0") else None})
    place = "hf_bmtrain.checkpoint.save_state"
    with mock.patch(f"{place}._SECONDS", 6), mock.patch(f"{place}._GONE_SECONDS", 0.1):
        problem = _Posts(world, mock.Mock(staged="tmp")).collect("parts", None)
    assert problem.startswith("rank 1: rank 1 was last seen at a.py:3; its process has ended without an exception")


def test_files_that_are_added_are_flushed_before_older_checkpoints_are_deleted(tmp_path):
    """After a failure of the machine, the new checkpoint was damaged, and the older ones were gone."""
    (tmp_path / "manifest.json").write_bytes(Manifest(1, 1, 1, {}).to_bytes())
    (tmp_path / "adapter").mkdir()
    for name in ("trainer_state.json", "adapter/weights"):
        (tmp_path / name).write_text("values")
    flushed, fsync = set(), os.fsync

    def note(handle):
        flushed.add(os.readlink(f"/proc/self/fd/{handle}").removeprefix(f"{tmp_path}/"))
        fsync(handle)

    with mock.patch.object(os, "fsync", note):
        folders.add_checksums(tmp_path)
    folders.add_checksums(tmp_path)  # again, as when Trainer adds more; its own file is none of the added
    assert {"trainer_state.json", "adapter/weights", "adapter"} <= flushed
    assert folders.find_damage_of_added(tmp_path) is None


# -- errors of one rank ----------------------------------------------------------------------------------------------


class Scheduler:
    """A user's own, which fails on one rank only."""

    def __init__(self, saves=True, loads=True):
        self.saves, self.loads, self.last_epoch = saves or bmt.rank() == 0, loads or bmt.rank() == 0, 0

    def state_dict(self):
        if not self.saves:
            raise ValueError("no state")
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state):
        if not self.loads:
            raise ValueError("not this state")
        self.last_epoch = state["last_epoch"]


def unsaved_on_one_rank(folder):
    training, rank = saved_before(folder), bmt.rank()
    manager = training.manager
    for arguments in ((manager, Scheduler(saves=False)), (manager, None, threading.Lock() if rank else 1)):
        with pytest.raises(RuntimeError, match="save_state.*rank 1: .*(no state|cannot pickle)"):
            bmt.save_state(folder, training.model, *arguments)
    with mock.patch.object(manager, "schedulers", [Scheduler(saves=False)]):
        with pytest.raises(RuntimeError, match="nothing was saved to .*rank 1: ValueError: no state"):
            training.save(folder)
    with pytest.raises(RuntimeError, match="because an object cannot be pickled. rank 1: TypeError"):
        bmt.store.allgather_objects(threading.Lock() if rank else 1)
    with pytest.raises(RuntimeError, match="because an object cannot be pickled. rank 0: TypeError"):
        bmt.store.broadcast_object(1 if rank else threading.Lock())
    assert bmt.store.broadcast_object(threading.Lock() if rank else 1) == 1
    assert names(folder) == [".lock", "checkpoint-1"]
    bmt.synchronize()
    training.save(folder, keep=1)
    return names(folder)


def test_state_that_one_rank_cannot_save(world, tmp_path):
    """The other ranks waited for a rank that had caught its error, until the timeout."""
    assert world(2)(unsaved_on_one_rank, str(tmp_path)) == [[".lock", "checkpoint-7"]] * 2


def rejected_by_one_rank(folder):
    training = Training(blocks=1)
    bmt.save_state(folder, training.model, training.manager, Scheduler(), step=1)
    for manager, scheduler in ((None, Scheduler(loads=False)), (training.manager, Scheduler(loads=False))):
        with pytest.raises(RuntimeError, match="was loaded only in part.* rank 1: ValueError: not this state"):
            bmt.load_state(folder, training.model, manager, scheduler)
    with mock.patch.object(training.optimizer, "_load", mock.Mock(side_effect=[ValueError("no")] * bmt.rank() or None)):
        with pytest.raises(RuntimeError, match="rank 1: ValueError: no"):
            bmt.load_state(folder, training.model, training.manager, Scheduler())
    return bmt.load_state(folder, training.model, training.manager, Scheduler()).step


def test_state_that_one_rank_rejects(world, tmp_path):
    """The others trained on."""
    assert world(2)(rejected_by_one_rank, str(tmp_path)) == [1, 1]


# -- two jobs -------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time, torch, hf_bmtrain as bmt
bmt.init_distributed()
bmt.save_state(sys.argv[1], torch.nn.Linear(3, 3), step=1)
print("saved", flush=True)
time.sleep(200)
"""


@contextlib.contextmanager
def holder(folder):
    """Another job that has saved to the folder, and lives."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "saved\n"
        try:
            yield process.pid
        finally:
            process.kill()


def second(folder, process):
    training = Training(blocks=1)
    with pytest.raises(
        RuntimeError, match=f"nothing was saved to .*rank 0: .*process {process} on .* is also saving to"
    ):
        bmt.save_state(folder, training.model, step=5)


@full
def test_a_second_job(world, tmp_path):
    """Its error names the first, whose files stay."""
    with holder(tmp_path) as process:
        (tmp_path / "tmp-checkpoint-5").mkdir()
        (tmp_path / "tmp-checkpoint-0").mkdir()
        world(2)(second, str(tmp_path), process)
        assert names(tmp_path) == [".lock", "checkpoint-1", "tmp-checkpoint-0", "tmp-checkpoint-5"]


@full
def test_workers_that_outlive_a_job_do_not_hold_its_lock(tmp_path):
    """A DataLoader's forked workers notice only after seconds that their job was killed."""
    locked = folders.lock(tmp_path)
    reading, writing = os.pipe()
    worker = os.fork()
    if not worker:
        os.read(reading, 1)
        os._exit(0)
    locked.close()
    code = "import sys, pathlib; from hf_bmtrain.checkpoint.folder import lock; lock(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    os.write(writing, b"x")
    os.waitpid(worker, 0)
    assert done.returncode == 0, done.stderr


@full
def test_only_what_save_state_has_left_is_removed(tmp_path):
    for name in ("tmp-data", "tmp-checkpoint-3", "tmp-removed-checkpoint-2"):
        (tmp_path / name).mkdir()
    staging = folders.stage(tmp_path, 4, 1000)
    assert names(tmp_path) == sorted(["tmp-data", staging.name])


def stage_names(folder):
    found = []
    original = os.mkdir

    def mkdir(path, *arguments, **options):
        found.append(Path(path).name)
        return original(path, *arguments, **options)

    training = Training(blocks=1)
    with mock.patch.object(os, "mkdir", mkdir):
        training.save(folder)
        training.save(folder)
    return sorted({name for name in found if name.startswith("tmp-")})


def test_a_rank_that_outlives_its_job_writes_to_another_folder(world, tmp_path):
    """The same step is written to a folder of another name: what a rank of a killed job opens is not there."""
    made = world(1)(stage_names, str(tmp_path))[0]
    assert len(made) == 2


TAKES_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("another job", file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


def other_job(folder):
    """Another process that tries to lock the folder, and keeps the lock until its input is closed."""
    command = [sys.executable, "-c", TAKES_LOCK, str(folder / ".lock")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_lock_that_was_lost_is_taken_again(tmp_path):
    """Copying the folder in the process ends its lock: the next save takes it again, or says who has it."""
    (tmp_path / "run").mkdir()
    held = folders.lock(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert folders.lock(tmp_path / "run", held) is held
    with other_job(tmp_path / "run") as refused:
        assert refused.communicate()[0] == ""
    shutil.copytree(tmp_path / "run", tmp_path / "copy 2")
    with other_job(tmp_path / "run") as other:
        assert other.stdout.readline() == "locked\n"
        for _ in range(2):
            with pytest.raises(RuntimeError, match="another job is also saving to"):
                folders.lock(tmp_path / "run", held)
        other.stdin.close()
    assert folders.lock(tmp_path / "run", held) is held
    assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()


PLACES = {"listed": (os, "listdir"), "opened": (load_state, "check_heads"), "read": (load_state, "read_parts")}


def replaced_meanwhile(folder, place, name, times):
    """Another job, played by rank 0, saves over or beside the newest checkpoint whenever `place` is called."""
    folder, training = Path(folder), Training(blocks=1)
    training.train(1)
    training.save(folder, name=name)
    training.train(3)
    training.save(folder, name="next")
    values = training.whole()
    if bmt.rank() == 0:
        (folder / "next").rename(folder.with_name("next"))
    bmt.synchronize()
    original, calls, after = getattr(*PLACES[place]), 0, place == "listed"

    def replace(*arguments, **options):
        nonlocal calls
        if after and str(arguments[0]) != str(folder):  # a call of other code
            return original(*arguments, **options)
        calls += 1
        result = original(*arguments, **options) if after else None
        bmt.synchronize()
        if calls <= times and bmt.rank() == 0:
            new = folder.with_name(f"new-{calls}")
            shutil.copytree(folder.with_name("next"), new)
            (new / "manifest.json").write_bytes(dataclasses.replace(Manifest.read(new), number=2 + calls).to_bytes())
            (newest,) = (Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith("."))
            newest.rename(folder / "tmp-removed")
            new.rename(newest if name == "best" else folder / f"checkpoint-{calls}")
            shutil.rmtree(folder / "tmp-removed")
        bmt.synchronize()
        return result if after else original(*arguments, **options)

    other = Training(blocks=1, seed=1)
    with log_lines() as lines, mock.patch.object(*PLACES[place], replace):
        if times > folders.LISTINGS:
            with pytest.raises(RuntimeError, match=f"no checkpoint .*is intact.* listed {folders.LISTINGS} times"):
                other.load(folder)
            return
        assert other.load(folder).step == 3
    assert not [line for line in lines if "skipped" in line], lines
    assert calls
    for name, value in other.whole().items():
        assert torch.equal(value, values[name]), name


@pytest.mark.parametrize("name", ["checkpoint-0", *in_full("best")])
@pytest.mark.parametrize("place", by_default(PLACES, "listed", "read"))
def test_checkpoints_that_another_job_deletes_while_they_are_loaded(world, tmp_path, place, name):
    """The newer one is loaded: it is neither "damaged" nor missing, and training does not begin anew."""
    size = 1 if place == "listed" else 2  # only rank 0 lists the folder
    world(size)(replaced_meanwhile, str(tmp_path / "run"), place, name, 2)


@full
def test_checkpoints_that_another_job_deletes_all_the_time(world, tmp_path):
    world(2)(replaced_meanwhile, str(tmp_path / "run"), "opened", "checkpoint-0", 100)
