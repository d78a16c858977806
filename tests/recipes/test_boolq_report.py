"""Scores against values computed by hand; a curve that is read every few steps."""

import argparse
import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from boolq.report import Report, score
from cases import full
from common.curve import READ_EVERY, Curve


def test_scores():
    labels = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0])
    predictions = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0])
    found = score(predictions, labels)
    assert found["accuracy"] == pytest.approx(6 / 8)
    assert found["balanced_accuracy"] == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert found["majority_share"] == pytest.approx(6 / 8)
    always_true = score(torch.ones(8), labels)
    assert always_true["accuracy"] == always_true["majority_share"]
    assert always_true["balanced_accuracy"] == pytest.approx(0.5)


@full
def test_scores_where_only_one_class_occurs():
    assert score(torch.tensor([0, 1]), torch.tensor([0, 0])) == {
        "accuracy": 0.5,
        "balanced_accuracy": 0.5,
        "majority_share": 1.0,
    }


@full
def test_a_curve_is_read_every_few_steps_and_at_the_end():
    curve = Curve()
    for step in range(READ_EVERY + 2):
        read = curve.add(1, torch.tensor(float(step)), torch.tensor(2.0 * step), lr=0.1)
        assert read == (step == READ_EVERY - 1)
    assert len(curve.steps) == READ_EVERY
    curve.read()
    curve.read()
    assert [step["loss"] for step in curve.steps] == list(range(READ_EVERY + 2))
    assert curve.steps[-1] == {"step": 12, "epoch": 1, "lr": 0.1, "loss": 11.0, "grad_norm": 22.0}
    assert curve.mean_loss(1) == pytest.approx(5.5)


@full
def test_what_is_not_finite_becomes_none():
    curve = Curve()
    curve.add(1, torch.tensor(math.nan), torch.tensor(math.inf), lr=0.1)
    curve.read()
    assert curve.steps[0]["loss"] is curve.steps[0]["grad_norm"] is None
    assert curve.mean_loss(1) is None


def test_metrics_and_plot_are_written(tmp_path: Path):
    options = argparse.Namespace(output=tmp_path / "new", lr=0.5, batch_size=8)
    report = Report(options, "a job", torch.device("cpu"), world_size=3)
    report.curve.add(1, torch.tensor(0.25, dtype=torch.bfloat16), torch.tensor(1.0), lr=0.5)
    report.curve.read()
    line = report.add_epoch(1, score(torch.tensor([1, 0]), torch.tensor([1, 0])), training=2.0, evaluation=0.5)
    assert (
        "loss 0.2500, accuracy 1.0000, balanced 1.0000 (majority 0.5000), 2.0 s at 12 samples/s" in line
    )  # 1 step x 8 x 3
    told = report.write(options.output)
    assert "accuracy 1.0000, 12 samples/s, peak memory of rank 0's process " in told
    metrics = json.loads((options.output / "metrics.json").read_text())
    assert metrics["arguments"] == {"output": str(options.output), "lr": 0.5, "batch_size": 8}
    assert 0.05 < metrics["peak_memory_gib"] < 50
    assert (metrics["world_size"], metrics["device"], metrics["seconds"]) == (3, "cpu", 2.5)
    assert metrics["versions"]["torch"] == version("torch")  # a wheel's own name may lack "+cu130"
    assert metrics["steps"] == [{"step": 1, "epoch": 1, "lr": 0.5, "loss": 0.25, "grad_norm": 1.0}]
    assert metrics["epochs"][0]["accuracy"] == 1.0
    assert (options.output / "curves.png").read_bytes().startswith(b"\x89PNG")
