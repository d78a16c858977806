"""Cells of the Trainer matrix; `python tests trainer_matrix` prints all with their errors."""

import math

import pytest
import torch
from trainer_matrix import Errors, Matrix, cells, difference

from cases import full, rows_in_full


@pytest.fixture(scope="module")
def matrix(world):
    return Matrix(world)


DEFAULT = (
    "accumulation,_a_rest_at_an_epoch's_end-SGD-2",
    "max_grad_norm_of_what_was_accumulated-AdamW-2",
    "bf16-AdamW-2",
    "gradient_checkpointing-SGD-2",
    "load_best_model_at_end-AdamW-2",
    "AdamW,_amsgrad-own-2",
    "AdamOffloadOptimizer,_accumulated,_clipped,_scheduled-own-2",
)
"""The others are `full`; `python tests trainer_matrix` prints those on one rank and more with AdamW."""


def marked(cell):
    marks = [pytest.mark.slow] if cell.row == "torch_compile" else [] if cell.label() in DEFAULT else [full]
    return pytest.param(cell, id=cell.label(), marks=marks)


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
@pytest.mark.parametrize(
    ("changes", "column", "error"),
    [
        ({"weights": {"a": torch.ones(3), "b": torch.tensor([0.01, 0.0100001])}}, "weights", 10),
        *rows_in_full(
            [
                ({"weights": {"a": torch.ones(3), "b": torch.tensor([0.01, math.nan])}}, "weights", math.inf),
                ({"logged": [{"loss": 2.0002, "grad_norm": 1.0, "learning_rate": 0.1}]}, "loss", 2),
                ({"logged": [{"loss": 2.0, "grad_norm": math.nan, "learning_rate": 0.1}]}, "grad_norm", math.inf),
                ({"logged": [{"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.10001}]}, "other", 2),
                ({"logged": [{"loss": 2.0, "grad_norm": 1.0}]}, "other", math.inf),
                ({"logged": []}, "other", math.inf),
                ({"state": (3, None, ["checkpoint-2/model.safetensors"])}, "other", math.inf),
                ({"state": (4, None, [])}, "other", math.inf),
            ]
        ),
    ],
)
def test_a_difference_is_seen(changes, column, error):
    assert max(difference(run(), run(), 1e-6).values()) == 0
    found = difference(run(**changes), run(), 1e-6)
    assert found.pop(column) == pytest.approx(error, rel=0.01)
    assert not any(found.values())


@full
def test_a_row_without_effect_shows_nothing():
    assert Errors(effect=5.0).worst == 2
    assert Errors(resume=math.inf).worst == math.inf
