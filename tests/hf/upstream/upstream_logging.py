"""What Trainer logs and counts: cases of transformers' tests/trainer/test_trainer.py around a sharded model."""

import math

import numpy as np
from torch import nn

import hf_bmtrain as bmt
import jobs
from regression import arguments


def accumulated_losses(folder, accumulate, loss):
    given = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4} if accumulate else {}
    trainer = jobs.make_trainer(
        folder, True, {**given, "max_steps": 5}, size=bmt.world_size(), compute_loss_func=loss
    )  # fmt: skip
    trainer.train()
    return np.array([loss for (loss,) in jobs.losses(trainer.state.log_history)])


def token_loss(outputs, labels, num_items_in_batch=None):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(outputs["logits"], labels, outputs["logits"].shape[-1], num_items_in_batch)


def mean_of_each(outputs, labels, num_items_in_batch=None):
    return token_loss(outputs, labels)


def gradient_accumulation_loss_alignment_with_loss_func(folder):
    base = accumulated_losses(folder, False, token_loss)
    assert abs(accumulated_losses(folder, True, token_loss) - base).max() < 1e-4
    assert abs(accumulated_losses(folder, True, mean_of_each) - base).max() > 3


def logging_inf_nan_filter(folder):
    for filtered in (False, True):
        given = {"logging_nan_inf_filter": filtered, "learning_rate": 1e9, "max_steps": 10, "logging_steps": 5}
        options = {"family": "gpt2", "make_optimizer": None, "size": bmt.world_size()}
        trainer = jobs.make_trainer(folder, True, given, **options)
        trainer.train()
        losses = [loss for (loss,) in jobs.losses(trainer.state.log_history)]
        assert len(losses) == 2 and all(map(math.isfinite, losses)) == filtered, losses


def get_num_trainable_parameters(folder):
    """Through bmt.hf.Trainer: on several ranks stock Trainer counts a rank's slices."""
    model = bmt.auto_wrap(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)))
    trainer = bmt.hf.Trainer(model=model, args=arguments(folder))
    assert trainer.get_num_trainable_parameters() == 128 * 64 + 64 + 64 * 32 + 32
    model[-1].requires_grad_(False)
    assert trainer.get_num_trainable_parameters() == 128 * 64 + 64
