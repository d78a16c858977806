"""Correct the loss of the last evaluation batch, which Accelerate fills up with repeated rows if it is short."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from transformers.trainer_pt_utils import find_batch_size

from ...engine.runtime.world import World, current_world
from ...engine.wrap.accelerator import ranks_per_row
from .hooks import IGNORED, LABELS, labels_uncounted, parts_without_rows
from .mean import follow_loss_function

_log = logging.getLogger("hf_bmtrain")
_OF_PAIRS = ("trl.trainer.reward_trainer", "trl.trainer.dpo_trainer")  # modules of TRL with losses over pairs of rows
_OF_BATCHES = {"aot", "aot_unpaired", "sft"}
"""Names of losses of TRL's DPOTrainer that are not a mean over pairs of rows."""
_OF_CACHES = ("PREFIX_TUNING", "CARTRIDGE")
"""PEFT's prompt-learning methods whose virtual tokens are keys and values in the cache. Other such methods put
embeddings before each row."""


def follow_short_batch(trainer: transformers.Trainer) -> None:
    """Make the evaluation loss of `trainer` on several ranks equal that of one process, even with a short last batch.

    Accelerate fills up a short last batch with rows of the first batch, so that all ranks take the same number of
    steps. Trainer drops the predictions for these repeated rows. But the loss of a rank is a mean over all its rows,
    including repeated rows.

    This function replaces `prediction_step` of `trainer` by one that corrects the loss of such a batch. Usually it
    computes the loss again without the repeated rows. For TRL's SFTTrainer, or if a collator has concatenated the rows
    of a rank into one, it sets the labels of the repeated rows to -100 instead, which the loss ignores. If neither is
    possible (for example, if the rows of the dataset are packed or the dataset has no length), the loss is not
    corrected, and rank 0 logs a warning.

    For SFTTrainer, and for Seq2SeqTrainer with `predict_with_generate`, the new `prediction_step` also averages the
    loss of every batch over the labels of all ranks. This function does nothing with one rank, or if the trainer
    object itself has an attribute `prediction_step`, set by an earlier call or by the program. (The method of a
    subclass is replaced like Trainer's.)
    """
    world = current_world()
    if world.size == 1 or "prediction_step" in vars(trainer):
        return
    plain, told = trainer.prediction_step, False

    def as_in_one_process(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        nonlocal told
        left, groups = _rows_left(trainer), world.size // ranks_per_row(trainer.model)
        group = world.rank // ranks_per_row(trainer.model)
        # For TRL's SFTTrainer, set the labels of repeated rows to -100, so that the loss ignores them, and average the
        # loss over the labels of all ranks. Then set `left`, the number of rows that are not repeated, to None, as for
        # a full batch, because nothing else needs a correction.
        of_labels = is_sft(trainer, inputs)
        if of_labels and left is not None and left > 0 and rows_in(inputs) == _rows_of_rank(trainer):
            inputs, left = _ignore_repeated(inputs, left - group * _rows_of_rank(trainer)), None
        # If a collator has concatenated this rank's rows into one, do the same in that row: set the labels of repeated
        # rows to -100, and `left` to None.
        flattened = left is not None and left > 0 and _is_flattened(trainer, inputs)
        if flattened:
            own = _ignore_flattened(trainer, inputs, left or 0, of_labels)
            if all(world.gather_objects(own is not None)):
                inputs, left = own, None
        # `full` is True if Accelerate treats the last batch as short, but it has no repeated rows.
        full = left is not None and not flattened
        full = full and all(world.gather_objects(left == groups * (rows_in(inputs) or 0)))
        loss, logits, labels = plain(model, inputs, prediction_loss_only, *args, **kwargs)
        generates = getattr(trainer.args, "predict_with_generate", False) and not prediction_loss_only
        if loss is not None and (of_labels or generates):
            loss = _weigh(trainer, inputs, loss, of_labels, world)
        elif loss is not None and (flattened and left is None or full or left is not None and is_listed(inputs)):
            # Trainer gathers one copy of the loss per row from each rank, and averages the copies. It drops the copies
            # that come last, perhaps all of the last rank, as if they belonged to repeated rows. The loss of that rank
            # would then not count. So return the mean of all ranks' losses on every rank.
            mean = loss.detach().reshape(1).to(trainer.args.device, copy=True)
            world.reduce.all_reduce_mean(mean).wait()
            loss = mean[0]
        if loss is None or left is None or full:
            return loss, logits, labels
        right, of_pairs = None, groups == world.size and _is_mean_over_pairs(trainer)
        if left > 0 and not flattened:
            right = (_loss_of_pairs if of_pairs else _loss_of_rows)(trainer, model, inputs, left, world)
        if right is not None:
            if of_pairs and not told and world.rank == 0:
                _log.info(
                    "the last evaluation batch has %d pairs of rows (chosen and rejected) for %d ranks, so Accelerate "
                    "fills it up with pairs of the first batch. These do not count in the evaluation loss, but they "
                    "count in the other metrics of %s. To avoid this, evaluate a number of pairs that is a multiple of "
                    "per_device_eval_batch_size times the number of ranks",
                    left, world.size, type(trainer).__name__,
                )  # fmt: skip
                told = True
            return right.to(loss.dtype), logits, labels
        if not told and world.rank == 0:
            _log.warning(
                "the last evaluation batch has %s rows for %d ranks, so Accelerate fills it up with rows of the first "
                "batch. Their losses count in the evaluation loss, because %s. To avoid this, evaluate a number of "
                "rows that is a multiple of per_device_eval_batch_size times the number of ranks",
                left if left > 0 else "perhaps too few", world.size,
                "the rows of this batch are packed" if flattened
                else f"{type(trainer).__name__}, or its model, computes losses in its own way" if left > 0
                else "the dataset has no length",
            )  # fmt: skip
        told = True
        return loss, logits, labels

    # `args` and `kwargs` are Trainer's `ignore_keys` and, for Seq2SeqTrainer, options of `generate`.
    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        accelerator = trainer.accelerator
        follow_loss_function(trainer)
        # Seq2SeqTrainer sets `gather_function` to `Accelerator.gather`, which keeps repeated rows. Use `gather` only
        # for the loss, so that the repeated rows of logits and labels are dropped, as with other trainers.
        if trainer.gather_function == accelerator.gather:
            trainer.gather_function = _GatherRows(  # pyright: ignore[reportAttributeAccessIssue]
                accelerator, accelerator.gather
            )
        elif accelerator.split_batches and not isinstance(trainer.gather_function, _GatherRows):
            # Trainer copies the loss of each batch, gathers the copies of all ranks, and finally averages all copies.
            # So the number of copies is the weight of a batch, and should be its number of rows. But with
            # split_batches, each rank makes a copy for every row of all ranks, which is too many. Accelerate drops the
            # surplus only for a short last batch, so this batch would weigh too little compared with full batches.
            # Therefore keep only as many copies on each rank as the rank has rows in a full batch.
            trainer.gather_function = _GatherRows(  # pyright: ignore[reportAttributeAccessIssue]
                accelerator, lambda losses: accelerator.gather_for_metrics(losses[: _rows_of_rank(trainer)])
            )
        loss, logits, labels = as_in_one_process(model, inputs, prediction_loss_only, *args, **kwargs)
        if isinstance(trainer.gather_function, _GatherRows):
            trainer.gather_function.loss_comes = loss is not None
        return loss, logits, labels

    trainer.prediction_step = prediction_step  # pyright: ignore[reportAttributeAccessIssue]


class _GatherRows:
    """Replacement for `trainer.gather_function` that gathers the loss of a batch by the function `gather_loss`.

    Logits and labels are gathered by Accelerate, which drops the rows that it repeated to fill up the last batch.

    Args:
        accelerator: the trainer's Accelerator.
        gather_loss: a function that gathers the copies of the loss from all ranks. Trainer makes one copy per row and
            later averages all copies, so the number of copies is the weight of the batch.

    Attributes:
        loss_comes: whether the next call gathers a loss, and not logits or labels. Set it after each forward: Trainer
            then gathers the batch's loss, if there is one, before the other outputs.
    """

    def __init__(self, accelerator: Any, gather_loss: Callable[[Any], Any]) -> None:
        self._accelerator, self._gather_loss = accelerator, gather_loss
        self.loss_comes = False

    def __call__(self, values: Any) -> Any:
        if self.loss_comes:
            self.loss_comes = False
            return self._gather_loss(values)
        return self._accelerator.gather_for_metrics(values)


def is_sft(trainer: transformers.Trainer, inputs: Any) -> bool:
    """Return whether the methods of TRL's own SFTTrainer compute the loss of a batch.

    Such a loss is a mean over this rank's labels that are not -100. So callers can exclude repeated rows, with which
    Accelerate fills up a batch, by setting the labels of these rows to -100. False if a subclass of SFTTrainer or a
    `compute_loss_func` computes the loss, or if `inputs` has no labels.

    Args:
        trainer: the trainer.
        inputs: the batch, {name of an argument of the model: value}.
    """
    methods = (type(trainer).compute_loss, type(trainer).prediction_step)
    own = all(method.__module__ == "trl.trainer.sft_trainer" for method in methods)
    if not own or trainer.compute_loss_func is not None or is_listed(inputs):
        return False
    return isinstance(inputs.get("labels"), torch.Tensor)


def is_listed(inputs: Any) -> bool:
    """Return whether a batch is a list of rows instead of a dict of tensors.

    TRL's GRPOTrainer, for example, gets such batches, and converts them to tensors itself.
    """
    return not isinstance(inputs, Mapping)


def rows_in(inputs: Any) -> int | None:
    """Return the number of rows of a batch, or None if it is unknown.

    inputs: the batch. A list has one item per row. In a dict, the size of dimension 0 of a tensor is the number of
        rows.
    """
    return len(inputs) if isinstance(inputs, (list, tuple)) else find_batch_size(inputs)


def _rows_of_rank(trainer: transformers.Trainer) -> int:
    """Return the number of rows of a full evaluation batch on one rank."""
    groups = current_world().size // ranks_per_row(trainer.model)
    return trainer.args.eval_batch_size // (groups if trainer.accelerator.split_batches else 1)


def _ignore_repeated(inputs: Any, kept: int) -> dict[str, Any]:
    """Return `inputs` with the labels of all rows after the first `kept` set to -100, which losses ignore.

    These rows are repeated rows of the first batch, with which Accelerate has filled up the last batch.
    """
    labels = labels_in(inputs)
    for each in labels.values():
        each[max(kept, 0) :] = IGNORED
    return {**inputs, **labels}


def labels_in(inputs: Any) -> dict[str, torch.Tensor]:
    """Return copies of the labels in a batch, of which there may be two kinds: {"labels": ..., "shift_labels": ...}.

    inputs: the batch, {name of an argument of the model: value}. Labels that are not tensors are left out.
    """
    return {name: inputs[name].clone() for name in LABELS if isinstance(inputs.get(name), torch.Tensor)}


def starts_of_rows(inputs: Any) -> torch.Tensor | None:
    """Return where each row begins if a collator has concatenated all rows of a batch into one long row.

    Callers use these positions to find the rows that Accelerate has repeated to fill up the batch, because these rows
    must not count in the loss.

    Args:
        inputs: the batch, {name of an argument of the model: value}, or a list of rows.

    Returns:
        (rows,), the index of the first token of each row, where `position_ids` is 0. None if `inputs` is not such a
        batch: it is a list, or its labels and position_ids are not both tensors of shape (1, tokens).
    """
    if is_listed(inputs):
        return None
    positions, labels = inputs.get("position_ids"), inputs.get("labels")
    if not isinstance(positions, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return None
    if labels.ndim != 2 or len(labels) != 1 or positions.shape != labels.shape:
        return None
    return positions[0].eq(0).nonzero()[:, 0]


def ignore_after(inputs: Any, starts: torch.Tensor, kept: int) -> dict[str, Any]:
    """Return a copy of `inputs` with the labels of all rows after the first `kept` set to -100, which losses ignore.

    Called for the last batch, which Accelerate has filled up with repeated rows. (These are the rows after the first
    `kept`.) A collator has concatenated all rows of the batch into one long row. The copy is shallow, except that its
    labels are new tensors.

    Args:
        inputs: the batch, {name of an argument of the model: value}, with labels (1, tokens).
        starts: (rows,), the index of the first token of each row (see `starts_of_rows`).
        kept: the number of rows whose labels are kept; zero or negative if none are kept.
    """
    labels = labels_in(inputs)
    for each in labels.values() if kept < len(starts) else ():
        each[:, int(starts[max(kept, 0)]) :] = IGNORED
    return {**inputs, **labels}


def _is_flattened(trainer: transformers.Trainer, inputs: Any) -> bool:
    """Return whether `inputs` contain one long row, into which a collator has concatenated all rows of this rank.

    False if full batches have one row per rank, or if rank 0 reads the batches and Accelerate divides them.
    """
    divided = isinstance(trainer.accelerator.gradient_state.active_dataloader, DataLoaderDispatcher)
    return not divided and _rows_of_rank(trainer) > 1 and starts_of_rows(inputs) is not None


def _ignore_flattened(trainer: Any, inputs: Any, left: int, of_labels: bool) -> dict[str, Any] | None:
    """Return the last batch with the labels of repeated rows set to -100, which losses ignore.

    Repeated rows are those with which Accelerate has filled up the batch. Returns None if the number of concatenated
    rows is not that of a full batch (as for a dataset whose rows are already packed), or if the loss is not averaged
    over the labels of all ranks.

    Args:
        trainer: the Trainer that evaluates.
        inputs: this rank's batch, in which a collator has concatenated all rows.
        left: the number of rows on all ranks that are not repeated. In rank order, they come before the repeated rows.
        of_labels: whether the caller averages the loss over the labels of all ranks. Otherwise Trainer itself does so
            if transformers' own methods compute the loss, `trainer.model_accepts_loss_kwargs` is True, and the argument
            `average_tokens_across_devices` is set.
    """
    starts, rows = starts_of_rows(inputs), _rows_of_rank(trainer)
    counted = computes_loss(trainer) and trainer.model_accepts_loss_kwargs
    if starts is None or len(starts) != rows:
        return None
    if not of_labels and not (counted and trainer.args.average_tokens_across_devices):
        return None
    return ignore_after(inputs, starts, left - current_world().rank // ranks_per_row(trainer.model) * rows)


def _weigh(trainer: transformers.Trainer, inputs: Any, loss: torch.Tensor, of_sft: bool, world: World) -> torch.Tensor:
    """Return the mean loss over the labels of all ranks, given `loss`, the mean over this rank's labels.

    Collective: every rank must call it. This is for trainers that do not pass the number of labels to the model:
    Seq2SeqTrainer with `predict_with_generate`, and SFTTrainer (`of_sft`). If the labels are not a tensor, or no label
    on any rank counts, `loss` is returned unchanged.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor):
        return loss
    shifts = _shifts_labels(trainer) if of_sft else getattr(trainer, "_loss_shifts_labels", False)
    if isinstance(inputs.get("shift_labels"), torch.Tensor):
        counted = inputs["shift_labels"].ne(IGNORED)
    else:
        counted = (labels[..., 1:] if shifts else labels).ne(IGNORED)
    mine = counted.sum(dtype=torch.float64).to(loss.device)
    sums = torch.stack([torch.where(mine > 0, loss.detach().double() * mine, 0.0), mine])
    world.reduce.all_reduce(sums).wait()
    return (sums[0] / sums[1]).to(loss.dtype) if sums[1] > 0 else loss


def _shifts_labels(trainer: transformers.Trainer) -> bool:
    """Return whether the loss of TRL's SFTTrainer leaves out the first label of each row, which no token predicts.

    The result is True, unless PEFT puts the embeddings of virtual tokens before each row. The last virtual token then
    predicts the first label.
    """
    config: Any = getattr(trainer.model, "active_peft_config", None)
    return not getattr(config, "is_prompt_learning", False) or config.peft_type in _OF_CACHES


def _rows_left(trainer: transformers.Trainer) -> int | None:
    """Return the number of rows on all ranks in the last evaluation batch, without repeated rows.

    Repeated rows are those with which Accelerate fills up this batch. Returns -1 if the number is unknown. Returns None
    if the current batch is not the last, if Accelerate treats the last batch as full, or if Accelerate has not divided
    the rows among the ranks.
    """
    loader: Any = trainer.accelerator.gradient_state.active_dataloader
    if loader is None or loader is not trainer.callback_handler.eval_dataloader or loader._drop_last:
        return None
    if not loader.end_of_dataloader or loader.remainder == 0:
        return None
    if loader.remainder < 0 or isinstance(loader, DataLoaderDispatcher):
        return loader.remainder
    # Accelerate computes `remainder` from the length of the dataset. This may be wrong, because a sampler may yield
    # each row several times, as that of TRL's GRPOTrainer does. So compute it from the length of the sampler.
    batches = getattr(loader.batch_sampler, "batch_sampler", None)
    rows: Any = getattr(batches, "sampler", None)
    left = len(rows if hasattr(rows, "__len__") else loader.dataset) % loader.total_batch_size
    return left or loader.total_batch_size


def _loss_of_rows(
    trainer: transformers.Trainer, model: Any, inputs: Any, left: int, world: World
) -> torch.Tensor | None:
    """Compute the loss of the last evaluation batch without the rows that Accelerate repeated to fill up the batch.

    Collective: every rank must call it. Returns None if this loss cannot be computed.

    inputs: this rank's rows of the batch.
    left: the number of rows on all ranks that are not repeated. In rank order, they come before the repeated rows.
    """
    rows, shared = rows_in(inputs), ranks_per_row(trainer.model)  # `shared` ranks share each row
    mine = min(max(left - world.rank // shared * (rows or 0), 0), rows or 0)
    short = first_rows(inputs, rows, max(mine, 1)) if computes_loss(trainer) and not is_listed(inputs) else None
    if not all(world.gather_objects(short is not None)):
        return None
    assert short is not None
    # The number of groups of ranks without rows of their own. Their batches consist of rows that were repeated to fill
    # the last batch. The `left` rows that are not repeated fill ceil(left / rows) groups.
    absent = world.size // shared + -left // (rows or left)
    with torch.no_grad(), trainer.compute_loss_context_manager():
        prepared = own = trainer._prepare_inputs(short)
        if mine == 0 and isinstance(prepared.get("labels"), torch.Tensor):
            own = _ignore_repeated(prepared, 0)  # this rank has only repeated rows, so none of its labels may count
        count = trainer._get_num_items_in_batch([own], trainer.args.device)
        # The forward is collective, so a rank without rows of its own runs it with a repeated row.
        uncounted = labels_uncounted(trainer.model) if mine == 0 else nullcontext()
        with uncounted, parts_without_rows(trainer.model, absent):
            loss: Any = trainer.compute_loss(model, prepared, num_items_in_batch=count)
    # If `counted`, the loss of a rank is (sum over its tokens) / (number of tokens of all ranks) * (number of ranks).
    # The loss of the batch is then the mean of the ranks' losses. Otherwise, the loss of a rank is the mean over its
    # own rows, and its weight is its share of all rows. As `shared` ranks have the same rows, each counts 1 / shared.
    counted = count is not None and trainer.args.average_tokens_across_devices
    share = 1 / world.size if counted else mine / left / shared
    total = loss.detach().double().mean().reshape(1) * share if mine else loss.new_zeros(1, dtype=torch.float64)
    world.reduce.all_reduce(total).wait()
    return total[0]


def _is_mean_over_pairs(trainer: Any) -> bool:
    """Return whether the trainer's loss is a mean over pairs of rows, as in TRL's RewardTrainer or DPOTrainer."""
    methods = (type(trainer).compute_loss, getattr(type(trainer), "_compute_loss", type(trainer).compute_loss))
    if any(method.__module__ not in _OF_PAIRS for method in methods) or not hasattr(trainer, "_metrics"):
        return False
    kinds = getattr(trainer, "loss_types", ())
    return _OF_BATCHES.isdisjoint(kinds) and not getattr(trainer, "aux_loss_enabled", False)


def _loss_of_pairs(trainer: Any, model: Any, inputs: Any, left: int, world: World) -> torch.Tensor | None:
    """Return the mean loss of the last evaluation batch without the pairs that Accelerate repeated to fill it up.

    The mean is over the pairs of all ranks. A pair is, for example, a chosen and a rejected answer. Returns None if
    `inputs` are not pairs. Collective: every rank must call it.

    Each rank passes one pair at a time to the trainer. Without the repeated pairs, ranks would have different numbers
    of pairs, but the trainer gathers tensors that must have the same shape on all ranks. So ranks compute the losses of
    repeated pairs, too, but leave them out of the mean.

    inputs: this rank's part of the batch.
    left: the number of pairs that are not repeated, on all ranks together. In rank order, they come before the repeated
        pairs.
    """
    size = _rows_of_rank(trainer)
    pairs = [_pair(inputs, row, size) for row in range(min(size, left))]
    if not all(world.gather_objects(None not in pairs)):
        return None
    metrics, total = trainer._metrics["eval"], torch.zeros(1, dtype=torch.float64, device=trainer.args.device)
    # Discard the metrics of the pairs: the trainer's own prediction_step has already recorded those of the batch.
    trainer._metrics["eval"] = defaultdict(list)
    try:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            for row, pair in enumerate(pairs):
                loss = trainer.compute_loss(model, trainer._prepare_inputs(pair)).double()
                total += loss if world.rank * size + row < left else 0
    finally:
        trainer._metrics["eval"] = metrics
    world.reduce.all_reduce(total).wait()
    return total[0] / left


def _pair(inputs: Any, row: int, size: int) -> dict[str, Any] | None:
    """Return the pair with index `row` of a batch of `size` pairs, or None if a value does not contain such pairs.

    A value that contains pairs is a tensor with either `size` rows, one for each pair, or 2 * `size` rows: the first
    rows of all pairs, followed by the second rows of all pairs.

    inputs: the batch, {name of an argument of the model: value}.
    """
    found = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) not in (size, 2 * size):
            return None
        found[name] = value[row::size]
    return found


def computes_loss(trainer: transformers.Trainer) -> bool:
    """Return whether `trainer` computes losses by transformers' own methods, which also work for part of a batch.

    Accelerate fills up the last batch with repeated rows. If the result is True, callers may compute the loss of the
    batch without these rows. False if another class, such as a subclass of Trainer outside transformers, computes
    losses, because it may need full batches.
    """
    methods = (type(trainer).compute_loss, type(trainer).prediction_step)
    return all(method.__module__.split(".")[0] == "transformers" for method in methods)


def first_rows(inputs: Any, rows: int | None, kept: int) -> dict[str, Any] | None:
    """Return `inputs` with only their first `kept` rows, or None if a tensor, list or tuple does not have `rows` rows.

    Called for the last batch, which Accelerate has filled up with repeated rows. These are the rows after the first
    `kept`, and must not count in the loss.

    Args:
        inputs: the batch, {name of an argument of the model: value}. Values that are not tensors, lists or tuples stay
            as they are.
        rows: the number of rows (the size of dimension 0) that each tensor, list and tuple must have. None if it is
            unknown: the result is then None, too, if there is any tensor, list or tuple.
        kept: the number of rows to keep.
    """
    found = {}
    for name, value in inputs.items():
        if isinstance(value, (torch.Tensor, list, tuple)):
            if isinstance(value, torch.Tensor) and value.ndim == 0 or len(value) != rows:
                return None
            value = value[:kept]
        found[name] = value
    return found
