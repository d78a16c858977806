"""Hooks that correct a model's loss before Trainer gets it."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

COUNT = "num_items_in_batch"
_HOOKS = "_bmt_loss_hooks"
"""Name of an attribute of the base model: (weak reference to the Trainer that added the hooks, the hooks' handles)."""
_UNCOUNTED = "_bmt_uncounted_labels"
"""Name of an attribute that the base model (the model without PEFT's wrapper) has while the context `labels_uncounted`
is active, in which loss hooks count no labels."""
_LOSS = re.compile(r"(?<=\w)Loss$|_loss$|(^|_)cross_entropy|loss_(fct|fn)$|^criterion$")
"""Matches the names of functions, classes and attributes that compute a loss."""


def claim_hooks(model: Any, trainer: object) -> bool:
    """Prepare `model` for the loss hooks of `trainer`: remove the loss hooks that another Trainer has added.

    Args:
        model: the sharded model, with or without PEFT's wrapper.
        trainer: the Trainer that will train or evaluate the model.

    Returns:
        Whether `trainer` must now add its hooks by `hook_loss`. If it already did, the result is False, and nothing is
        changed.
    """
    record = vars(base_of(model))  # kept on the base model, to be found with and without PEFT's wrapper
    owner, handles = record.get(_HOOKS, (None, []))
    if owner is not None and owner() is trainer:
        return False
    for handle in handles:
        handle.remove()
    record[_HOOKS] = weakref.ref(trainer), []
    return True


def hook_loss(
    model: Any,
    correct: Callable[[dict[str, Any], Any, torch.Tensor], torch.Tensor],
    around: tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[], None]] | None = None,
) -> None:
    """Add hooks to `model` that correct the loss of each forward to which Trainer passes `num_items_in_batch`.

    Args:
        model: the sharded model, after a call of `claim_hooks`, which removes the hooks of another Trainer.
        correct: called with the forward's keyword arguments, its outputs and the loss. Returns the new loss.
        around: two functions, with which the caller can observe what such a forward does. The first is called before
            each such forward with its keyword arguments, and returns those that the forward gets. The second is called
            after it, even if the forward raises. None calls nothing.
    """

    # Whether Trainer passed num_items_in_batch. This is recorded before other hooks run, which may add the argument.
    # The labels are recorded too, because `sequence_parallel` replaces them by those of this rank's tokens.
    asked, labels, begun = False, None, False

    def before(module: Any, inputs: tuple, given: dict[str, Any]) -> None:
        nonlocal asked, labels, begun
        asked, labels, begun = given.get(COUNT) is not None, counted_labels(model, given.get("labels")), False

    def begin(module: Any, inputs: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal begun
        if around is None or not asked:
            return None
        begun = True
        return inputs, around[0](given)

    def after(module: Any, inputs: tuple, given: dict[str, Any], outputs: Any) -> Any:
        nonlocal labels
        given, labels = {**given, "labels": labels}, None
        if not asked:
            return None
        if around is not None and begun:
            around[1]()
        if given.get(COUNT) is None:
            return None
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), torch.Tensor):
            outputs["loss"] = correct(given, outputs, outputs["loss"])
        elif isinstance(outputs, tuple) and outputs and is_scalar(outputs[0]):  # return_dict is False
            corrected = (correct(given, outputs, outputs[0]), *outputs[1:])
            return type(outputs)._make(corrected) if hasattr(outputs, "_make") else corrected  # pyright: ignore
        return None

    keep_hooks(
        model,
        model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        # After the other hooks, which may look at the arguments, but are not part of the forward.
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    )


def keep_hooks(model: Any, *handles: RemovableHandle) -> None:
    """Let the next call of `claim_hooks` remove hooks.

    Args:
        model: the sharded model, after a call of `claim_hooks`.
        *handles: the hooks' handles.
    """
    vars(base_of(model))[_HOOKS][1].extend(handles)


@contextmanager
def labels_uncounted(model: Any) -> Iterator[None]:
    """Context manager inside which the loss hooks of `model` count all labels as ignored.

    A rank without rows of its own must run the forward with other rows, but their labels may not count. The forward
    itself gets these labels unchanged. They are not set to -100, because not every loss works with such labels: some
    losses use them as indices, and others become 0 / 0, with gradients of nan.
    """
    record = vars(base_of(model))
    record[_UNCOUNTED] = True
    try:
        yield
    finally:
        del record[_UNCOUNTED]


def counted_labels(model: Any, labels: Any) -> Any:
    """Return `labels` or, while the context `labels_uncounted` of `model` is active, as many ignored labels (-100)."""
    ignored = isinstance(labels, torch.Tensor) and _UNCOUNTED in vars(base_of(model))
    return torch.full_like(labels, -100) if ignored else labels


def is_scalar(value: Any) -> bool:
    """Return whether `value` is a tensor without dimensions.

    Callers search a model's tuple of outputs for a loss or an auxiliary loss: these have no dimensions, unlike logits.
    """
    return isinstance(value, torch.Tensor) and value.ndim == 0


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or `model` itself if it is not wrapped by PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def chooses_loss(model: Any) -> bool:
    """Return whether the forward of `model` calls `self.loss_function`, a property of models of transformers.

    The forward's code then does not tell whether the loss is divided by `num_items_in_batch`, because this depends on
    the loss function. The caller must observe the calls of the loss function instead.
    """
    return "loss_function" in names_in_forward(model) and isinstance(
        getattr(type(base_of(model)), "loss_function", None), property
    )


def ignores_count(model: Any) -> bool:
    """Return whether the forward of `model` computes a loss itself, without dividing it by `num_items_in_batch`.

    `num_items_in_batch` is the number of labels in all micro-batches on all ranks, by which Trainer expects a model to
    divide its loss. A model that ignores it returns a mean over this rank's labels, which a loss hook then corrects.
    The result is a guess from the names in the forward's code. It is False if the forward calls `self.loss_function`.
    """
    names = names_in_forward(model)
    if chooses_loss(model) or COUNT in names:
        return False
    parts = {type(child).__name__ for child in base_of(model).children()}
    return any(map(_LOSS.search, names | parts))


def has_own_forward(model: Any) -> bool:
    """Return whether the forward of `model` is code of the user or of the Hub, and not of transformers.

    The names in such code do not tell how it computes its loss. The caller must observe the forward instead.
    """
    forward = next(vars(cls)["forward"] for cls in type(base_of(model)).__mro__ if "forward" in vars(cls))
    return package_of(forward) not in ("transformers", "torch", "hf_bmtrain")


def package_of(function: Any) -> str:
    """Return the name of the package whose code a function is, inside decorators and functools.partial."""
    return (getattr(_undecorated(function), "__module__", None) or "").split(".")[0]


def names_in_forward(model: Any) -> set[str]:
    """Return the names and strings in the code of the forward of `model` and of forwards that it calls by super().

    From these, callers guess how the forward computes its loss, for example whether it uses `num_items_in_batch`.
    """
    found: set[str] = set()
    for cls in type(base_of(model)).__mro__:
        names = names_in(vars(cls).get("forward"))
        found |= names
        if names and "super" not in names:
            break
    return found


def names_in(function: Any) -> set[str]:
    """Return the names and strings in the code of a function, to find out, for example, which arguments it uses.

    The code of a loss function that takes the number of labels contains the name `num_items_in_batch`. Decorators and
    functools.partial are ignored: the code of the function inside them is read. The result is empty for a function
    without Python code, such as a built-in one.
    """
    code = getattr(_undecorated(function), "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names, *code.co_varnames, *(text for text in code.co_consts if isinstance(text, str))}


def _undecorated(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)
