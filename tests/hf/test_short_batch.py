"""The evaluation loss of several ranks, also after a last batch that Accelerate fills with rows of the first one."""

import logging

import pytest
import torch
import transformers

import hf_bmtrain as bmt
import jobs
from cases import full, in_full
from tiny_models import VOCABULARY, build

BATCH = 4  # of one process
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths, with the labels of a kind of model."""

    def __init__(self, kind, size):
        self.kind, self.size = kind, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = 5 if self.kind == "spans" else 3 + 7 * index % 11  # logits of padding enter the loss of spans
        ids = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(index))
        row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.kind == "numbers":
            return {**row, "labels": torch.tensor(0.1 * index)}
        if self.kind == "spans":
            return {**row, "start_positions": torch.tensor(index % 3), "end_positions": torch.tensor(2)}
        return {**row, "labels": ids}


class Stream(torch.utils.data.IterableDataset):
    """Rows of one length, as Accelerate needs them to send them from rank 0 to the others."""

    def __init__(self, kind, size):
        self.rows = Rows(kind, size)

    def __iter__(self):
        for index in range(self.rows.size):
            yield {name: value[:3] for name, value in self.rows[index].items()}


def collate(rows):
    filled = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filled[name])
        if values[0].ndim
        else torch.stack(values)
        for name, values in columns.items()
    }


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def make(kind):
    if kind in ("numbers", "spans"):
        torch.manual_seed(0)
        config = transformers.BertConfig(**BERT, num_labels=1 if kind == "numbers" else 2)
        return getattr(
            transformers, f"BertFor{'SequenceClassification' if kind == 'numbers' else 'QuestionAnswering'}"
        )(config)
    return build(kind)


def evaluated(folder, kind, size, wrapped, given=None, cls=transformers.Trainer, rows=Rows):
    """Loss and predictions of an evaluation before training, the loss of one in it, and warnings."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hf_bmtrain").addHandler(handler)
    ranks = bmt.world_size() if wrapped else 1
    model = bmt.auto_wrap(make(kind)) if wrapped else make(kind)
    args = jobs.arguments(
        folder, per_device_train_batch_size=BATCH // ranks, per_device_eval_batch_size=BATCH // ranks, max_steps=1,
        learning_rate=0.0, optim="sgd", eval_strategy="steps", eval_steps=1, **(given or {}),
    )  # fmt: skip
    trainer = cls(
        model, args=args, data_collator=collate, train_dataset=Rows(kind, BATCH), eval_dataset=rows(kind, size),
        callbacks=[bmt.hf.BMTrainCallback()] if wrapped else [],
    )  # fmt: skip
    output = trainer.predict(rows(kind, size))
    trainer.train()
    logging.getLogger("hf_bmtrain").removeHandler(handler)
    (inside,) = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    first = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    return output.metrics["test_loss"], inside, first, lines


@pytest.mark.parametrize("size", [9, *in_full(10, 11, 5, 1, 8)])
@pytest.mark.parametrize("kind", ["llama", *in_full("bert", "numbers", "spans")])
def test_as_one_process(world, tmp_path, kind, size):
    loss, inside, predictions, _ = evaluated(str(tmp_path / "plain"), kind, size, False)
    assert loss == inside
    for ours in world(2)(evaluated, str(tmp_path / "ours"), kind, size, True):
        assert ours[:2] == (pytest.approx(loss, rel=1e-5),) * 2
        assert len(ours[2]) == len(predictions) == size
        assert not ours[3]


@full
@pytest.mark.parametrize("given", [{"label_smoothing_factor": 0.3}, {"prediction_loss_only": True}])
def test_arguments(world, tmp_path, given):
    loss, *_ = evaluated(str(tmp_path / "plain"), "llama", 9, False, given)
    for ours in world(2)(evaluated, str(tmp_path / "ours"), "llama", 9, True, given):
        assert ours[:2] == (pytest.approx(loss, rel=1e-5),) * 2


@full
def test_rows_without_a_number(world, tmp_path):
    loss, *_ = evaluated(str(tmp_path / "plain"), "llama", 9, False, rows=Stream)
    for ours in world(2)(evaluated, str(tmp_path / "ours"), "llama", 9, True, None, transformers.Trainer, Stream):
        assert ours[:2] == (pytest.approx(loss, rel=1e-5),) * 2
    given = {"accelerator_config": {"dispatch_batches": False}}
    told = world(2)(evaluated, str(tmp_path / "ours"), "llama", 9, True, given, transformers.Trainer, Stream)[0][-1]
    assert len(told) == 1 and "the dataset has no length" in told[0]


@full
def test_a_loss_of_ones_own_is_told_of(world, tmp_path):
    """Its method might compute with rows of other ranks, so it is not called for some of the rows."""
    results = world(2)(evaluated, str(tmp_path), "llama", 9, True, None, OwnLoss)
    assert [len(lines) for *_, lines in results] == [1, 0]
    assert "the last evaluation batch has 1 rows for 2 ranks" in results[0][-1][0]
    assert "OwnLoss, or its model, computes losses in its own way" in results[0][-1][0]
    results = world(2)(evaluated, str(tmp_path), "llama", 8, True, None, OwnLoss)
    assert [len(lines) for *_, lines in results] == [0, 0]
