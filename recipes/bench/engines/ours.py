"""hf_bmtrain."""

from typing import Any

import torch

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.engines.base import WEIGHT_DECAY, Engine, managed_step
from bench.models import flops_a_token, make_model
from common.adapters import add_adapters

RECOMPUTED: dict[str, Any] = {"none": False, "full": True, "attention": "attention", "auto": "auto"}


def ours(cell: Cell, config, device: torch.device) -> Engine:
    """Build hf_bmtrain with bf16 weights; the optimizer keeps float32 masters."""
    model: Any = make_model(config, torch.bfloat16, device)
    if cell.lora:
        torch.manual_seed(0)
        model = add_adapters(model, cell.lora, 2 * cell.lora)
    flops = flops_a_token(model, cell.seq)
    float8 = cell.float8 == "rows"
    model = bmt.auto_wrap(
        model,
        use_checkpoint=RECOMPUTED[cell.recompute],
        compile=cell.compile,
        float8=float8,
        quantize_frozen=None if cell.quantize == "none" else cell.quantize,
        sequence_parallel=cell.sequence_parallel,
        offload_activations=cell.offload_activations,
        mlp_chunks=cell.mlp_chunks,
        cuda_graphs=cell.cuda_graphs,
    )
    if cell.linear_loss and not bmt.hf.fuse_causal_loss(model):
        raise ValueError(f"--linear-loss: {type(model).__name__} keeps its own loss, the log says why")
    optimizer = make_optimizer(cell, model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    described = f"hf_bmtrain, ZeRO-3, bf16 weights, {type(optimizer).__name__}" + ", float8 products" * float8
    described += f", frozen ones in {cell.quantize}" * (cell.quantize != "none")
    return Engine(managed_step(model, optimizer, manager), flops, described)


def make_optimizer(cell: Cell, model: torch.nn.Module) -> bmt.optim.AdamOptimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if cell.offload:
        return bmt.optim.AdamOffloadOptimizer(trained, cell.lr, weight_decay=WEIGHT_DECAY)
    return bmt.optim.AdamOptimizer(trained, cell.lr, weight_decay=WEIGHT_DECAY, state_bits=cell.state_bits)
