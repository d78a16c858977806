"""Change a loss that is a mean over this rank's labels, so that Trainer on several ranks gets the mean over all labels.

Trainer multiplies the loss by the number of ranks, which is right only for a sum divided by the number of labels on
all ranks. A hook therefore first multiplies a mean by this rank's share of the labels of all ranks.
"""

from __future__ import annotations

import functools
import logging
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import transformers

from ...engine.runtime.world import current_world
from ...engine.wrap.accelerator import ranks_per_row
from .count_use import CountUse, hide_from_blocks
from .hooks import (
    COUNT,
    base_of,
    chooses_loss,
    counted_labels,
    hook_loss,
    ignores_count,
    must_observe,
    names_in,
    names_in_forward,
    package_of,
)

_log = logging.getLogger("hf_bmtrain")
_OF_ROWS = re.compile("CTC|RNNT|TDT")
"""Matches the names of losses that are a mean over rows (sequences), not over labels."""
_OF_SENTENCES = {"next_sentence_label", "sentence_order_label", "sentence_image_labels"}
"""Names of arguments with one label per row, which models such as BertForPreTraining take. The loss of these models is
the sum of two means: over tokens, and over rows."""


def follow_mean_loss(model: Any, trainer: transformers.Trainer) -> LastForward | None:
    """Make Trainer's loss of `model` on several ranks the mean over the labels of all ranks, as in one process.

    By default (`average_tokens_across_devices`), Trainer multiplies the loss by the number of ranks. This is right if
    the loss is a sum divided by `num_items_in_batch`, the number of labels in all micro-batches on all ranks. But many
    models, such as BERT, ignore `num_items_in_batch` and return a mean over this rank's labels. A hook multiplies the
    loss of such a model by this rank's share of the labels of all ranks, before Trainer multiplies it.

    Trainer also adds up the losses of micro-batches, which is wrong for a mean, even in one process. `follow_mean_loss`
    does not change that, but a warning is logged.

    Args:
        model: the sharded model. Call `claim_hooks(model, trainer)` first.
        trainer: the Trainer that trains or evaluates the model.

    Returns:
        An object that tells whether the loss of the model's last forward was a mean, or a sum divided by
        `num_items_in_batch`. The result is None, and no hook is added, in two cases. Either the loss is known to be
        such a sum. Or a step has only one micro-batch, and losses are not averaged over several ranks (because there is
        one rank, or `average_tokens_across_devices=False`).
    """
    several = _averages(trainer)
    if not several and trainer.args.gradient_accumulation_steps == 1:
        return None
    base, forward = base_of(model), LastForward(model)
    if not forward.may_be_mean:
        return None
    sentences = _OF_SENTENCES & names_in_forward(model) if several else set()
    way_out = "set trainer.model_accepts_loss_kwargs = False before train()"
    correct = _Correction(type(base).__name__, trainer, way_out)

    def weigh(given: dict[str, Any], outputs: Any, loss: torch.Tensor) -> torch.Tensor:
        # With ctc_loss_reduction="sum", the CTC loss is a sum, which needs no correction: Trainer multiplies it by the
        # number of ranks, and gradients are averaged over the ranks, so the result is the sum over all ranks. Adding up
        # the losses of micro-batches is also correct for a sum.
        if "CTC" in forward.name and base.config.ctc_loss_reduction == "sum":
            return loss
        for name in sentences:
            if forward.ignored and not forward.observed and isinstance(given.get(name), torch.Tensor):
                # The loss is a mean over tokens plus a mean over rows. The first must be multiplied by this rank's
                # share of the tokens, the second by its share of the rows. So compute the mean over rows again, from
                # the outputs: (the loss, the logits of tokens, the logits of rows).
                of_rows = torch.nn.functional.cross_entropy(outputs[2].view(-1, 2), given[name].view(-1))
                of_tokens = correct(loss - of_rows, given, True, False)
                return of_tokens + correct(of_rows, {"labels": given[name]}, True, False)
        of_rows = bool(_OF_ROWS.search(forward.name))
        return correct(loss, given, forward.ignored, forward.observed, of_rows, forward.shifts)

    hook_loss(model, weigh, (forward.begin, forward.end))
    return forward


def follow_loss_function(trainer: transformers.Trainer) -> None:
    """Make the result of Trainer's `compute_loss_func` the mean over the labels of all ranks, as in one process.

    The function may ignore `num_items_in_batch` (the number of labels on all ranks), as a model may. Its result is then
    corrected in the same way as the loss of a model by `follow_mean_loss`.

    Called when a trainer is created, when its training begins, and before each batch of an evaluation on several ranks,
    because programs may set another function in between.

    Args:
        trainer: the Trainer. Its `compute_loss_func` is replaced, unless an earlier call has replaced it. Nothing is
            replaced if a step has only one micro-batch, and losses are not averaged over several ranks (because there
            is one rank, or `average_tokens_across_devices=False`).
    """
    function: Any = trainer.compute_loss_func
    if isinstance(function, _ObservedFunction) and not function.is_for(trainer):  # taken from another Trainer
        function = trainer.compute_loss_func = function.function
    if not _averages(trainer) and trainer.args.gradient_accumulation_steps == 1:
        return
    if callable(function) and not isinstance(function, _ObservedFunction):
        trainer.compute_loss_func = _ObservedFunction(function, trainer)


def _averages(trainer: transformers.Trainer) -> bool:
    """Return whether there are several ranks, and losses are averaged over them (`average_tokens_across_devices`)."""
    return current_world().size > 1 and trainer.args.average_tokens_across_devices


class LastForward:
    """Finds out whether a forward of a model computes a loss that is a mean, because it ignores `num_items_in_batch`.

    `num_items_in_batch` is the number of labels in all micro-batches on all ranks. A model ignores it if the forward
    does not use it, does not pass it to `loss_function`, or calls a `loss_function` that does not use it. For most code
    of transformers, this is found out from the names in the code. Other code is observed when it runs.

    Args:
        model: the sharded model, after a call of `claim_hooks`.

    Attributes:
        may_be_mean: False if the loss of every forward is known to be divided by `num_items_in_batch`.
        ignored: whether the last forward has ignored `num_items_in_batch`.
        observed: whether `ignored` was found by running the code, and not from names in it. If so, `ignored` may differ
            between ranks.
        name: the name of the `loss_function` that the last forward called; "" if it called none.
        shifts: whether the loss leaves out the first label of each row, because no token predicts it. None if the
            forward's code does not tell.
        keeps_sum: whether to set `summed` in each forward. Callers may set it to True.
        summed: the result of the `loss_function` that the last forward called, if it was divided by
            `num_items_in_batch`; otherwise None. Callers must reset it to None, because it keeps the graph in memory.
    """

    def __init__(self, model: Any) -> None:
        self._base, self._use = base_of(model), CountUse()
        self._observe, self._chooses = must_observe(model), chooses_loss(model)
        self._mean = not self._observe and ignores_count(model)
        self._own_function: list[Any] = []
        self.may_be_mean = self._observe or self._chooses or self._mean
        self.ignored, self.observed, self.name = False, False, ""
        self.keeps_sum = False
        self.summed: torch.Tensor | None = None
        # A forward in transformers that computes a mean itself has a variable `shift_labels` if it leaves out the first
        # label of each row.
        self.shifts = "shift_labels" in names_in_forward(model) if self._mean else None
        if self._observe:
            hide_from_blocks(model)

    def begin(self, given: dict[str, Any]) -> dict[str, Any]:
        """Begin to observe whether a forward uses `num_items_in_batch`. Called before each forward.

        given: the keyword arguments of the forward.

        Returns the keyword arguments to pass to the forward instead of `given`.
        """
        self.ignored, self.observed, self.name, self.summed = self._mean, self._observe, "", None
        if self._chooses:
            # Replace the model's `loss_function` by one that also records whether it ignores num_items_in_batch.
            function = self._base.loss_function
            self._own_function = [vars(self._base)["_loss_function"]] if "_loss_function" in vars(self._base) else []
            # update_wrapper keeps the function's name, by which other code recognizes it.
            seen = functools.partial(self._call, function)
            self._base.loss_function = functools.update_wrapper(seen, function)
        return {**given, COUNT: self._use.observed(given[COUNT])} if self._observe else given

    def end(self) -> None:
        """Stop watching how a forward computes its loss, and restore `loss_function`. Called after each forward."""
        if self._observe:
            self.ignored = not self._use.seen
        if self._chooses:
            vars(self._base).pop("_loss_function", None)
            for function in self._own_function:
                self._base.loss_function = function

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.name = getattr(function, "__name__", "")
        if self._observe:  # the whole forward is already observed, including this call
            return function(*args, **kwargs)
        names = names_in(function)
        if kwargs.get(COUNT) is None:
            self.ignored = True
        elif package_of(function) != "transformers":
            self.observed, kwargs[COUNT] = True, self._use.observed(kwargs[COUNT])
            loss = function(*args, **kwargs)
            self.ignored = not self._use.seen
            return loss
        elif not names & {COUNT, "fixed_cross_entropy"}:
            self.ignored = True
        loss = function(*args, **kwargs)
        # transformers' loss for sequence classification, recognized by "MSELoss" in its code, takes
        # `num_items_in_batch`, but ignores it for these two problem types.
        kind = getattr(self._base.config, "problem_type", None)
        if "MSELoss" in names and kind in ("regression", "multi_label_classification"):
            self.ignored = True
        if self.keeps_sum and not self.ignored:
            self.summed = loss
        return loss


class _ObservedFunction:
    """A replacement for Trainer's `compute_loss_func`, whose result is averaged over all ranks if it is a mean.

    Args:
        function: the user's `compute_loss_func`.
        trainer: the Trainer, which multiplies the result by the number of ranks.
    """

    def __init__(self, function: Callable[..., Any], trainer: transformers.Trainer) -> None:
        self.function, self._use = function, CountUse()
        name = getattr(function, "__name__", type(function).__name__)
        self._correct = _Correction(
            name, trainer, "let this function return the sum of the losses of all labels, divided by num_items_in_batch"
        )

    def is_for(self, trainer: transformers.Trainer) -> bool:
        """Return whether this object replaces the `compute_loss_func` of `trainer`, and not that of another Trainer."""
        return self._correct.trainer() is trainer

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        if num_items_in_batch is None:
            return self.function(outputs, labels, num_items_in_batch=None)
        loss = self.function(outputs, labels, num_items_in_batch=self._use.observed(num_items_in_batch))
        return self._correct(loss, {"labels": labels}, not self._use.seen, observed=True)


class _Correction:
    """A callable that corrects a loss: it multiplies a mean over this rank's labels by this rank's share of all labels.

    Trainer multiplies the result by the number of ranks, and gradients are averaged over the ranks. The averaged
    gradients are then those of the mean over the labels of all ranks.

    Args:
        name: the name of the class or function that computes the loss, for the log.
        trainer: the Trainer that gets the loss. With `model_init`, its model may change between calls.
        way_out: what the user can do to average the losses of micro-batches. This text follows "To average the losses,"
            at the end of a warning that Trainer adds these losses up.

    Attributes:
        trainer: a weak reference to the Trainer.
    """

    def __init__(self, name: str, trainer: transformers.Trainer, way_out: str) -> None:
        self._name, self._args, self._way_out = name, trainer.args, way_out
        self.trainer = weakref.ref(trainer)  # weak, because the model may live longer than the trainer
        self._told = self._warned = False

    def __call__(
        self,
        loss: torch.Tensor,
        given: dict[str, Any],
        ignored: bool,
        observed: bool,
        of_rows: bool = False,
        shifts: bool | None = None,
    ) -> torch.Tensor:
        """Multiply a loss that is a mean over this rank's labels by this rank's share of the labels of all ranks.

        Any other loss is returned unchanged. Collective if Trainer averages over ranks: every rank must call it.

        Args:
            loss: the loss of this rank.
            given: the keyword arguments of the forward, of which "labels" (or "shift_labels") and "attention_mask" tell
                which labels count. If the labels are not a tensor, the loss is returned unchanged.
            ignored: whether the loss is a mean, because its computation ignores `num_items_in_batch`.
            observed: whether `ignored` was observed on this rank, and may be different on other ranks, for example on a
                rank without labels. The loss is treated as a mean only if every rank has ignored `num_items_in_batch`.
            of_rows: whether the loss is a mean over rows that have a label, not over labels.
            shifts: whether the loss leaves out the first label of each row. None if this is unknown: the first labels
                then count only if Trainer counts them.
        """
        trainer, world = self.trainer(), current_world()
        if trainer is None or not isinstance(given["labels"], torch.Tensor):
            return loss
        model: Any = trainer.model
        steps, summed = self._args.gradient_accumulation_steps, getattr(trainer, "loss_is_scaled_for_ga", None)
        if ignored and model.training and steps > 1 and summed is not False:
            self._warn(steps)
        if not (ignored or observed) or world.size == 1 or not self._args.average_tokens_across_devices:
            return loss
        if ignored and not self._told and world.rank == 0:
            _log.info(
                "the loss of %s is a mean over labels. It is averaged over all ranks, instead of being multiplied by "
                "the number of ranks as Trainer does with average_tokens_across_devices=True", self._name,
            )  # fmt: skip
            self._told = True
        shifted = isinstance(given.get("shift_labels"), torch.Tensor)
        if shifted:  # Trainer's own count of labels also prefers `shift_labels` to `labels`
            given = {**given, "labels": given["shift_labels"]}
        counted = counted_labels(model, given, observed)
        assert counted is not None
        # If the loss itself shifts the labels, the first label of each row does not count, because no token predicts
        # it. Trainer guesses from the model's class whether the loss does so. The guess is wrong for some classes of
        # transformers, such as TrOCRForCausalLM, so use `shifts` where it is known. It is unknown (None) for models
        # that the user's program defines. Their labels are counted as Trainer counts them.
        if not shifted and (getattr(trainer, "_loss_shifts_labels", False) if shifts is None else shifts):
            counted = counted[..., 1:]
        if of_rows:
            counted = counted.flatten(1).any(1)
        share = _share(counted, loss, ignored, ranks_per_row(model))
        return (
            torch.where(share > 0, loss, loss.nan_to_num()) * share
        )  # nan_to_num, because a mean over no labels may be nan, and nan * 0 is nan

    def _warn(self, steps: int) -> None:
        if self._warned or current_world().rank != 0:
            return
        self._warned = True
        _log.warning(
            "the loss of %s is a mean that ignores num_items_in_batch, but Trainer adds up the losses of the %d "
            "micro-batches of a step, and does not average them (with or without hf_bmtrain). So the logged loss and "
            "the gradients are %d times as large as with an average. To average the losses, %s",
            self._name, steps, steps, self._way_out,
        )  # fmt: skip


def _share(counted: torch.Tensor, loss: torch.Tensor, ignored: bool, shared: int) -> torch.Tensor:
    """Return the factor by which a mean over this rank's labels is multiplied, or 1 if the loss is not a mean.

    The factor is this rank's share of the labels of all ranks, multiplied by `shared`, because ranks that share rows
    count the same labels. If no label on any rank counts, all ranks have the same share. The loss is a mean if every
    rank has ignored `num_items_in_batch`. Collective: every rank must call it. The host does not wait for the device.

    Args:
        counted: which of this rank's labels (or rows) count.
        loss: the loss, whose device and dtype the result has.
        ignored: whether this rank has ignored `num_items_in_batch`.
        shared: the number of ranks that have the same rows (sequences).
    """
    world = current_world()
    mine = counted.sum(dtype=torch.float64).reshape(1).to(loss.device)
    everyone = torch.cat([mine, torch.full_like(mine, float(not ignored))])
    # If ranks may run different blocks, other ranks may still be in their forward, whose collectives need this rank.
    # Take part in these collectives before the all-reduce.
    if (entry := world.schedule.negotiated) is not None:
        world.schedule.negotiation.finish(entry)
    world.reduce.all_reduce(everyone).wait()
    used, share = everyone[1] > 0, torch.where(everyone[0] > 0, mine[0] / everyone[0], 1 / world.size) * shared
    return torch.where(used, torch.ones_like(share), share).to(loss.dtype)
