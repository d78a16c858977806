"""Let Trainer train models with `sequence_parallel`: ranks that share rows get the same batch and count it once."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import recursively_apply
from transformers import Trainer

from ..engine.runtime.world import current_world
from ..features.sequence import ranks_per_row
from ..features.sequence.loader import share_batches


class _SharedRows(ParallelismConfig):
    """A ParallelismConfig that tells Trainer and TRL how many ranks get the same batch, as its tensor-parallel size.

    It is for models with `sequence_parallel`, of which several ranks compute parts of the same rows (sequences).
    Accelerate must neither parallelize the model nor create a device mesh, because the model is already parallelized.
    """

    @property
    def tp_enabled(self) -> bool:
        return False

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        return self.device_mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        pass


def follow_shared_rows(model: Any, args: Any) -> None:
    """Make Trainer give the same batches to ranks that share rows, and count their samples and tokens once.

    With `sequence_parallel`, several ranks share rows: each computes a part of every sequence. If the model was wrapped
    without it, undo what an earlier call changed for another model.

    Args:
        model: the sharded model.
        args: the trainer's TrainingArguments.

    Raises:
        ValueError: an argument does not work with shared rows.
    """
    size, world = ranks_per_row(model), current_world()
    if size == 1:
        state = AcceleratorState()
        if isinstance(getattr(state, "parallelism_config", None), _SharedRows):  # set for an earlier model
            state.parallelism_config, state.device_mesh = ParallelismConfig(), None
        return
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"average_tokens_across_devices=False does not work with sequence_parallel={size}: the ranks that "
            "share a row have different tokens of it, which must have the same weight. Leave this argument out."
        )
    if args.eval_use_gather_object:
        raise ValueError(
            f"eval_use_gather_object=True does not work with sequence_parallel={size}: it would gather each row {size} "
            "times. Leave this argument out."
        )
    share_batches(size, world)
    shared = _SharedRows(tp_size=size, dp_shard_size=world.size // size, dp_replicate_size=1, cp_size=1, sp_size=1)
    shared.device_mesh = AcceleratorState().device_mesh
    AcceleratorState().parallelism_config = shared
    if "parallelism_config" not in Trainer.get_tp_size.__code__.co_consts:  # older versions read the model's attribute
        model._tp_size = size


def gather_rows_once(trainer: Trainer) -> None:
    """Make evaluations of `trainer` gather each row once, although with `sequence_parallel` several ranks share it.

    Each row is taken from the first of the ranks that share it. After gathering, Accelerate removes the rows with which
    it has filled up the last batch. It would remove the wrong rows if there were several copies of each.
    """
    size, accelerator, ranks = ranks_per_row(trainer.model), trainer.accelerator, current_world().size
    if size == 1 or "gather_for_metrics" in vars(accelerator):
        return
    gather, cut = accelerator.gather, accelerator.gather_for_metrics

    def first_of_groups(gathered: torch.Tensor) -> torch.Tensor:
        return gathered.unflatten(0, (ranks // size, size, len(gathered) // ranks))[:, 0].flatten(0, 1)

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        accelerator.gather = lambda tensor: recursively_apply(first_of_groups, gather(tensor))
        try:
            return cut(input_data, use_gather_object)
        finally:
            del accelerator.gather

    accelerator.gather_for_metrics = gather_for_metrics
    trainer.gather_function = functools.partial(gather_for_metrics, use_gather_object=False)
