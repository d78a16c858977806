"""The interface of an engine, and the training loops that several engines share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT_DECAY, MAX_NORM = 0.01, 1.0
Batch = dict[str, torch.Tensor]


@dataclass
class Engine:
    """One model in training.

    step: trains on one batch (input_ids and labels, each (rows, tokens) on the device) and returns the loss, a scalar
    there. flops_a_token: FLOPs per token of forward and backward, without recomputation. described: for the report.
    close: call it before the engine is dropped.
    """

    step: Callable[[Batch], torch.Tensor]
    flops_a_token: float
    described: str
    close: Callable[[], None] = lambda: None


def checkpoint_layers(model, recompute: str, offload: bool = False) -> None:
    """Recompute every layer through transformers' own gradient checkpointing, if `recompute` is "full".

    offload: keep the layers' inputs in host memory.
    """
    if recompute == "full":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}, **({"offload": True} if offload else {})
        )


def adamw(parameters, lr: float) -> torch.optim.AdamW:
    """Return torch's fused AdamW."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


def torch_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Callable:
    """Return a training step of plain torch. clip: clips the gradients."""

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        return loss.detach()

    return step


def torch_clip(model: torch.nn.Module) -> Callable[[], object]:
    """Return a function that clips the gradients of `model` to MAX_NORM."""
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def managed_step(model, optimizer, manager):
    """Return a training step as in BMTrain's documentation."""

    def step(batch: Batch) -> torch.Tensor:
        manager.zero_grad()
        loss = model(**batch).loss
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
        manager.step()
        return loss.detach()

    return step
