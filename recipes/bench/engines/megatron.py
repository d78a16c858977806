"""Megatron-FSDP; needs GPUs."""

import importlib
from typing import Any

import torch
import torch.distributed as dist

from bench.cell import Cell
from bench.engines.base import MAX_NORM, Engine, adamw, checkpoint_layers, torch_step
from bench.models import flops_a_token, layers_of, make_model


def megatron_fsdp(cell: Cell, config, device: torch.device) -> Engine:
    """Build Megatron-FSDP with bf16 weights and float32 masters, one unit per layer. tuned: double buffers are kept."""
    if device.type != "cuda":
        raise ValueError("--engine megatron-fsdp works on GPUs only")
    package: Any = importlib.import_module("megatron_fsdp")
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, cell.seq)
    checkpoint_layers(model, cell.recompute)
    model, optimizer = package.fully_shard(
        module=model,
        optimizer=adamw(model.parameters(), cell.lr),
        fsdp_unit_modules=[type(layers_of(model)[0])],
        fsdp_double_buffer=cell.tuned,
    )
    step = torch_step(model, optimizer, lambda: clip_uneven(model.parameters(), device))
    described = f"megatron-fsdp {package.__version__}, bf16, float32 masters, fused AdamW"
    return Engine(step, flops, described + ", double buffers" * cell.tuned)


@torch.no_grad()
def clip_uneven(parameters, device: torch.device) -> None:
    """Clip by the norm over all ranks. torch's own clipping hangs on tensors that are sharded unevenly."""
    grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters if p.grad is not None]
    grads = [grad for grad in grads if grad.numel()]
    norms = torch._foreach_norm(grads)
    square = torch.stack(norms).float().square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(square)
    if grads:
        torch._foreach_mul_(grads, (MAX_NORM / (square.sqrt() + 1e-6)).clamp(max=1.0))
