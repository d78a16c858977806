"""What users do with Trainer and its relatives on two ranks, a row each: `python tests trainer_usages` lists them.

The truth is plain Trainer in one process with the same global batches. The rows of a dataset are no multiple of them,
so the last batch of an epoch and of an evaluation is short. A weight may differ by 2e-5 of the largest movement, and a
logged number or a prediction by 1e-4.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import transformers

import hf_bmtrain as bmt
import jobs
from tiny_models import VOCABULARY, build

BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SIZE = 21
"""Rows of a dataset. With global batches of 8 the last one has 5, of which the second of two ranks has one."""


@dataclass(frozen=True)
class Usage:
    """model: makes one. labels: the kind of rows. given: TrainingArguments; batch sizes are those of one process.

    options: of the Trainer. rows, evaluated: sizes of the datasets. alike: batch sizes are those of all ranks.
    """

    model: Callable[[], torch.nn.Module]
    labels: str = "ids"
    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    cls: Any = transformers.Trainer
    rows: int = SIZE
    evaluated: int = 11
    stream: bool = False
    alike: bool = False


class Rows(torch.utils.data.Dataset):
    """Rows of different lengths, with labels of a kind."""

    def __init__(self, labels: str, size: int, seed: int = 0) -> None:
        self.rows = [row_of(labels, index, seed) for index in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(self.rows[index])


class Stream(torch.utils.data.IterableDataset):
    """The same rows without a number, of one length, which Accelerate requires of them."""

    def __init__(self, labels: str, size: int, seed: int = 0) -> None:
        self.rows = [{name: value[:3] for name, value in row.items()} for row in Rows(labels, size, seed).rows]

    def __iter__(self):
        return iter(map(dict, self.rows))


def row_of(labels: str, index: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    if labels == "sound":
        ids = torch.randint(1, 9, (2 + index % 3,), generator=generator)
        return {"input_values": torch.randn(400, generator=generator), "labels": ids}
    if labels in ("image", "image and number"):
        label = torch.tensor(index % 3 if labels == "image" else 0.1 * index)
        return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": label}
    if labels == "pixels":
        label = torch.randint(0, 3, (16, 16), generator=generator)
        label[: index % 16] = 255
        return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": label}
    length = 6 if labels in ("spans", "ids of one length", "masked classes") else 4 + 7 * index % 5
    ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
    row = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if labels == "shifted ids":  # aligned with the logits; none predicts what a different number of labels hides
        shifted = torch.where(torch.arange(length) < 1 + index % length, ids, -100)
        return {**row, "labels": ids, "shift_labels": shifted}
    if labels in ("ids", "ids of one length"):
        return {**row, "labels": ids}
    if labels == "target":
        return {**row, "labels": torch.randint(1, VOCABULARY, (3 + index % 2,), generator=generator)}
    if labels == "class":
        return {**row, "labels": torch.tensor(index % 3)}
    if labels == "number":
        return {**row, "labels": torch.tensor(0.1 * index)}
    if labels == "number of -100":
        return {**row, "labels": torch.tensor(-100.0 if index % 3 == 0 else -0.1 * index)}
    if labels == "tags in most rows":
        return {**row, "labels": torch.where(torch.tensor(index % 7 == 1), -100, ids % 3)}
    if labels == "masked classes":
        return {**row, "attention_mask": (torch.arange(length) <= index % length).long(), "labels": ids % 2}
    if labels.endswith("_label"):
        tags = torch.where(torch.arange(length) < 1 + index % length, ids, -100)
        return {**row, "labels": tags, labels: torch.tensor(int(index % 3 == 0))}
    if labels == "several":
        return {**row, "labels": (torch.arange(3) < index % 4).float()}
    if labels == "tags":
        return {**row, "labels": torch.where(ids % 3 == 0, -100, ids % 3)}
    assert labels == "spans"
    return {**row, "start_positions": torch.tensor(index % 3), "end_positions": torch.tensor(3)}


FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100, "shift_labels": -100}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=FILL[name])
        if name in FILL and values[0].ndim == 1
        else torch.stack(values)
        for name, values in columns.items()
    }


def run(name: str, wrapped: bool, folder: str) -> dict[str, Any]:
    """What a usage logs, predicts and ends with."""
    usage = USAGES[name]
    size = bmt.world_size() if wrapped else 1
    torch.manual_seed(0)
    model = usage.model()
    given = {
        "max_steps": -1, "num_train_epochs": 1, "optim": "sgd", "max_grad_norm": 1e9, "seed": 7, **usage.given,
    }  # fmt: skip
    for each in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        given[each] = given.get(each, 8) // (1 if usage.alike else size)
    start = jobs.weights(model)
    dataset = Stream if usage.stream else Rows
    model = bmt.auto_wrap(model) if wrapped else model
    options = {name: value() if name == "compute_metrics" else value for name, value in usage.options.items()}
    trainer = usage.cls(
        model=model, args=jobs.arguments(folder, **given), train_dataset=dataset(usage.labels, usage.rows),
        eval_dataset=Rows(usage.labels, usage.evaluated, 1), data_collator=collate,
        callbacks=[bmt.hf.BMTrainCallback()] if wrapped else [], **options,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    predicted = trainer.predict(Rows(usage.labels, usage.evaluated, 2))
    return {
        "predictions": without_padding(predicted.predictions, predicted.label_ids), "label_ids": predicted.label_ids,
        "logged": [timeless(each) for each in [*trainer.state.log_history, predicted.metrics]],
        "moved": (start, jobs.weights(trainer.model)), "tokens": trainer.state.num_input_tokens_seen,
        "steps": trainer.state.global_step,
    }  # fmt: skip


def without_padding(predictions: Any, labels: Any) -> Any:
    """Zero where labels are ignored: Trainer fills the shorter batches of a rank with -100."""
    if isinstance(predictions, tuple):
        return tuple(without_padding(each, labels) for each in predictions)
    if not isinstance(labels, numpy.ndarray) or predictions.shape[:-1] != labels.shape or labels.ndim != 2:
        return predictions
    return numpy.where((labels != -100)[..., None], predictions, 0)


OURS = ("runtime", "per_second", "per_device", "memory_gib", "preparation_time", "total_flos")


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(OURS)}


def difference(ours: dict[str, Any], plain: dict[str, Any]) -> str:
    """What differs, and by how much; empty if nothing does."""
    found = []
    start, end = plain["moved"]
    moved = max((end[name] - start[name]).abs().max().item() for name in start if end[name].is_floating_point())
    apart, worst = max(
        (
            (ours["moved"][1][name] - end[name]).abs().max().item()
            if end[name].shape == ours["moved"][1][name].shape
            else math.inf,
            name,
        )
        for name in end
    )
    if not apart <= 2e-5 * moved:
        found.append(f"weights: {worst} by {100 * apart / moved:.2g} % of a movement of {moved:.2g}")
    for mine, theirs in zip(ours["logged"], plain["logged"]):
        if mine.keys() != theirs.keys():
            found.append(f"log: {mine.keys() ^ theirs.keys()}")
        found += [
            f"{name}: {mine[name]} for {theirs[name]}"
            for name in theirs
            if name in mine and not close(mine[name], theirs[name])
        ]
    if len(ours["logged"]) != len(plain["logged"]):
        found.append(f"{len(ours['logged'])} log entries for {len(plain['logged'])}")
    for name in plain:
        if name not in ("moved", "logged") and not close(ours[name], plain[name]):
            found.append(f"{name}: {describe(ours[name])} for {describe(plain[name])}")
    return "; ".join(found)


def describe(value: Any) -> str:
    if isinstance(value, numpy.ndarray):
        return f"{value.shape} {value.reshape(-1)[:4]}"
    return str(value)[:80]


def close(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(close, mine, theirs))
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(close(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, (str, type(None))):
        return mine == theirs
    mine, theirs = torch.as_tensor(mine).double(), torch.as_tensor(theirs).double()
    if mine.shape != theirs.shape:
        return False
    return bool(((mine - theirs).abs() <= 1e-4 * theirs.abs().max().clamp_min(1e-6)).all()) if theirs.numel() else True


# -- the rows -----------------------------------------------------------------------------------------------------


def bert(head: str, **options: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**BERT, **options))

    return make


def llama() -> torch.nn.Module:
    return build("llama")


def t5() -> torch.nn.Module:
    model = build("t5")
    model.generation_config.max_length = 8
    return model


def two_berts() -> torch.nn.Module:
    """Its forward passes the number of labels to the decoder, and computes a mean itself."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)
    both.decoder_start_token_id = both.pad_token_id = 0
    return transformers.EncoderDecoderModel(config=both)


def xlm() -> torch.nn.Module:
    """Its last layer computes the loss, a mean."""
    torch.manual_seed(0)
    config = transformers.XLMConfig(
        vocab_size=VOCABULARY, emb_dim=24, n_layers=2, n_heads=3, dropout=0.0, attention_dropout=0.0,
        max_position_embeddings=16,
    )  # fmt: skip
    return transformers.XLMWithLMHeadModel(config)


def trocr() -> torch.nn.Module:
    """A causal model whose labels are shifted already, although Trainer leaves out the first one."""
    torch.manual_seed(0)
    config = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=24, decoder_layers=2, decoder_attention_heads=3, decoder_ffn_dim=40, dropout=0.0
    )
    return transformers.TrOCRForCausalLM(config)


def imagegpt() -> torch.nn.Module:
    """It leaves out the first label of each row, although Trainer counts it."""
    torch.manual_seed(0)
    config = transformers.ImageGPTConfig(
        vocab_size=VOCABULARY + 1, n_positions=16, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.ImageGPTForCausalImageModeling(config)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


class MaskedMean(transformers.Trainer):
    """A mean over this rank's labels, without num_items_in_batch; nan, as its gradients are, where all are ignored."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        labels = inputs["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels.clamp_min(0), reduction="none"
        )
        loss = (losses * (labels != -100)).sum() / (labels != -100).sum()
        return (loss, outputs) if return_outputs else loss


class UncountedMean(MaskedMean):
    """The same, where num_items_in_batch is among other arguments."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs)


class CallsSuper(transformers.BertForSequenceClassification):
    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)


class Bare(torch.nn.Module):
    """Not of transformers; its loss is a function of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 24), torch.nn.Linear(24, 3)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(24, 24) for _ in range(2)])

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        logits = self.head((hidden * attention_mask[..., None]).sum(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def bare() -> torch.nn.Module:
    torch.manual_seed(0)
    return Bare()


class Unlabelled(Bare):
    """Computes no loss, and takes no other keyword arguments."""

    def forward(self, input_ids, attention_mask):
        return {"logits": super().forward(input_ids, attention_mask, input_ids.new_zeros(len(input_ids)))["logits"]}


class Focal(Bare):
    """Its loss indexes by the labels, so a label of -100 is out of range. It takes no num_items_in_batch."""

    def forward(self, input_ids, attention_mask, labels=None):
        logits = super().forward(input_ids, attention_mask, torch.zeros_like(labels))["logits"]
        return {"loss": focal(logits, labels).mean(), "logits": logits}


class CountedFocal(Focal):
    """The same, where Trainer counts the labels."""

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels)


class Normed(Bare):
    """Its batch norm cannot train with a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.norm(super().forward(input_ids, attention_mask, labels)["logits"])
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The focal loss of each row."""
    chances = logits.softmax(-1).gather(1, labels[:, None])
    return -((1 - chances) ** 2) * chances.log()


def focal_of_outputs(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
    """A `compute_loss_func`."""
    return focal(outputs["logits"], labels).sum() / num_items_in_batch


def mean_of_outputs(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func` with the signature that Trainer's documentation gives, which ignores the number."""
    return focal(outputs["logits"], labels).mean()


def mean_over_labels(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    """A `loss_function` of a causal model with the signature of transformers' own, which ignores the number."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sum_over_labels(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
    """The same, which uses it."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    ) / int(num_items_in_batch)


def llama_with(loss_function: Callable) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        model: Any = llama()
        model.loss_function = loss_function
        return model

    return make


class OwnMean(transformers.BertPreTrainedModel):
    """A model of the user, whose code has no name of a loss, and passes the number of labels on to all layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.out = transformers.BertModel(config), torch.nn.Linear(24, 3)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.out(self.bert(input_ids, attention_mask, **kwargs)[1])
        return {
            "loss": self.reduce(-logits.log_softmax(-1).gather(1, labels[:, None]), labels, kwargs),
            "logits": logits,
        }

    def reduce(self, losses, labels, kwargs):
        return losses.mean()


class IgnoresCount(OwnMean):
    """The same, which names the number, but does not use it."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels)


class OwnSum(OwnMean):
    """A sum over the labels of one class, which uses the number only on ranks that have such labels."""

    def reduce(self, losses, labels, kwargs):
        chosen = labels == 2
        return losses[chosen].sum() / kwargs["num_items_in_batch"] if chosen.any() else losses.sum() * 0


class OwnCopied(OwnMean):
    """A sum over the labels, divided by a copy of the number, of which torch tells nothing by `__torch_function__`."""

    def reduce(self, losses, labels, kwargs):
        return losses.sum() / losses.new_tensor(kwargs["num_items_in_batch"])


class MeanForCausalLM(transformers.LlamaForCausalLM):
    """A subclass that replaces the loss."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs: Any = super().forward(input_ids, attention_mask, **kwargs)
        outputs["loss"] = mean_over_labels(outputs.logits, labels, VOCABULARY)
        return outputs


class ShiftedForCausalLM(transformers.LlamaForCausalLM):
    """A mean over labels that the batch contains shifted already."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, shift_labels=None, **kwargs):
        outputs: Any = super().forward(input_ids, attention_mask, **kwargs)
        assert shift_labels is not None
        outputs["loss"] = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), shift_labels.flatten())
        return outputs


def own(cls: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        causal = issubclass(cls, transformers.LlamaPreTrainedModel)
        return cls(llama().config if causal else transformers.BertConfig(**BERT))

    return make


def calls_super() -> torch.nn.Module:
    torch.manual_seed(0)
    return CallsSuper(transformers.BertConfig(**BERT, num_labels=3))


def distilbert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=24, n_layers=2, n_heads=3, hidden_dim=40, dropout=0.0, attention_dropout=0.0
    )
    return transformers.DistilBertForMaskedLM(config)


def llama_of_classes() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForSequenceClassification(config)


def ctc(layerdrop: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=10, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0, final_dropout=0.0, layerdrop=layerdrop,
        mask_time_prob=0.0, mask_feature_prob=0.0, ctc_loss_reduction="mean", num_feat_extract_layers=2,
    )  # fmt: skip
    return transformers.Wav2Vec2ForCTC(config)


def electra() -> torch.nn.Module:
    torch.manual_seed(0)
    return transformers.ElectraForPreTraining(transformers.ElectraConfig(**BERT, embedding_size=24))


def albert() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(**BERT, embedding_size=24, classifier_dropout_prob=0.0)
    return transformers.AlbertForPreTraining(config)


def segformer(num_labels: int = 3) -> torch.nn.Module:
    """Without batch norm, in which each rank would take the mean of its own rows."""
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[1, 1], hidden_sizes=[16, 16], patch_sizes=[3, 3],
        strides=[2, 2], num_attention_heads=[1, 1], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=num_labels,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)
    model.decode_head.batch_norm = torch.nn.Identity()
    return model


def vit(num_labels: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        num_labels=num_labels, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Metrics:
    """Sums over what compute_metrics gets; in batches, too."""

    def __init__(self) -> None:
        self.seen = 0.0

    def __call__(self, given: Any, compute_result: bool = True) -> dict[str, float]:
        found = without_padding(
            *(
                numpy.asarray(each) if isinstance(each, torch.Tensor) else each
                for each in (given.predictions, given.label_ids)
            )
        )
        first = found[0] if isinstance(found, tuple) else found
        self.seen += float(numpy.abs(numpy.asarray(first, dtype=numpy.float64)).sum())
        extra = {}
        if given.inputs is not None and not isinstance(given.inputs, dict):
            extra["rows_of_inputs"] = len(given.inputs)
        if given.losses is not None:
            extra["losses"] = len(given.losses)
        return {"sum": self.seen, "rows": len(first), **extra} if compute_result else {}


STEPS = {"eval_strategy": "steps", "eval_steps": 1}
TOKENS = {"include_num_input_tokens_seen": "non_padding"}
ALL_TOKENS = {"include_num_input_tokens_seen": "all"}
GENERATE = {"predict_with_generate": True, **STEPS}
NOT_GENERATED = {"predict_with_generate": False}
SEQ2SEQ = transformers.Seq2SeqTrainer
WITH_METRICS = {"compute_metrics": Metrics}

USAGES: dict[str, Usage] = {
    "causal": Usage(llama),
    "causal, the second rank has no row left": Usage(llama, rows=18),
    "causal, accumulated": Usage(llama, given={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "causal, accumulated, no row left": Usage(
        llama, rows=18, given={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    ),
    "label smoothing": Usage(llama, given={"label_smoothing_factor": 0.2, **STEPS}),
    "label smoothing of classes": Usage(
        bert("SequenceClassification", num_labels=3), "class", given={"label_smoothing_factor": 0.2, **STEPS}
    ),
    "classes": Usage(bert("SequenceClassification", num_labels=3), "class", STEPS, WITH_METRICS),
    "classes, no row left": Usage(bert("SequenceClassification", num_labels=3), "class", STEPS, rows=17),
    "regression": Usage(bert("SequenceClassification", num_labels=1), "number", STEPS),
    "regression, no row left": Usage(bert("SequenceClassification", num_labels=1), "number", STEPS, rows=17),
    "regression to -100": Usage(bert("SequenceClassification", num_labels=1), "number of -100", STEPS),
    "regression to -100, no row left": Usage(
        bert("SequenceClassification", num_labels=1), "number of -100", STEPS, rows=17
    ),
    "segmentation": Usage(segformer, "pixels", STEPS),
    "segmentation, no row left": Usage(segformer, "pixels", STEPS, rows=17, evaluated=9),
    "segmentation, one class": Usage(lambda: segformer(1), "pixels", STEPS),
    "classes of allowed tokens": Usage(electra, "masked classes", STEPS),
    "tokens and next sentences": Usage(bert("PreTraining"), "next_sentence_label", STEPS, rows=17),
    "tokens and order of sentences": Usage(albert, "sentence_order_label", STEPS),
    "token classes, a rank without any": Usage(
        bert("TokenClassification", num_labels=3), "tags in most rows", {**STEPS, "per_device_train_batch_size": 2}
    ),
    "multi-label": Usage(
        bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"), "several", STEPS
    ),
    "multi-label, no row left": Usage(
        bert("SequenceClassification", num_labels=3, problem_type="multi_label_classification"),
        "several",
        STEPS,
        rows=20,
    ),
    "token classes": Usage(bert("TokenClassification", num_labels=3), "tags", STEPS, WITH_METRICS),
    "token classes, no row left": Usage(bert("TokenClassification", num_labels=3), "tags", STEPS, rows=18),
    "questions": Usage(bert("QuestionAnswering"), "spans", STEPS),
    "questions, no row left": Usage(bert("QuestionAnswering"), "spans", STEPS, rows=18),
    "CTC": Usage(ctc, "sound", STEPS, rows=21),
    "CTC, no row left": Usage(ctc, "sound", STEPS, rows=18),
    "images": Usage(vit, "image", STEPS),
    "images and numbers": Usage(lambda: vit(1), "image and number"),
    "masked words": Usage(bert("MaskedLM")),
    "masked words, accumulated": Usage(
        bert("MaskedLM"), given={"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ),
    "loss in an attribute": Usage(distilbert),
    "masked mean of one's own": Usage(llama, "ids of one length", cls=UncountedMean, evaluated=8),
    "masked mean of one's own, no row left": Usage(llama, "ids of one length", cls=MaskedMean, rows=18, evaluated=8),
    "loss by label, no row left": Usage(Focal, "class", STEPS, rows=18, evaluated=10),
    "loss by label, counted, no row left": Usage(CountedFocal, "class", STEPS, rows=18, evaluated=10),
    "forward calls super": Usage(calls_super, "class"),
    "not of transformers": Usage(bare, "class"),
    "own model, a mean": Usage(own(OwnMean), "class", STEPS),
    "own model, a mean, no row left": Usage(own(OwnMean), "class", STEPS, rows=18),
    "own model, names the count": Usage(own(IgnoresCount), "class", STEPS),
    "own model, some ranks use the count": Usage(own(OwnSum), "class", {**STEPS, "per_device_train_batch_size": 4}),
    "own model, divides by a copy of the count": Usage(
        own(OwnCopied), "class", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    ),
    "own model, subclass with another loss": Usage(own(MeanForCausalLM), "ids", STEPS),
    "own model, shifted labels, no row left": Usage(own(ShiftedForCausalLM), "shifted ids", STEPS, rows=18),
    "shifted labels": Usage(llama, "shifted ids", {**STEPS, "remove_unused_columns": False}),
    "shifted labels, no row left": Usage(
        llama, "shifted ids", {**STEPS, "remove_unused_columns": False}, rows=18, evaluated=10
    ),
    "own loss_function, a mean": Usage(llama_with(mean_over_labels), "ids", STEPS),
    "own loss_function, a sum": Usage(llama_with(sum_over_labels), "ids", STEPS),
    "compute_loss_func, a mean": Usage(
        bert("SequenceClassification", num_labels=3), "class", STEPS, {"compute_loss_func": mean_of_outputs}, rows=16
    ),
    "compute_loss_func, a sum": Usage(
        bert("SequenceClassification", num_labels=3), "class", STEPS, {"compute_loss_func": focal_of_outputs}, rows=16
    ),
    "compute_loss_func, a mean, no row left": Usage(
        bert("SequenceClassification", num_labels=3), "class", STEPS, {"compute_loss_func": mean_of_outputs}, rows=18
    ),
    "compute_loss_func, a sum, no row left": Usage(
        bert("SequenceClassification", num_labels=3), "class", STEPS, {"compute_loss_func": focal_of_outputs}, rows=18
    ),
    "compute_loss_func, a sum, accumulated": Usage(
        bert("SequenceClassification", num_labels=3),
        "class",
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"compute_loss_func": focal_of_outputs},
        rows=21,
    ),
    "compute_loss_func, forward without keywords, no row left": Usage(
        Unlabelled, "class", {"label_names": ["labels"]}, {"compute_loss_func": focal_of_outputs}, rows=18
    ),
    "passes no count": Usage(llama_of_classes, "class"),
    "passes the count on, a mean": Usage(two_berts, "target", STEPS),
    "a layer computes the mean": Usage(xlm, "ids", STEPS),
    "causal, does not shift": Usage(trocr, "ids", STEPS, rows=16),
    "shifts, not by its name": Usage(imagegpt, "ids", STEPS, rows=16),
    "encoder-decoder": Usage(t5, "target", {**STEPS, **NOT_GENERATED}, cls=SEQ2SEQ),
    "generation": Usage(t5, "target", GENERATE, WITH_METRICS, cls=SEQ2SEQ),
    "generation, beams": Usage(
        t5, "target", {**GENERATE, "generation_num_beams": 2, "generation_max_length": 6}, cls=SEQ2SEQ
    ),
    "generation, no row left": Usage(t5, "target", GENERATE, WITH_METRICS, cls=SEQ2SEQ, evaluated=10),
    "generation, one row": Usage(t5, "target", GENERATE, WITH_METRICS, cls=SEQ2SEQ, evaluated=1),
    "generation, eval_accumulation_steps": Usage(
        t5, "target", {**GENERATE, "eval_accumulation_steps": 1}, WITH_METRICS, cls=SEQ2SEQ
    ),
    "eval_accumulation_steps": Usage(llama, given={**STEPS, "eval_accumulation_steps": 1}, options=WITH_METRICS),
    "batch_eval_metrics": Usage(llama, given={**STEPS, "batch_eval_metrics": True}, options=WITH_METRICS),
    "include_for_metrics": Usage(
        llama, given={**STEPS, "include_for_metrics": ["inputs", "loss"]}, options=WITH_METRICS
    ),
    "eval_do_concat_batches=False": Usage(
        bert("SequenceClassification", num_labels=3), "class", {**STEPS, "eval_do_concat_batches": False}
    ),
    "nested outputs": Usage(
        bert("SequenceClassification", num_labels=3, output_hidden_states=True), "class", STEPS, rows=16
    ),
    "label_names": Usage(
        bert("QuestionAnswering"), "spans", {**STEPS, "label_names": ["start_positions", "end_positions"]}, WITH_METRICS
    ),
    "tokens seen, without padding": Usage(llama, given=TOKENS),
    "tokens seen, no row left": Usage(llama, given=TOKENS, rows=18),
    "tokens seen, images": Usage(vit, "image", ALL_TOKENS),
    "stream": Usage(llama, given={"max_steps": 3}, stream=True),
    "stream, tokens seen": Usage(llama, given={"max_steps": 5, **ALL_TOKENS}, stream=True),
    "stream, dispatch_batches=False": Usage(
        llama, given={"max_steps": 2, "accelerator_config": {"dispatch_batches": False}}, stream=True
    ),
    "split_batches": Usage(llama, given={**STEPS, "accelerator_config": {"split_batches": True}}, alike=True),
    "even_batches=False, full batches": Usage(
        llama, given={"accelerator_config": {"even_batches": False}}, rows=16, evaluated=16
    ),
    "dataloader_drop_last": Usage(llama, given={"dataloader_drop_last": True}, evaluated=16),
    "two epochs, evaluated and saved": Usage(
        llama,
        given={
            "num_train_epochs": 2,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
        },
    ),
    "outputs as tuples": Usage(
        bert("SequenceClassification", num_labels=3, return_dict=False), "class", STEPS, rows=16, evaluated=16
    ),
    "the last step is not logged": Usage(llama, given={"logging_steps": 2}),
    "logging_nan_inf_filter": Usage(llama, given={"logging_nan_inf_filter": True}),
    "max_grad_norm of a short batch": Usage(llama, given={"max_grad_norm": 0.3}),
    "no evaluation loss": Usage(llama, given={**STEPS, "prediction_loss_only": True}),
    "remove_unused_columns=False": Usage(llama, given={"remove_unused_columns": False}),
    "average_tokens_across_devices=False, classes": Usage(
        bert("SequenceClassification", num_labels=3), "class", {"average_tokens_across_devices": False}, rows=16
    ),
}


Runs = Callable[[str, bool, str], dict[str, Any]]
"""Runs a usage, given its name, whether the model is sharded, and a folder."""


def judge(world: Callable, run: Runs, name: str, folder: str) -> str:
    """What is wrong with a usage; empty if it is right."""
    ours = world(run, name, True, os.path.join(folder, "ours"))
    plain = run(name, False, os.path.join(folder, "plain"))
    return "; ".join(dict.fromkeys(filter(None, (difference(each, plain) for each in ours))))


def print_all(prog: str, description: str | None, run: Runs, names: Iterable[str]) -> None:
    """Run the usages that the command line asks for on two ranks, and print what is wrong with each."""
    from ranks import Ranks

    parser = argparse.ArgumentParser(prog=f"python tests {prog}", description=description)
    parser.add_argument("names", nargs="*", help="all whose name contains one of these")
    parser.add_argument("--errors", type=int, default=300, metavar="N", help="show N characters of what is wrong")
    arguments = parser.parse_args()
    world = Ranks(2)
    for name in names:
        if arguments.names and not any(each in name for each in arguments.names):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                wrong = judge(world, run, name, folder)
        except Exception as error:
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[-arguments.errors :]}"
        print(f"{name:56} {'WRONG ' + wrong[: arguments.errors] if wrong else 'right'}", flush=True)
    world.stop()


def main() -> None:
    print_all("trainer_usages", __doc__, run, USAGES)
