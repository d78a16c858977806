"""Small Trainer jobs: the same rows, order and model for stock Trainer in one process and for sharded ranks."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_bmtrain as bmt
from tiny_models import VOCABULARY, build

CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": True}
if "activation_checkpointing" not in transformers.TrainingArguments.__dataclass_fields__:
    CHECKPOINTING = {"gradient_checkpointing": True}  # its older name

ROWS, LENGTH = 24, 7
transformers.utils.logging.disable_progress_bar()


class Rows(torch.utils.data.Dataset):
    """Token ids with labels, of which the first row masks none, the next one, and so on: ranks count differently."""

    def __init__(self, size: int = ROWS, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.ids[index].clone()
        labels[: index % (LENGTH - 2)] = -100
        return {"input_ids": self.ids[index], "labels": labels}


def arguments(folder: str | Path, **given: Any) -> transformers.TrainingArguments:
    """Three updates of 8 rows, all logged, on CPU; `given` goes before. Batch sizes are those of one process."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 3, "logging_steps": 1,
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "save_strategy": "no",
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 5, "logging_nan_inf_filter": False,
    }  # fmt: skip
    cls = transformers.Seq2SeqTrainingArguments if "predict_with_generate" in given else transformers.TrainingArguments
    return cls(output_dir=str(folder), **{**defaults, **given})


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def losses(history: list[dict], *names: str) -> list[tuple]:
    """(loss, grad_norm, learning rate, …) of every logged update."""
    return [tuple(entry[name] for name in ("loss", *names)) for entry in history if "loss" in entry]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    # By the class: on a model without save_pretrained, the callback replaces the method after training.
    return {name: value.detach().clone() for name, value in type(model).state_dict(model).items()}


def make_trainer(
    folder: str | Path,
    wrapped: bool,
    given: dict[str, Any],
    family: str = "llama",
    tied: bool = False,
    make_optimizer: Callable | None = sgd,
    cls: Any = transformers.Trainer,
    size: int = 1,
    use_checkpoint: bool = True,
    dropout: float = 0.0,
    **options: Any,
) -> transformers.Trainer:
    """A Trainer over `build(family)`, sharded or plain. `given` holds the batch sizes of one process.

    size: how many processes share a batch; a plain run in several is Trainer's own DistributedDataParallel.
    """
    given = dict(given)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        given[name] = given.get(name, 8) // size
    args = arguments(folder, **given)
    model = build(family, tied, dropout)
    if wrapped:
        model = bmt.auto_wrap(model, use_checkpoint=use_checkpoint)
        given_callbacks = options.get("callbacks", [])
        if not any(isinstance(callback, bmt.hf.BMTrainCallback) for callback in given_callbacks):
            given_callbacks = [*given_callbacks, bmt.hf.BMTrainCallback()]
        options["callbacks"] = given_callbacks
    optimizer = None if make_optimizer is None else make_optimizer(model)
    options.setdefault("train_dataset", Rows())
    trainer = cls(model=model, args=args, optimizers=(optimizer, None), **options)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def train(folder: str | Path, wrapped: bool, given: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The log and the final weights of one run."""
    trainer = make_trainer(folder, wrapped, given, **options)
    trainer.train()
    return {"history": trainer.state.log_history, "weights": weights(trainer.model)}


def train_sharded(folder: str, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """`train` on every rank of a world."""
    return train(folder, True, given, size=bmt.world_size(), **options)


def train_ddp(folder: str, given: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The same without hf_bmtrain: Trainer's DistributedDataParallel over the ranks."""
    return train(folder, False, given, size=bmt.world_size(), **options)


def bmt_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)


def torch_adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.01)


def check_same(ours: dict, plain: dict, *names: str, tolerance: float = 1e-5) -> None:
    """Logged numbers and final weights of two runs are equal to `tolerance`."""
    mine, theirs = losses(ours["history"], *names), losses(plain["history"], *names)
    assert mine and len(mine) == len(theirs)
    for step, (here, there) in enumerate(zip(mine, theirs)):
        for name, value, expected in zip(("loss", *names), here, there):
            assert math.isclose(value, expected, rel_tol=tolerance, abs_tol=1e-7), (step, name, value, expected)
    assert list(ours["weights"]) == list(plain["weights"])
    for name, value in plain["weights"].items():
        torch.testing.assert_close(ours["weights"][name], value, rtol=tolerance, atol=tolerance, msg=name)


# Trainer collects garbage at every start, which takes longer than the rest of a small job: not in what is imported.
build("llama"), bmt.hf.BMTrainCallback
gc.freeze()
