"""The engines that the benchmark compares, each built as its users build it."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from benchmark_models import flops_a_token, layers_of, make_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers.configuration_utils import PreTrainedConfig

import hf_bmtrain as bmt

LR, WEIGHT_DECAY, MAX_NORM = 1e-4, 0.01, 1.0


@dataclass
class Engine:
    """`step(ids)` trains on one batch (rows, length) of token numbers and returns its loss, a scalar on the device."""

    step: Callable[[torch.Tensor], torch.Tensor]
    flops_a_token: float
    described: str


def ours(config: PreTrainedConfig, options: argparse.Namespace, device: torch.device) -> Engine:
    model = make_model(config, torch.bfloat16, device)
    flops = flops_a_token(model, options.length)
    model = bmt.auto_wrap(model, use_checkpoint=options.recompute, compile=options.compile)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, overlap_forward=True)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step(ids: torch.Tensor) -> torch.Tensor:
        manager.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)
        manager.step()
        return loss.detach()

    return Engine(step, flops, "hf_bmtrain, ZeRO-3, bf16 weights, float32 masters")


def fsdp2(config: PreTrainedConfig, options: argparse.Namespace, device: torch.device) -> Engine:
    """float32 shards cast to bf16 before they are gathered, as Accelerate sets FSDP2 up under bf16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = make_model(config, torch.float32, device)
    flops = flops_a_token(model, options.length)
    _recompute(model, options.recompute)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in layers_of(model):
        if options.compile:
            layer.compile()
        fully_shard(layer, mp_policy=policy)  # resharded after its forward: ZeRO-3
    fully_shard(model, mp_policy=policy)
    return Engine(_torch_step(model), flops, "FSDP2, float32 shards, bf16 gathers and reductions, fused AdamW")


def ddp(config: PreTrainedConfig, options: argparse.Namespace, device: torch.device) -> Engine:
    """Whole float32 weights on every GPU, bf16 by autocast."""
    model = make_model(config, torch.float32, device)
    flops = flops_a_token(model, options.length)
    _recompute(model, options.recompute)
    if options.compile:
        for layer in layers_of(model):
            layer.compile()
    wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    step = _torch_step(wrapped)

    def autocast_step(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return step(ids)

    return Engine(autocast_step, flops, "DDP, float32 weights, bf16 autocast, fused AdamW")


def _recompute(model: torch.nn.Module, recompute: bool) -> None:
    if recompute:
        chosen = set(layers_of(model))
        apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)


def _torch_step(model: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    return step


ENGINES: dict[str, Callable[[PreTrainedConfig, argparse.Namespace, torch.device], Engine]] = {
    "ours": ours,
    "fsdp2": fsdp2,
    "ddp": ddp,
}


def start(engine: str, gather: str) -> torch.device:
    """Join the world: torch's own process group for the others beside the control group of hf_bmtrain."""
    if engine != "ours" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    bmt.init_distributed(seed=0, gather=gather)
    return bmt.current_world().device
