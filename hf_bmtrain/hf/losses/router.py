"""Correct the auxiliary loss of a mixture of experts, which Trainer would add once per micro-batch and rank."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers

from ...engine.runtime.world import current_world
from ...engine.wrap.accelerator import ranks_per_row
from .hooks import base_of, count_parts_without_rows, hook_loss, is_scalar, names_in_forward

_log = logging.getLogger("hf_bmtrain")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


def average_router_loss(model: Any, trainer: transformers.Trainer, is_mean: Callable[[], bool]) -> None:
    """Make the auxiliary loss of the routers of `model` count once per step, averaged over micro-batches and ranks.

    A mixture of experts returns the loss `cross_entropy / num_items_in_batch + router_aux_loss_coef * aux_loss`, where
    `num_items_in_batch` is the number of labels in all micro-batches on all ranks. Trainer adds up the losses of the
    micro-batches and multiplies them by the number of ranks. This is right for the cross entropy. But the auxiliary
    loss is already a mean, so it would count once per micro-batch and rank. Before Trainer gets the loss, a hook
    therefore divides the auxiliary loss by the number of micro-batches times the number of ranks. In the last batch,
    ranks may have no rows; they are left out.

    Args:
        model: the sharded model, with or without PEFT's adapters.
        trainer: the Trainer that trains it.
        is_mean: the result of `follow_mean_loss(model, trainer)`: a function that returns whether the loss of the last
            forward is a mean, and not a sum divided by `num_items_in_batch`. If it is, the hook divides nothing,
            because the hook of `follow_mean_loss` averages the whole loss over the ranks, with the auxiliary loss.
    """
    names = names_in_forward(model)
    name = next((name for name in _COEFFICIENTS if name in names), None)
    if name is None:
        return
    base, args, told = base_of(model), trainer.args, False
    owner = weakref.ref(trainer)  # weak, because the model may live longer than the trainer and its optimizer

    def divide(given: dict[str, Any], outputs: Any, loss: torch.Tensor) -> torch.Tensor:
        nonlocal told
        trainer = owner()
        found = [outputs.get("aux_loss")] if isinstance(outputs, dict) else filter(is_scalar, outputs[1:])
        auxiliary = next(iter(found), None)
        if trainer is None or is_mean() or not isinstance(auxiliary, torch.Tensor):
            return loss
        times = trainer.current_gradient_accumulation_steps if model.training else 1
        if args.average_tokens_across_devices:
            times = times * (current_world().size // ranks_per_row(model)) - count_parts_without_rows(model)
        if times == 1:
            return loss
        coefficient = _value(base, name)
        if not told and current_world().rank == 0:
            _log.info(
                "the routers' auxiliary loss of %s is averaged over micro-batches and ranks, and multiplied by its "
                "coefficient, %g. Trainer alone adds it once per micro-batch and rank, %d times in a step, which makes "
                "it larger by this factor. If you want that, pass average_router_loss=False to BMTrainCallback",
                type(base).__name__, coefficient, times,
            )  # fmt: skip
        told = True
        return loss - (1 - 1 / times) * coefficient * auxiliary.to(loss.device)

    hook_loss(model, divide)


def _value(model: Any, name: str) -> float:
    """Return the coefficient called `name` that the forward of `model` uses, such as "router_aux_loss_coef".

    The coefficient is an attribute of the model or, if the model has no such attribute, of its configuration.
    """
    return getattr(model if hasattr(model, name) else model.config.get_text_config(), name)
