"""Cases of transformers' tests/trainer/test_trainer_evaluation.py around a sharded model."""

import pytest

import hf_bmtrain as bmt
from regression import LineConfig, PlainLine, Points, arguments, close_enough, close_to, make, wrapped

LINE = {"a": 1.5, "b": 2.5}


def shift(logits, labels):
    return logits + 1


def evaluate(folder):
    """Loss and accuracy are those computed here from the line, whether or not batches divide the rows."""
    for options in ({}, {"eval_rows": 66}, {"preprocess_logits_for_metrics": shift}):
        trainer = make(folder, **LINE, compute_metrics=close_enough, **options)
        results, points = trainer.evaluate(), trainer.eval_dataset
        line, y = 1.5 * points.x + 2.5, points.ys["labels"]
        if bmt.world_size() == 1 or len(points) == 64:  # several ranks fill the last batch up with rows seen before
            assert results["eval_loss"] == pytest.approx(((line - y) ** 2).mean(), abs=1e-5)
        shifted = line + 1 if "preprocess_logits_for_metrics" in options else line
        assert results["eval_accuracy"] == pytest.approx(close_enough((shifted, y))["accuracy"])


class TwoLabels(PlainLine):
    def forward(self, input_x, labels=None, others=None):
        return super().forward(input_x, labels)


def predict(folder):
    for rows in (64, 66):
        trainer = make(folder, **LINE, eval_rows=rows)
        points = trainer.eval_dataset
        result = trainer.predict(points)
        assert result.predictions.shape == (rows,) and close_to(result.predictions, **LINE, x=points.x)
    for names in (["labels"], ["labels", "others"]):
        trainer = make(folder, **LINE, twice=True, model=TwoLabels, label_names=names)
        points = trainer.eval_dataset
        result = trainer.predict(points)
        assert len(result.predictions) == 2
        assert all(close_to(line, **LINE, x=points.x) for line in result.predictions)
        found = result.label_ids if len(names) == 2 else [result.label_ids]
        assert all((ids == points.ys[name]).all() for ids, name in zip(found, names))


class DictLine(PlainLine):
    def forward(self, input_x, labels=None):
        loss, line = super().forward(input_x, labels)
        return {"output": line, "loss": loss}


def eval_use_gather_object(folder):
    trainer = wrapped(
        DictLine(LineConfig(**LINE)), arguments(folder, eval_use_gather_object=True, max_steps=3),
        train_dataset=Points(), eval_dataset=Points(),
    )  # fmt: skip
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    result = trainer.predict(Points())
    assert result.metrics["test_loss"] == pytest.approx(loss, rel=1e-6)
    assert result.predictions.shape == (64,)
