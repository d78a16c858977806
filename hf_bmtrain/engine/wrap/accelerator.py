"""Make wrapped models work with the Accelerator or Trainer of this process, if there is one.

The model computes in the Accelerator's mixed precision. Errors are raised if the Accelerator shards models itself or
has a different number of ranks than this package, or if the Trainer lacks this package's callback (BMTrainCallback).
Neither Accelerate nor transformers is imported here, because a program need not have them. If the program has imported
them, they are found in `sys.modules`.

If a group of ranks shares the rows (sequences) of a batch, this module changes Accelerate: Accelerate's data loaders
then give the same batches to all ranks of the group, and `Accelerator.gather_for_metrics` returns each row once.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..base.torch_internals import pytree
from ..runtime.world import World

_log = logging.getLogger("hf_bmtrain")
_log_once = functools.cache(_log.log)
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
HAD_CALLBACK = "_had_bmtrain_callback"
"""The name of an attribute that BMTrainCallback, this package's callback, sets on its Trainer."""
_ROWS = "_bmt_ranks_per_row"
_OWN_SHARDING = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def check_accelerator(state: Any, size: int) -> None:
    """Raise RuntimeError if the Accelerator shards models itself, or if its number of ranks is not `size`.

    Called before each training forward, when a Trainer begins to use a sharded model, and before sharded checkpoints of
    an Accelerator are saved or loaded. If the numbers differ, Accelerate usually sees a single process, so every rank
    would train on the same rows.

    Args:
        state: the AcceleratorState, which contains the settings of this process's Accelerator.
        size: the number of ranks in the world.
    """
    kind = getattr(state.distributed_type, "value", str(state.distributed_type))
    if kind in _OWN_SHARDING:
        raise RuntimeError(
            f"Accelerate is configured to use {kind}, but hf_bmtrain shards the model already. Remove the FSDP, "
            "DeepSpeed or Megatron options (arguments, plugin, config file, ACCELERATE_USE_* variables)."
        )
    if state.num_processes != size:
        # On a machine without a GPU, Accelerate ignores the ranks of the launcher unless its CPU option is set.
        way_out = (
            "Start the script with torchrun or accelerate launch."
            if torch.cuda.is_available()
            else "On CPUs, set ACCELERATE_USE_CPU=true (or TrainingArguments(use_cpu=True), Accelerator(cpu=True))."
        )
        raise RuntimeError(
            f"Accelerate sees {state.num_processes} process(es), but hf_bmtrain has {size} ranks, so every rank would "
            f"train on the same rows. {way_out}"
        )


def check_trainer(model: torch.nn.Module, size: int) -> None:
    """Raise RuntimeError if a Trainer without this package's BMTrainCallback trains `model`.

    Without this callback, the Trainer would scale some losses by the number of ranks, and would hang when rank 0 saves
    alone. Called before each training forward if there are several ranks and transformers.trainer has been imported.

    The Trainer is found in the call stack: this function looks for a call of `Trainer.training_step`. No error is
    raised in these cases:

    * There is no such call.
    * `model` is not part of the model that the Trainer trains. An example is a sharded teacher in distillation.
    * The Trainer had the callback earlier, but the callback was removed.

    Args:
        model: the sharded model.
        size: the number of ranks, at least 2. Only the error message uses it.
    """
    transformers: Any = sys.modules["transformers.trainer"]
    if not hasattr(transformers, "Trainer"):  # transformers.trainer is still being imported
        return
    step, frame = transformers.Trainer.training_step.__code__, sys._getframe(1)
    while frame is not None and frame.f_code is not step:
        frame = frame.f_back
    if frame is None:
        return
    # Read `f_locals` of this frame only, not in the loop above. Before Python 3.13, reading `f_locals` stores
    # references to all local variables in the frame. These references may keep objects of the program alive.
    trainer = frame.f_locals["self"]
    # Raise nothing if the Trainer only calls the sharded `model` and trains another one. In distillation, for example,
    # the teacher may be sharded and the student not.
    if not hasattr(trainer, HAD_CALLBACK) and any(each is model for each in trainer.model.modules()):
        raise RuntimeError(
            f"{type(trainer).__name__} trains a sharded model on {size} ranks without BMTrainCallback: it would scale "
            "some losses by the number of ranks, and hang when rank 0 saves alone. Pass "
            "callbacks=[bmt.hf.BMTrainCallback()]."
        )


def in_mixed_precision(state: Any, forward: Callable[[], Any], device: torch.device, weights: set[torch.dtype]) -> Any:
    """Run a sharded model's forward in the Accelerator's mixed precision, and return its outputs.

    Called instead of the model's forward if the program has an Accelerator. Accelerate itself changes only the forwards
    of models that it prepares, and it does not prepare sharded models. As in Accelerate, half-precision outputs are
    converted to float32. On the CPU, where Accelerate has no loss scale, 'fp16' is treated as 'no', with a warning.

    Args:
        state: the AcceleratorState.
        forward: a function without arguments that runs the model's forward.
        device: the device on which the model computes.
        weights: the dtypes of the model's floating-point parameters. If all have the dtype of the mixed precision, a
            log message recommends turning mixed precision off.

    Raises:
        RuntimeError: the mixed precision is not 'no', 'fp16' or 'bf16'.
    """
    precision = str(state.mixed_precision)
    if precision == "fp16" and device.type == "cpu":
        _log_once(
            logging.WARNING,
            "mixed_precision='fp16' is ignored on the CPU, as in Accelerate, so the model computes in the dtype of its "
            "weights. Use 'bf16' for mixed precision.",
        )
        precision = "no"
    if precision == "no":
        return forward()
    if precision not in _HALF:
        raise RuntimeError(
            f"A sharded model does not support mixed_precision='{precision}'. Use 'bf16', 'fp16' or 'no'."
        )
    if weights == {_HALF[precision]}:
        _log_once(
            logging.INFO,
            "mixed_precision='%s' is set, but all weights are already in %s. Autocast then only has the effect "
            "that norms and losses are computed in float32, which takes time and memory. To avoid this, turn mixed "
            "precision off (bf16=False and fp16=False in TrainingArguments). hf_bmtrain's optimizers keep float32 "
            "master weights in both cases.", precision, precision,
        )  # fmt: skip
    with torch.autocast(device.type, dtype=_HALF[precision], cache_enabled=False):
        outputs = forward()
    return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _HALF.values() else t, outputs)


@dataclass(frozen=True)
class _Dimension:
    ranks: int

    def size(self) -> int:
        return self.ranks


class GroupMesh:
    """Replacement for the DeviceMesh by which Accelerate's data loaders distribute batches over ranks.

    With this mesh, each group of `size` consecutive ranks gets the same batches, as in context parallelism: the
    dimension "cp" has the size of a group. Accelerate reads only the names and sizes of the dimensions.

    Attributes:
        models: the models whose ranks share batches, as weak references. While one of them exists, `divide_batches`
            does not remove the mesh.
    """

    mesh_dim_names = ("dp_shard", "cp")

    def __init__(self, size: int, ranks: int) -> None:
        """Set the number of ranks in a group (`size`), and the total number of ranks (`ranks`)."""
        self._sizes = {"dp_shard": ranks // size, "cp": size}
        self.models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def __getitem__(self, name: str) -> _Dimension:
        return _Dimension(self._sizes[name])


def share_rows(model: torch.nn.Module, size: int) -> None:
    """Record in `model` that each group of `size` consecutive ranks shares the same rows (sequences) of a batch.

    Called for models that are wrapped with sequence parallelism or tensor parallelism. `ranks_per_row` then returns
    `size` for this model. Code that distributes batches, averages losses or counts tokens needs this number.

    Args:
        model: the model, which gets a private attribute.
        size: the number of ranks in a group.
    """
    setattr(model, _ROWS, size)


def ranks_per_row(model: Any) -> int:
    """Return how many consecutive ranks share each row of a model's batches: 1 if every rank has its own rows."""
    return getattr(model, _ROWS, 1)


def share_batches(model: torch.nn.Module, world: World) -> None:
    """Make Accelerate's data loaders give the same batches to all ranks of a group that shares rows (sequences).

    Called when a model whose ranks share rows is wrapped, and when a Trainer begins to use it. Data loaders that
    Accelerate has already prepared do not change. `Accelerator.gather_for_metrics` is also changed: it returns each
    row once, and not once for each rank of the group. If no Accelerator has been created, this function does nothing.

    Args:
        model: the model. `share_rows` must have been called for it, because that call sets the size of the groups.
        world: the world of all ranks.
    """
    if world.accelerator is None:
        return
    before, mesh = world.accelerator.device_mesh, GroupMesh(ranks_per_row(model), world.size)
    mesh.models.update([model, *(before.models if isinstance(before, GroupMesh) else ())])
    world.accelerator.device_mesh = mesh
    _gather_rows_once(sys.modules["accelerate"].Accelerator)


def divide_batches(model: torch.nn.Module, world: World) -> None:
    """Make Accelerate's data loaders give each rank batches of its own again, if `share_batches` has changed this.

    Called when a model whose ranks do not share rows (sequences) is wrapped. An earlier model may have needed
    `share_batches`. If the earlier model has been deleted, data loaders that Accelerate prepares from now on give each
    rank different batches. If the earlier model still exists, nothing changes, and rank 0 logs a warning, because
    `model` would get the same batches on several ranks.

    Args:
        model: the model that is being wrapped. Only the warning uses it.
        world: the world of all ranks.
    """
    mesh = getattr(world.accelerator, "device_mesh", None)
    if not isinstance(mesh, GroupMesh):
        return
    other = next(iter(mesh.models), None)
    if other is None:
        world.accelerator.device_mesh = None
    elif world.rank == 0:
        _log.warning(
            "Accelerate's data loaders give all %d ranks of a group the same batches, because a model that was "
            "wrapped earlier, a %s, needs this. The model wrapped now, a %s, needs different batches on each rank, but "
            "would get the same ones. Delete the earlier model before auto_wrap, or load the batches of this model "
            "with a DistributedSampler instead of Accelerate. (Trainer with BMTrainCallback needs neither: it divides "
            "the batches as its model needs.)",
            mesh["cp"].size(), type(other).__name__, type(model).__name__,
        )  # fmt: skip


@functools.cache  # so that the class is changed only once
def _gather_rows_once(kind: Any) -> None:
    """Make `Accelerator.gather_for_metrics` return each row of a batch once, even if several ranks share the row.

    Only the rows of the first rank of each group are returned. Accelerate adds rows to an incomplete last batch. Of the
    gathered rows, `gather_for_metrics` keeps only the first ones, as many as this batch had before rows were added. If
    the gathered rows contained duplicates, it would keep the wrong rows. Nothing changes for Accelerators whose mesh is
    not a GroupMesh.

    kind: the class accelerate.Accelerator. The class is changed, because a program may create its Accelerator later.
    """
    gather_for_metrics: Callable[..., Any] = kind.gather_for_metrics

    @functools.wraps(gather_for_metrics)
    def gather(accelerator: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        mesh, plain = getattr(accelerator.state, "device_mesh", None), accelerator.gather
        if not isinstance(mesh, GroupMesh):
            return gather_for_metrics(accelerator, input_data, use_gather_object)
        groups, size = mesh["dp_shard"].size(), mesh["cp"].size()
        apply: Callable[..., Any] = sys.modules["accelerate.utils"].recursively_apply
        try:
            apply(lambda each: each, input_data, error_on_other_type=True)
        except TypeError:  # not everything in `input_data` is a tensor, so Accelerate gathers it as Python objects
            use_gather_object = True
        if use_gather_object:
            # Accelerate joins the lists of all ranks. To return each row once, only the first rank of a group passes
            # its list, and the others pass an empty list.
            own = input_data if accelerator.process_index % size == 0 else []
            return gather_for_metrics(accelerator, own, use_gather_object=True)

        def first_of_groups(gathered: torch.Tensor) -> torch.Tensor:
            return gathered.unflatten(0, (groups, size, len(gathered) // (groups * size)))[:, 0].flatten(0, 1)

        accelerator.gather = lambda tensors: apply(first_of_groups, plain(tensors))
        try:
            return gather_for_metrics(accelerator, input_data)
        finally:
            del accelerator.gather

    kind.gather_for_metrics = gather
