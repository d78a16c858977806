"""The choice between recomputing a block's forward and keeping its activations: the meaning of `use_checkpoint`."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import torch

from ...engine.base.device_memory import DeviceMemory
from ...engine.base.torch_internals import top_saved_tensors_hooks
from ...engine.runtime.world import World
from .activations import AutoCheckpoint, Block, Planner

_log_once = functools.cache(logging.getLogger("hf_bmtrain").info)
UseCheckpoint = bool | Literal["auto"]


def check_use_checkpoint(use_checkpoint: UseCheckpoint) -> None:
    """Raise ValueError if `use_checkpoint` is not True, False or "auto"."""
    if not isinstance(use_checkpoint, bool) and not (isinstance(use_checkpoint, str) and use_checkpoint == "auto"):
        raise ValueError(f"use_checkpoint must be True, False or 'auto', not {use_checkpoint!r}")


def choose_policy(use_checkpoint: UseCheckpoint, block: Block, world: World) -> bool | AutoCheckpoint:
    """Return the policy of `block`: True or False for every forward, or an AutoCheckpoint.

    Raises RuntimeError for "auto" with torch 2.6.
    """
    if use_checkpoint is True or use_checkpoint is False:
        return use_checkpoint
    schedule = world.schedule
    if schedule.planner is None and world.device.type == "cpu":
        _log_once("use_checkpoint='auto' recomputes nothing on the CPU: the memory that is left is only known of GPUs")
        return False
    if top_saved_tensors_hooks is None:
        raise RuntimeError(
            f"use_checkpoint='auto' counts what autograd saves, which torch {torch.__version__} does not allow: pass "
            "True or False, or install a newer torch."
        )
    if schedule.planner is None:
        schedule.planner = Planner(world, DeviceMemory(world.device))
    elif schedule.planner.outlived:
        schedule.planner = Planner(world, schedule.planner.memory)
    return AutoCheckpoint(schedule.planner, block)
