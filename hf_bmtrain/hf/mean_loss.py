"""Losses that are a mean over a rank's labels, which Trainer would multiply by the number of ranks."""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers

from ..engine.runtime.world import current_world
from .loss_hooks import hook_loss, ignores_count

_log = logging.getLogger("hf_bmtrain")


def follow_mean_loss(model: Any, trainer: transformers.Trainer) -> None:
    """Make Trainer's loss of `model` on several ranks the mean over all ranks' labels, as in one process.

    With `average_tokens_across_devices`, the default, Trainer multiplies the loss by the number of ranks for every
    model whose forward takes keyword arguments, because the model is to divide a sum by `num_items_in_batch`. A model
    that computes a mean, as BERT does, ignores that number. A hook multiplies its loss by this rank's share of all
    labels beforehand.
    """
    world, args = current_world(), trainer.args
    if world.size == 1 or not args.average_tokens_across_devices or not ignores_count(model):
        return

    def weigh(module: Any, given: dict[str, Any], outputs: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss * _share(given["labels"], loss) if args.average_tokens_across_devices else loss

    hook_loss(model, trainer, weigh)
    if world.rank == 0:
        _log.info(
            "the loss of %s is a mean over labels: averaged over all ranks, and not multiplied by their number as "
            "Trainer does with average_tokens_across_devices=True", type(model).__name__,
        )  # fmt: skip


def _share(labels: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the labels of all ranks, those that are ignored left out. Collective."""
    world = current_world()
    mine = labels.ne(-100).sum(dtype=torch.float64).reshape(1).to(loss.device)
    everyone = mine.clone()
    world.reduce.all_reduce(everyone).wait()
    return (mine / everyone).to(loss.dtype)[0]
