"""FSDP2, torch's `fully_shard`."""

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from bench.cell import Cell
from bench.engines.base import Engine, adamw, torch_clip, torch_step
from bench.models import flops_a_token, layers_of, make_model


def fsdp2(cell: Cell, config, device: torch.device) -> Engine:
    """Build FSDP2 with float32 shards, cast to bf16 before they are gathered, as Accelerate does under bf16.

    tuned: prefetches two layers instead of one.
    """
    model = make_model(config, torch.float32, device)
    flops = flops_a_token(model, cell.seq)
    if cell.recompute == "full":
        chosen = set(layers_of(model))
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cell.offload else OffloadPolicy()
    layers = layers_of(model)
    for layer in layers:
        if cell.compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy, offload_policy=offload)  # ZeRO-3: resharded after its forward
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    if cell.tuned:
        gather_further_ahead(layers)
    described = "FSDP2, float32 shards, bf16 gathers and reductions, fused AdamW"
    step = torch_step(model, adamw(model.parameters(), cell.lr), torch_clip(model))
    return Engine(step, flops, described + ", two layers ahead" * cell.tuned)


def gather_further_ahead(layers: list, ahead: int = 2) -> None:
    """Make each layer prefetch the next `ahead` layers, in forward and in backward."""
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - ahead) : place][::-1])
