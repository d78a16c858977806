"""Correct the loss of an epoch's last batch, which Accelerate fills up with repeated rows if it is too short."""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import transformers
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, SkipBatchSampler
from torch.nn.modules.batchnorm import _BatchNorm

from ...engine.runtime.world import World, current_world
from ...engine.wrap.accelerator import ranks_per_row
from .hooks import COUNT, IGNORED, labels_uncounted, parts_without_rows
from .short_batch import computes_loss, first_rows, ignore_after, is_listed, is_sft, labels_in, rows_in, starts_of_rows

_log = logging.getLogger("hf_bmtrain")


@dataclass(frozen=True)
class _Short:
    """This rank's part of an epoch's short last batch, changed so that repeated rows do not count in the loss.

    Repeated rows are those with which Accelerate has filled up the batch.

    Attributes:
        inputs: the inputs for the forward. Repeated rows are left out, or their labels are -100. If this rank has only
            repeated rows, at least one of them is kept, because every rank must run the model.
        rows: the inputs without repeated rows, and so perhaps without any row. Trainer counts the tokens in them.
        absent: how many ranks (or groups of ranks that share rows) have only repeated rows.
        weight: the number by which a loss that is a mean over this rank's rows is multiplied. It is 0 if `rows` has no
            rows.
        labels: the labels that the forward gets instead of those in `inputs`, {name of an argument: labels}. They are
            given only if this rank has only repeated rows. The labels in `inputs` are then all -100, so that Trainer
            counts none of them, but not every loss works with such labels. None: the forward gets those in `inputs`.
    """

    inputs: dict[str, Any]
    rows: dict[str, Any]
    absent: int
    weight: float
    labels: dict[str, torch.Tensor] | None = None


def follow_short_training_batch(trainer: transformers.Trainer) -> None:
    """Correct training on several ranks for the last batch of an epoch, if it has too few rows for all ranks.

    Called when a trainer is created or its training begins. Further calls for the same trainer do nothing.

    Accelerate fills up such a batch with rows of the epoch's first batch, so that all ranks take the same number of
    steps. These repeated rows would count twice in the epoch. So they are removed from the batch, or their labels are
    set to -100. The step is then the same as in one process. A rank that has only repeated rows keeps at least one of
    them, but its loss counts 0, because every rank must run the model. If the repeated rows can neither be removed nor
    ignored, rank 0 logs a warning with the reason.

    Args:
        trainer: the trainer. Three of its methods are replaced: `get_batch_samples`, `training_step`, and the method
            that counts tokens.
    """
    world = current_world()
    if world.size == 1 or "get_batch_samples" in vars(trainer):
        return
    collect, step, told = trainer.get_batch_samples, trainer.training_step, False
    short: _Short | None = None
    loader: Any = None

    def own_rows(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal short, told, loader
        state = trainer.accelerator.gradient_state
        before = len(state.dataloader_references)
        for inputs in batches:
            # Find the data loader that yields `batches`. When its first batch is read, Accelerate appends it to its
            # list of active data loaders. So if the list became longer while a batch was read, take the last item.
            # Otherwise keep the data loader found before, because the last item may be one for evaluation that a
            # callback is reading. (Compare lengths, because the list may already have contained the same data loader,
            # if a callback has begun to read it.)
            references = state.dataloader_references
            if len(references) > before:
                loader = references[-1]
            short = None
            left, size = _rows_left(loader) if loader in references else (None, None)
            if left:
                short, reason = _shorten(trainer, inputs, left, size, world)
                if reason and not told and world.rank == 0:
                    _log.warning(
                        "the last training batch of an epoch has %s rows for %d ranks, so Accelerate fills it up with "
                        "rows of the first batch. They count twice, because %s. To avoid this, train on a number of "
                        "rows that is a multiple of per_device_train_batch_size times the number of ranks, or set "
                        "dataloader_drop_last=True",
                        left if left > 0 else "perhaps too few", world.size, reason,
                    )  # fmt: skip
                    told = True
            yield inputs if short is None else short.inputs
            before = len(state.dataloader_references)

    def get_batch_samples(epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        return collect(own_rows(epoch_iterator), *args, **kwargs)

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if short is None:
            return step(model, inputs, num_items_in_batch)
        # Tell the loss hooks how many parts (micro-batches of ranks) of the step have no rows, also in its full
        # micro-batches: a loss that is a mean over parts is averaged over those of the whole step.
        with parts_without_rows(trainer.model, short.absent):
            return step_of_short(short, model, inputs, num_items_in_batch)

    def step_of_short(short: _Short, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        if inputs is not short.inputs:
            return step(model, inputs, num_items_in_batch)
        if num_items_in_batch is not None and short.weight > 0 and not _ignores_count(trainer):
            return step(model, inputs, num_items_in_batch)
        compute, weight, own = trainer.compute_loss, short.weight, vars(trainer).get("compute_loss")

        def weighted(*args: Any, **kwargs: Any) -> Any:
            loss: Any = compute(*args, **kwargs)
            return loss * weight if weight > 0 else loss.nan_to_num() * 0  # nan * 0 would be nan

        trainer.compute_loss = weighted  # pyright: ignore[reportAttributeAccessIssue]
        try:
            if short.labels is None:
                return step(model, inputs, num_items_in_batch)
            with labels_uncounted(trainer.model):
                return step(model, {**inputs, **short.labels}, num_items_in_batch)
        finally:
            del trainer.compute_loss
            if own is not None:
                trainer.compute_loss = own

    trainer.get_batch_samples = get_batch_samples
    trainer.training_step = training_step
    if (track := getattr(trainer, "_track_num_input_tokens", None)) is not None:
        trainer._track_num_input_tokens = lambda inputs: track(  # pyright: ignore[reportAttributeAccessIssue]
            short.rows if short is not None and inputs is short.inputs else inputs
        )


def _rows_left(loader: Any) -> tuple[int | None, int | None]:
    """Count the rows of an epoch's last batch, without repeated rows, with which Accelerate has filled up the batch.

    Returns two numbers. The first is the number of rows on all ranks that are not repeated. It is None if the current
    batch is not the last of an epoch or has no repeated rows, and -1 if the number is unknown. The second is the number
    of rows that one rank has in a full batch. It is None if this number is unknown, or not fixed because rank 0 reads
    the batch and Accelerate divides it.

    loader: the data loader that has yielded the batch; None if it is not one of Accelerate's.
    """
    if loader is None or not loader.end_of_dataloader or loader._drop_last:
        return None, None
    if isinstance(loader, DataLoaderDispatcher):
        return loader.remainder, None
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return -1, None
    sampler = loader.sampler if isinstance(loader.sampler, torch.utils.data.BatchSampler) else loader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):  # after a resume, the sampler is wrapped to skip batches
        sampler = sampler.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or not sampler.even_batches or not sampler.batch_size:
        return None, None
    ranks = sampler.num_processes
    # Ranks that share rows (`ranks_per_row`) count as one process here. If there is only one process, all ranks get the
    # same rows, so none are repeated.
    if ranks == 1:
        return None, None
    total = sampler.batch_size if sampler.split_batches else sampler.batch_size * ranks
    rows = getattr(sampler.batch_sampler, "sampler", loader.dataset)
    if not hasattr(rows, "__len__"):
        return -1, None
    left = len(rows) % total
    return (left or None), total // ranks


def _shorten(
    trainer: transformers.Trainer, inputs: Any, left: int, size: int | None, world: World
) -> tuple[_Short | None, str]:
    """Remove repeated rows, with which Accelerate has filled up an epoch's last batch, or set their labels to -100.

    Collective: every rank must call it.

    Args:
        trainer: the Trainer that trains.
        inputs: this rank's part of the batch.
        left: the number of rows of all ranks that are not repeated, or -1 if it is unknown.
        size: the number of rows that one rank has in a full batch; None if it is unknown or not fixed.
        world: the ranks that train together.

    Returns:
        (the changed batch, ""); (None, why the repeated rows cannot be excluded from the loss); or (None, "") if there
        are no repeated rows.
    """
    found, shared = rows_in(inputs), ranks_per_row(trainer.model)
    groups, group = world.size // shared, world.rank // shared
    starts = starts_of_rows(inputs)
    if starts is not None and 1 < len(starts) == size:
        found = len(starts)  # a collator has concatenated the rows
    else:
        starts = None
    rows = found or 0
    if left == groups * rows and size is None:
        return None, ""
    if is_listed(inputs):
        return None, "this batch is a list of rows, which the trainer itself converts to tensors"
    mine, absent = min(max(left - group * rows, 0), rows), groups + -left // max(rows, 1)
    reason, shortened = _reason(trainer, inputs, left, mine, found, size), None
    counted = _counts_labels(trainer, inputs)
    # If this rank has only repeated rows, all their labels are set to -100, so that Trainer does not count them. But
    # not every loss works with such labels. So the forward gets the real labels (`_Short.labels`), which the loss hooks
    # do not count. SFTTrainer's forward gets labels of -100: its loss works with them, and its metrics would count real
    # labels.
    labels = labels_in(inputs) if counted and mine == 0 and not is_sft(trainer, inputs) else None
    if not reason and starts is not None:
        end = int(starts[mine]) if mine < rows else None
        own = {name: value[:, :end] for name, value in inputs.items() if getattr(value, "ndim", 0) == 2}
        shortened = _Short(ignore_after(inputs, starts, mine), own, absent, mine * groups / left, labels)
        if not counted:
            reason = "the rows of this batch are not along the first dimension"
    elif not reason:
        own = first_rows(inputs, rows, mine)
        kept = first_rows(inputs, rows, max(mine, 1)) if computes_loss(trainer) else dict(inputs)
        if own is None or kept is None:
            reason = "the tensors and lists in this batch do not all have the same number of rows"
        else:
            # Some repeated rows may stay in the batch. A rank that has no other rows keeps one, because it must run a
            # forward. All stay if the trainer's loss may need full batches. If Trainer counts labels, set the labels of
            # these rows to -100, so that they have no effect.
            if counted:
                labels = None if labels is None else {name: labels[name][: len(kept[name])] for name in labels}
                for name, ignored in labels_in(kept).items():
                    ignored[mine:] = IGNORED
                    kept[name] = ignored
            shortened = _Short(kept, own, absent, mine * groups / left, labels)
    reasons = [each for each in world.gather_objects(reason) if each]
    return (None, reasons[0]) if reasons else (shortened, "")


def _reason(
    trainer: transformers.Trainer, inputs: Any, left: int, mine: int, found: int | None, size: int | None
) -> str:
    """Return why repeated rows cannot be excluded from the loss, or an empty string if they can.

    Repeated rows are those with which Accelerate has filled up the last batch of an epoch.

    inputs: this rank's part of the batch.
    left: the number of rows of all ranks that are not repeated, or -1 if it is unknown.
    mine: the number of rows of this rank that are not repeated.
    found: the number of rows in `inputs`; None if it is unknown.
    size: the number of rows that one rank has in a full batch; None if it is unknown or not fixed.
    """
    if left < 0:
        return "the dataset has no length"
    if found is None or size not in (None, found):
        return "the rows of this batch are not along the first dimension"
    if trainer.compute_loss_func is not None and not computes_loss(trainer):
        return "compute_loss_func computes the loss"
    counted = _counts_labels(trainer, inputs)
    if counted and not isinstance(inputs["labels"], torch.Tensor):
        return "the labels of this batch are not a tensor"
    if counted and not trainer.args.average_tokens_across_devices:
        return "with average_tokens_across_devices=False, each rank's loss is a mean over its own labels"
    # Do not ask whether a batch norm is in training mode: after an evaluation between two steps, the model is still in
    # eval mode here, although it will be in training mode in the forward.
    model: Any = trainer.model
    normed = any(isinstance(module, _BatchNorm) for module in model.modules())
    if normed and computes_loss(trainer) and mine <= 1 < found:
        return "the model has batch norm, which cannot train with a single row on a rank"
    ignored = counted and "shift_labels" not in inputs and _are_of_tokens(trainer, inputs)
    if not computes_loss(trainer) and not ignored:
        return f"{type(trainer).__name__}, or its model, computes losses in its own way"
    return ""


def _counts_labels(trainer: transformers.Trainer, inputs: Any) -> bool:
    """Return whether Trainer counts the labels of all ranks, so that a loss may be divided by their number."""
    return "labels" in inputs and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _are_of_tokens(trainer: transformers.Trainer, inputs: Any) -> bool:
    """Return whether the batch `inputs` has one label for each token.

    In such labels, -100 marks a token that losses ignore. In other labels (one for each row, or floating-point), -100
    may be an ordinary value.
    """
    model: Any = trainer.model
    labels, read = inputs["labels"], inputs.get(getattr(model, "main_input_name", "input_ids"))
    if labels.is_floating_point() or labels.ndim != 2 or not isinstance(read, torch.Tensor):
        return False
    config = getattr(model, "config", None)  # a module that is not from transformers may have none
    return labels.shape == read.shape[:2] or getattr(config, "is_encoder_decoder", False)


def _ignores_count(trainer: transformers.Trainer) -> bool:
    """Return whether the method `compute_loss` of the Trainer's class does not use `num_items_in_batch`.

    `num_items_in_batch` is the number of labels on all ranks, by which the loss should be divided. A loss that is
    computed without it is something else, for example a mean over this rank's labels.
    """
    method = inspect.unwrap(type(trainer).compute_loss)
    code = getattr(method, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    parameters = inspect.signature(method).parameters
    # Trainer passes the number of labels as the keyword argument COUNT (num_items_in_batch). A method without this
    # parameter gets it in `**kwargs`.
    others = [name for name, each in parameters.items() if each.kind is each.VAR_KEYWORD]
    name = COUNT if COUNT in parameters or not others else others[0]
    for instruction in dis.get_instructions(code):
        loaded = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        if "LOAD" in instruction.opname and name in loaded:
            return False
    return True
