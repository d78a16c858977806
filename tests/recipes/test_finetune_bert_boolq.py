"""The recipe from the command line to its output folder, compared with the same job in plain torch."""

import json
from importlib.metadata import version

import pytest
import torch
from small_job import PYTHON, ROOT, STEPS_AN_EPOCH, TWO_RANKS, check_same_curves, run, train
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cases import full, in_slow, slow

RECIPE = ROOT / "recipes" / "finetune_bert_boolq.py"


@pytest.fixture(scope="module")
def two_ranks(small) -> dict:
    return train(small, "two", TWO_RANKS, RECIPE, "--dropout", 0, "--batch-size", 8)


@full
def test_one_process_follows_plain_torch(small, plain):
    ours = train(small, "one", PYTHON, RECIPE, "--dropout", 0, "--batch-size", 16)
    check_same_curves(ours, plain)
    assert ours["world_size"] == 1
    losses = [step["loss"] for step in ours["steps"]]
    assert losses[-1] < 0.7 * losses[0]  # it has moved, so agreeing says something
    assert ours["epochs"][-1]["accuracy"] > 0.75  # so does the order of the predictions


@full
def test_two_processes_follow_one(plain, two_ranks):
    check_same_curves(two_ranks, plain)
    assert two_ranks["world_size"] == 2


@pytest.mark.slow
def test_zero_2_without_recomputation_is_the_same_too(small, plain):
    options = ("--dropout", 0, "--batch-size", 8, "--zero-level", 2, "--no-checkpoint")
    check_same_curves(train(small, "zero2", TWO_RANKS, RECIPE, *options), plain)


@slow
def test_float8_learns_the_same(small, plain):
    ours = train(small, "float8", TWO_RANKS, RECIPE, "--dropout", 0, "--batch-size", 8, "--float8")
    losses, expected = ([step["loss"] for step in run["steps"]] for run in (ours, plain))
    assert losses != expected and ours["arguments"]["float8"]
    # In between, where the loss falls fast, one rounding can be worth a few steps.
    assert all(abs(mine - other) < 0.1 * expected[0] for mine, other in zip(losses[:4], expected[:4]))
    assert all(abs(mine - other) < 0.02 * expected[0] for mine, other in zip(losses[-10:], expected[-10:]))


@full
def test_metrics_hold_the_whole_run(two_ranks, small):
    assert two_ranks["arguments"]["lr"] == 3e-3
    assert two_ranks["arguments"]["dtype"] == "float32"
    assert two_ranks["versions"]["torch"] == version("torch")  # a wheel's own name may lack "+cu130"
    assert [step["step"] for step in two_ranks["steps"]] == list(range(1, 2 * STEPS_AN_EPOCH + 1))
    assert two_ranks["epochs"][0]["majority_share"] == pytest.approx(16 / 31)
    assert (small / "two" / "curves.png").read_bytes().startswith(b"\x89PNG")


@full
def test_the_folder_opens_and_answers_as_measured(small, two_ranks):
    """Accuracy of the saved model, computed here without the recipe's code, is that of metrics.json."""
    model = AutoModelForSequenceClassification.from_pretrained(small / "two").eval()
    tokenizer = AutoTokenizer.from_pretrained(small / "two")
    assert model.config.id2label == {0: "False", 1: "True"}
    right = 0
    rows = [json.loads(line) for line in (small / "data" / "dev.jsonl").read_text().splitlines()]
    for row in rows:
        with torch.no_grad():
            logits = model(**tokenizer(row["question"], row["passage"], return_tensors="pt")).logits
        right += model.config.id2label[logits.argmax().item()] == str(row["answer"])
    assert right / len(rows) == pytest.approx(two_ranks["epochs"][-1]["accuracy"])


@pytest.mark.parametrize(
    "launcher", [pytest.param(PYTHON, id="1", marks=full), pytest.param(TWO_RANKS, id="2", marks=pytest.mark.slow)]
)
def test_a_mistake_is_one_line_and_status_2(small, launcher, tmp_path):
    done = run(launcher, RECIPE, "--model", small / "model", "--data", small / "nowhere", "--output", tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert set(errors) == {errors[0]}
    assert "nowhere: no such folder; give a folder with train.jsonl" in errors[0]
    if launcher is PYTHON:
        assert (done.returncode, done.stderr) == (2, errors[0] + "\n")
    assert not list(tmp_path.iterdir())


@full
def test_an_output_that_cannot_be_written_is_told_before_training(small, tmp_path):
    (tmp_path / "file").touch()
    model, data, output = small / "model", small / "data", tmp_path / "file" / "folder"
    done = run(PYTHON, RECIPE, "--model", model, "--data", data, "--output", output)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --output {output} cannot be written to (")
    assert done.stdout == ""


@full
@pytest.mark.parametrize("dtype", ["bf16", *in_slow("fp16")])
def test_half_precision_trains_and_is_saved_as_such(small, plain, dtype):
    ours = train(small, dtype, PYTHON, RECIPE, "--dropout", 0, "--batch-size", 16, f"--{dtype}")
    losses = [step["loss"] for step in ours["steps"]]
    assert losses[0] == pytest.approx(plain["steps"][0]["loss"], abs=0.03)
    saved = AutoModelForSequenceClassification.from_pretrained(small / dtype, dtype="auto")
    assert saved.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_embedded_default_learns_to_read(tmp_path, seed):
    done = run(PYTHON, RECIPE, "--seed", seed, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "No --model, no --data, and no GPU: a small new BERT learns generated questions." in done.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["epochs"][-1]["accuracy"] > 0.95
    assert metrics["seconds"] < 180
