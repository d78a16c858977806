"""The recipe for long rows, from the command line to its report; the rows; the limit of memory."""

import json
import random
import re

import pytest
import torch
from small_job import PYTHON, ROOT, run

from cases import full
from needle.data import HAY, IGNORED, KEYS, VALUES, VOCABULARY, lengths, rows, text_row

RECIPE = ROOT / "recipes" / "long_context.py"


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
