"""The engines of the benchmark, and the options that each supports."""

import importlib
from collections.abc import Callable

import torch

from bench.cell import STEPS, WARMUP, Cell
from bench.engines.base import Engine
from bench.engines.bmtrain import bmtrain
from bench.engines.ddp import ddp
from bench.engines.deepspeed import deepspeed
from bench.engines.fsdp2 import fsdp2
from bench.engines.megatron import megatron_fsdp
from bench.engines.ours import ours

ENGINES: dict[str, Callable[[Cell, object, torch.device], Engine]] = {
    "ours": ours,
    "fsdp2": fsdp2,
    "ddp": ddp,
    "deepspeed": deepspeed,
    "megatron-fsdp": megatron_fsdp,
    "bmtrain": bmtrain,
}
OPTIONS = {
    "ours": (
        "recompute none",
        "recompute full",
        "recompute attention",
        "recompute auto",
        "compile",
        "offload",
        "linear-loss",
        "float8 rows",
        "sequence-parallel",
        "offload-activations",
        "mlp-chunks",
        "cuda-graphs",
        "state-bits",
        "lora",
        "quantize nf4",
        "shard-over host",
        "shard-over host+world",
        "shard-over auto",
    ),
    "fsdp2": (
        "recompute none",
        "recompute full",
        "compile",
        "offload",
        "tuned",
        "linear-loss",
        "float8 rows",
        "float8 tensor",
        "sequence-parallel",
        "offload-activations",
        "lora",
        "shard-over host",
    ),
    "ddp": ("recompute none", "recompute full", "compile", "tuned"),
    "deepspeed": (
        "recompute none",
        "recompute full",
        "offload",
        "tuned",
        "linear-loss",
        "sequence-parallel",
        "offload-activations",
    ),
    "megatron-fsdp": ("recompute none", "recompute full", "tuned"),
    "bmtrain": ("recompute full", "offload"),
}
PACKAGES = {"deepspeed": "deepspeed", "megatron-fsdp": "megatron_fsdp", "bmtrain": "bmtrain"}
FLOAT8_PACKAGES = {"fsdp2": "torchao.float8"}
"""What an engine needs for --float8."""
OWN_GROUP = ("ours", "bmtrain")
"""Engines that do not need torch's process group."""


def check(cell: Cell) -> None:
    """Raise ValueError if the engine does not support an option of the cell, or if an option would have no effect."""
    flags = {
        "compile": cell.compile,
        "offload": cell.offload,
        "tuned": cell.tuned,
        "linear-loss": cell.linear_loss,
        "sequence-parallel": cell.sequence_parallel > 1,
        "offload-activations": cell.offload_activations,
        "mlp-chunks": cell.mlp_chunks > 1,
        "cuda-graphs": cell.cuda_graphs,
        "state-bits": cell.state_bits != 32,
        "lora": cell.lora > 0,
    }
    asked = [f"recompute {cell.recompute}", *(name for name, on in flags.items() if on)]
    asked += [f"float8 {cell.float8}"] * (cell.float8 != "none")
    asked += [f"quantize {cell.quantize}"] * (cell.quantize != "none")
    asked += [f"shard-over {cell.shard_over}"] * (cell.shard_over != "world")
    if cell.offload_activations and cell.recompute == "none":
        raise ValueError("--offload-activations moves the inputs of recomputed layers: it needs --recompute full")
    if cell.offload and cell.state_bits != 32:
        raise ValueError("--offload keeps float32 state in host memory: leave out --state-bits")
    if cell.quantize != "none" and not cell.lora:
        raise ValueError("--quantize stores frozen weights in 4 bits, but without --lora none are frozen")
    if cell.profile is not None and not cell.trace:
        raise ValueError("--profile writes the trace that --no-trace leaves out")
    if cell.profile is not None and cell.largest_batch:
        raise ValueError("--profile traces the step after the timed ones; a search has no such step")
    useless = {"--steps": cell.steps != STEPS, "--warmup": cell.warmup != WARMUP, "--no-trace": not cell.trace}
    if cell.largest_batch and any(useless.values()):
        option = next(option for option, given in useless.items() if given)
        raise ValueError(f"{option} has no effect on --largest-batch, which takes two steps per batch: leave it out")
    if cell.seq % cell.sequence_parallel:
        raise ValueError(f"--sequence-parallel {cell.sequence_parallel} does not divide --seq {cell.seq}")
    missing = [option for option in asked if option not in OPTIONS[cell.engine]]
    if missing:
        raise ValueError(f"--engine {cell.engine} has no --{missing[0]}; it has: {', '.join(OPTIONS[cell.engine])}")


def why_missing(cell: Cell) -> str | None:
    """Return in one line why a package that the cell needs cannot be imported and how to install it, or None."""
    engine = cell.engine
    module = FLOAT8_PACKAGES.get(engine) if cell.float8 != "none" else PACKAGES.get(engine)
    if cell.lora:
        module = module or "peft"
    if module is None:
        return None
    package = engine if engine in PACKAGES else module.partition(".")[0]
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # an installed package may still lack a library
        reason = " ".join(str(error).split())
        return (
            f"{engine} is left out ({reason}): pip install {package}, or without a network pip install --no-index "
            f"--no-deps the wheels of {package} and of what it imports"
        )
    return None
