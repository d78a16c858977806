"""The processes that train together. The only global of the library."""

from __future__ import annotations

import atexit
import logging
import os
import random
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..comm.backend import open_lanes
from ..comm.control import Control
from .parallelism import check_one_way
from .schedule import Step

_log = logging.getLogger("hf_bmtrain")
_EXIT_SECONDS = 30


@dataclass(frozen=True)
class World:
    """rank: 0 … size−1. local_rank: on this host. device: where this rank computes and keeps its shards.

    step: the lanes and what is open on them. control: agreement between the ranks' Python. zero_level,
    loss_scale_factor, loss_scale_steps: defaults for what is made later.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    step: Step
    control: Control
    zero_level: int
    loss_scale_factor: float
    loss_scale_steps: int

    def assemble(self, occasion: str, seconds: float = 300) -> None:
        """Wait for every rank; RuntimeError that names the missing ones, or those at another occasion."""
        try:
            self.control.meet(seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: '{occasion}' needs every rank, but not all came within {seconds:.0f} s. "
                f"Call it on all ranks, not on rank 0 alone. {error}"
            ) from error
        occasions = self.gather_objects(occasion)
        if len(set(occasions)) > 1:
            places = ", ".join(f"'{place}' of rank {rank}" for rank, place in enumerate(occasions))
            raise RuntimeError(
                f"rank {self.rank}: the ranks are at different places: {places}. Each needs every rank: call them on "
                "all ranks, in the same order."
            )

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value` (anything that pickles), in rank order. Collective."""
        return self.control.gather(value)

    def raise_everywhere(self, what: str, problem: str | None) -> None:
        """RuntimeError on every rank where one has a problem, instead of a hang of the others. Collective."""
        problems = self.gather_objects(problem)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
        if told:
            raise RuntimeError(f"{what}. {told}")


_world: World | None = None


def current_world() -> World:
    """The world of this process. RuntimeError before `init_distributed`."""
    if _world is None:
        raise RuntimeError("hf_bmtrain is not initialised: call hf_bmtrain.init_distributed() first.")
    return _world


def buffers_made() -> int:
    """How many flat buffers this process has made; 0 also before `init_distributed`."""
    return 0 if _world is None else _world.step.buffers_made


def init_distributed(
    seed: int = 0,
    zero_level: int = 3,
    loss_scale_factor: float = 2,
    loss_scale_steps: int = 1024,
    timeout: float = 1800,
    gather: str = "auto",
    pipe_size: int = 1,
    tp_size: int = 1,
) -> None:
    """Join the processes that the launcher started; one process under plain `python`.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun, torch.distributed.launch and
    accelerate set them, or joins a torch process group that is already up. CUDA where it is (NCCL through CuPy),
    otherwise CPU (gloo); ACCELERATE_USE_CPU=true asks for the CPU.

    seed: for `random`, NumPy and torch on every rank; CUDA generators get seed + rank, so that dropout differs.
    zero_level: 3 frees a block's parameters between forward and backward, 2 keeps them. timeout: seconds that an
    operation on CPU waits for other ranks. gather: "peer" copies weights out of the other ranks' memory, and
    gradients of blocks into it, which takes one host and, between GPUs, peer access; "collective" uses NCCL or gloo;
    "auto" copies what is large between GPUs where it can. pipe_size, tp_size: BMTrain's, only 1 (NotImplementedError).
    """
    global _world
    if _world is not None:
        raise RuntimeError(
            f"init_distributed was called before: this is rank {_world.rank} of {_world.size}. Call it once, at the "
            "start of the program."
        )
    check_zero_level(zero_level)
    check_one_way(pipe_size, tp_size)
    rank, size, local_rank = _place()
    device = _choose_device(local_rank, size)
    _seed_everything(seed, rank, device)
    joined = dist.is_initialized()
    lanes = open_lanes(rank, size, device, timedelta(seconds=timeout), gather)
    poison = os.environ.get("HF_BMTRAIN_POISON", "0") == "1"
    step = Step(lanes.gather, lanes.reduce, lanes.blocks, lanes.apart, poison)
    _world = World(
        rank, size, local_rank, device, step, lanes.control, zero_level, loss_scale_factor, loss_scale_steps
    )  # fmt: skip
    if size > 1:
        atexit.register(_leave, _world, joined)
    kind = type(lanes.gather).__name__
    _log.info("rank %d of %d on %s: %s lanes, zero_level %d", rank, size, device, kind, zero_level)


def rank() -> int:
    """This process's rank, 0 … world_size() − 1."""
    return current_world().rank


def world_size() -> int:
    """How many processes train together."""
    return current_world().size


def print_rank(*values, rank: int = 0, **options) -> None:
    """`print` on one rank (0 unless told), nothing elsewhere."""
    if current_world().rank == rank:
        print(*values, **options)


def synchronize() -> None:
    """Wait until every rank has come here and this rank's device has finished what was queued.

    Shards of models that every rank has dropped are given back to the device.
    """
    world = current_world()
    world.step.gather.quiesce()
    wait_loader()
    world.assemble("synchronize", seconds=1800)
    world.step.free_dropped()


def wait_loader() -> None:
    """Wait until this rank's device has finished what was queued, so that a loader does not run ahead of it.

    Not collective. Nothing in this library needs it: gathers wait for what they use by themselves.
    """
    world = current_world()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def check_zero_level(zero_level: int) -> None:
    if zero_level not in (2, 3):
        raise ValueError(
            f"zero_level must be 2 (parameters stay whole from forward to backward) or 3 (freed between them), "
            f"not {zero_level!r}."
        )


def _place() -> tuple[int, int, int]:
    """(rank, size, local rank) from the process group that is up, else from the launcher's variables."""
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


def _choose_device(local_rank: int, size: int) -> torch.device:
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


def _seed_everything(seed: int, rank: int, device: torch.device) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed + rank)


def _leave(world: World, joined: bool) -> None:
    """At exit: end the lanes together, or each alone where another rank does not come.

    joined: the process group was up before and is ended by whoever made it.
    """
    # A process group that has gone (accelerator.end_training() ends it) leaves nothing to agree through.
    failed = getattr(sys, "last_value", None) is not None or not dist.is_initialized()
    if not failed:
        try:
            world.assemble("exit", seconds=_EXIT_SECONDS)
        except (RuntimeError, ValueError):  # ValueError: the process group that is up is another one
            failed = True
    world.step.gather.close(abort=failed)
    world.step.reduce.close(abort=failed)
    world.control.close()
    if not failed and not joined and dist.is_initialized():
        dist.destroy_process_group()
