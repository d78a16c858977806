"""The recipes as subprocesses, and the BoolQ job on a small saved model and few rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

from boolq.data import Example
from boolq.questions import reading_questions
from boolq.small_bert import small_bert_config, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ROOT / "tests" / "scripts" / "plain_boolq.py"
PYTHON = [sys.executable]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS_AN_EPOCH = 25  # 400 rows, 16 a step


def run(launcher: list[str], script: Path, *options: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "recipes"))),  # the latter for plain_boolq.py
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [*launcher, str(script), *map(str, options)]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=False)


def make_small(folder: Path) -> Path:
    """Fill `folder` with a saved model and few rows: 400 to train, 31 to validate (no batch size divides 31)."""
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
    """Write Google's layout. Each passage is cut to the sentence that answers, which is learnt within a few steps."""
    file.parent.mkdir(exist_ok=True)
    rows = ({"question": x.question, "passage": sentence_asked_for(x), "answer": x.label} for x in examples)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(small: Path, output: str, launcher: list[str], script: Path, *options: object, **variables: str) -> dict:
    """Train two epochs at a high learning rate. Return the metrics."""
    fixed = ("--model", small / "model", "--data", small / "data", "--epochs", 2, "--lr", 3e-3)
    done = run(launcher, script, *fixed, "--output", small / output, *options, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads((small / output / "metrics.json").read_text())


def check_same_curves(one: dict, other: dict) -> None:
    assert len(one["steps"]) == len(other["steps"]) == 2 * STEPS_AN_EPOCH
    for here, there in zip(one["steps"], other["steps"], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-4)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-3)
        assert here["lr"] == pytest.approx(there["lr"], rel=1e-9)
    for here, there in zip(one["epochs"], other["epochs"], strict=True):
        for name in ("accuracy", "balanced_accuracy"):
            assert here[name] == pytest.approx(there[name], abs=1 / 31 + 1e-9)
        assert here["majority_share"] == there["majority_share"]  # of all validation rows, each once
