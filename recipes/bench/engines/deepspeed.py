"""DeepSpeed ZeRO-3."""

import importlib
from typing import Any

import torch

from bench.cell import Cell
from bench.engines.base import MAX_NORM, WEIGHT_DECAY, Batch, Engine, adamw, checkpoint_layers
from bench.models import flops_a_token, layers_of, make_model


def deepspeed(cell: Cell, config, device: torch.device) -> Engine:
    """Build DeepSpeed with bf16 weights, float32 masters and torch's fused AdamW. tuned: see `settings`."""
    package: Any = importlib.import_module("deepspeed")
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, cell.seq)
    layer = sum(parameter.numel() for parameter in layers_of(model)[0].parameters())
    checkpoint_layers(model, cell.recompute)
    if cell.offload:  # DeepSpeed's own CPU Adam would have to be compiled
        optimizer = torch.optim.AdamW(model.parameters(), lr=cell.lr, weight_decay=WEIGHT_DECAY)
    else:
        optimizer = adamw(model.parameters(), cell.lr)
    engine = package.initialize(model=model, optimizer=optimizer, config=settings(cell, layer))[0]

    def step(batch: Batch) -> torch.Tensor:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    described = f"deepspeed {package.__version__} ZeRO-3, bf16, {type(optimizer).__name__}"
    return Engine(step, flops, described + ", buckets by layer" * cell.tuned, engine.destroy)


def settings(cell: Cell, layer: int) -> dict:
    """Return DeepSpeed's configuration.

    layer: elements of one layer. tuned: bucket sizes are multiples of it instead of DeepSpeed's defaults.
    """
    zero: dict[str, object] = {"stage": 3}
    if cell.tuned:
        zero |= {
            "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": 2 * layer, "stage3_max_live_parameters": 4 * layer,
            "stage3_max_reuse_distance": 2 * layer,
        }  # fmt: skip
    if cell.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": cell.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
