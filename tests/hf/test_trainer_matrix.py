"""Cells of the Trainer matrix; `python tests trainer_matrix` prints all with their errors."""

import math

import pytest
import torch
from trainer_matrix import Errors, Matrix, cells, difference

from cases import full, slow


@pytest.fixture(scope="module")
def matrix(world):
    return Matrix(world)


DEFAULT = (
    "accumulation,_a_rest_at_an_epoch's_end-SGD-2",
    "max_grad_norm_of_what_was_accumulated-AdamW-2",
    "bf16-AdamW-2",
    "gradient_checkpointing-SGD-2",
    "load_best_model_at_end-AdamW-2",
    "AdamOffloadOptimizer,_accumulated,_clipped,_scheduled-own-2",
)
"""The others are `full`; `python tests trainer_matrix` prints those on one rank and more with AdamW."""
SLOW = (
    "torch_compile", "torch_compile_mode", "data_seed", "seed, dropout", "num_train_epochs", "logging_steps",
    "linear", "cosine",
    "eval_strategy=epoch", "several evaluation sets", "label_smoothing_factor in evaluation", "save_strategy=epoch",
    "save_total_limit", "load_best_model_at_end, save_total_limit", "max_grad_norm=0", "optim=sgd",
    "SGD with momentum", "AdamOffloadOptimizer", "optim=adamw_torch_fused",
)  # fmt: skip
"""Rows that repeat paths of others."""


def marked(cell):
    marks = [slow] if cell.row in SLOW else [] if cell.label() in DEFAULT else [full]
    return pytest.param(cell, id=cell.label(), marks=marks)


def test_the_rows_exist():
    assert {cell.row for cell in cells()} >= {*SLOW}


@pytest.mark.parametrize(
    "cell",
    [marked(cell) for cell in cells() if cell.size == 2 and (cell.optimizer != "AdamW" or cell.label() in DEFAULT)],
)
def test_trainer_matrix(matrix, tmp_path, cell):
    errors = matrix.measure(cell, tmp_path)
    assert errors.worst <= 1, errors


def run(**changes):
    result = {
        "weights": {"a": torch.ones(3), "b": torch.full((2,), 0.01)},
        "logged": [{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1}],
        "state": (4, None, ["checkpoint-2/model.safetensors"]),
    }
    return {**result, **changes}


@full
def test_a_difference_is_seen():
    assert max(difference(run(), run(), 1e-6).values()) == 0
    nearly, spoilt = ({"a": torch.ones(3), "b": torch.tensor([0.01, second])} for second in (0.0100001, math.nan))
    assert difference(run(weights=nearly), run(), 1e-6)["weights"] == pytest.approx(10, rel=0.01)
    assert difference(run(weights=spoilt), run(), 1e-6)["weights"] == math.inf
    assert difference(run(logged=[]), run(), 1e-6)["other"] == math.inf
    assert difference(run(state=(4, None, [])), run(), 1e-6)["other"] == math.inf
    assert Errors(effect=5.0).worst == 2 and Errors(resume=math.inf).worst == math.inf
