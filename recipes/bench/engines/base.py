"""What an engine is to the benchmark, and what those built on torch's own loop have in common."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

WEIGHT_DECAY, MAX_NORM = 0.01, 1.0
Batch = dict[str, torch.Tensor]


@dataclass
class Engine:
    """One model in training.

    step: trains on one batch (input_ids and labels, each (rows, tokens) on the device); the loss, a scalar there.
    flops_a_token: of forward and backward, recomputation not counted. close: before the engine is dropped.
    """

    step: Callable[[Batch], torch.Tensor]
    flops_a_token: float
    described: str
    close: Callable[[], None] = lambda: None


def checkpoint_layers(model, recompute: str) -> None:
    """Recompute every layer, as a user of transformers asks for it."""
    if recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def adamw(parameters, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY, fused=True)


def torch_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Callable:
    """The loop of plain torch; `clip` bounds the gradients' norm."""

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        clip()
        optimizer.step()
        return loss.detach()

    return step


def torch_clip(model: torch.nn.Module) -> Callable[[], object]:
    return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def managed_step(model, optimizer, manager):
    """A step as BMTrain's documents write it."""

    def step(batch: Batch) -> torch.Tensor:
        manager.zero_grad()
        loss = model(**batch).loss
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
        manager.step()
        return loss.detach()

    return step
