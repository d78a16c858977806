"""Let Trainer train with `sequence_parallel` or `tp_size`: ranks that share rows get one batch, which counts once."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from transformers import Trainer

from ..engine.runtime.world import current_world
from ..engine.wrap.accelerator import GroupMesh, ranks_per_row, share_batches


class _SharedRows(ParallelismConfig):
    """A ParallelismConfig whose tensor-parallel size is the number of ranks that get the same batch.

    Trainer and TRL read this size. With `sequence_parallel` or `tp_size`, several ranks compute the same rows
    (sequences) together. Accelerate must neither parallelize the model nor create a device mesh, because the model is
    already parallelized; the methods of this class prevent that.
    """

    @property
    def tp_enabled(self) -> bool:
        return False

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        return self.device_mesh

    def _validate_accelerator(self, accelerator: Any) -> None:
        pass


def follow_shared_rows(model: Any, args: Any) -> None:
    """Make Trainer give the same batch to ranks that share rows, and count its samples and tokens once.

    Ranks share a row (a sequence) if they compute it together. With `sequence_parallel`, each of them computes a part
    of the sequence. With `tp_size`, each of them has a part of the layers' weights.

    Called when a BMTrainCallback first gets the model: when the Trainer is created, or when training begins. This
    function changes settings of Accelerate, which hold for the whole process. If no ranks share rows with this model,
    the settings are reset instead, in case an earlier call has changed them for another model.

    Args:
        model: the sharded model.
        args: the trainer's TrainingArguments.

    Raises:
        NotImplementedError: `init_distributed` got a `tp_size` above 1, but `auto_wrap` has not split the model by its
            `tp_plan`, for example because the model has layers such as bmt.nn.ColumnParallelLinear.
        ValueError: ranks share rows, but `args` has average_tokens_across_devices=False or eval_use_gather_object=True.
    """
    size, world = ranks_per_row(model), current_world()
    if size == 1 and world.grid is not None:
        raise NotImplementedError(
            "Trainer supports init_distributed(tp_size=) only for models that auto_wrap splits by their tp_plan. "
            f"{type(model).__name__} has BMTrain's layers, such as bmt.nn.ColumnParallelLinear. With these, the ranks "
            "of a group may have the same rows or different ones, so Trainer cannot know how often to count a row. "
            "Train the model in your own loop, or call init_distributed without tp_size."
        )
    if size == 1:
        state = AcceleratorState()
        if isinstance(getattr(state, "parallelism_config", None), _SharedRows):  # set earlier, for another model
            state.parallelism_config = ParallelismConfig()
        if isinstance(getattr(state, "device_mesh", None), GroupMesh):
            state.device_mesh = None
        return
    name = "tp_size" if world.grid is not None else "sequence_parallel"
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"average_tokens_across_devices=False does not work with {name}={size}: {size} ranks share each row, but "
            "Trainer would count the tokens of each rank separately, and the loss would be wrong. Leave out "
            "average_tokens_across_devices."
        )
    if args.eval_use_gather_object:
        raise ValueError(
            f"eval_use_gather_object=True does not work with {name}={size}: it would gather each row {size} times. "
            "Leave out eval_use_gather_object."
        )
    share_batches(model, world)
    shared = _SharedRows(tp_size=size, dp_shard_size=world.size // size, dp_replicate_size=1, cp_size=1, sp_size=1)
    shared.device_mesh = AcceleratorState().device_mesh
    AcceleratorState().parallelism_config = shared


def count_rows_once(trainer: Trainer) -> None:
    """Make `trainer` gather and count each row (sequence) once, although several ranks compute the row together.

    Ranks share rows if the model is trained with `tp_size` or `sequence_parallel`. This function is called when the
    trainer is created, and again when training begins.

    In evaluations, `Accelerator.gather_for_metrics` returns each row once. In training, `num_input_tokens_seen` and
    `total_flos`, which Trainer adds up over all ranks, are divided by the number of ranks that share a row.

    Args:
        trainer: the Trainer. Its methods are replaced.
    """
    size = ranks_per_row(trainer.model)
    # TRL's SFTTrainer gathers numbers of tokens, and divides their sum by `_tp_size`, because it expects every rank
    # that has a row to count the row's tokens. Here, only one of these ranks does, so the sum must not be divided.
    if size > 1 and hasattr(trainer, "_tp_size"):
        trainer._tp_size = 1  # pyright: ignore[reportAttributeAccessIssue]
    if size == 1 or "get_tp_size" in vars(trainer):
        return
    # The trainer's constructor stored `gather_for_metrics` of the Accelerator in `gather_function`. It may have done so
    # before `share_batches` replaced this method by one that returns each row once. So store the method again.
    trainer.gather_function = functools.partial(trainer.accelerator.gather_for_metrics, use_gather_object=False)
    trainer.get_tp_size = lambda: size  # older versions of Trainer do not look up the size in the Accelerator
    track, operations = getattr(trainer, "_track_num_input_tokens", None), trainer.floating_point_ops
    trainer.floating_point_ops = lambda inputs: operations(inputs) / size  # pyright: ignore[reportAttributeAccessIssue]
    if track is None:
        return

    def track_once(inputs: Any) -> None:
        before = trainer.state.num_input_tokens_seen
        track(inputs)
        trainer.state.num_input_tokens_seen = before + (trainer.state.num_input_tokens_seen - before) // size

    trainer._track_num_input_tokens = track_once  # pyright: ignore[reportAttributeAccessIssue]
