"""Steps, seeds and models: cases of transformers' tests/trainer/test_trainer.py around a sharded model."""

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn

import jobs
from regression import (
    LineConfig,
    PlainLine,
    Points,
    arguments,
    ends,
    make,
    make_tokenizer,
    wrapped,
)  # fmt: skip
from tiny_models import build

EPOCHS, STEPS = 3, 24  # Trainer's default, and the steps that it makes of 64 rows


def same_line(trainer, other, tolerance=1e-5):
    assert ends(trainer) == pytest.approx(ends(other), rel=tolerance, abs=tolerance)


def trained(folder, **given):
    trainer = make(folder, learning_rate=0.1, **given)
    trainer.train()
    return trainer


def num_batches_in_training_with_gradient_accumulation(folder):
    for epochs in (1, 2):
        for rows in (123, 120):
            given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 5, "num_train_epochs": epochs}
            trainer = make(folder, rows=rows, save_strategy="no", **given)
            stock, counts = trainer.get_batch_samples, []

            def counted(iterator, number, device, stock=stock, counts=counts):
                samples, items = stock(iterator, number, device)
                assert 0 < number == len(samples)
                counts.append(number)
                return samples, items

            trainer.get_batch_samples = counted
            trainer.train()
            assert sum(counts) == len(trainer.get_train_dataloader()) * epochs


def number_of_steps_in_training(folder):
    for given, expected in (({}, STEPS), ({"num_train_epochs": 1.5}, 12), ({"max_steps": 10}, 10)):
        assert make(folder, save_strategy="no", **given).train().global_step == expected


def num_train_epochs_in_training(folder):
    """Fewer batches than are accumulated: one update an epoch."""
    few = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 5, "save_strategy": "no"}
    assert make(folder, max_steps=3, **few).train().global_step == 3
    assert make(folder, **few).train().global_step == EPOCHS


def trainer_with_datasets(folder):
    """Columns of `datasets`, as Python numbers or tensors; one that the model does not know is left out."""
    points = Points()
    columns = {"input_x": points.x, "label": points.ys["labels"]}
    rows = datasets.Dataset.from_dict(columns)
    expected = trained(folder, model=PlainLine, save_strategy="no")
    extra = {"extra": np.zeros(len(points), np.float32)}
    for table in (rows, rows.with_format("torch"), datasets.Dataset.from_dict({**columns, **extra})):
        trainer = wrapped(
            PlainLine(LineConfig()), arguments(folder, learning_rate=0.1, save_strategy="no"), train_dataset=table
        )
        trainer.train()
        same_line(trainer, expected)


def special_token_alignment(folder):
    """Trainer gives the model the tokenizer's special tokens; the embeddings have grown before wrapping."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "bos_token": "<|start|>", "pad_token": "<|end|>"})
    model = build("llama")
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)
    ids = list(range(len(tokenizer) - 8, len(tokenizer)))
    rows = datasets.Dataset.from_dict({"input_ids": [ids] * 2, "labels": [ids] * 2})
    trainer = wrapped(
        model, arguments(folder, max_steps=1, per_device_train_batch_size=2), train_dataset=rows,
        processing_class=tokenizer, data_collator=transformers.default_data_collator,
    )  # fmt: skip
    names = ("eos_token_id", "pad_token_id", "bos_token_id")
    assert all(getattr(model.config, name) != getattr(tokenizer, name) for name in names)
    trainer.train()
    assert all(getattr(model.config, name) == getattr(tokenizer, name) for name in names)


class WithoutConfig(nn.Module):
    """Somebody's language model."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, 61)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def trainer_works_without_model_config(folder):
    args = arguments(folder, max_steps=5, logging_steps=1, learning_rate=0.05)
    trainer = wrapped(WithoutConfig(), args, train_dataset=jobs.Rows(), processing_class=make_tokenizer())
    trainer.train()
    losses = [loss for (loss,) in jobs.losses(trainer.state.log_history)]
    assert losses[-1] < losses[0]


def double_train_wrap_once(folder):
    trainer = make(folder, max_steps=2)
    trainer.train()
    before = trainer.model_wrapped
    trainer.train()
    assert trainer.model_wrapped is before
