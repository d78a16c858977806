"""FSDP2, torch's `fully_shard`, with products and gathers in float8 by torchao."""

import functools
import importlib
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.engines.base import Batch, Engine, adamw, checkpoint_layers, torch_clip, torch_step
from bench.engines.shared_rows import compute_loss_in_chunks, whole_row
from bench.models import flops_a_token, layers_of, make_model
from common.adapters import add_adapters


def fsdp2(cell: Cell, config, device: torch.device) -> Engine:
    """Build FSDP2 with float32 shards, cast to bf16 before they are gathered, as Accelerate does under bf16.

    tuned: prefetches two layers instead of one. float8: linear layers of the model's layers are torchao's, with its
    recipe "rowwise" (rows), or "tensorwise" and gathers in float8 (tensor). sequence_parallel: torch's context
    parallelism, as Accelerate drives it. shard_over "host": every host stores all shards (HSDP). lora: the frozen
    weights are bf16, the adapters float32, as PEFT makes them.
    """
    model: Any = make_model(config, torch.bfloat16 if cell.lora else torch.float32, device)
    if cell.lora:
        torch.manual_seed(0)
        model = add_adapters(model, cell.lora, 2 * cell.lora)
    flops = flops_a_token(model, cell.seq)
    if cell.offload_activations:
        checkpoint_layers(model, cell.recompute, offload=True)
    elif cell.recompute == "full":
        chosen = set(layers_of(model))
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cell.offload else OffloadPolicy()
    sharding: dict = {"mp_policy": policy, "offload_policy": offload, "mesh": shard_mesh(cell.shard_over, device)}
    layers = layers_of(model)
    if cell.sequence_parallel > 1 or cell.linear_loss:
        compute_loss_in_chunks(model, cell.sequence_parallel)
    if cell.float8 != "none":
        convert_to_float8(layers, cell.float8)
    for layer in layers:
        if cell.compile:
            layer.compile()
        fully_shard(layer, **sharding)  # ZeRO-3: resharded after its forward
    fully_shard(model, **sharding)
    if cell.tuned:
        gather_further_ahead(layers)
    described = "FSDP2, float32 shards, bf16 gathers and reductions, fused AdamW" + ", two layers ahead" * cell.tuned
    described += ", frozen ones in bf16" * (cell.lora > 0)
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad], cell.lr)
    if cell.float8 == "tensor":
        scale_once_a_step(model, optimizer)
    described += f", torchao float8 by {cell.float8}" * (cell.float8 != "none")
    step = torch_step(model, optimizer, torch_clip(model))
    if cell.sequence_parallel > 1:
        step = context_parallel_step(step, cell.sequence_parallel, device)
    elif cell.linear_loss:
        step = functools.partial(on_whole_rows, step)
    return Engine(step, flops, described)


def shard_mesh(shard_over: str, device: torch.device) -> DeviceMesh | None:
    """Return the ranks over which `fully_shard` shards: None for all ranks, or for "host" those of each host."""
    if shard_over == "world":
        return None
    hosts = bmt.current_world().gather_objects(os.environ.get("HF_BMTRAIN_HOST", socket.gethostname()))
    several = len(set(hosts))
    return init_device_mesh(device.type, (several, len(hosts) // several), mesh_dim_names=("replicate", "shard"))


def on_whole_rows(step: Callable[[Batch], torch.Tensor], batch: Batch) -> torch.Tensor:
    """Run `step` with the inputs that the loss in chunks takes."""
    return step(whole_row(batch))


def context_parallel_step(
    step: Callable[[Batch], torch.Tensor], ranks: int, device: torch.device
) -> Callable[[Batch], torch.Tensor]:
    """Return a step in which groups of `ranks` ranks share rows: each has a part of them, and attention is a ring."""
    mesh = init_device_mesh(device.type, (bmt.world_size() // ranks, ranks), mesh_dim_names=("data", "row"))
    split = ("input_ids", "position_ids", "attention_mask", "shift_labels")

    def shared_step(batch: Batch) -> torch.Tensor:
        row = whole_row(batch)
        buffers = [row[name] for name in split]
        with context_parallel(
            mesh["row"], buffers=buffers, buffer_seq_dims=[1] * len(split), no_restore_buffers=set(buffers)
        ):
            return step(row)

    return shared_step


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
