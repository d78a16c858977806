"""python -m hf_bmtrain.checkpoint merge: what it writes is the model, bit by bit, or nothing."""

import errno
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch

import hf_bmtrain as bmt
from cases import full, rows_in_full
from hf_bmtrain.checkpoint import __main__ as command
from hf_bmtrain.checkpoint.header import read_header
from resumable import Training, damage
from state_dicts import check_equal
from tiny_models import build


@pytest.fixture
def merge(monkeypatch, capfd):
    """Runs the command: returns its exit status or message, and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["checkpoint", "merge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        return ended.value.code, capfd.readouterr().out

    return run


def save(folder, case, steps=(1, 2), trained_only=False):
    training = Training(**case)
    for step in steps:
        training.train(step)
        training.save(folder, trained_only=trained_only)
    return {name: value.clone() for name, value in training.model.state_dict().items()}


def opened(folder, family):
    return type(build(family)).from_pretrained(folder)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("family", "dtype", "tied", "size"),
    [
        ("t5", torch.bfloat16, True, 2),
        *rows_in_full([("llama", torch.float32, False, 1), ("mixtral", torch.float32, True, 2)]),
    ],
)
def test_it_is_the_model(world, tmp_path, merge, family, dtype, tied, size):
    state = world(size)(save, str(tmp_path / "run"), {"family": family, "dtype": dtype, "tied": tied})[0]
    status, printed = merge(tmp_path / "run", "--max-shard-size", "10KB")
    output = tmp_path / "run" / "merged-checkpoint-2"
    assert status is None and f"{output}: written from " in printed
    files = names(output)
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} >= set(files) - {
        name for name in files if name.startswith("model-0")
    }
    assert not any(name.startswith(("optimizer", "state", "manifest")) for name in files)
    model = opened(output, family)
    check_equal({name: model.state_dict()[name] for name in state}, state)
    assert merge(tmp_path / "run")[0].startswith(f"merge: nothing was written. {output} already exists")
    assert names(tmp_path / "run") == [".lock", "checkpoint-1", "checkpoint-2", "merged-checkpoint-2"]


def resumed(folder, case):
    training = Training(**case, seed=1)
    loaded = training.load(folder)
    return loaded.step, loaded.extra, training.whole()


def saved_whole(folder, case):
    training = Training(**case)
    training.train(2)
    training.save(folder)
    return training.whole()


@full
def test_with_the_optimizer_it_is_a_checkpoint(world, tmp_path, merge):
    case = {"family": "gpt2", "dtype": torch.bfloat16}
    values = world(2)(saved_whole, str(tmp_path / "run"), case)[0]
    assert merge(tmp_path / "run", "--optimizer")[0].endswith("Choose an --output in another folder")
    assert merge(tmp_path / "run", "--optimizer", "--output", tmp_path / "all", "--max-shard-size", "9kb")[0] is None
    assert "optimizer.safetensors.index.json" in names(tmp_path / "all")
    (step, extra, loaded), (_, other, _) = world(2)(resumed, str(tmp_path / "all"), case)
    assert (step, extra, other) == (2, {"rank": 0, "position": 2}, {"rank": 1, "position": 2})
    check_equal(loaded, values)


# -- trained tensors over another model's ---------------------------------------------------------------------------


def test_trained_tensors_over_a_base(world, tmp_path, merge):
    case = {"family": "llama", "frozen": True}
    run, base = tmp_path / "run", tmp_path / "base"
    build("llama").save_pretrained(base, max_shard_size="20KB")
    state = world(2)(save, str(run), case, (1, 2), True)[0]
    assert "pass --base" in merge(run)[0]
    files = sorted(base.glob("*.safetensors"))
    for number, given in enumerate(([base], files)):
        output = tmp_path / f"out{number}"
        assert merge(run, "--output", output, "--base", *given)[0] is None
        model = opened(output, "llama")
        check_equal({name: model.state_dict()[name] for name in state}, state)
    world(2)(save, str(tmp_path / "whole"), {"family": "llama"}, (1,))
    assert "contains the full model" in merge(tmp_path / "whole", "--base", base)[0]
    assert names(tmp_path) == ["base", "out0", "out1", "run", "whole"]


@full
def test_a_base_of_ours_in_another_dtype(world, tmp_path, merge):
    """The trained tensors keep their dtype, and that is said; the base's checksums count."""
    case = {"family": "llama", "frozen": True}
    run, base = tmp_path / "run", tmp_path / "base"
    world(1)(save, str(base), {"family": "llama", "dtype": torch.bfloat16}, (0,))
    base /= "checkpoint-0"
    state = world(1)(save, str(run), case, (1,), True)[0]
    status, printed = merge(run, "--base", base)
    assert status is None and "note: trained tensors are written in torch.float32, as they were saved" in printed
    written = safetensors.torch.load_file(run / "merged-checkpoint-1" / "model.safetensors")
    first = safetensors.torch.load_file(base / "model.safetensors")
    trained = safetensors.torch.load_file(run / "checkpoint-1" / "trained.safetensors")
    assert trained and set(trained) < set(first) == set(written)
    for name, value in written.items():
        assert torch.equal(value, state[name] if name in trained else first[name])
    frozen = next(name for name in first if name not in trained)
    damage(base / "model.safetensors", read_header(base / "model.safetensors")[frozen].start)
    status, _ = merge(run, "--base", base, "--output", tmp_path / "out")
    assert f"merge: nothing was written. --base {base} is damaged: {frozen} in model.safetensors: bytes " in status
    assert names(tmp_path) == ["base", "run"]


def wrong_bases(folder):
    build("gpt2").save_pretrained(folder / "gpt2")
    other = build("llama")
    other.lm_head = torch.nn.Linear(24, 5)
    other.save_pretrained(folder / "other")
    (folder / "empty").mkdir()
    (folder / "words.safetensors").write_text("words")
    return {
        "gpt2": r"--base lacks \d+ of the \d+ trained tensors: .*merge_and_unload", "other": "do not have the shapes",
        "empty": "does not contain a model", "words.safetensors": "does not contain a model",
        "nothing": "does not contain a model in safetensors files",
    }  # fmt: skip


@full
def test_wrong_bases(world, tmp_path, merge):
    expected = wrong_bases(tmp_path)
    world(1)(save, str(tmp_path / "run"), {"family": "llama", "frozen": True}, (1,), True)
    for name, message in expected.items():
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(merge(tmp_path / "run", "--base", tmp_path / name)[0])
    assert names(tmp_path / "run") == [".lock", "checkpoint-1"]


def save_stack(folder):
    """As with tp_size=2, a weight that is split by columns."""
    model = torch.nn.Linear(4, 3, bias=False)
    safetensors.torch.save_file(dict(model.state_dict()), f"{folder}/base.safetensors")
    model.weight = torch.nn.Parameter(torch.stack(model.weight.detach().chunk(2, 1)))
    bmt.save_state(f"{folder}/run", model, step=1, trained_only=True)


def test_a_stack_of_parts_over_a_base(world, tmp_path, merge):
    world(1)(save_stack, str(tmp_path))
    status, _ = merge(tmp_path / "run", "--base", tmp_path / "base.safetensors")
    assert r"weight (2, 3, 2) (in --base (3, 4)). Pass the model " in status
    assert status.endswith("Then write the whole weights with bmt.save")


# -- damage and full disks ------------------------------------------------------------------------------------------


def test_damage(world, tmp_path, merge):
    """It is named, and nothing is left; of a folder of checkpoints the newest that is whole is written."""
    world(2)(save, str(tmp_path), {"family": "llama"}, (1, 2))
    newest = tmp_path / "checkpoint-2"
    damage(newest / "model.safetensors")
    status, printed = merge(newest)
    assert (
        status == f"merge: nothing was written: no checkpoint in {newest} is intact. Restore a checkpoint from a copy"
    )
    assert "checkpoint-2: damaged: " in printed and " in model.safetensors: bytes " in printed
    assert names(tmp_path) == [".lock", "checkpoint-1", "checkpoint-2"]
    status, printed = merge(tmp_path)
    assert status is None and "checkpoint-2: damaged: " in printed and "checkpoint-1, step 1" in printed
    assert names(tmp_path) == [".lock", "checkpoint-1", "checkpoint-2", "merged-checkpoint-1"]
    damage(tmp_path / "checkpoint-1" / "config.json")
    assert "no checkpoint in" in merge(tmp_path, "--output", tmp_path / "x")[0]


@full
@pytest.mark.parametrize(
    ("function", "code", "after"),
    [
        ("fsync", errno.EIO, 9),
        *rows_in_full([
            ("ftruncate", errno.ENOSPC, 0), ("pwrite", errno.ENOSPC, 5), ("rename", errno.EACCES, 0),
            ("mkdir", errno.EROFS, 0),
        ]),
    ],
)  # fmt: skip
def test_faults_of_the_disk(world, tmp_path, merge, function, code, after):
    world(1)(save, str(tmp_path), {"family": "llama"}, (1,))
    original, calls = getattr(os, function), 0

    def fail(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))
        return original(*arguments, **options)

    with mock.patch.object(os, function, fail):
        status = merge(tmp_path)[0]
    assert "nothing was written" in status and os.strerror(code) in status
    assert names(tmp_path) == [".lock", "checkpoint-1"]
    assert merge(tmp_path)[0] is None


@full
def test_sizes(tmp_path, merge):
    assert merge(tmp_path, "--max-shard-size", "five")[0] == 2
    assert "neither a checkpoint of save_state" in merge(tmp_path)[0]
