"""The world: the processes that train together. The only global of the library."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..comm.backend import open_backend
from ..comm.collectives import Communicator
from ..comm.control import Control
from ..comm.watch import Watch
from .launcher import choose_device, find_place, seed_everything
from .schedule import Schedule

_log = logging.getLogger("hf_bmtrain")
_EXIT_SECONDS = 30


@dataclass(frozen=True)
class World:
    """The ranks that train together, and this rank's place, device and communicators.

    rank: 0 ... size - 1. local_rank: on this host. device: where this rank computes and stores its shards. gather,
    reduce: communicators for flat tensors. schedule: what is open in the current forward and backward. control:
    agreement between the ranks' Python. watch: finds out that the ranks do different things. zero_level,
    loss_scale_factor, loss_scale_steps: defaults. kept: by folder, what saves its checkpoints.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    gather: Communicator
    reduce: Communicator
    schedule: Schedule
    control: Control
    watch: Watch
    zero_level: int
    loss_scale_factor: float
    loss_scale_steps: int
    kept: dict[Path, Any] = field(default_factory=dict)

    def assemble(self, occasion: str, seconds: float = 300) -> None:
        """Wait for every rank. Raises RuntimeError that names the ranks that are missing or at another occasion.

        And if the ranks have issued different operations before, whose results are wrong.
        """
        try:
            self.control.barrier(seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: '{occasion}' needs every rank, but not all came within {seconds:.0f} s. "
                f"Call it on all ranks, not on rank 0 alone. {error}"
            ) from error
        occasions, excerpts = zip(*self.gather_objects((occasion, self.watch.excerpts())))
        if len(set(occasions)) > 1:
            places = ", ".join(f"'{place}' of rank {rank}" for rank, place in enumerate(occasions))
            raise RuntimeError(
                f"rank {self.rank}: the ranks are at different places: {places}. Each needs every rank: call them on "
                "all ranks, in the same order."
            )
        for rank, theirs in enumerate(excerpts):
            problem = self.watch.compare(rank, theirs)
            if problem is not None:
                raise RuntimeError(f"rank {self.rank}: '{occasion}' found that {problem}")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value` (any picklable object), in rank order. Collective."""
        return self.control.gather(value)

    def check_comm(self, comm: Any) -> None:
        """Raise NotImplementedError unless `comm`, an argument of BMTrain's, is None or this world: all ranks."""
        if comm is not None and comm is not self:
            raise NotImplementedError(
                f"comm={comm!r}: collectives are over all ranks. Leave comm out, or pass bmt.config['comm']."
            )

    def raise_everywhere(self, what: str, problem: str | None) -> None:
        """Raise RuntimeError on every rank if one has a problem, so that the others do not hang. Collective."""
        problems = self.gather_objects(problem)
        report = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None)
        if report:
            raise RuntimeError(f"{what}. {report}")


_world: World | None = None


def current_world() -> World:
    """Return the world of this process. Raises RuntimeError before `init_distributed`."""
    if _world is None:
        raise RuntimeError("hf_bmtrain is not initialised: call hf_bmtrain.init_distributed() first.")
    return _world


def init_distributed(
    seed: int = 0,
    zero_level: int = 3,
    loss_scale_factor: float = 2,
    loss_scale_steps: int = 1024,
    timeout: float = 1800,
    gather: str = "auto",
    pipe_size: int = 1,
    tp_size: int = 1,
    init_method: str = "env://",
    num_micro_batches: int | None = None,
) -> None:
    """Initialize the world of the processes that the launcher started, or of one process without a launcher.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as set by torchrun, torch.distributed.launch and
    accelerate, or joins an initialized torch process group. Uses CUDA if available (NCCL through CuPy), otherwise the
    CPU (gloo); ACCELERATE_USE_CPU=true selects the CPU. Raises RuntimeError on a second call.

    seed: for `random`, NumPy and torch on every rank; CUDA generators get seed + rank, so that dropout differs.
    zero_level: 3 frees a block's parameters between forward and backward, 2 keeps them. loss_scale_factor,
    loss_scale_steps: defaults of OptimManager. timeout: seconds that an operation on CPU waits for other ranks.
    gather: "peer" copies weights from the other ranks' memory and gradients of blocks to it, which requires one host
    and, between GPUs, peer access; "collective" uses NCCL or gloo; "auto" copies large shards between GPUs if possible.
    pipe_size, tp_size: BMTrain's; other values than 1 raise NotImplementedError. num_micro_batches: BMTrain's, of its
    pipeline, and without effect. init_method: where the ranks meet, as in torch.distributed.init_process_group.
    """
    global _world
    if _world is not None:
        raise RuntimeError(
            f"init_distributed was called before: this is rank {_world.rank} of {_world.size}. Call it once, at the "
            "start of the program."
        )
    check_zero_level(zero_level)
    for name, parts in (("pipe_size", pipe_size), ("tp_size", tp_size)):
        if parts not in (1, -1):  # BMTrain takes -1 for 1
            refuse_parallelism(f"{name}={parts}")
    rank, size, local_rank = find_place()
    device = choose_device(local_rank)
    seed_everything(seed, rank, device)
    joined = dist.is_initialized()
    backend = open_backend(rank, size, device, timedelta(seconds=timeout), gather, init_method)
    poison = os.environ.get("HF_BMTRAIN_POISON", "0") == "1"
    schedule = Schedule(backend.shards, backend.reduce, backend.blocks, backend.outside, backend.control, poison)
    _world = World(
        rank, size, local_rank, device, backend.gather, backend.reduce, schedule, backend.control, backend.watch,
        zero_level, loss_scale_factor, loss_scale_steps,
    )  # fmt: skip
    if size > 1:
        atexit.register(_leave, _world, backend.opened, joined)
    kind = type(backend.shards).__name__
    _log.info("rank %d of %d on %s: %s of shards, zero_level %d", rank, size, device, kind, zero_level)


def rank() -> int:
    """Return this process's rank, 0 ... world_size() - 1."""
    return current_world().rank


def world_size() -> int:
    """Return the number of processes that train together."""
    return current_world().size


def print_rank(*values, rank: int = 0, **options) -> None:
    """Print on one rank, 0 by default; do nothing on the others."""
    if current_world().rank == rank:
        print(*values, **options)


def synchronize() -> None:
    """Wait until every rank has called this and this rank's device has finished all queued work. Collective.

    Frees the shards of models that every rank has dropped.
    """
    world = current_world()
    world.schedule.quiesce()
    wait_loader()
    world.assemble("synchronize", seconds=1800)
    world.schedule.free_dropped()


def wait_loader() -> None:
    """Wait until this rank's device has finished all queued work, so that a loader does not run ahead of it.

    Not collective. This library does not need it: gathers wait for their inputs by themselves.
    """
    world = current_world()
    torch.get_device_module(world.device).synchronize(world.device)


def check_zero_level(zero_level: int) -> None:
    """Raise ValueError unless `zero_level` is 2 or 3."""
    if zero_level not in (2, 3):
        raise ValueError(
            f"zero_level must be 2 (parameters stay whole from forward to backward) or 3 (freed between them), "
            f"not {zero_level!r}."
        )


def refuse_parallelism(what: str) -> NoReturn:
    """Raise NotImplementedError for `what`, an option of BMTrain's that splits a model in another way than ZeRO."""
    raise NotImplementedError(
        f"{what} is not offered: hf_bmtrain splits weights, gradients and optimizer state over all ranks (ZeRO-2/3) "
        "and keeps every layer's computation whole. Leave pipe_size and tp_size at 1, and use bmt.nn.Linear or any "
        "torch layer."
    )


def _leave(world: World, opened: Sequence[Communicator], joined: bool) -> None:
    """Close the communicators at exit: on all ranks together, or alone if another rank does not come.

    joined: the process group existed before `init_distributed`, and its creator destroys it.
    """
    # Without a process group (accelerator.end_training() destroys it) the ranks cannot agree.
    world.watch.stop()
    failed = getattr(sys, "last_value", None) is not None or not dist.is_initialized()
    if not failed:
        try:
            world.assemble("exit", seconds=_EXIT_SECONDS)
        except (RuntimeError, ValueError):  # ValueError: the present process group is another one
            failed = True
    for communicator in opened:
        communicator.close(abort=failed)
    world.control.close()
    if not failed and not joined and dist.is_initialized():
        dist.destroy_process_group()
