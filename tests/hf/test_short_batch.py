"""The last batch of an evaluation, which Accelerate fills with rows of the first one, where the dataset is a stream or
the loss is the trainer's own. `trainer_usages` compares all other evaluations with one process."""

import pytest
import torch
import transformers
from trainer_usages import OwnLoss, Rows, Stream, bert, collate, focal_of_outputs, llama, t5

import hf_bmtrain as bmt
import jobs
from cases import full, rows_in_full
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


class Listed(transformers.Trainer):
    """Gets a list of rows as a batch, as TRL's GRPOTrainer does, and makes tensors of them itself."""

    def __init__(self, *args, data_collator, **options):
        super().__init__(*args, data_collator=self.batch, **options)

    def batch(self, rows):
        return [{"text": "", **row} for row in rows]

    def compute_loss(self, model, inputs, **options):
        rows = [{name: value for name, value in row.items() if name != "text"} for row in inputs]
        return super().compute_loss(model, collate(rows), **options)

    def prediction_step(self, model, inputs, *args, **options):
        with torch.no_grad():
            return self.compute_loss(model, inputs).detach(), None, None


class Named(Listed):
    """Gets a list of texts beside the tensors, and before them."""

    def batch(self, rows):
        return {"text": ["" for _ in rows], **collate(rows)}

    def compute_loss(self, model, inputs, **options):
        tensors = {name: value for name, value in inputs.items() if name != "text"}
        return transformers.Trainer.compute_loss(self, model, tensors, **options)


class Unsized(transformers.Trainer):
    """Reads its rows in order, from a sampler that does not tell their number."""

    def _get_train_sampler(self, dataset=None):
        return map(int, range(len(self.train_dataset)))


def trained(folder, size, cls, max_steps=-1):
    args = jobs.arguments(
        folder, per_device_train_batch_size=4 // bmt.world_size(), max_steps=max_steps, num_train_epochs=1
    )
    callbacks = [bmt.hf.BMTrainCallback()]
    trainer = cls(
        bmt.auto_wrap(llama()), args=args, data_collator=collate, train_dataset=Rows("ids", size), callbacks=callbacks
    )
    with log_lines() as lines:
        trainer.train()
    return lines


def told_in_evaluation(folder, size, cls):
    return evaluated(folder, size, True, cls=cls)[1]


def test_batches_with_lists(world, tmp_path):
    both = [trained, told_in_evaluation]
    for size, cls, told in [(8, Listed, []), (10, Listed, both), (10, Named, both[1:])]:
        for number, function in enumerate(both):
            first, second = world(2)(function, str(tmp_path / f"{cls.__name__}-{size}-{number}"), size, cls)
            assert ["has 2 rows for 2 ranks" in line for line in first] == [True] * (function in told) and not second


def generated(folder):
    """What prediction_step generates with an option of `generate`, after an evaluation."""
    args = transformers.Seq2SeqTrainingArguments(
        folder, per_device_eval_batch_size=2, predict_with_generate=True, report_to=[], use_cpu=True, disable_tqdm=True
    )
    ids = torch.arange(1, 9).view(2, 4)
    rows = [{"input_ids": row, "labels": row} for row in ids.tolist()] * 2
    callbacks = [bmt.hf.BMTrainCallback()]
    trainer = transformers.Seq2SeqTrainer(bmt.auto_wrap(t5()), args, eval_dataset=rows, callbacks=callbacks)
    trainer.evaluate()
    batch = {"input_ids": ids, "labels": ids}
    return trainer.prediction_step(trainer.model, batch, False, min_new_tokens=9, max_new_tokens=9)[1].shape


@full
def test_options_of_generate(world, tmp_path):
    assert world(2)(generated, str(tmp_path)) == [(2, 10)] * 2  # the start token and nine more


@full
def test_training_rows_without_a_number(world, tmp_path):
    first, second = world(2)(trained, str(tmp_path), 10, Unsized, 3)
    assert len(first) == 1 and "has perhaps too few rows for 2 ranks" in first[0] and not second
    assert "the dataset has no length" in first[0]


@full
def test_rows_without_a_number(world, tmp_path):
    for size in (9, 10):  # of 10, each rank has one of the last two rows, and none is repeated
        loss, _ = evaluated(str(tmp_path / "plain"), size, False, rows=Stream)
        for ours, _ in world(2)(evaluated, str(tmp_path / "ours"), size, True, None, transformers.Trainer, Stream):
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


class LooksAtABatch(transformers.TrainerCallback):
    """Reads one evaluation batch during training, on the ranks `ranks`, and keeps the data loader or drops it.

    keep: or "training": reads a training batch before training, from the Trainer's own data loader.
    """

    def __init__(self, ranks, keep):
        self.ranks, self.keep, self.kept, self.trainer = ranks, keep, None, None

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        if self.keep == "training" and bmt.rank() in self.ranks:
            next(iter(train_dataloader))

    def on_step_begin(self, args, state, control, **kwargs):
        if self.keep != "training" and state.global_step in (0, 4) and bmt.rank() in self.ranks:
            loader = self.trainer.get_eval_dataloader()
            next(iter(loader))
            self.kept = loader if self.keep else None


def trained_looking(folder, ranks, keep, resume=None):
    """The log of two epochs of 18 rows, 8 in a step: only one rank has rows of the last."""
    callback = LooksAtABatch(ranks, keep)
    trainer = transformers.Trainer(
        bmt.auto_wrap(llama()), data_collator=collate, train_dataset=Rows("ids", 18), eval_dataset=Rows("ids", 3, 1),
        callbacks=[callback, bmt.hf.BMTrainCallback()],
        args=jobs.arguments(
            folder, per_device_train_batch_size=4, max_steps=6, optim="sgd", per_device_eval_batch_size=2,
            save_strategy="steps", save_steps=4, include_num_input_tokens_seen="non_padding",
        ),
    )  # fmt: skip
    callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return jobs.losses(trainer.state.log_history, "grad_norm"), trainer.state.num_input_tokens_seen


@pytest.mark.parametrize(
    ("ranks", "keep"),
    [
        ((0, 1), True),
        *rows_in_full([((0, 1), False), ((1,), True), ((0, 1), "training")]),
    ],
)
def test_an_evaluation_batch_read_during_training(world, tmp_path, ranks, keep):
    """Its data loader passes for the one that is read, but the training batches are those of another."""
    expected = world(2)(trained_looking, str(tmp_path / "other"), (), keep)
    assert world(2)(trained_looking, str(tmp_path), ranks, keep) == expected
    resumed = world(2)(trained_looking, str(tmp_path), ranks, keep, str(tmp_path / "checkpoint-4"))
    assert resumed == expected
