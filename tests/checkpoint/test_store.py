"""Whole checkpoints, in and out, and what a kill while saving leaves."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import hf_bmtrain as bmt
import state_memory
from cases import full, in_full
from hf_bmtrain.checkpoint import store
from hf_bmtrain.engine.base.files import atomic_file
from processes import environment
from ranks import Ranks, on_ranks
from state_dicts import check_equal, same_storage
from tiny_models import build
from twins import Tower, ids

ROOT = Path(__file__).resolve().parents[2]


class Counting(Tower):
    """Persistent and other buffers, in a block and outside."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.layers[1].register_buffer("mean", torch.full((2, 2), 7.0))
        self.layers[1].register_buffer("count", torch.tensor(4))


def shifted(model):
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1)
    return model


@pytest.mark.parametrize("suffix", [".safetensors", *in_full(".pt", ".bin")])
@on_ranks(2)
def test_round_trip(folder, suffix):
    """A sharded model's file opens in plain torch and the other way round, buffers included."""
    ours, plain = f"{folder}/ours{suffix}", f"{folder}/plain{suffix}"
    state = shifted(Counting()).state_dict()
    if bmt.rank() == 0:
        safetensors.torch.save_file(state, plain) if suffix == ".safetensors" else torch.save(state, plain)
    model = bmt.auto_wrap(Counting())
    result = bmt.load(model, plain)
    assert not result.missing_keys and not result.unexpected_keys
    check_equal(model.state_dict(), state)
    assert model.scratch.tolist() == [1, 1]
    assert bmt.save(model, ours) is None
    opened = (
        safetensors.torch.load_file(ours) if suffix == ".safetensors" else torch.load(ours, weights_only=True)
    )  # fmt: skip
    check_equal(OrderedDict(sorted(opened.items())), OrderedDict(sorted(state.items())))
    twin = Counting()
    twin.load_state_dict(opened)
    torch.testing.assert_close(model(ids(0, 0)), twin(ids(0, 0)))
    if bmt.rank() == 0:
        assert sorted(os.listdir(folder)) == [Path(ours).name, Path(plain).name]
    bmt.synchronize()


@pytest.mark.parametrize("suffix", [".safetensors", *in_full(".pt")])
@on_ranks(2)
def test_damage_is_found(folder, suffix):
    """A bit that flips anywhere in the file is found, or harmless. Other readers ignore the checksums."""
    path = Path(folder) / f"model{suffix}"
    model = bmt.auto_wrap(Counting())
    bmt.save(model, path)
    state = model.state_dict()
    opened = safetensors.torch.load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    Counting().load_state_dict(opened)
    data, draw, told = path.read_bytes(), random.Random(0), 0
    bmt.synchronize()
    places = [draw.randrange(len(data)) for _ in range(60)]
    places += [data.index(state["head.weight"].numpy().tobytes()) + 2, data.rindex(b"layers.1.mean") + 9]
    for at in places:
        if bmt.rank() == 0:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
        bmt.synchronize()
        try:
            bmt.load(model, path)
        except RuntimeError:
            told += 1
        check_equal(model.state_dict(), state)
        bmt.synchronize()
    assert told > 20


@full
@pytest.mark.parametrize("suffix", [".safetensors", *in_full(".pt")])
@on_ranks(2)
def test_ties(folder, suffix):
    path = f"{folder}/tied{suffix}"
    model, plain = bmt.auto_wrap(build("gpt2", tied=True)), build("gpt2", tied=True)
    bmt.save(model, path)
    if suffix == ".pt":
        state = torch.load(path, weights_only=True)
        assert same_storage(state) == same_storage(plain.state_dict()) != []
        check_equal(state, plain.state_dict())
    other = bmt.auto_wrap(build("gpt2", tied=True, seed=1))
    bmt.load(other, path)
    check_equal(other.state_dict(), plain.state_dict())
    assert same_storage(other.state_dict()) == same_storage(plain.state_dict())


class Mixed(nn.Module):
    """A plain root over sharded parts, as BMTrain's BERT example has it."""

    def __init__(self):
        super().__init__()
        self.tower = bmt.auto_wrap(Tower())
        self.dense = bmt.nn.Linear(2, 3)
        self.plain = nn.Parameter(torch.ones(2))
        self.again = self.plain


def plain_root(folder):
    path = f"{folder}/mixed.pt"
    model, other = Mixed(), Mixed()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    bmt.save(model, path)
    state = torch.load(path, weights_only=True)
    assert state["dense.weight"].shape == (3, 2)
    assert state["tower.head.weight"].shape == (2, 6)
    assert state["plain"].data_ptr() == state["again"].data_ptr()
    bmt.load(other, path)
    check_equal(other.state_dict(), model.state_dict())


def other_hosts_formats(folder):
    """BMTrain wrote files of torch's older format too."""
    path = f"{folder}/old.pt"
    if bmt.rank() == 0:
        torch.save(shifted(Tower()).state_dict(), path, _use_new_zipfile_serialization=False)
    model = bmt.auto_wrap(Tower())
    bmt.load(model, path)
    check_equal(model.state_dict(), shifted(Tower()).state_dict())


def behind_the_program(folder):
    """non_blocking: what is written is the weights of the call, whatever the optimizer does next."""
    path = f"{folder}/late.pt"
    model = bmt.auto_wrap(Counting())
    saving = bmt.save(model, path, non_blocking=True)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    saving.wait()
    bmt.synchronize()
    check_equal(torch.load(path, weights_only=True), Counting().state_dict())
    failing = bmt.save(model, f"{folder}/nowhere/late.pt", non_blocking=True)
    if bmt.rank() == 0:
        with pytest.raises(RuntimeError, match="nowhere"):
            failing.wait()
    else:
        failing.wait()


def folders_of_hugging_face(folder):
    """One file, or an index and several, of either format; the folder and the index stand for all."""
    plain = build("llama", tied=True)
    state = shifted(plain).state_dict()
    weights = {name: value for name, value in state.items() if name != "lm_head.weight"}  # as Hugging Face does
    kinds = {"model.safetensors": safetensors.torch.save_file, "pytorch_model.bin": torch.save}
    for name, write in kinds.items():
        whole, parts = Path(folder, f"whole {name}"), Path(folder, f"parts {name}")
        if bmt.rank() == 0:
            whole.mkdir()
            parts.mkdir()
            write(weights, whole / name)
            files = {key: f"{number % 3}-{name}" for number, key in enumerate(weights)}
            for file in set(files.values()):
                write({key: value for key, value in weights.items() if files[key] == file}, parts / file)
            (parts / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        bmt.synchronize()
        for path in (whole, whole / name, parts, parts / f"{name}.index.json"):
            model = bmt.auto_wrap(build("llama", tied=True))
            bmt.load(model, path)
            check_equal(model.state_dict(), state)
    bmt.synchronize()
    if bmt.rank() == 0:
        (parts / f"1-{name}").unlink()
    bmt.synchronize()
    for path, message in ((parts, f"1-{name}"), (Path(folder), r"contain one of model\.safetensors")):
        with pytest.raises(RuntimeError, match=message):
            bmt.load(model, path)
    bmt.synchronize()
    if bmt.rank() == 0:
        torch.save({}, parts / f"1-{name}")
        (whole / "model.safetensors.index.json").write_text("[]")
    bmt.synchronize()
    for path, message in ((parts, "lists [0-9]+ tensors that its files do not contain"), (whole, "has a weight_map")):
        with pytest.raises(RuntimeError, match=message):
            bmt.load(model, path)


def through_links(folder):
    """The target is written, as by torch.save: in the format of the link's name, and where the link led at the call."""
    folder, rank0, model = Path(folder), bmt.rank() == 0, bmt.auto_wrap(Counting())
    places, link, state = ("here", "there"), folder / "model.safetensors", Counting().state_dict()
    if rank0:
        for place in places:
            (folder / place).mkdir()
        (folder / "here" / "weights").write_text("old")
        link.symlink_to("here/weights")
    bmt.synchronize()
    for place, later, non_blocking in (("here", "there", False), ("there", "here", True)):  # no file is there yet
        saving = bmt.save(model, link, non_blocking)
        if rank0:
            link.unlink()
            link.symlink_to(f"{later}/weights")
        if saving is not None:
            saving.wait()
        bmt.synchronize()
        opened = safetensors.torch.load_file(folder / place / "weights")
        check_equal(OrderedDict(sorted(opened.items())), OrderedDict(sorted(state.items())))
        assert link.is_symlink() and {*os.listdir(folder)} == {*places, link.name}
        assert os.listdir(folder / place) == ["weights"]
        bmt.synchronize()
    if rank0:
        (folder / "folder.pt").symlink_to("here")
        os.mkfifo(folder / "pipe.pt")
        (folder / "lost.pt").symlink_to("nowhere/model.pt")
    bmt.synchronize()
    for name, message in {
        "folder.pt": "here is not a file, but a folder", "pipe.pt": "pipe.pt is not a file", "lost.pt": "nowhere",
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=f"an earlier file was not changed. rank 0: .*{message}"):
            bmt.save(model, folder / name)
    assert (folder / "folder.pt").is_symlink() and (folder / "lost.pt").is_symlink() and (folder / "pipe.pt").is_fifo()


def other_arguments(folder):
    """The ranks would otherwise mix up the data of the next operations."""
    path, model, first = f"{folder}/model.pt", bmt.auto_wrap(Tower()), bmt.rank() == 0
    with pytest.raises(
        RuntimeError, match="save: the ranks differ.*non_blocking: rank 0 has True, rank 1 has False; f"
    ):
        bmt.save(model, path, non_blocking=first)
    assert not os.listdir(folder)
    bmt.save(model, path)
    with pytest.raises(RuntimeError, match="load: the ranks differ.*strict: rank 0 has True, rank 1 has False; file_"):
        bmt.load(model, path, strict=first)
    assert not bmt.load(model, path, strict=1 if first else True).missing_keys


def wrong_files(folder):
    model, rank0 = bmt.auto_wrap(Tower()), bmt.rank() == 0
    state = Tower().state_dict()
    files = {
        "missing.pt": {k: v for k, v in state.items() if k != "head.bias"},
        "more.pt": {**state, "tail.bias": torch.ones(1)},
        "shape.pt": {**state, "layers.1.linear.weight": torch.ones(6, 7)},
        "nested.pt": {"model": state, "epoch": 3},
        "module.pt": nn.Linear(2, 2),
        "words.pt": None,
        "words.safetensors": None,
    }
    if rank0:
        for name, content in files.items():
            if content is None:
                Path(folder, name).write_text("no tensors here, only words " * 20)
            else:
                torch.save(content, f"{folder}/{name}")
    bmt.synchronize()
    for name, message in {
        "missing.pt": r"missing\.pt does not fit.*head\.bias",
        "more.pt": r"does not fit.*tail\.bias",
        "shape.pt": r"layers\.1\.linear\.weight.*\(6, 6\).*\(6, 7\)",
        "nested.pt": r"nested\.pt is not a model's state dict.*model, epoch",
        "module.pt": r"module\.pt cannot be loaded.*save model\.state_dict\(\)",
        "words.pt": "cannot be loaded with weights_only=True",
        "words.safetensors": r"words\.safetensors is not a safetensors file.* Use another copy",
        "nowhere.pt": "could not be read.*nowhere",
    }.items():
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            bmt.load(model, f"{folder}/{name}")
    assert bmt.load(model, f"{folder}/missing.pt", strict=False).missing_keys == ["head.bias"]
    for path in (f"{folder}/no/folder.pt", folder):
        with pytest.raises(RuntimeError, match="rank 0: "):
            bmt.save(model, path)
    if rank0:
        assert not list(Path(folder).glob("*.tmp"))
    bmt.synchronize()


CASES = [
    plain_root, folders_of_hugging_face, other_hosts_formats, behind_the_program, through_links, other_arguments,
    wrong_files,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_files(world, case, tmp_path):
    world(2)(case, str(tmp_path))


def on_rank_0_only(folder):
    """`save` names who did not come."""
    model = bmt.auto_wrap(Tower())
    patient = type(bmt.current_world()).barrier
    if bmt.rank() == 0:
        type(bmt.current_world()).barrier = lambda self, occasion, seconds=1: patient(self, occasion, 1)
        with pytest.raises(RuntimeError, match=r"'save' needs every rank(.|\n)*1"):
            bmt.save(model, f"{folder}/alone.pt")
        assert not os.listdir(folder)


@full
def test_on_rank_0_only(tmp_path):
    ranks = Ranks(2)
    ranks(on_rank_0_only, str(tmp_path))
    ranks.stop()


@on_ranks(1)
def test_the_order_of_a_write(folder):
    """On disk before it is renamed, renamed in one step; where that fails nothing is left but the earlier file."""
    path, calls = Path(folder) / "model.pt", []
    model = bmt.auto_wrap(Tower())
    bmt.save(model, path)
    earlier = path.read_bytes()
    replace, fsync = os.replace, os.fsync

    def noting_fsync(handle):
        calls.append(("fsync", os.path.realpath(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def failing_replace(source, target):
        calls.append(("replace", str(source), str(target)))
        assert torch.load(source, weights_only=True).keys() == Tower().state_dict().keys()
        raise OSError("no rename today")

    def noting_replace(source, target):
        assert path.read_bytes() == earlier
        calls.append(("replace", str(source), str(target)))
        replace(source, target)

    os.fsync, os.replace = noting_fsync, failing_replace
    try:
        with torch.no_grad():
            model.head.weight.zero_()
        with pytest.raises(RuntimeError, match="no rename today"):
            bmt.save(model, path)
        assert path.read_bytes() == earlier
        assert os.listdir(folder) == ["model.pt"]
        calls.clear()
        os.replace = noting_replace
        bmt.save(model, path)
    finally:
        os.replace, os.fsync = replace, fsync
    beside = calls[0][1]
    real = os.path.realpath(folder)
    assert calls == [("fsync", beside), ("replace", beside, str(path)), ("fsync", real)]
    assert os.path.dirname(os.path.dirname(beside)) == real
    assert not torch.load(path, weights_only=True)["head.weight"].any()


SAVE_FOR_EVER = """
import sys, torch, hf_bmtrain as bmt
bmt.init_distributed()
model = bmt.auto_wrap(torch.nn.Linear(1500, 1500))
for number in range(10**6):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(number))
    bmt.save(model, sys.argv[1])
    print(number, flush=True)
"""


@full
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_kill_while_saving_leaves_a_whole_file(tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    interrupted = 0
    for _ in range(4):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(path)]
        with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            deadline = time.monotonic() + 20
            while not list(tmp_path.glob("*.tmp/lock")) and time.monotonic() < deadline:
                pass  # kill in the middle of a write
            process.send_signal(signal.SIGKILL)
        interrupted += len(list(tmp_path.glob("*.tmp"))) > 0
        state = safetensors.torch.load_file(path) if suffix == ".safetensors" else torch.load(path)
        values = torch.cat([value.reshape(-1) for value in state.values()])
        assert values.numel() == 1500 * 1501
        assert (values == values[0]).all()
        if interrupted:
            break
    assert interrupted, "no kill met a write"
    store.write_atomically({"weight": torch.ones(1)}, path, path.suffix)
    assert os.listdir(tmp_path) == [path.name]


def test_a_folder_whose_process_was_killed_before_it_made_the_lock(tmp_path):
    path, new, old = (tmp_path / name for name in ("model.pt", "model.pt.01234567.tmp", "model.pt.89abcdef.tmp"))
    for folder in (new, old):
        folder.mkdir()
    os.utime(old, (time.time() - 3600,) * 2)
    store.write_atomically({"weight": torch.ones(1)}, path, path.suffix)
    assert sorted(os.listdir(tmp_path)) == [path.name, new.name], "another process may be about to lock the new one"


@full
@pytest.mark.parametrize("suffix", [".safetensors", *in_full(".pt")])
def test_only_what_was_abandoned_is_deleted(tmp_path, suffix):
    """Not the folder of a save that is under way, of another target, or what has another name."""
    path, other = tmp_path / f"model{suffix}", tmp_path / f"model{suffix}.best"
    state = {"weight": torch.ones(1)}
    others = {f"model{suffix}.123.tmp", f"model{suffix}.mine.tmp"}
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    with atomic_file(path) as writing, atomic_file(other) as second_writing:
        mine, second = writing.parent, second_writing.parent
        second_writing.touch()
        shutil.copytree(mine, left := mine.with_name(f"model{suffix}.01234567.tmp"))
        shutil.copytree(second, theirs := mine.with_name(f"model{suffix}.best.01234567.tmp"))
        store.write_atomically(state, path, path.suffix)
        assert not left.exists()
        assert {*os.listdir(tmp_path)} == others | {path.name, mine.name, second.name, theirs.name}
        writing.touch()
    assert {*os.listdir(tmp_path)} == others | {path.name, other.name, theirs.name}
    before = os.umask(0o027)
    try:
        store.write_atomically(state, path, path.suffix)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.slow
def test_memory_of_loading(tmp_path):
    """A file's tensors are mapped; of a gathered optimizer state each rank keeps its own part of two moments."""
    for results in state_memory.run(str(tmp_path)):
        for case, (peak, left) in results.items():
            if case != "AdamW optimizer":  # torch's load_state_dict keeps whole tensors until the next step
                assert max(peak, left) < 1.1 and (not case.startswith("load ") or peak < 0.1), case


class SharesBuffers(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.register_buffer("one", torch.full((3,), value))
        self.register_buffer("other", self.one)
        self.register_buffer("passing", self.one, persistent=False)


def test_a_buffer_with_two_names_is_loaded(world, tmp_path):
    """A safetensors file contains it once, and `load` said that its other name was missing."""
    world(1)(loads_shared_buffers, str(tmp_path / "model.safetensors"))


def loads_shared_buffers(path):
    model = SharesBuffers(2.0)
    bmt.save(SharesBuffers(1.0), path)
    bmt.load(model, path)
    assert model.one is model.other and model.one.tolist() == [1.0] * 3
