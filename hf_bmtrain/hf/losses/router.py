"""Average a model's auxiliary loss, such as that of routers, over micro-batches and ranks. Trainer would sum it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
import transformers

from ...engine.runtime.world import current_world
from ...engine.wrap.accelerator import ranks_per_row
from .hooks import base_of, count_parts_without_rows, hook_loss, is_scalar, must_observe, names_in_forward
from .mean import LastForward

_log = logging.getLogger("hf_bmtrain")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


_ADDED = {
    "z_loss_coefficient": None,  # in the model Bamba
    "density_router_loss_weight": "router_labels",  # in the model Granite Docling
    "diffusion_loss_weight": "acoustic_loss_mask",  # in the model VibeVoice
}
"""Means that models of transformers add to their cross entropy, and do not return separately, as {name of the weight by
which the model multiplies the mean: name of the argument without which it adds no mean, or None if it always adds it}.
"""


def average_router_loss(model: Any, trainer: transformers.Trainer, forward: LastForward | None) -> None:
    """Make the auxiliary loss of the routers of `model` count once per step, averaged over micro-batches and ranks.

    A mixture of experts returns the loss `cross_entropy / num_items_in_batch + router_aux_loss_coef * aux_loss`, where
    `num_items_in_batch` is the number of labels in all micro-batches on all ranks. Trainer adds up the losses of the
    micro-batches and multiplies the sum by the number of ranks. This is right for the cross entropy. But the auxiliary
    loss is already a mean, so it would count once per micro-batch and rank. Before Trainer gets the loss, a hook
    therefore divides the auxiliary loss by the number of micro-batches times the number of ranks. (Ranks that have no
    rows in the last batch of an epoch are not counted.) Some models add other means to the cross entropy (`_ADDED`).
    The hook divides them in the same way, except with `sequence_parallel`.

    Args:
        model: the sharded model, with or without PEFT's adapters.
        trainer: the Trainer that trains it.
        forward: the result of `follow_mean_loss(model, trainer)`. It tells whether the loss of the last forward is a
            mean, and not a sum divided by `num_items_in_batch`. If the loss is a mean, the hook divides nothing,
            because the hook of `follow_mean_loss` averages the whole loss over the ranks, including the auxiliary loss.
            None: every loss is treated as such a sum.
    """
    names = names_in_forward(model)
    name = next((name for name in (*_COEFFICIENTS, *_ADDED) if name in names), None)
    if name is None:
        return
    base, args, told, subtracts = base_of(model), trainer.args, False, name in _ADDED
    # Change nothing if the added mean cannot be separated from the cross entropy. For example, `must_observe` is True
    # for a forward of the user's program: the names in its code do not tell which mean it adds.
    if subtracts and (forward is None or must_observe(model) or ranks_per_row(model) > 1 or not _value(base, name)):
        return
    if forward is not None:
        forward.keeps_sum = subtracts
    owner = weakref.ref(trainer)  # weak, because the model may live longer than the trainer and its optimizer

    def divide(given: dict[str, Any], outputs: Any, loss: torch.Tensor) -> torch.Tensor:
        nonlocal told
        trainer, summed = owner(), None
        if forward is not None:
            summed, forward.summed = forward.summed, None
        if trainer is None or forward is not None and forward.ignored:
            return loss
        times = trainer.current_gradient_accumulation_steps if model.training else 1
        if args.average_tokens_across_devices:
            times = times * (current_world().size // ranks_per_row(model)) - count_parts_without_rows(model)
        if times == 1:
            return loss
        if subtracts:
            weighted = None if summed is None else _added_mean(base, name, given, outputs, loss - summed, summed)
        else:
            found = [outputs.get("aux_loss")] if isinstance(outputs, dict) else filter(is_scalar, outputs[1:])
            auxiliary = next(iter(found), None)
            weighted = _value(base, name) * auxiliary.to(loss.device) if isinstance(auxiliary, torch.Tensor) else None
        if weighted is None:
            return loss
        if not told and current_world().rank == 0:
            _log.info(
                "the %s of %s is averaged over micro-batches and ranks, and multiplied by its "
                "coefficient, %g. Without hf_bmtrain, Trainer adds it once per micro-batch and rank, %d times in a "
                "step, which makes it larger by this factor. If you want that, pass average_router_loss=False to "
                "BMTrainCallback",
                "term beside the cross entropy" if subtracts else "routers' auxiliary loss", type(base).__name__,
                _value(base, name), times,
            )  # fmt: skip
        told = True
        return loss - (1 - 1 / times) * weighted

    hook_loss(model, divide)


def _added_mean(
    model: Any, name: str, given: dict[str, Any], outputs: Any, rest: torch.Tensor, summed: torch.Tensor
) -> torch.Tensor | None:
    """Return the weighted mean that a forward of `model` has added to the cross entropy, or None if it added none.

    name: the name of the weight, a key of `_ADDED`.
    given: the keyword arguments of the forward.
    outputs: the outputs of the forward.
    rest: the loss without the cross entropy.
    summed: the cross entropy.
    """
    needed = _ADDED[name]
    if needed is not None and given.get(needed) is None:
        return None
    if name != "diffusion_loss_weight":
        return rest
    # With audio, the loss of VibeVoice is (1 - weight) * cross entropy + weight * mean. So `rest`, which is this loss
    # minus the cross entropy, is too small by weight * cross entropy.
    return rest + _value(model, name) * summed if getattr(outputs, "audio_features", None) is not None else None


def _value(model: Any, name: str) -> float:
    """Return the coefficient called `name` that the forward of `model` uses, such as "router_aux_loss_coef".

    The coefficient is an attribute of the model or, if the model has no such attribute, of its configuration. If the
    configuration has a part for text, this part is read first.
    """
    if hasattr(model, name):  # a model of the user's program may have no configuration
        return getattr(model, name)
    text = model.config.get_text_config()
    return getattr(text if hasattr(text, name) else model.config, name)
