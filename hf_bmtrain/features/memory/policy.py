"""The choice between recomputing a block's forward and keeping its activations: the meaning of `use_checkpoint`."""

from __future__ import annotations

import functools
import logging

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import top_saved_tensors_hooks
from ...engine.blocks.recompute import ALWAYS, NEVER, Recompute
from ...engine.runtime.world import World
from ..options import UseCheckpoint
from .activations import AutoCheckpoint, Block, Planner

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)


def choose_recompute(use_checkpoint: UseCheckpoint, block: Block, world: World) -> Recompute:
    """Return what `use_checkpoint` means for `block`: ALWAYS, NEVER, or an AutoCheckpoint.

    Raises RuntimeError for "auto" with torch 2.6.
    """
    if use_checkpoint is True or use_checkpoint is False:
        return ALWAYS if use_checkpoint else NEVER
    schedule = world.schedule
    if schedule.planner is None and schedule.memory is None and world.device.type == "cpu":
        _log_once("use_checkpoint='auto' recomputes nothing on the CPU: the memory that is left is only known of GPUs")
        return NEVER
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"use_checkpoint='auto' counts what autograd saves, which torch {torch.__version__} does not allow: pass "
            "True or False, or install a newer torch."
        )
    if schedule.planner is None:
        schedule.planner = Planner(world, schedule.memory or DeviceMemory(world.device))
    elif schedule.planner.outlived:
        schedule.planner = Planner(world, schedule.planner.memory)
    return AutoCheckpoint(schedule.planner, block)
