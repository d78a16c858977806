"""A causal model with 61 tokens, trained beside a plain twin, and a folder for what it saves."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import nn

import hf_bmtrain as bmt
from twins import compare_backward


def rows(number: int) -> torch.Tensor:
    """Token ids (2, 7)."""
    return torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(input_ids=rows(number), labels=rows(number)).loss


def train_beside(model: nn.Module, twin: nn.Module, steps: int = 3) -> None:
    """SGD on both; losses and gradients are equal at each step."""

    def loss(either: nn.Module, step: int, rank: int) -> torch.Tensor:
        return loss_of(either, step * bmt.world_size() + rank)

    for step in range(steps):
        compare_backward(model, twin, loss, step, rtol=1e-5)
        for either in (model, twin):
            torch.optim.SGD([p for p in either.parameters() if p.requires_grad], lr=0.1).step()
            either.zero_grad()


def shared_folder() -> str:
    """A new folder, the same on every rank. Collective."""
    folder = [tempfile.mkdtemp()]
    if bmt.world_size() > 1:
        dist.broadcast_object_list(folder)
    return folder[0]
