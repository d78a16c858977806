"""The last batch of an evaluation, which Accelerate fills with rows of the first one, where the dataset is a stream or
the loss is the trainer's own. `trainer_usages` compares all other evaluations with one process."""

import pytest
import transformers
from trainer_usages import OwnLoss, Rows, Stream, bert, collate, focal_of_outputs, llama

import hf_bmtrain as bmt
import jobs
from cases import full
from log_lines import log_lines


def evaluated(folder, size, wrapped, given=None, cls=transformers.Trainer, rows=Rows):
    """The loss of an evaluation with a batch of 4 rows in one process, and what is told of it."""
    model = bmt.auto_wrap(llama()) if wrapped else llama()
    args = jobs.arguments(
        folder, per_device_eval_batch_size=4 // bmt.world_size() if wrapped else 4, **(given or {})
    )  # fmt: skip
    callbacks = [bmt.hf.BMTrainCallback()] if wrapped else []
    trainer = cls(model, args=args, data_collator=collate, callbacks=callbacks)
    with log_lines() as lines:
        return trainer.predict(rows("ids", size)).metrics["test_loss"], lines


@full
def test_rows_without_a_number(world, tmp_path):
    loss, _ = evaluated(str(tmp_path / "plain"), 9, False, rows=Stream)
    for ours, _ in world(2)(evaluated, str(tmp_path / "ours"), 9, True, None, transformers.Trainer, Stream):
        assert ours == pytest.approx(loss, rel=1e-5)
    given = {"accelerator_config": {"dispatch_batches": False}}
    told = world(2)(evaluated, str(tmp_path / "ours"), 9, True, given, transformers.Trainer, Stream)[0][-1]
    assert len(told) == 1 and "the dataset has no length" in told[0]


@full
def test_a_loss_of_ones_own_is_told_of(world, tmp_path):
    """Its method might compute with rows of other ranks, so it is not called for some of the rows."""
    results = world(2)(evaluated, str(tmp_path), 9, True, None, OwnLoss)
    assert [len(lines) for _, lines in results] == [1, 0]
    assert "the last evaluation batch has 1 rows for 2 ranks" in results[0][-1][0]
    assert "OwnLoss, or its model, computes losses in its own way" in results[0][-1][0]
    results = world(2)(evaluated, str(tmp_path), 8, True, None, OwnLoss)
    assert [len(lines) for _, lines in results] == [0, 0]


def evaluated_by_function(folder, wrapped):
    """The loss of an evaluation of 10 rows in batches of 8, of which the second of two ranks has none of the last."""
    model = bert("SequenceClassification", num_labels=3)()
    args = jobs.arguments(folder, per_device_eval_batch_size=8 // bmt.world_size() if wrapped else 8)
    trainer = transformers.Trainer(
        bmt.auto_wrap(model) if wrapped else model, args=args, data_collator=collate,
        callbacks=[bmt.hf.BMTrainCallback()] if wrapped else [], compute_loss_func=focal_of_outputs,
    )  # fmt: skip
    with log_lines() as lines:
        return trainer.predict(Rows("class", 10)).metrics["test_loss"], lines


@full
def test_a_loss_function_that_indexes_by_the_labels(world, tmp_path):
    loss, _ = evaluated_by_function(str(tmp_path / "plain"), False)
    for ours, told in world(2)(evaluated_by_function, str(tmp_path / "ours"), True):
        assert ours == pytest.approx(loss, rel=1e-5) and not told
