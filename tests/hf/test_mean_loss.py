"""Losses that are means over labels where ranks or Trainers differ; `trainer_usages` compares them with one process."""

import pytest
import torch
import transformers
from trainer_usages import Rows, collate, ctc

import hf_bmtrain as bmt
import jobs
from tiny_models import build


def train_with_dropped_layers(folder):
    model = bmt.auto_wrap(ctc(layerdrop=0.5))
    args = jobs.arguments(folder, per_device_train_batch_size=2, max_steps=8, optim="sgd", seed=1 + bmt.rank())
    trainer = transformers.Trainer(
        model, args=args, data_collator=collate, train_dataset=Rows("sound", 16), callbacks=[bmt.hf.BMTrainCallback()]
    )
    trainer.add_callback(_OwnSeed())
    trainer.train()
    return trainer.state.global_step


class _OwnSeed(transformers.TrainerCallback):
    """Gives each rank random numbers of its own, as ranks have after different amounts of dropout."""

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed(100 * bmt.rank() + state.global_step)


def test_ranks_that_drop_different_layers(world, tmp_path):
    """The rank that drops its last layer must not wait for the others' labels before they have computed theirs."""
    assert world(2)(train_with_dropped_layers, str(tmp_path)) == [8, 8]


def train_after_another_trainer(folder):
    """The logged loss of a model with adapters, after a Trainer of the model without them."""
    import peft

    model, data = bmt.auto_wrap(build("llama")), jobs.Rows()
    args = jobs.arguments(
        folder, per_device_train_batch_size=2, max_steps=1, optim="sgd", learning_rate=1e-4,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    first = transformers.Trainer(model, args=args, eval_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    first.evaluate()
    adapted = bmt.auto_wrap(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])))
    second = transformers.Trainer(adapted, args=args, train_dataset=data, callbacks=[bmt.hf.BMTrainCallback()])
    second.train()
    taken = [data[index] for index in range(2 * bmt.world_size())]
    with torch.no_grad():
        joined = {key: torch.stack([row[key] for row in taken]) for key in taken[0]}
        truth = adapted(**joined).loss.item()  # adapters begin as zeros, and one small step changes little
    return second.state.log_history[0]["loss"], truth


def test_hooks_of_another_trainer_do_not_act(world, tmp_path):
    pytest.importorskip("peft")
    for logged, truth in world(2)(train_after_another_trainer, str(tmp_path)):
        assert logged == pytest.approx(truth, rel=1e-2)
