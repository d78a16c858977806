"""DistributedDataParallel, which replicates the whole model."""

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.cell import Cell
from bench.engines.base import Batch, Engine, adamw, checkpoint_layers, torch_clip, torch_step
from bench.models import flops_a_token, layers_of, make_model


def ddp(cell: Cell, config, device: torch.device) -> Engine:
    """Build DDP with float32 weights and bf16 autocast. tuned: gradients are views of the buckets, static graph."""
    model = make_model(config, torch.float32, device)
    flops = flops_a_token(model, cell.seq)
    checkpoint_layers(model, cell.recompute)
    if cell.compile:
        for layer in layers_of(model):
            layer.compile()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=cell.tuned, static_graph=cell.tuned)
    step = torch_step(wrapped, adamw(wrapped.parameters(), cell.lr), torch_clip(wrapped))

    def autocast_step(batch: Batch) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return step(batch)

    return Engine(autocast_step, flops, "DDP, float32 weights, bf16 autocast, fused AdamW")
