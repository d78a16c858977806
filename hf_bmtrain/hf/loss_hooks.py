"""Hooks that correct a model's loss before Trainer gets it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import transformers

from .calling_trainer import calling_trainer

COUNT = "num_items_in_batch"
_LOSSES = {"CrossEntropyLoss", "MSELoss", "BCEWithLogitsLoss"}


def hook_loss(model: Any, trainer: transformers.Trainer, correct: Callable[..., torch.Tensor]) -> None:
    """Replace the loss that `model` returns to `trainer`, if it was given `num_items_in_batch`.

    Args:
        model: the sharded model.
        trainer: the Trainer that trains it. Losses for another Trainer of the same model are left as they are.
        correct: called with the model, its keyword arguments, its outputs and the loss; returns the new loss.
    """
    owner = weakref.ref(trainer)

    def replace(module: Any, inputs: tuple, given: dict[str, Any], outputs: Any) -> None:
        if given.get(COUNT) is None or not isinstance(outputs, dict) or calling_trainer() is not owner():
            return
        if isinstance(loss := outputs.get("loss"), torch.Tensor):
            outputs["loss"] = correct(module, given, outputs, loss)

    model.register_forward_hook(replace, with_kwargs=True)


def base_of(model: Any) -> Any:
    """Return the model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def ignores_count(model: Any) -> bool:
    """Return whether the forward of `model` computes its loss itself, by a mean of torch's."""
    names = names_in_forward(model)
    return bool(names & _LOSSES) and "loss_function" not in names and COUNT not in names


def names_in_forward(model: Any) -> set[str]:
    """Return the names and the texts that occur in the forward of `model`; none if it is not written in Python."""
    code = getattr(inspect.unwrap(type(base_of(model)).forward), "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names, *code.co_varnames, *(text for text in code.co_consts if isinstance(text, str))}
