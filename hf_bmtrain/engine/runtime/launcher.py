"""The rank and the device of this process, read from the launcher's variables or torch's process group."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from ..base.arguments import expect_number


def find_place() -> tuple[int, int, int]:
    """Return (rank, size, local rank) of the process group if it is initialized, or of the launcher's variables."""
    launched = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        numbers = {name: int(value) for name, value in launched.items() if value is not None}
    except ValueError as error:
        raise ValueError(f"The launcher's variables must be integers, got {launched}.") from error
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if numbers.get("WORLD_SIZE", size) != size:
            raise RuntimeError(
                f"The torch process group has {size} ranks but WORLD_SIZE is {numbers['WORLD_SIZE']}: initialise "
                "the process group over all ranks of the launch, or clear the variable."
            )
        return rank, size, numbers.get("LOCAL_RANK", rank)
    size = numbers.get("WORLD_SIZE", 1)
    rank = numbers.get("RANK", 0 if size == 1 else -1)
    if not 0 <= rank < size:
        raise RuntimeError(
            f"RANK={launched['RANK']} does not fit WORLD_SIZE={launched['WORLD_SIZE']}: start the script with "
            "torchrun, torch.distributed.launch or accelerate launch, or clear both for a single process."
        )
    return rank, size, numbers.get("LOCAL_RANK", 0 if size == 1 else rank)


def choose_device(local_rank: int) -> torch.device:
    """Return this rank's GPU, made current, or the CPU where there is none or ACCELERATE_USE_CPU asks for it."""
    asked_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if asked_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but this host shows {devices} GPU(s): start at most {devices} processes a "
            "host (--nproc-per-node), or widen CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_seed(seed: int) -> None:
    """Raise TypeError or ValueError unless torch accepts the seed."""
    expect_number("seed", seed, "from -2**63 to 2**64 - 1", lambda number: -(2**63) <= number < 2**64, integer=True)


def seed_everything(seed: int, rank: int, device: torch.device) -> None:
    """Seed `random`, NumPy and torch alike on every rank, and CUDA generators with seed + rank."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed + rank)
