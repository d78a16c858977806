"""Stock Trainer on two ranks against one process, with short last batches. `python tests trainer_usages` lists all."""

import re

import pytest
import torch
import transformers
from trainer_usages import USAGES, Normed, OwnLoss, Rows, Stream, bert, collate, judge, llama, run

import hf_bmtrain as bmt
import jobs
from cases import full
from log_lines import log_lines

# Of EncoderDecoderModel.
pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces a better way:FutureWarning")

DEFAULT = (
    "causal, the second rank has no row left", "classes, no row left", "generation", "masked words",
    "masked mean of one's own, no row left", "own model, a mean", "own loss_function, a mean",
    "compute_loss_func, a mean", "regression to -100, no row left", "segmentation, no row left",
    "tokens and next sentences", "compute_loss_func, a sum, no row left", "passes the count on, a mean",
    "causal, does not shift", "a layer computes the mean",
)  # fmt: skip
IN_FULL = (
    "causal, accumulated", "label smoothing", "regression, no row left", "token classes, no row left",
    "questions, no row left", "CTC, no row left", "generation, no row left", "batch_eval_metrics",
    "tokens seen, no row left", "stream, tokens seen", "split_batches", "two epochs, evaluated and saved",
    "images and numbers", "masked words, accumulated", "loss in an attribute", "forward calls super",
    "not of transformers", "passes no count", "the last step is not logged", "outputs as tuples",
    "masked mean of one's own", "loss by label, no row left", "loss by label, counted, no row left",
    "own model, a mean, no row left", "own model, names the count", "own model, some ranks use the count",
    "own model, subclass with another loss", "own model, divides by a copy of the count",
    "own model, shifted labels, no row left", "shifted labels, no row left", "shifted labels",
    "own loss_function, a sum", "compute_loss_func, a sum",
    "regression to -100", "segmentation", "segmentation, one class", "classes of allowed tokens",
    "tokens and order of sentences", "token classes, a rank without any", "compute_loss_func, a mean, no row left",
    "compute_loss_func, a sum, accumulated", "compute_loss_func, forward without keywords, no row left",
    "shifts, not by its name",
)  # fmt: skip


def case(name):
    mark = () if name in DEFAULT else full if name in IN_FULL else pytest.mark.slow
    return pytest.param(name, marks=mark, id=name.replace(" ", "_"))


@pytest.mark.parametrize("name", [*map(case, USAGES)])
def test_as_one_process(world, tmp_path, name):
    assert not judge(world(2), run, name, str(tmp_path))


class OwnSquares(transformers.Trainer):
    """A loss that would take a label of -100 as a number."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return (model(inputs["input_ids"]).logits[:, 0] - inputs["labels"]).square().mean()


class OwnFocal(transformers.Trainer):
    """A loss for which a label of -100 is out of range."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chances = model(inputs["input_ids"]).logits.softmax(-1).gather(1, inputs["labels"][:, None])
        return -((1 - chances) ** 2 * chances.log()).mean()


MODELS = {"ids": llama, "spans": bert("QuestionAnswering"), "class": bert("SequenceClassification", num_labels=3),
          "number": bert("SequenceClassification", num_labels=1)}  # fmt: skip


def warnings_of(folder, cls, labels, rows, given, make=None):
    """What is said of the training batches of two epochs, with the loss of the first short one."""
    model = (make or MODELS[labels])()
    args = jobs.arguments(folder, per_device_train_batch_size=4, optim="sgd", max_steps=6, seed=7, **given)
    trainer = cls(
        model=bmt.auto_wrap(model), args=args, train_dataset=rows(labels, 18), data_collator=collate,
        callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    with log_lines() as lines:
        trainer.train()
    return [line for line in lines if "training batch" in line], trainer.state.log_history[2]["loss"]


@full
@pytest.mark.parametrize(
    ("cls", "labels", "rows", "given", "reason"),
    [
        (OwnLoss, "spans", Rows, {}, "has 2 rows for 2 ranks.*OwnLoss, or its model, computes losses in its own way"),
        (transformers.Trainer, "ids", Rows, {"average_tokens_across_devices": False}, "a mean over its own labels"),
        (
            transformers.Trainer, "ids", Stream, {"accelerator_config": {"dispatch_batches": False}},
            "perhaps too few.*the dataset has no length",
        ),
        (OwnSquares, "number", Rows, {}, "OwnSquares, or its model, computes losses in its own way"),
        (OwnFocal, "class", Rows, {}, "OwnFocal, or its model, computes losses in its own way"),
        (OwnLoss, "ids", Rows, {}, None),  # it gets labels that are ignored
    ],
)  # fmt: skip
def test_what_cannot_be_left_out_is_told_once(world, tmp_path, cls, labels, rows, given, reason):
    (lines, loss), (others, _) = world(2)(warnings_of, str(tmp_path), cls, labels, rows, given)
    assert not others and len(lines) == (reason is not None)
    assert loss < 10
    assert reason is None or re.search(reason, lines[0])
    if reason is None:
        assert loss == pytest.approx(world(2)(warnings_of, str(tmp_path), transformers.Trainer, labels, rows, {})[0][1])


@full
def test_batch_norm_keeps_its_full_batch(world, tmp_path):
    """Of the last batch, the second rank has no row of its own."""
    (lines, loss), (others, _) = world(2)(warnings_of, str(tmp_path), transformers.Trainer, "class", Rows, {}, Normed)
    assert not others and len(lines) == 1
    assert "the model has batch norm, which cannot train with a single row on a rank" in lines[0]
    assert loss < 10


class OwnLoader(transformers.Trainer):
    """Reads its rows by a DataLoader that Accelerate has not prepared."""

    sampled = False

    def get_train_dataloader(self):
        rows = self.train_dataset
        sampler = torch.utils.data.DistributedSampler(rows, bmt.world_size(), bmt.rank()) if self.sampled else None
        return torch.utils.data.DataLoader(rows, self._train_batch_size, sampler=sampler, collate_fn=collate)


class SampledLoader(OwnLoader):
    sampled = True


def warnings_of_loader(folder, cls):
    """What is said when `cls` trains."""
    trainer = cls(
        model=bmt.auto_wrap(llama()), args=jobs.arguments(folder, per_device_train_batch_size=4, max_steps=1),
        train_dataset=Rows("ids", 16), data_collator=collate, callbacks=[bmt.hf.BMTrainCallback()],
    )  # fmt: skip
    with log_lines() as lines:
        trainer.train()
    return [line for line in lines if "same first batch" in line]


def test_a_loader_that_gives_all_ranks_the_same_rows(world, tmp_path):
    for number, (cls, told) in enumerate([(OwnLoader, 1), (SampledLoader, 0)]):
        results = world(2)(warnings_of_loader, str(tmp_path / str(number)), cls)
        assert [len(lines) for lines in results] == [told, 0]
