"""Change a loss that is a mean over this rank's labels, so that Trainer on several ranks gets the mean over all labels.

Trainer multiplies the loss by the number of ranks, which is right only for a sum divided by the number of labels on
all ranks. A hook therefore first multiplies a mean by this rank's share of the labels of all ranks.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

import torch

from ...engine.runtime.world import current_world
from ...engine.wrap.accelerator import ranks_per_row
from .hooks import COUNT, base_of, chooses_loss, hook_loss, ignores_count, names_in

_log = logging.getLogger("hf_bmtrain")
_OF_ROWS = re.compile("CTC|RNNT|TDT")
"""Matches the names of losses that are a mean over rows (sequences), not over labels."""


def follow_mean_loss(model: Any, args: Any) -> None:
    """Make Trainer's loss of `model` on several ranks the mean over the labels of all ranks, as in one process.

    By default (`average_tokens_across_devices`), Trainer multiplies the loss by the number of ranks. This is right if
    the model divides a sum by `num_items_in_batch`, the number of labels in all micro-batches on all ranks. But many
    models, such as BERT, ignore `num_items_in_batch` and return a mean over this rank's labels. A hook multiplies the
    loss of such a model by this rank's share of the labels of all ranks, before Trainer multiplies it.

    Trainer also adds up the losses of micro-batches, which is wrong for a mean, even in one process. This function does
    not change that, but logs a warning.

    Args:
        model: the sharded model, after a call of `claim_hooks`, which removes the hooks of another Trainer.
        args: the trainer's TrainingArguments.
    """
    world = current_world()
    several = world.size > 1 and args.average_tokens_across_devices
    if not several and args.gradient_accumulation_steps == 1:
        return
    base, told, warned = base_of(model), False, False
    # A model can ignore num_items_in_batch in three ways: its forward does not use it (`ignores`), does not pass it to
    # `loss_function`, or calls a `loss_function` that does not use it. `calls` recognizes the last two.
    ignores, calls = ignores_count(model), _Calls(base) if chooses_loss(model) else None
    if not ignores and calls is None:
        return

    def weigh(given: dict[str, Any], outputs: Any, loss: torch.Tensor) -> torch.Tensor:
        nonlocal told, warned
        if calls is not None and not calls.ignored:
            return loss
        name = "" if calls is None else calls.name
        # A sum needs no hook: Trainer multiplies it by the number of ranks, and gradients are averaged over the ranks,
        # so the result is the sum over all ranks. Adding up the losses of micro-batches is also correct for a sum.
        if "CTC" in name and base.config.ctc_loss_reduction == "sum":
            return loss
        if model.training and args.gradient_accumulation_steps > 1 and not warned and world.rank == 0:
            _log.warning(
                "the loss of %s is a mean that ignores num_items_in_batch, but Trainer adds up the losses of the %d "
                "micro-batches of a step, and does not average them (with or without hf_bmtrain). So the logged loss "
                "and the gradients are %d times those of the average. To average the losses, set "
                "trainer.model_accepts_loss_kwargs = False before train()",
                type(base).__name__, args.gradient_accumulation_steps, args.gradient_accumulation_steps,
            )  # fmt: skip
            warned = True
        if world.size == 1 or not args.average_tokens_across_devices:
            return loss
        if not told and world.rank == 0:
            _log.info(
                "the loss of %s is a mean over labels. It is averaged over all ranks, instead of "
                "being multiplied by the number of ranks as Trainer does with "
                "average_tokens_across_devices=True", type(base).__name__,
            )  # fmt: skip
        told = True
        return loss * _share(given["labels"], loss, bool(_OF_ROWS.search(name))) * ranks_per_row(model)

    hook_loss(model, weigh, None if calls is None else (calls.begin, calls.end))


class _Calls:
    """Records whether a model of transformers ignores `num_items_in_batch` when it calls its `loss_function`.

    Attributes:
        ignored: whether the loss of the last forward is a mean that does not depend on `num_items_in_batch`.
        name: the name of the loss function that the last forward called; "" if it called none.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._own: list[Any] = []
        self.ignored, self.name = False, ""

    def begin(self) -> None:
        """Replace the model's `loss_function` by one that also records whether it ignores `num_items_in_batch`.

        Called before each forward.
        """
        function = self._base.loss_function
        self._own = [vars(self._base)["_loss_function"]] if "_loss_function" in vars(self._base) else []
        self.ignored, self.name = False, ""
        # update_wrapper keeps the function's name, by which other code recognizes it.
        seen = functools.partial(self._call, function)
        self._base.loss_function = functools.update_wrapper(seen, function)

    def end(self) -> None:
        """Restore the model's own `loss_function`. Called after each forward."""
        vars(self._base).pop("_loss_function", None)
        for function in self._own:
            self._base.loss_function = function

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = function(*args, **kwargs)
        names = names_in(function)
        self.name = getattr(function, "__name__", "")
        if kwargs.get(COUNT) is None or not names & {COUNT, "fixed_cross_entropy"}:
            self.ignored = True
        else:
            # transformers' loss for sequence classification, recognized by "MSELoss" in its code, takes
            # `num_items_in_batch`, but ignores it for these two problem types.
            kind = getattr(self._base.config, "problem_type", None)
            self.ignored = "MSELoss" in names and kind in ("regression", "multi_label_classification")
        return loss


def _share(labels: torch.Tensor, loss: torch.Tensor, of_rows: bool) -> torch.Tensor:
    """Return this rank's share, from 0 to 1, of the labels of all ranks. Ignored labels (-100) do not count.

    Collective: every rank must call it.

    Args:
        labels: this rank's labels.
        loss: the loss, whose device and dtype the result has.
        of_rows: whether to count rows that have a label, instead of labels.
    """
    world = current_world()
    counted = labels.ne(-100).flatten(1).any(1) if of_rows else labels.ne(-100)
    mine = counted.sum(dtype=torch.float64).reshape(1).to(loss.device)
    everyone = mine.clone()
    # If ranks may run different blocks, other ranks may still be in their forward, whose collectives need this rank.
    # Take part in these collectives before the all-reduce.
    if (entry := world.schedule.negotiated) is not None:
        world.schedule.negotiation.finish(entry)
    world.reduce.all_reduce(everyone).wait()
    return (mine / everyone).to(loss.dtype)[0]
