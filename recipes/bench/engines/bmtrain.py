"""BMTrain."""

import importlib
from importlib.metadata import version
from typing import Any

import torch

from bench.cell import Cell
from bench.engines.base import WEIGHT_DECAY, Engine, managed_step
from bench.models import flops_a_token, make_model


def bmtrain(cell: Cell, config, device: torch.device) -> Engine:
    """Build BMTrain through its model wrapper, which always recomputes every layer."""
    package: Any = importlib.import_module("bmtrain")
    if not package.config["initialized"]:
        package.init_distributed(seed=0)
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, cell.seq)
    model = package.BMTrainModelWrapper(model)
    kind = package.optim.AdamOffloadOptimizer if cell.offload else package.optim.AdamOptimizer
    optimizer = kind(model.parameters(), lr=cell.lr, weight_decay=WEIGHT_DECAY)
    manager = package.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return Engine(managed_step(model, optimizer, manager), flops, f"bmtrain {version('bmtrain')}, bf16 weights")
