"""The best model: cases of transformers' tests/trainer/test_trainer_checkpointing.py around a sharded model.

Where those put an evaluation's result in the place of Trainer's own method, a metric here gives it: on several ranks
the callback stages what is to be saved when an evaluation has happened.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from upstream_checkpoints import check_checkpoints

from regression import Line, PlainLine, checkpoints, make, read_state, whole


class Scripted:
    """The given values of a metric, one an evaluation, the last one for ever."""

    def __init__(self, *values):
        self.values = list(values)

    def __call__(self, prediction):
        return {"accuracy": self.values.pop(0) if len(self.values) > 1 else self.values[0]}


SCRIPT = {"a": 1.5, "b": 2.5, "learning_rate": 0.1, "eval_strategy": "epoch", "metric_for_best_model": "accuracy"}


def save_best_checkpoint(folder):
    """Saved where the metric got better, and only there: after the first two of three epochs."""
    for greater, values in ((True, (0.60, 0.65, 0.64)), (False, (0.03, 0.02, 0.03))):
        own = f"{folder}/{greater}"
        given = {**SCRIPT, "greater_is_better": greater, "compute_metrics": Scripted(*values)}
        trainer = make(own, save_strategy="best", **given)
        trainer.train()
        check_checkpoints(own, [8, 16])
        assert trainer.state.best_metric == values[1]


def metric_for_best_model_behavior(folder):
    with pytest.raises(ValueError, match="metric_for_best_model` must be provided"):
        make(folder, **{**SCRIPT, "metric_for_best_model": None}, save_strategy="best")
    given = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    assert make(folder, **given).args.metric_for_best_model == "loss"


BY_STEPS = {"metric_for_best_model": "accuracy", "greater_is_better": True, "save_strategy": "steps", "save_steps": 1}
EPOCHS, STEPS, EVERY = {"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 1}, list(range(1, 25))
FALLING, STEEP = (0.59, 0.57, 0.55), (0.90, 0.80, 0.70)
BEHAVIOUR = [  # arguments, metric of each evaluation, best metric and its step, best checkpoint, checkpoints
    ({}, (), None, None, EVERY),
    ({"save_total_limit": 1}, (), None, None, [24]),
    ({**EPOCHS, "save_strategy": "epoch"}, FALLING, (0.59, 8), 8, [8, 16, 24]),
    (EPOCHS, FALLING, (0.59, 8), 8, EVERY),
    ({**STEPS, "save_total_limit": 1}, STEEP, (0.90, 1), 1, [1]),
    ({**STEPS, "eval_steps": 3, "save_steps": 2}, STEEP, (0.90, 3), None, EVERY[1::2]),
]


def best_model_checkpoint_behavior(folder):
    for number, (given, values, best, checkpoint, kept) in enumerate(BEHAVIOUR):
        own = f"{folder}/{number}"
        metric = {"compute_metrics": Scripted(*values)} if values else {}
        trainer = make(own, **{**BY_STEPS, **given}, **metric)
        trainer.train()
        state = trainer.state
        assert state.best_metric == (best and best[0]), number
        assert best is None or state.best_global_step == best[1], number
        assert state.best_model_checkpoint == (checkpoint and f"{own}/checkpoint-{checkpoint}"), number
        assert checkpoints(own) == kept, number


def load_best_model_from_safetensors(folder):
    """The checkpoint with the best loss in the log is loaded at the end, and evaluates to that loss."""
    given = {"a": 1.5, "b": 2.5, "learning_rate": 0.1, "load_best_model_at_end": True}
    by_steps = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5}
    for model in (Line, PlainLine):
        own = f"{folder}/{model.__name__}"
        trainer = make(own, model=model, **given, **by_steps)
        trainer.train()
        check_checkpoints(own, [5, 10, 15, 20, 24], {"config.json"} if model is Line else set())
        history = read_state(f"{own}/checkpoint-24")["log_history"]
        values = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
        best = min(values, key=values.__getitem__)
        assert Path(trainer.state.best_model_checkpoint).name == f"checkpoint-{best}"
        saved = load_file(f"{own}/checkpoint-{best}/model.safetensors")
        assert all(torch.equal(value, saved[name]) for name, value in whole(trainer.model).items())
        if model is Line:
            assert Line.from_pretrained(f"{own}/checkpoint-{best}").a.item() == saved["a"].item()
        assert trainer.evaluate()["eval_loss"] == values[best]
