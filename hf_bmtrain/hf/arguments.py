"""Check Trainer's arguments, model and optimizer. Each error says how to resolve it."""

from __future__ import annotations

import importlib.metadata
import logging
import re
from typing import Any

import torch
from transformers import TrainingArguments

from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import DistributedParameter
from ..engine.wrap.accelerator import check_accelerator

_log = logging.getLogger("hf_bmtrain")
_OLDEST_ACCELERATE = (1, 14)
_EQUAL = (
    "max_grad_norm", "learning_rate", "weight_decay", "optim", "lr_scheduler_type", "warmup_steps", "bf16", "fp16",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "logging_strategy",
    "logging_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_only_model",
    "load_best_model_at_end",
)  # fmt: skip
"""Arguments that must be equal on all ranks: they determine the updates, the batches, and when collectives are
issued."""


def check_versions() -> None:
    """Raise RuntimeError if the installed accelerate would wrap a sharded model in DistributedDataParallel.

    Called when `hf_bmtrain.hf` is imported. The error asks the user to install accelerate 1.14 or later.
    """
    installed = importlib.metadata.version("accelerate")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < _OLDEST_ACCELERATE:
        raise RuntimeError(
            f"accelerate {installed} wraps every model in DistributedDataParallel, which would corrupt a sharded "
            "model. Install a newer version: pip install 'accelerate>=1.14'."
        )


def check_model(model: Any) -> None:
    """Raise RuntimeError if a parameter of `model` is not sharded. The error asks the user to call `auto_wrap` first.

    BMTrainCallback calls this when the trainer is constructed, and again when training begins.

    model: the model that the trainer trains.
    """
    parameters = list(model.parameters())
    sharded = sum(isinstance(parameter, DistributedParameter) for parameter in parameters)
    if sharded < len(parameters):
        raise RuntimeError(
            f"BMTrainCallback: only {sharded} of the {len(parameters)} parameters of {type(model).__name__} are "
            "sharded. Call model = bmt.auto_wrap(model) before you create the Trainer, after everything that adds or "
            "replaces parameters."
        )


def check_arguments(args: TrainingArguments, model: torch.nn.Module) -> None:
    """Raise an error if an argument of Trainer does not work with a sharded model, such as `auto_find_batch_size=True`.

    BMTrainCallback calls this when it first sees a model, usually when the trainer is constructed. Not collective.

    Args:
        args: the trainer's arguments.
        model: the sharded model. Only the dtypes of its parameters are used: the arguments `fp16`, `fp16_full_eval` and
            `bf16_full_eval` must fit them.

    Raises:
        ValueError: an argument does not work with a sharded model, or Trainer sees several GPUs in one process.
        RuntimeError: Accelerate would shard the model itself, or its number of processes is not the number of ranks.
    """
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True does not work with a sharded model: if one rank runs out of memory and tries "
            "again, the other ranks wait for it forever. Leave it out and choose a smaller "
            "per_device_train_batch_size. To keep the global batch size, increase gradient_accumulation_steps."
        )
    if getattr(args, "enable_jit_checkpoint", False) and current_world().size > 1:
        raise ValueError(
            "enable_jit_checkpoint=True does not work with several ranks: each rank would save when it receives its "
            "own signal, but all ranks must save a sharded model together. Leave it out, and set save_steps to the "
            "number of steps that you can afford to lose."
        )
    for name in ("use_transformers_continuous_batching", "use_transformers_paged"):  # arguments of TRL
        if getattr(args, name, False) and current_world().size > 1:
            raise ValueError(
                f"{name}=True does not work with several ranks: each rank would run the layers as often as its own "
                "prompts require, but the ranks must run the layers of a sharded model together. Leave it out; then "
                "TRL calls generate(), in which every rank runs the layers the same number of times."
            )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in ("lomo", "adalomo") or (optim.endswith("_layerwise") and current_world().size > 1):
        raise ValueError(
            f"optim={optim!r} updates each weight during the backward pass, but the gradients of a sharded model are "
            "averaged over the ranks and known only after it. Use another optimizer. bmt.optim.AdamOptimizer with "
            "state_bits=8 takes about as little memory, because every rank stores only its part of the state."
        )
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            raise ValueError(
                f"{name}={getattr(args, name)!r} does not work with a model that hf_bmtrain has sharded, because this "
                "would shard or parallelize the model once more. Leave it out."
            )
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer sees {args.n_gpu} GPUs in one process and would use DataParallel. Start one process for each GPU "
            "(torchrun --nproc-per-node N script.py), or make only one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )
    world = current_world()
    if world.accelerator is not None:
        check_accelerator(world.accelerator, world.size)
    _check_precision(args, {parameter.dtype for parameter in model.parameters()})


def agree_on_arguments(args: TrainingArguments) -> None:
    """Raise RuntimeError if an argument of Trainer that must be the same on all ranks differs between them.

    BMTrainCallback calls this when training begins. It checks the arguments that determine the updates, the batches,
    and when collectives are issued, such as `max_steps`. Collective: every rank must call it.
    """
    current_world().check_same_on_all_ranks("Trainer.train", {name: getattr(args, name, None) for name in _EQUAL})


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if all parameters of `optimizer` are frozen parameters of a sharded model.

    Nothing would be trained then. The usual cause is that adapters were added to the model after the optimizer was
    created. BMTrainCallback calls this when training begins.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if held and all(isinstance(p, DistributedParameter) and not p.requires_grad for p in held):
        raise RuntimeError(
            f"All {len(held)} parameters of {type(optimizer).__name__} are frozen, so nothing would be trained. "
            "Adapters were probably added to the model after the optimizer was created, for example by peft_config=. "
            "Let the trainer create the optimizer (optim= or optimizer_cls_and_kwargs=), or add the adapters before "
            "you create the optimizer."
        )


def warn_of_missing_masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Log a warning if the optimizer updates half-precision weights without float32 master copies.

    Rounding would lose small updates. Only the optimizers of hf_bmtrain have master copies, so the warning is logged
    for any other class. BMTrainCallback calls this when training begins.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if dtypes & {torch.float16, torch.bfloat16} and type(optimizer).__module__.split(".")[0] != "hf_bmtrain":
        _log.warning(
            "%s updates half-precision weights without float32 master copies, so rounding loses small updates. Use "
            "bmt.optim.AdamOptimizer, which keeps master copies, or float32 weights with bf16=True.",
            type(optimizer).__name__,
        )


def _check_precision(args: TrainingArguments, dtypes: set[torch.dtype]) -> None:
    if args.fp16 and torch.float16 in dtypes:
        raise ValueError(
            "fp16=True does not work with float16 weights: torch's GradScaler refuses float16 gradients. Load the "
            "model in float32 (dtype=torch.float32) and keep fp16=True, or use bfloat16 weights."
        )
    for name, dtype in (("fp16_full_eval", torch.float16), ("bf16_full_eval", torch.bfloat16)):
        if getattr(args, name, False) and dtypes != {dtype}:
            raise ValueError(
                f"{name}=True casts the model for evaluation, but a sharded model cannot be cast. Leave it out (with "
                "bf16 or fp16, evaluation runs under autocast too), or cast the model before auto_wrap."
            )
