"""This library's engine; BMTrain's public names are the same, so its step is too."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch
from benchmark_engine import MAX_NORM, WEIGHT_DECAY, Batch, Engine
from benchmark_models import flops_a_token, make_model

import hf_bmtrain as bmt

if TYPE_CHECKING:
    from benchmark_cell import Cell


def ours(cell: Cell, config, device: torch.device) -> Engine:
    """bf16 weights; the optimizer keeps their float32 copies."""
    recompute: bool | str = cell.recompute == "full"
    if cell.recompute == "auto":
        if inspect.signature(bmt.auto_wrap).parameters["use_checkpoint"].annotation == "bool":
            raise ValueError("--recompute auto: auto_wrap of this version takes use_checkpoint=True or False only")
        recompute = "auto"
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, cell.seq)
    model = bmt.auto_wrap(model, use_checkpoint=recompute, compile=cell.compile)  # pyright: ignore[reportArgumentType]
    if cell.linear_loss and not bmt.hf.fuse_causal_loss(model):
        raise ValueError(f"--linear-loss: {type(model).__name__} keeps its own loss, the log says why")
    kind = bmt.optim.AdamOffloadOptimizer if cell.offload else bmt.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=cell.lr, weight_decay=WEIGHT_DECAY)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return Engine(managed_step(model, optimizer, manager), flops, f"hf_bmtrain, ZeRO-3, bf16 weights, {kind.__name__}")


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
