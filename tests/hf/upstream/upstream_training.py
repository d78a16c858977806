"""Steps, seeds and models: cases of transformers' tests/trainer/test_trainer.py around a sharded model."""

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
import jobs
from regression import (
    CloseEnough,
    Line,
    LineConfig,
    PlainLine,
    Points,
    arguments,
    ends,
    make,
    make_tokenizer,
    whole,
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


def gradient_accumulation(folder):
    accumulated = trained(folder, gradient_accumulation_steps=2, per_device_train_batch_size=4, optim="sgd")
    same_line(accumulated, trained(folder, optim="sgd"))


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


def gradient_checkpointing(folder):
    given = {**jobs.CHECKPOINTING, "per_device_train_batch_size": 2}
    trainer = jobs.make_trainer(
        folder, True, given, size=bmt.world_size(), make_optimizer=None, use_checkpoint=False
    )  # fmt: skip
    before = whole(trainer.model)
    trainer.train()
    for name, value in whole(trainer.model).items():
        assert not torch.allclose(before[name], value, rtol=1e-4, atol=1e-4), name


def neftune(folder):
    from transformers.integrations import activate_neftune

    ids = torch.tensor([[1, 0, 1]])
    given = {"neftune_noise_alpha": 0.4, "learning_rate": 1e-9}
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), family="gpt2")
    activate_neftune(trainer.model.train(), trainer.args.neftune_noise_alpha)
    embed = trainer.model.get_input_embeddings()
    assert not torch.allclose(embed(ids), embed(ids)), "no noise"
    trainer = jobs.make_trainer(folder, True, given, size=bmt.world_size(), family="gpt2")
    trainer.train()
    trainer.model(ids)
    embed = trainer.model.get_input_embeddings()
    assert len(embed._forward_hooks) == 0
    trainer.model.eval()
    assert torch.equal(embed(ids), embed(ids))


def number_of_steps_in_training(folder):
    for given, expected in (({}, STEPS), ({"num_train_epochs": 1.5}, 12), ({"max_steps": 10}, 10)):
        assert make(folder, save_strategy="no", **given).train().global_step == expected


def num_train_epochs_in_training(folder):
    """Fewer batches than are accumulated: one update an epoch."""
    few = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 5, "save_strategy": "no"}
    assert make(folder, max_steps=3, **few).train().global_step == 3
    assert make(folder, **few).train().global_step == EPOCHS


def reproducible_training(folder):
    one, again, other = (trained(folder, save_strategy="no", seed=seed) for seed in (42, 42, 314))
    assert ends(one) == ends(again) != ends(other)


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


def model_init(folder):
    """Every train() begins anew, and with the seed that then holds."""
    args = arguments(folder, learning_rate=0.1, save_strategy="no")
    trainer = bmt.hf.Trainer(model_init=lambda: bmt.auto_wrap(Line(LineConfig())), args=args, train_dataset=Points())
    for seed in (42, 42, 314):
        trainer.args.seed = seed
        trainer.train()
        same_line(trainer, trained(folder, save_strategy="no", seed=seed), 1e-6)


def early_stopping_callback(folder):
    given = {
        "num_train_epochs": 20, "per_device_train_batch_size": 16, "eval_strategy": "epoch", "save_strategy": "epoch",
        "metric_for_best_model": "accuracy", "compute_metrics": CloseEnough(),
    }  # fmt: skip
    for best in (True, False):
        trainer = make(folder, load_best_model_at_end=best, **given)
        trainer.add_callback(transformers.EarlyStoppingCallback(1, 0.0001))
        assert trainer.train().global_step < 20 * 4
        assert trainer.state.best_model_checkpoint is not None
    trainer = make(folder, **{**given, "eval_strategy": "no"})
    trainer.add_callback(transformers.EarlyStoppingCallback(1))
    with pytest.raises(AssertionError, match="EarlyStoppingCallback requires"):
        trainer.train()
    assert trainer.state.global_step == 0


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


def training_arguments_are_left_untouched(folder):
    trainer = make(folder, max_steps=2)
    trainer.train()
    assert arguments(folder, max_steps=2).to_dict() == trainer.args.to_dict()


def double_train_wrap_once(folder):
    trainer = make(folder, max_steps=2)
    trainer.train()
    before = trainer.model_wrapped
    trainer.train()
    assert trainer.model_wrapped is before
