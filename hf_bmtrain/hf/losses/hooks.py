"""Hooks that correct a model's loss before Trainer gets it."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..calling_trainer import calling_trainer

COUNT = "num_items_in_batch"
IGNORED = -100
"""The label that losses ignore by default."""
LABELS = ("labels", "shift_labels")
"""Names of arguments with labels. If a batch has both, losses and Trainer's count of labels use `shift_labels`: each of
them is the label of the logits at its own position."""
_HOOKS = "_bmt_loss_hooks"
"""Name of an attribute of the base model (the model without PEFT's wrapper). Its value is a list with a pair for each
Trainer of the model, oldest first: (weak reference to the Trainer, the handles of its hooks)."""
_UNCOUNTED = "_bmt_uncounted_labels"
"""Name of an attribute that the base model (the model without PEFT's wrapper) has while the context `labels_uncounted`
is active, in which loss hooks count no labels."""
_WITHOUT_ROWS = "_bmt_parts_without_rows"
"""Name of an attribute that the base model has while the context `parts_without_rows` is active. Its value is the
number of parts (micro-batches of ranks) that have no rows."""
_LOSS = re.compile(r"(?<=\w)Loss$|_loss$|(^|_)cross_entropy|loss_(fct|fn)$|^criterion$")
"""Matches the names of functions, classes and attributes that compute a loss."""


def claim_hooks(model: Any, trainer: object) -> bool:
    """Prepare `model` for the hooks that correct its loss for `trainer`. Hooks of deleted Trainers are removed.

    A model may have several Trainers, each with its own hooks. In each forward, only one Trainer's hooks act: those of
    the Trainer that computes the loss.

    Args:
        model: the sharded model, with or without PEFT's wrapper.
        trainer: the Trainer that will train or evaluate the model.

    Returns:
        Whether `trainer` must now add its hooks by `hook_loss`. If it already did, the result is False.
    """
    record = vars(base_of(model))  # the base model's attributes, which are the same with and without PEFT's wrapper
    kept = []
    for owner, handles in record.get(_HOOKS, []):
        if owner() is not None:
            kept.append((owner, handles))
            continue
        for handle in handles:
            handle.remove()
    record[_HOOKS] = kept
    if any(owner() is trainer for owner, _ in kept):
        return False
    kept.append((weakref.ref(trainer), []))
    return True


def _computes(trainer: object, model: Any) -> bool:
    """Return whether `trainer` computes the loss of the running forward of `model`.

    If the model has one Trainer, this Trainer computes the loss. If it has several, the innermost Trainer on the call
    stack does, because one Trainer may run inside another, as in an evaluation by a callback. If the innermost Trainer
    is not one of the model's, or no Trainer is on the call stack, the model's newest Trainer computes the loss.

    trainer: a Trainer of the model, or None if it was deleted. The result for None is False.
    model: the sharded model, after a call of `claim_hooks`.
    """
    owners = [each for owner, _ in vars(base_of(model))[_HOOKS] if (each := owner()) is not None]
    computing = calling_trainer() if len(owners) > 1 else None
    if not any(each is computing for each in owners):
        computing = owners[-1] if owners else None
    return trainer is not None and trainer is computing


def hook_loss(
    model: Any,
    correct: Callable[[dict[str, Any], Any, torch.Tensor], torch.Tensor],
    around: tuple[Callable[[dict[str, Any]], dict[str, Any]], Callable[[], None]] | None = None,
) -> None:
    """Add hooks to `model` that correct the loss of each forward to which Trainer passes `num_items_in_batch`.

    Args:
        model: the sharded model. The hooks act only in forwards of the Trainer that `claim_hooks` was last called with.
        correct: called with the forward's keyword arguments, its outputs and the loss. Returns the new loss.
        around: (before, after), two functions, or None for neither. `before(kwargs)` is called before each such forward
            with its keyword arguments, and returns the keyword arguments to use instead. `after()` is called when the
            forward has ended, even with an error.
    """

    # `before` sets these variables before other hooks of the model run, because those may change the arguments:
    # * `asked`: whether the Trainer that owns these hooks runs this forward, and has passed num_items_in_batch to it.
    # * `recorded`: the labels and the attention mask of whole sequences. Hooks of `sequence_parallel` replace them by
    #   those of this rank's tokens.
    # * `begun`: False. `begin` sets it to True when it calls the first function of `around`.
    asked, recorded, begun = False, {}, False
    owner, _ = vars(base_of(model))[_HOOKS][-1]

    def before(module: Any, inputs: tuple, given: dict[str, Any]) -> None:
        nonlocal asked, recorded, begun
        asked, begun = given.get(COUNT) is not None and _computes(owner(), model), False
        recorded = {name: given.get(name) for name in (*LABELS, "attention_mask")}

    def begin(module: Any, inputs: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal begun
        if around is None or not asked:
            return None
        begun = True
        return inputs, around[0](given)

    def after(module: Any, inputs: tuple, given: dict[str, Any], outputs: Any) -> Any:
        nonlocal recorded
        given, recorded = {**given, **recorded}, {}
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
        # `begin` runs after the model's other pre-hooks. If they read num_items_in_batch, this does not count as a use
        # by the forward.
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    )


def keep_hooks(model: Any, *handles: RemovableHandle) -> None:
    """Store the handles of loss hooks, so that `claim_hooks` can remove the hooks of a Trainer that was deleted.

    Call `claim_hooks` first, with the model and the Trainer that owns the hooks.

    Args:
        model: the sharded model.
        *handles: the hooks' handles.
    """
    vars(base_of(model))[_HOOKS][-1][1].extend(handles)


@contextmanager
def _noted(model: Any, name: str, value: Any) -> Iterator[None]:
    """Context manager inside which the base model of `model` has an attribute `name` with the value `value`."""
    record = vars(base_of(model))
    record[name] = value
    try:
        yield
    finally:
        del record[name]


def labels_uncounted(model: Any) -> AbstractContextManager[None]:
    """Return a context manager inside which the loss hooks of `model` count no labels.

    A rank without rows of its own must run the forward with other rows, but the labels of these rows must not count.
    The forward itself gets these labels unchanged. The labels are not set to -100, because not every loss works with
    such labels: some losses use them as indices, and other losses become 0 / 0, with gradients of nan.
    """
    return _noted(model, _UNCOUNTED, True)


def parts_without_rows(model: Any, number: int) -> AbstractContextManager[None]:
    """Return a context manager inside which the loss hooks of `model` know how many parts of a step have no rows.

    A part is the micro-batch of one rank (or of several ranks that share rows). In the last batch of an epoch or an
    evaluation, ranks may have no rows. Such ranks compute repeated rows, whose losses do not count. A loss that is a
    mean over the parts, such as the auxiliary loss of a router, must then be averaged only over the parts with rows.

    Args:
        model: the sharded model.
        number: the number of parts of the step (or the evaluation batch) that have no rows.
    """
    return _noted(model, _WITHOUT_ROWS, number)


def count_parts_without_rows(model: Any) -> int:
    """Return the `number` of the context manager `parts_without_rows` that is active for `model`, or 0 if none is."""
    return vars(base_of(model)).get(_WITHOUT_ROWS, 0)


def counted_labels(model: Any, given: dict[str, Any], own: bool) -> torch.Tensor | None:
    """Return which labels count in a loss that is a mean over labels: booleans, in the shape of the labels.

    The first of these cases that applies decides:

    * The context `labels_uncounted` of `model` is active. No label counts.
    * The labels have a floating-point dtype, and `own` is False. All labels count.
    * The loss of the model is a mean over the tokens that the attention mask allows, as in ElectraForPreTraining, and
      `given` has a mask in the shape of the labels. The labels of these tokens count, except labels of -100.
    * Any other loss. All labels count, except labels of -100. (If the labels are classes of pixels, the model's
      configuration may name another value than -100.)

    Args:
        model: the sharded model.
        given: the keyword arguments of the forward, with "labels" and possibly "attention_mask".
        own: whether the loss is computed by code from the user's program or the Hub, and not by transformers. Labels of
            -100 then do not count in any dtype, as in Trainer's own count of labels.

    Returns:
        The booleans; None if the labels are not a tensor.
    """
    labels, mask = given["labels"], given.get("attention_mask")
    if not isinstance(labels, torch.Tensor):
        return None
    if _UNCOUNTED in vars(base_of(model)):
        return torch.zeros_like(labels, dtype=torch.bool)
    if labels.is_floating_point() and not own:
        return torch.ones_like(labels, dtype=torch.bool)
    counted = labels.ne(_ignored_label(model, labels))
    # Losses of some models, such as ElectraForPreTraining, are means over the tokens that the mask allows. Their code
    # calls these tokens `active_loss`.
    if isinstance(mask, torch.Tensor) and mask.shape == labels.shape and "active_loss" in names_in_forward(model):
        counted = counted & mask.eq(1).to(counted.device)
    return counted


def _ignored_label(model: Any, labels: torch.Tensor) -> int:
    """Return the label that does not count in the mean of the loss of `model`.

    This is -100, except for labels of pixels, which have shape (rows, height, width). For them, it is the label that
    the model's configuration names. If there is only a single class, it is -100 for pixels, too: the loss of Segformer
    is then 0 for the pixels with the configured label, but is divided by the number of all pixels.
    """
    config = getattr(base_of(model), "config", None)  # a module that is not from transformers may have none
    if labels.ndim != 3 or getattr(config, "num_labels", None) == 1:
        return IGNORED
    return getattr(config, "semantic_loss_ignore_index", getattr(config, "loss_ignore_index", IGNORED))


def is_scalar(value: Any) -> bool:
    """Return whether `value` is a tensor without dimensions.

    Callers search a model's tuple of outputs for a loss or an auxiliary loss: these have no dimensions, unlike logits.
    """
    return isinstance(value, torch.Tensor) and value.ndim == 0


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or `model` itself if it is not wrapped by PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def chooses_loss(model: Any) -> bool:
    """Return whether the forward of `model` calls `self.loss_function`, a property of models from transformers.

    If so, the forward's code does not tell whether the loss is divided by `num_items_in_batch`, because this depends on
    the loss function. The caller must observe the calls of the loss function instead.
    """
    return "loss_function" in names_in_forward(model) and isinstance(
        getattr(type(base_of(model)), "loss_function", None), property
    )


def ignores_count(model: Any) -> bool:
    """Return whether the forward of `model` computes a loss itself, without dividing it by `num_items_in_batch`.

    `num_items_in_batch` is the number of labels in all micro-batches on all ranks, by which Trainer expects a model to
    divide its loss. A model that ignores it returns a mean over this rank's labels, which a loss hook then corrects.
    The result is a guess from names in the code of the forward. It is reliable only if `must_observe(model)` is False.
    The result is False if the forward calls `self.loss_function`.
    """
    if chooses_loss(model):
        return False
    parts = {type(child).__name__ for child in base_of(model).children()}
    return any(map(_LOSS.search, names_in_forward(model) | parts))


def must_observe(model: Any) -> bool:
    """Return whether a forward of `model` must be observed to find out whether its loss uses `num_items_in_batch`.

    For most models of transformers, the names in the forward's code show this. The names are not enough in three cases:

    * The forward is code from the user's program or the Hub.
    * The forward passes the labels to another module, which computes the loss, as in BlipForConditionalGeneration.
    * The forward names `num_items_in_batch` but does not pass it to `self.loss_function`. For example, the forward of
      EncoderDecoderModel passes it to its decoder, and then computes a mean itself.
    """
    names = names_in_forward(model)
    if not chooses_loss(model) and (COUNT in names or ("labels" in names and not ignores_count(model))):
        return True
    forward = next(vars(cls)["forward"] for cls in type(base_of(model)).__mro__ if "forward" in vars(cls))
    return package_of(forward) not in ("transformers", "torch", "hf_bmtrain")


def package_of(function: Any) -> str:
    """Return the name of the package that defines a function. Decorators and functools.partial are ignored."""
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
