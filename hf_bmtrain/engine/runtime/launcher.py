"""The rank and the device of this process, from the launcher's environment variables or torch's process group."""

from __future__ import annotations

import os
import random
import socket

import numpy as np
import torch
import torch.distributed as dist

from ..base.arguments import expect_number


def find_place() -> tuple[int, int, int]:
    """Return (rank, number of ranks, local rank) of this process.

    Rank and number of ranks come from torch's default process group if it is initialized, and otherwise from the
    environment variables RANK and WORLD_SIZE, which launchers set. Without these, the process is the only rank. The
    local rank comes from LOCAL_RANK. Without this variable, it is equal to the rank.

    Raises:
        ValueError: a variable is not an integer.
        RuntimeError: a process group is initialized, and its size differs from WORLD_SIZE.
        RuntimeError: no process group is initialized, and RANK is not from 0 to WORLD_SIZE - 1.
        RuntimeError: no process group is initialized, and WORLD_SIZE is above 1, but RANK is not set.
    """
    launched = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        numbers = {name: int(value) for name, value in launched.items() if value is not None}
    except ValueError as error:
        raise ValueError(
            f"The environment variables RANK, WORLD_SIZE and LOCAL_RANK must be integers, got {launched}. Start the "
            "script with torchrun or accelerate launch, or unset these variables for a single process."
        ) from error
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if numbers.get("WORLD_SIZE", size) != size:
            raise RuntimeError(
                f"The torch process group has {size} ranks, but WORLD_SIZE is {numbers['WORLD_SIZE']}. Initialize the "
                "process group with all ranks that the launcher started, or unset the variable."
            )
        return rank, size, numbers.get("LOCAL_RANK", rank)
    size = numbers.get("WORLD_SIZE", 1)
    rank = numbers.get("RANK", 0 if size == 1 else -1)
    if not 0 <= rank < size:
        raise RuntimeError(
            f"RANK={launched['RANK']} does not fit WORLD_SIZE={launched['WORLD_SIZE']}: both must be set (None means "
            "that the variable is not set), and RANK must be from 0 to WORLD_SIZE - 1. Start the script with torchrun, "
            "torch.distributed.launch or accelerate launch, or unset both variables for a single process."
        )
    return rank, size, numbers.get("LOCAL_RANK", 0 if size == 1 else rank)


def find_host() -> tuple[str, str]:
    """Return (host name, boot identifier), which together identify the host of this process.

    The boot identifier of the Linux kernel distinguishes hosts of the same name. It is "" if it cannot be read. In
    tests, processes of one host can act as ranks of several hosts: if the environment variable HF_BMTRAIN_HOST is set,
    the result is (its value, "").
    """
    pretended = os.environ.get("HF_BMTRAIN_HOST")
    if pretended:
        return pretended, ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return socket.gethostname(), file.read().strip()
    except OSError:
        return socket.gethostname(), ""


def choose_device(local_rank: int) -> torch.device:
    """Return the device of this rank. If it is a GPU, make it torch's current device.

    The device is GPU `local_rank`. It is the CPU if there is no GPU, or if the environment variable ACCELERATE_USE_CPU
    is 1, true or yes.

    Args:
        local_rank: this process's index on its host, and the index of its GPU.

    Raises:
        RuntimeError: the device should be a GPU, but no GPU has the index `local_rank`.
    """
    asked_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if asked_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise RuntimeError(
            f"LOCAL_RANK={local_rank}, but torch finds {devices} GPU(s) on this host. Start at most {devices} "
            "processes per host (--nproc-per-node), or make more GPUs visible with CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_seed(seed: int) -> int:
    """Return `seed` as an int. Raise TypeError or ValueError unless it is an integer that torch accepts as a seed."""
    return expect_number(
        "seed", seed, "from -2**63 to 2**64 - 1", lambda number: -(2**63) <= number < 2**64, integer=True
    )


def seed_everything(seed: int, rank: int, device: torch.device) -> None:
    """Seed `random`, NumPy and torch with `seed`. If `device` is a GPU, its generator gets `seed` + `rank` instead.

    On GPUs, dropout thus differs between ranks. NumPy's seed is `seed` modulo 2**32.

    Args:
        seed: the seed, the same on every rank.
        rank: this process's rank.
        device: this rank's device.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.type == "cuda":
        own = seed + rank
        torch.cuda.manual_seed(own if own < 2**64 else own - 2**64)
