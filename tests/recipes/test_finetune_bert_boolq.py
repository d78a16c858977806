"""The recipe from the command line to the folder it leaves, against the same job in plain torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from boolq_data import Example
from reading_questions import reading_questions
from small_bert import small_bert_config, train_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "finetune_bert_boolq.py"
PLAIN = Path(__file__).with_name("plain_boolq.py")
PYTHON = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS_AN_EPOCH = 25  # 400 rows, 16 a step


def run(launcher: list[str], script: Path, *options: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*launcher, str(script), *map(str, options)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a saved model and few rows: 400 to train, 31 to validate (a number no batch divides)."""
    folder = tmp_path_factory.mktemp("small")
    questions = reading_questions(seed=0)
    tokenizer = train_tokenizer(text for x in questions.train[:500] for text in (x.question, x.passage))
    config = small_bert_config(len(tokenizer))
    config.hidden_size, config.intermediate_size, config.hidden_dropout_prob = 64, 64, 0.1
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_rows(folder / "data" / "train.jsonl", questions.train[:400])
    write_rows(folder / "data" / "dev.jsonl", questions.validation[:31])
    return folder


def sentence_asked_for(example: Example) -> str:
    person = " ".join(example.question.split()[1:3])
    return next(sentence for sentence in example.passage.split(".") if person in sentence.lower())


def write_rows(file: Path, examples: list[Example]) -> None:
    """Google's layout; each passage is cut to the sentence asked for, which is learned within a few steps."""
    file.parent.mkdir(exist_ok=True)
    rows = ({"question": x.question, "passage": sentence_asked_for(x), "answer": x.label} for x in examples)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(small: Path, output: str, launcher: list[str], script: Path, *options: object) -> dict:
    """Two epochs at a high learning rate; returns the metrics."""
    fixed = ("--model", small / "model", "--data", small / "data", "--epochs", 2, "--lr", 3e-3)
    done = run(launcher, script, *fixed, "--output", small / output, *options)
    assert done.returncode == 0, done.stderr
    return json.loads((small / output / "metrics.json").read_text())


@pytest.fixture(scope="module")
def plain(small: Path) -> dict:
    return train(small, "plain", PYTHON, PLAIN, "--dropout", 0, "--batch-size", 16)


@pytest.fixture(scope="module")
def two_ranks(small: Path) -> dict:
    return train(small, "two", TWO_RANKS, RECIPE, "--dropout", 0, "--batch-size", 8)


def check_same_curves(one: dict, other: dict) -> None:
    assert len(one["steps"]) == len(other["steps"]) == 2 * STEPS_AN_EPOCH
    for here, there in zip(one["steps"], other["steps"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-4)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-3)
        assert here["lr"] == pytest.approx(there["lr"], rel=1e-9)
    for here, there in zip(one["epochs"], other["epochs"], strict=True):
        for name in ("accuracy", "balanced_accuracy"):
            assert here[name] == pytest.approx(there[name], abs=1 / 31 + 1e-9)


def test_one_process_follows_plain_torch(small, plain):
    ours = train(small, "one", PYTHON, RECIPE, "--dropout", 0, "--batch-size", 16)
    check_same_curves(ours, plain)
    assert ours["world_size"] == 1
    losses = [step["loss"] for step in ours["steps"]]
    assert losses[-1] < 0.7 * losses[0]  # it has moved, so agreeing says something
    assert ours["epochs"][-1]["accuracy"] > 0.75  # so does the order of the predictions


def test_two_processes_follow_one(plain, two_ranks):
    check_same_curves(two_ranks, plain)
    assert two_ranks["world_size"] == 2


@pytest.mark.slow
def test_zero_2_without_recomputation_is_the_same_too(small, plain):
    options = ("--dropout", 0, "--batch-size", 8, "--zero-level", 2, "--no-checkpoint")
    check_same_curves(train(small, "zero2", TWO_RANKS, RECIPE, *options), plain)


def test_metrics_hold_the_whole_run(two_ranks, small):
    assert two_ranks["arguments"]["lr"] == 3e-3
    assert two_ranks["arguments"]["dtype"] == "float32"
    assert two_ranks["versions"]["torch"] == torch.__version__
    assert [step["step"] for step in two_ranks["steps"]] == list(range(1, 2 * STEPS_AN_EPOCH + 1))
    assert two_ranks["epochs"][0]["majority_share"] == pytest.approx(16 / 31)
    assert (small / "two" / "curves.png").read_bytes().startswith(b"\x89PNG")


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
    "launcher", [pytest.param(PYTHON, id="1"), pytest.param(TWO_RANKS, id="2", marks=pytest.mark.slow)]
)
def test_a_mistake_is_one_line_and_status_2(small, launcher, tmp_path):
    done = run(
        launcher, RECIPE, "--model", small / "model", "--data", small / "nowhere", "--output", tmp_path
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors
    assert set(errors) == {errors[0]}
    assert "nowhere: no such folder; give a folder with train.jsonl" in errors[0]
    if launcher is PYTHON:
        assert (done.returncode, done.stderr) == (2, errors[0] + "\n")
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_written_is_told_before_training(small, tmp_path):
    (tmp_path / "file").touch()
    model, data, output = small / "model", small / "data", tmp_path / "file" / "folder"
    done = run(PYTHON, RECIPE, "--model", model, "--data", data, "--output", output)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --output {output} cannot be written to (")
    assert done.stdout == ""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
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
