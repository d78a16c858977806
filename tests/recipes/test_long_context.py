"""The recipe for long rows, from the command line to its report; the rows; the limit of memory."""

import contextlib
import importlib
import json
import random
import re
import sys
from unittest import mock

import pytest
import torch
from small_job import PYTHON, ROOT, run

import hf_bmtrain as bmt
import long_context
from cases import full, in_full
from needle.data import HAY, IGNORED, KEYS, VALUES, VOCABULARY, lengths, rows, text_row
from needle.options import parse_options

RECIPE = ROOT / "recipes" / "long_context.py"
OTHERS = ("finetune_bert_boolq", "trainer_boolq", "accelerate_boolq", "train_gpt2", "lora", "moe")


def test_rows_can_be_answered():
    batch = rows(3, 40, torch.Generator().manual_seed(0))
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist()):
        needles = [token - HAY for token in ids[:20] if token >= HAY]
        values = {needle // VALUES: needle % VALUES for needle in needles}
        assert len(needles) == len(values) == KEYS and labels[:21] == [IGNORED] * 21
        for key, answer in zip(ids[20:], labels[21:]):
            assert answer == VOCABULARY - VALUES + values[key - HAY - KEYS * VALUES]


def test_rows_become_longer():
    found = [*lengths(8192, 150)]
    tokens = [length for _, length in found]
    assert len(found) == 150 and tokens == sorted(tokens) and set(tokens[:100]) == {32}
    assert 4 <= tokens.count(8192) <= 8 and all(count * length <= 8192 for count, length in found)
    assert {length for _, length in lengths(32, 5)} == {32}


def test_text():
    def tokenizer(text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    row = text_row(tokenizer, 300, random.Random(0))
    text = "".join(map(chr, row["input_ids"][0]))
    name, code = re.search(r"The code of (\w+) is (\d{5})\.", text).groups()
    assert text.endswith(f" What is the code of {name}? The code of {name} is {code}.") and len(text) == 300
    assert row["labels"][0].ne(IGNORED).sum() == len(f" {code}.")
    with pytest.raises(ValueError, match="give at least"):
        text_row(tokenizer, 64, random.Random(0))


def train(folder, *options):
    done = run(PYTHON, RECIPE, "--output", folder, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text()), done.stdout


@full
def test_two_processes_do_what_one_does(tmp_path):
    found = [
        train(tmp_path / str(count), "--length", 64, "--steps", 6, "--processes", count, "--memory", 1000)[0]
        for count in (1, 2)
    ]
    losses = [[step["loss"] for step in metrics["steps"]] for metrics in found]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert [metrics["world_size"] for metrics in found] == [1, 2]


@pytest.mark.slow
def test_the_default_learns_what_one_process_cannot_hold(tmp_path):
    metrics, said = train(tmp_path)
    assert "one process: a row of 8192 tokens does not fit into 208 MiB" in said
    assert metrics["world_size"] == 2 and metrics["right_before"] < 0.3 and metrics["right_after"] > 0.9


@pytest.mark.parametrize("recipe", ["long_context", *in_full(*OTHERS)])
def test_engine_options_reach_the_start(monkeypatch, tmp_path, recipe):
    if recipe == "lora":
        pytest.importorskip("peft")

    class Started(Exception):
        pass

    def start(**options):
        raise Started(options)

    monkeypatch.setenv("RANK", "0")  # or long_context.py would start processes
    options = ["--zero-level", "2", "--shard-over", "host", "--seed", "3", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [recipe, *options])
    monkeypatch.setattr(bmt, "init_distributed", start)
    with pytest.raises(Started) as told:
        importlib.import_module(recipe).main()
    assert told.value.args[0] == {"zero_level": 2, "shard_over": "host", "seed": 3}


def test_another_number_of_processes_than_the_launchers_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    long_context.check_processes(4)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    long_context.check_processes(2)  # as the script starts itself
    with pytest.raises(ValueError, match="--processes 4: the launcher has started 2"):
        long_context.check_processes(4)


def loss_scale(precision: str, folder: str) -> float | None:
    """Return the loss scale that the recipe starts with."""
    options = parse_options([precision, "--length", "64", "--trial", "--output", folder])
    with (
        mock.patch.object(bmt, "init_distributed"),
        mock.patch.object(bmt.optim, "OptimManager", side_effect=InterruptedError) as made,
        contextlib.suppress(InterruptedError),
    ):
        long_context.run(options)
    return made.call_args.kwargs.get("loss_scale")


@full
def test_the_loss_is_scaled_in_float16(world, tmp_path):
    """Or small gradients would become 0."""
    assert world(1)(loss_scale, "--fp16", str(tmp_path)) == [1024.0]
    assert world(1)(loss_scale, "--bf16", str(tmp_path)) == [None]
