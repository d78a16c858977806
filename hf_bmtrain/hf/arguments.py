"""Checks of Trainer's arguments, model and optimizer; each error says how to resolve it."""

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
"""Arguments by which the ranks would make other steps, split rows otherwise, or come to collectives at other times."""


def check_versions() -> None:
    """Raise RuntimeError if the installed accelerate would wrap a sharded model in DistributedDataParallel."""
    installed = importlib.metadata.version("accelerate")
    numbers = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
    if numbers < _OLDEST_ACCELERATE:
        raise RuntimeError(
            f"accelerate {installed} wraps every model in DistributedDataParallel, which corrupts a sharded one: "
            "pip install 'accelerate>=1.14'."
        )


def check_model(model: Any) -> None:
    """Raise RuntimeError unless every parameter of `model` is sharded."""
    parameters = list(model.parameters())
    sharded = sum(isinstance(parameter, DistributedParameter) for parameter in parameters)
    if sharded < len(parameters):
        raise RuntimeError(
            f"BMTrainCallback: {sharded} of the {len(parameters)} parameters of {type(model).__name__} are sharded. "
            "Call model = bmt.auto_wrap(model) before Trainer, after everything that adds or replaces parameters."
        )


def check_arguments(args: TrainingArguments, model: torch.nn.Module) -> None:
    """Raise ValueError for an argument that does not work with a sharded model."""
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True: when one rank runs out of memory the others wait for it for ever. Choose "
            "per_device_train_batch_size; gradient_accumulation_steps keeps the global batch."
        )
    if getattr(args, "enable_jit_checkpoint", False) and current_world().size > 1:
        raise ValueError(
            "enable_jit_checkpoint=True with several ranks: each rank would save when its own signal comes, and a "
            "sharded model is saved by all of them together. Leave it out; save_steps says how much a kill may cost."
        )
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if getattr(args, name, None):
            raise ValueError(f"{name}={getattr(args, name)!r}: hf_bmtrain shards the model already. Leave it out.")
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer sees {args.n_gpu} GPUs in one process and would use DataParallel: start one process a GPU "
            "(torchrun --nproc-per-node N script.py), or show the process one GPU (CUDA_VISIBLE_DEVICES=0)."
        )
    check_accelerator(current_world().size)
    _check_precision(args, {parameter.dtype for parameter in model.parameters()})


def agree_on_arguments(args: TrainingArguments) -> None:
    """Raise RuntimeError unless the arguments that must be equal on all ranks are. Collective."""
    current_world().check_same_on_all_ranks("Trainer.train", {name: getattr(args, name, None) for name in _EQUAL})


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if all parameters of `optimizer` are frozen slices."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if held and all(isinstance(p, DistributedParameter) and not p.requires_grad for p in held):
        raise RuntimeError(
            f"All {len(held)} parameters that {type(optimizer).__name__} holds are frozen, so nothing would be "
            "trained: adapters were put into the model after the optimizer was made (peft_config=, say). Leave it to "
            "the trainer (optim= or optimizer_cls_and_kwargs=), or put the adapters in before you make it."
        )


def warn_of_missing_masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Log a warning if half-precision weights are updated without float32 masters."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if dtypes & {torch.float16, torch.bfloat16} and type(optimizer).__module__.split(".")[0] != "hf_bmtrain":
        _log.warning(
            "%s updates half-precision weights without a float32 copy: small updates are lost. Use "
            "bmt.optim.AdamOptimizer, which keeps one, or float32 weights with bf16=True.",
            type(optimizer).__name__,
        )


def _check_precision(args: TrainingArguments, dtypes: set[torch.dtype]) -> None:
    if args.fp16 and torch.float16 in dtypes:
        raise ValueError(
            "fp16=True with float16 weights: the gradient scaler of torch refuses float16 gradients. Load the model "
            "in float32 (dtype=torch.float32) and keep fp16=True, or use bfloat16 weights."
        )
    for name, dtype in (("fp16_full_eval", torch.float16), ("bf16_full_eval", torch.bfloat16)):
        if getattr(args, name, False) and dtypes != {dtype}:
            raise ValueError(
                f"{name}=True casts the model for evaluation, and a sharded model cannot be cast. Leave it out (bf16 "
                "and fp16 evaluate under autocast as well), or cast the model before auto_wrap."
            )
