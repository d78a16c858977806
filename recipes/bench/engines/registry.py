"""The engines of the benchmark, and the options that each supports."""

import importlib
from collections.abc import Callable

import torch

from bench.cell import Cell
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
    "ours": ("recompute none", "recompute full", "recompute auto", "compile", "offload", "linear-loss"),
    "fsdp2": ("recompute none", "recompute full", "compile", "offload", "tuned"),
    "ddp": ("recompute none", "recompute full", "compile", "tuned"),
    "deepspeed": ("recompute none", "recompute full", "offload", "tuned"),
    "megatron-fsdp": ("recompute none", "recompute full", "tuned"),
    "bmtrain": ("recompute full", "offload"),
}
PACKAGES = {"deepspeed": "deepspeed", "megatron-fsdp": "megatron_fsdp", "bmtrain": "bmtrain"}
OWN_GROUP = ("ours", "bmtrain")
"""Engines that do not need torch's process group."""


def check(cell: Cell) -> None:
    """Raise ValueError if the engine does not support an option of the cell."""
    flags = {"compile": cell.compile, "offload": cell.offload, "tuned": cell.tuned, "linear-loss": cell.linear_loss}
    asked = [f"recompute {cell.recompute}", *(name for name, on in flags.items() if on)]
    missing = [option for option in asked if option not in OPTIONS[cell.engine]]
    if missing:
        raise ValueError(f"--engine {cell.engine} has no --{missing[0]}; it has: {', '.join(OPTIONS[cell.engine])}")


def why_missing(engine: str) -> str | None:
    """Return in one line why the engine's package cannot be imported and how to install it, or None."""
    package = PACKAGES.get(engine)
    if package is None:
        return None
    try:
        importlib.import_module(package)
    except (ImportError, OSError, RuntimeError) as error:  # an installed package may still lack a library
        reason = " ".join(str(error).split())
        return (
            f"{engine} is left out ({reason}): pip install {engine}, or without a network pip install --no-index "
            f"--no-deps the wheels of {engine} and of what it imports"
        )
    return None
