"""Losses that are a mean over a rank's labels, which Trainer would multiply by the number of ranks."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from ..engine.runtime.world import current_world

_log = logging.getLogger("hf_bmtrain")
_COUNT = "num_items_in_batch"
_LOSSES = {"CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"}


def follow_mean_loss(model: Any, args: Any) -> None:
    """Make Trainer's loss of `model` on several ranks the mean over all ranks' labels, as in one process.

    With `average_tokens_across_devices`, the default, Trainer multiplies the loss by the number of ranks for every
    model whose forward takes keyword arguments, because the model is to divide a sum by `num_items_in_batch`. A model
    that computes a mean, as BERT does, ignores that number. A hook multiplies its loss by this rank's share of all
    labels beforehand.
    """
    world = current_world()
    if world.size == 1 or not args.average_tokens_across_devices or not _ignores_count(model):
        return

    def weigh(module: Any, inputs: tuple, given: dict[str, Any], outputs: Any) -> None:
        if given.get(_COUNT) is None or not args.average_tokens_across_devices:
            return
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            outputs["loss"] = outputs["loss"] * _share(given["labels"], outputs["loss"])

    model.register_forward_hook(weigh, with_kwargs=True)
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


def _ignores_count(model: Any) -> bool:
    """Return whether the forward of `model` computes its loss itself, by a mean of torch's."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    if code is None:
        return False
    names = {*code.co_names, *code.co_varnames, *(text for text in code.co_consts if isinstance(text, str))}
    return bool(names & _LOSSES) and "loss_function" not in names and _COUNT not in names
