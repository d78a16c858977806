"""FSDP2, torch's `fully_shard`, with products and gathers in float8 by torchao."""

import importlib
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from bench.cell import Cell
from bench.engines.base import Engine, adamw, torch_clip, torch_step
from bench.models import flops_a_token, layers_of, make_model


def fsdp2(cell: Cell, config, device: torch.device) -> Engine:
    """Build FSDP2 with float32 shards, cast to bf16 before they are gathered, as Accelerate does under bf16.

    tuned: prefetches two layers instead of one. float8: linear layers of the model's layers are torchao's, with its
    recipe "rowwise" (rows), or "tensorwise" and gathers in float8 (tensor).
    """
    model = make_model(config, torch.float32, device)
    flops = flops_a_token(model, cell.seq)
    if cell.recompute == "full":
        chosen = set(layers_of(model))
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cell.offload else OffloadPolicy()
    layers = layers_of(model)
    if cell.float8 != "none":
        convert_to_float8(layers, cell.float8)
    for layer in layers:
        if cell.compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy, offload_policy=offload)  # ZeRO-3: resharded after its forward
    fully_shard(model, mp_policy=policy, offload_policy=offload)
    if cell.tuned:
        gather_further_ahead(layers)
    described = "FSDP2, float32 shards, bf16 gathers and reductions, fused AdamW" + ", two layers ahead" * cell.tuned
    optimizer = adamw(model.parameters(), cell.lr)
    if cell.float8 == "tensor":
        scale_once_a_step(model, optimizer)
    described += f", torchao float8 by {cell.float8}" * (cell.float8 != "none")
    return Engine(torch_step(model, optimizer, torch_clip(model)), flops, described)


def convert_to_float8(layers: list, recipe: str) -> None:
    """Replace linear layers by torchao's, which compute in float8."""
    torchao: Any = importlib.import_module("torchao.float8")
    config = torchao.Float8LinearConfig.from_recipe_name("rowwise")
    if recipe == "tensor":
        config = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for layer in layers:
        torchao.convert_to_float8_training(layer, config=config)


def scale_once_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Compute the scales of all weights in one collective after each step of the optimizer."""
    torchao: Any = importlib.import_module("torchao.float8")
    optimizer.register_step_post_hook(lambda *_: torchao.precompute_float8_dynamic_scale_for_fsdp(model))


def gather_further_ahead(layers: list, ahead: int = 2) -> None:
    """Make each layer prefetch the next `ahead` layers, in forward and in backward."""
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + ahead])
        layer.set_modules_to_backward_prefetch(layers[max(0, place - ahead) : place][::-1])
