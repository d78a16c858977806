"""Saving and resuming: cases of transformers' tests/trainer/test_trainer_checkpointing.py around a sharded model."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import hf_bmtrain as bmt
from regression import (
    Line,
    LineConfig,
    PlainLine,
    arguments,
    checkpoints,
    ends,
    logged,
    make,
    make_tokenizer,
    read_state,
    wrapped,
)  # fmt: skip

FILES = {"model.safetensors", "training_args.bin", "optimizer.pt", "scheduler.pt", "trainer_state.json"}


def check_checkpoints(folder, steps, extra=frozenset({"config.json"})):
    """Those of `steps` are there, each with Trainer's files and those that all ranks write."""
    assert checkpoints(folder) == steps
    ranks = {"manifest.json", "optimizer.safetensors", "state.pt", "complete.json"}
    for step in steps:
        assert FILES | extra | ranks <= {path.name for path in Path(folder, f"checkpoint-{step}").iterdir()}


def save_checkpoints(folder):
    for model, extra in ((Line, {"config.json"}), (PlainLine, set())):
        own = f"{folder}/{model.__name__}"
        make(own, model=model, save_steps=5).train()
        check_checkpoints(own, [5, 10, 15, 20, 24], extra)


class Collator:
    def __init__(self):
        self.tokenizer = make_tokenizer()
        self.tokenizer.add_tokens(["new1", "new2"])

    def __call__(self, features, return_tensors="pt"):
        return transformers.default_data_collator(features, return_tensors)


def save_collator_tokenizer_by_default(folder):
    make(folder, data_collator=Collator(), max_steps=2).train()
    assert checkpoints(folder) == [2]
    assert len(transformers.AutoTokenizer.from_pretrained(f"{folder}/checkpoint-2")) == len(make_tokenizer()) + 2


def check_resumed(folder, *steps, prepare=lambda trainer: None, change=lambda checkpoint: None, **given):
    """Runs that go on from the checkpoints of `steps` end where the whole run ended, with the same log."""
    given = {"rows": 128, "save_steps": 5, "learning_rate": 0.1, "logging_steps": 5, **given}
    trainer = make(folder, **given)
    prepare(trainer)
    trainer.train()
    for step in steps:
        checkpoint = f"{folder}/checkpoint-{step}"
        if bmt.rank() == 0:
            change(Path(checkpoint))
        bmt.synchronize()
        again = make(folder, **given)
        prepare(again)
        again.train(resume_from_checkpoint=checkpoint)
        assert ends(again) == ends(trainer)
        assert again.state.global_step == trainer.state.global_step
        assert logged(again) == logged(trainer)
    return trainer


def can_resume_training(folder):
    for model in (Line, PlainLine):
        check_resumed(f"{folder}/{model.__name__}", 5, 15, 20, model=model)  # an epoch has 16 steps
    with pytest.raises(ValueError, match="Can't find a valid checkpoint at"):
        make(folder).train(resume_from_checkpoint=f"{folder}/bogus")
    Path(folder, "fresh").mkdir(exist_ok=True)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        make(f"{folder}/fresh").train(resume_from_checkpoint=True)


def resume_training_with_randomness(folder):
    check_resumed(f"{folder}/steps", 15, noisy=True)
    check_resumed(f"{folder}/epochs", 16, noisy=True, save_strategy="epoch", logging_steps=8)


def resume_training_with_different_batch_size(folder):
    size = bmt.world_size()
    make(folder, max_steps=2, save_steps=1, per_device_train_batch_size=2).train()
    assert read_state(f"{folder}/checkpoint-1")["train_batch_size"] == 2 // size
    bmt.synchronize()
    trainer = make(folder, max_steps=4, save_steps=1, per_device_train_batch_size=4)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert trainer._train_batch_size == 4 // size and trainer.state.global_step == 4


def training_with_resume_from_checkpoint_false(folder):
    make(folder, max_steps=5, save_steps=5).train()
    trainer = make(folder, max_steps=5, save_steps=5, noisy=True)
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == 5 and len(logged(trainer)) == 1  # from the start


def split(checkpoint):
    """One file a tensor, and an index."""
    state = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    places = {name: f"model-{i + 1:05d}-of-{len(state):05d}.safetensors" for i, name in enumerate(state)}
    for name, place in places.items():
        save_file({name: state[name]}, checkpoint / place, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def resume_training_with_shard_checkpoint(folder):
    check_resumed(folder, 5, change=split)


def freeze(trainer):
    trainer.model.a.requires_grad_(False)


def resume_training_with_frozen_params(folder):
    trainer = check_resumed(folder, 5, prepare=freeze, per_device_train_batch_size=4, a=0.5)
    assert not trainer.model.a.requires_grad
    assert ends(trainer)[0] == 0.5 and ends(trainer)[1] != 0


class Classifier(nn.Module):
    """Notes the order of the rows that it has seen, in a buffer that grows."""

    def __init__(self, size=10):
        super().__init__()
        self.linear = nn.Linear(size, 10, bias=False)
        self.register_buffer("order", torch.empty(0, dtype=torch.int))

    def load_state_dict(self, state_dict, strict=True):
        self.order = state_dict["order"].clone()
        return super().load_state_dict(state_dict, strict=strict)

    def forward(self, input_ids, labels=None):
        logits = self.linear(input_ids)
        if self.training:
            self.order = torch.cat([self.order, input_ids[:, 0].int()])
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Numbered(torch.utils.data.Dataset):
    """Random rows that begin with their number."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(4)
        self.rows = torch.randn(size, 10, generator=generator)
        self.rows[:, 0] = torch.arange(size)
        self.labels = torch.randint(10, (size,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.labels[index]}


def classifier(folder, rows, **given):
    return wrapped(Classifier(), arguments(folder, save_strategy="steps", save_steps=1, **given), train_dataset=rows)


def resume_from_interrupted_training(folder):
    """Stopped by max_steps, gone on with in another folder to the epoch's end."""
    given = {"num_train_epochs": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    first, rest = f"{folder}/first", f"{folder}/rest"
    classifier(first, Numbered(100), max_steps=2, **given).train()
    assert checkpoints(first) == [1, 2]
    trainer = classifier(rest, Numbered(100), **given)
    trainer.train(resume_from_checkpoint=f"{first}/checkpoint-2")
    assert trainer.state.global_step == 17  # 100 rows, 6 an update
    check_checkpoints(rest, list(range(3, 18)), set())


def resume_batch_order(folder):
    """Resumed inside an epoch, the rows come as they came."""
    given = {"num_train_epochs": 3, "per_device_train_batch_size": 2, "optim": "sgd", "learning_rate": 0.01, "seed": 42}
    whole, rest = f"{folder}/whole", f"{folder}/rest"
    classifier(whole, Numbered(10), **given).train()
    classifier(rest, Numbered(10), **given).train(resume_from_checkpoint=f"{whole}/checkpoint-6")
    orders = [load_file(f"{where}/checkpoint-15/model.safetensors")["order"] for where in (whole, rest)]
    assert torch.equal(*orders) and len(orders[0]) == 30 // bmt.world_size()


def saves(folder, processing, read):
    """Without any training, through bmt.hf.Trainer: stock Trainer asks rank 0 alone for the weights."""
    model = bmt.auto_wrap(Line(LineConfig(a=1.5, b=2.5)))
    bmt.hf.Trainer(model=model, args=arguments(folder), processing_class=processing).save_model()
    bmt.synchronize()
    saved = Line.from_pretrained(folder)
    assert (saved.a.item(), saved.b.item()) == (1.5, 2.5)
    return read.from_pretrained(folder)


def trainer_saves_tokenizer(folder):
    again = saves(folder, make_tokenizer(), transformers.AutoTokenizer)
    text = "w3 w7 w11 unknown"
    assert again(text).input_ids == make_tokenizer()(text).input_ids
