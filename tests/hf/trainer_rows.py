"""What TrainingArguments and Trainer offer, a row each: the same arguments for the sharded and for the plain run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from trainer_witnesses import (
    CompiledGraphs,
    Impatient,
    MlpBits,
    MlpCalls,
    ShareByBatch,
    UnevenRows,
    accuracy,
    inputs_seen,
    likeliest,
    pad,
)  # fmt: skip

import hf_bmtrain as bmt
from jobs import CHECKPOINTING, Rows, bmt_adam, sgd, torch_adam


@dataclass(frozen=True)
class Row:
    """given: TrainingArguments; batch sizes are those of one process. options: `jobs.make_trainer`'s.

    pair: the optimizers of our run and of the plain one, as options; None: those of PAIRS that `optimizers` names.
    changes: the plain run's numbers differ from those of a run without the arguments. resumes: a checkpoint from
    before the end is left, with which to go on. refused: what the sharded run raises. sizes: numbers of ranks.
    """

    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    pair: tuple[dict[str, Any], dict[str, Any]] | None = None
    optimizers: tuple[str, ...] = ("SGD", "AdamW")
    sizes: tuple[int, ...] = (1, 2)
    changes: bool = True
    resumes: bool = True
    refused: str = ""


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SGD": ({"make_optimizer": sgd},) * 2,
    "AdamW": ({"make_optimizer": bmt_adam}, {"make_optimizer": torch_adam}),
}
ALIKE: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
UNSEEN = {"eval_dataset": Rows(size=16, seed=8)}  # DistributedDataParallel counts rows twice if the last batch is short
BEST = {**EVALUATED, "save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
GROUPED: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
if "train_sampling_strategy" not in transformers.TrainingArguments.__dataclass_fields__:
    GROUPED = {"group_by_length": True}  # its older name
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
GRAPHS = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}  # on the CPU, as torch_compile alone
HALVES = {"per_device_train_batch_size": 4}

TRAINING = {
    "plain": Row(changes=False),
    "gradient_accumulation_steps": Row({**HALVES, "gradient_accumulation_steps": 2}, changes=False),
    "accumulation, a rest at an epoch's end": Row({**HALVES, "gradient_accumulation_steps": 4}),
    "max_grad_norm": Row({"max_grad_norm": 0.3}),
    "max_grad_norm=0": Row({"max_grad_norm": 0.0}, changes=False),
    "max_grad_norm of what was accumulated": Row(
        {**HALVES, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    ),
    "bf16": Row({"bf16": True, **EVALUATED}, {**UNSEEN, "callbacks": [MlpBits]}),
    "fp16": Row({"fp16": True}, {"callbacks": [MlpBits]}, changes=False),
    "gradient_checkpointing": Row(
        CHECKPOINTING, {"use_checkpoint": False, "callbacks": [MlpCalls]}
    ),
    "torch_compile": Row(COMPILED, {"callbacks": [CompiledGraphs]}, optimizers=("SGD",)),
    "torch_compile_mode": Row(GRAPHS, {"callbacks": [CompiledGraphs]}, optimizers=("SGD",)),
    "label_smoothing_factor": Row({"label_smoothing_factor": 0.2}),
    "neftune_noise_alpha": Row({"neftune_noise_alpha": 5}),
    "group_by_length": Row(GROUPED, {"train_dataset": UnevenRows(), "data_collator": pad}),
    "average_tokens_across_devices=False": Row({"average_tokens_across_devices": False}, sizes=(2,)),
    "data_seed": Row({"data_seed": 11}),
    "seed, dropout": Row({"seed": 12}, {"dropout": 0.1}),
    "num_train_epochs": Row(
        {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch", "save_strategy": "epoch"}
    ),
    "logging_steps": Row({"logging_steps": 2}),
    "include_num_input_tokens_seen": Row({"include_num_input_tokens_seen": "all"}),
}  # fmt: skip
LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 2}
SCHEDULES = {
    "linear": Row(LINEAR),
    "cosine": Row({"lr_scheduler_type": "cosine", "warmup_steps": 1}, optimizers=("SGD",)),
    "reduce_lr_on_plateau": Row(
        {
            "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "warmup_steps": 1,
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 100.0}, **EVALUATED,
        },
        UNSEEN,
    ),
}  # fmt: skip
"""A schedule is Trainer's alone: these stand for all."""
EVALUATION = {
    "eval_strategy=steps": Row(EVALUATED, UNSEEN),
    "eval_strategy=epoch": Row({"eval_strategy": "epoch"}, UNSEEN),
    "eval_on_start": Row({**EVALUATED, "eval_on_start": True}, UNSEEN, resumes=False),  # evaluates once more
    "compute_metrics": Row(EVALUATED, {**UNSEEN, "compute_metrics": accuracy}),
    "preprocess_logits_for_metrics, batch_eval_metrics": Row(
        {**EVALUATED, "batch_eval_metrics": True},
        {**UNSEEN, "compute_metrics": ShareByBatch(), "preprocess_logits_for_metrics": likeliest},
    ),
    "include_for_metrics, eval_accumulation_steps": Row(
        {**EVALUATED, "include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1},
        {**UNSEEN, "compute_metrics": inputs_seen},
    ),
    "several evaluation sets": Row(EVALUATED, {"eval_dataset": {"seen": Rows(), "unseen": Rows(size=16, seed=8)}}),
    "label_smoothing_factor in evaluation": Row({**EVALUATED, "label_smoothing_factor": 0.2}, UNSEEN),
    "early stopping": Row({**BEST, "max_steps": 8}, {**UNSEEN, "callbacks": [Impatient]}),
}  # fmt: skip
SAVING = {
    "save_strategy=epoch": Row({"save_strategy": "epoch"}),
    "save_strategy=best": Row({**BEST, "save_strategy": "best", "greater_is_better": True, "max_steps": 3}, UNSEEN),
    "save_total_limit": Row({"save_steps": 1, "save_total_limit": 2}),
    "load_best_model_at_end": Row({**BEST, "greater_is_better": True}, UNSEEN),
    "load_best_model_at_end, save_total_limit": Row(
        {**BEST, "greater_is_better": True, "save_total_limit": 1}, UNSEEN, resumes=False
    ),
    "save_only_model": Row({"save_only_model": True}, resumes=False),
}  # fmt: skip

ADAM = {"lr": 1e-3, "eps": 1e-6}


def make(cls: Any, options: dict[str, Any], model: torch.nn.Module) -> torch.optim.Optimizer:
    return cls(model.parameters(), **options)


def named(optim: str, **given: Any) -> Row:
    """`optimizers=(None, None)`: Trainer makes the one that `optim` names."""
    given = {"optim": optim, "learning_rate": 1e-3, "weight_decay": 0.01, "adam_epsilon": 1e-6, **given}
    return Row(given, {"make_optimizer": None}, ALIKE, changes=False)


def of_class(cls: Any, **options: Any) -> Row:
    return Row({}, {"make_optimizer": None, "optimizer_cls_and_kwargs": (cls, options)}, ALIKE, changes=False)


def instance(cls: Any, **options: Any) -> Row:
    """`optimizers=(optimizer, None)`."""
    return Row({}, {"make_optimizer": functools.partial(make, cls, options)}, ALIKE, changes=False)


def of_ours(cls: Any, given: dict[str, Any] | None = None, **options: Any) -> Row:
    """Against torch's AdamW."""
    ours, plain = (
        {"make_optimizer": functools.partial(make, which, {**ADAM, "weight_decay": 0.01, **extra})}
        for which, extra in ((cls, options), (torch.optim.AdamW, {}))
    )
    return Row(given or {}, {}, (ours, plain), changes=False)


OPTIMIZERS = {
    "optim=adamw_torch": named("adamw_torch"),
    "optim=adamw_torch_fused": named("adamw_torch_fused"),
    "optim=sgd": named("sgd", learning_rate=0.1),
    "optim=adafactor": Row({"optim": "adafactor"}, {"make_optimizer": None}, ALIKE),
    "optimizer_cls_and_kwargs=Adam": of_class(torch.optim.Adam, **ADAM),
    "SGD with momentum": instance(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW, amsgrad": instance(torch.optim.AdamW, amsgrad=True, **ADAM),
    "AdamW, fused": instance(torch.optim.AdamW, fused=True, **ADAM),
    "AdamOptimizer": of_ours(bmt.optim.AdamOptimizer),
    "AdamOffloadOptimizer": of_ours(bmt.optim.AdamOffloadOptimizer),
    "AdamOffloadOptimizer, accumulated, clipped, scheduled": of_ours(
        bmt.optim.AdamOffloadOptimizer,
        {**HALVES, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3, **LINEAR},
    ),
}  # fmt: skip
ROWS = {**TRAINING, **SCHEDULES, **EVALUATION, **SAVING, **OPTIMIZERS}
