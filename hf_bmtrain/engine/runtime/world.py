"""The world: the processes that train together. The only global of the library."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...faults.process import Departure, report_exceptions
from ...faults.watch import EXIT, Watch
from ..base.arguments import expect_number
from ..blocks.schedule import Schedule
from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..comm.nccl import abort_all
from ..comm.object_comm import Control
from .backend import check_addresses, open_backend
from .launcher import check_seed, choose_device, find_place, seed_everything

_log = logging.getLogger("hf_bmtrain")


@dataclass(frozen=True)
class World:
    """The ranks that train together, and this rank's place, device and communicators.

    rank: 0 ... size - 1. local_rank: on this host. device: where this rank computes and stores its shards. gather,
    reduce: communicators for flat tensors. schedule: what is open in the current forward and backward. control:
    agreement between the ranks' Python. watch: finds out that the ranks do different things. zero_level,
    loss_scale_factor, loss_scale_steps: defaults. kept: by folder, what saves its checkpoints. copying: an
    event for each checkpoint whose values are being copied, for which optimizers wait before they write weights.
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
    copying: set[threading.Event] = field(default_factory=set)

    def assemble(self, occasion: str, seconds: float | None = None) -> None:
        """Wait for every rank, at most `seconds`, by default the timeout of `init_distributed`.

        Raises RuntimeError, with the ranks' names, if one does not come or is at another occasion, or if they have
        issued different operations before, whose results are wrong.
        """
        try:
            self.control.barrier(occasion, seconds)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: '{occasion}' needs every rank: call it on all of them, in the same order, not on "
                f"rank 0 alone. {error if self.watch.problem else self.watch.missing()}"
            ) from error
        for rank, theirs in enumerate(self.gather_objects(self.watch.excerpts())):
            problem = self.watch.compare(rank, theirs)
            if problem is not None:
                raise RuntimeError(f"rank {self.rank}: '{occasion}' found that {problem}")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's `value` (any picklable object), in rank order. Collective."""
        return self.control.gather(value)

    def agree(self, occasion: str, facts: Mapping[str, Any], may_differ: Mapping[str, Any] | None = None) -> None:
        """Raise RuntimeError, the same on every rank, unless all have equal `facts`, in one order. Collective.

        Two values are equal if their `repr`s are. If all are, the ranks have exchanged one digest. may_differ: what the
        error shows besides, such as the file that each rank has read.
        """
        agree(self.control, occasion, facts, may_differ)

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
    loss_scale_steps: defaults of OptimManager. timeout: seconds that a rank waits for others before all end.
    gather: "peer" copies weights from the other ranks' memory and gradients of blocks to it, which requires one host
    and, between GPUs, peer access; "collective" uses NCCL or gloo; "auto" copies large shards between GPUs if possible.
    pipe_size, tp_size: BMTrain's; other values than 1 raise NotImplementedError. num_micro_batches: BMTrain's, of its
    pipeline, and without effect. init_method: where the ranks meet, as in torch.distributed.init_process_group.
    """
    global _world
    check_seed(seed)
    check_zero_level(zero_level)
    expect_number("loss_scale_factor", loss_scale_factor, "at least 1 and finite", lambda x: 1 <= x < float("inf"))
    expect_number("loss_scale_steps", loss_scale_steps, "at least 1", lambda steps: steps >= 1, whole=True)
    expect_number("timeout", timeout, "of seconds, above 0 and at most 1e8", lambda seconds: 0 < seconds <= 1e8)
    check_addresses(gather, init_method)
    for name, parts in (("pipe_size", pipe_size), ("tp_size", tp_size)):
        expect_number(name, parts, "1", whole=True)
        if parts not in (1, -1):  # BMTrain takes -1 for 1
            refuse_parallelism(f"{name}={parts}")
    if _world is not None:
        raise RuntimeError(
            f"init_distributed was called before: this is rank {_world.rank} of {_world.size}. Call it once, at the "
            "start of the program."
        )
    rank, size, local_rank = find_place()
    device = choose_device(local_rank)
    seed_everything(seed, rank, device)
    joined = dist.is_initialized()
    poison = os.environ.get("HF_BMTRAIN_POISON", "0") == "1"
    facts = {"zero_level": zero_level, "HF_BMTRAIN_POISON": poison}
    facts |= {"loss_scale_factor": loss_scale_factor, "loss_scale_steps": loss_scale_steps}
    backend = open_backend(rank, size, device, timedelta(seconds=timeout), gather, init_method, facts)
    schedule = Schedule(backend.shards, backend.reduce, backend.blocks, backend.outside, backend.control, poison)
    _world = World(
        rank, size, local_rank, device, backend.gather, backend.reduce, schedule, backend.control, backend.watch,
        zero_level, loss_scale_factor, loss_scale_steps,
    )  # fmt: skip
    if size > 1:
        report_exceptions(_world.watch, rank)
        atexit.register(_leave, _world, backend.opened, joined, Departure(_world.watch))
    kind = type(backend.shards).__name__
    _log.info("rank %d of %d on %s: %s of shards, zero_level %d", rank, size, device, kind, zero_level)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Make `world` the current one under `with`, for a simulation on the meta device."""
    global _world
    present, _world = _world, world
    try:
        yield
    finally:
        _world = present


def rank() -> int:
    """Return this process's rank, 0 ... world_size() - 1."""
    return current_world().rank


def world_size() -> int:
    """Return the number of processes that train together."""
    return current_world().size


def print_rank(*values, rank: int = 0, **options) -> None:
    """Print on one rank, 0 by default; do nothing on the others."""
    expect_number("rank", rank, "at least 0", lambda number: number >= 0, whole=True)
    if current_world().rank == rank:
        print(*values, **options)


def synchronize() -> None:
    """Wait until every rank has called this and this rank's device has finished all queued work. Collective.

    Frees the shards of models that every rank has dropped.
    """
    world = current_world()
    world.schedule.quiesce()
    wait_loader()
    world.assemble("synchronize")
    world.schedule.free_dropped()


def wait_loader() -> None:
    """Wait until this rank's device has finished all queued work, so that a loader does not run ahead of it.

    Not collective. This library does not need it: gathers wait for their inputs by themselves.
    """
    world = current_world()
    torch.get_device_module(world.device).synchronize(world.device)


def check_zero_level(zero_level: int) -> None:
    """Raise ValueError unless `zero_level` is 2 or 3."""
    if not isinstance(zero_level, int) or zero_level not in (2, 3):
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


def _leave(world: World, opened: Sequence[Communicator], joined: bool, departure: Departure) -> None:
    """Close the communicators at exit: on all ranks together, or alone if another rank does not come.

    joined: the process group existed before `init_distributed`, and its creator destroys it. departure: how the program
    leaves.
    """
    # Without a process group (accelerator.end_training() destroys it) the ranks cannot agree.
    failed = getattr(sys, "last_value", None) is not None or not dist.is_initialized()
    problem = None
    if not world.watch.status.ended:
        world.watch.end("has left the program")
    if not failed:
        try:
            wait_loader()  # what another rank waits for may be queued
            world.assemble(EXIT)
        except (RuntimeError, ValueError):  # ValueError: the present process group is another one
            failed, problem = True, world.watch.problem
    world.watch.stop()
    if problem is not None and repr(EXIT) not in problem:
        _log.warning("rank %d leaves alone: %s", world.rank, problem)
        problem = None
    if problem is not None:
        print(f"rank {world.rank} left while others waited for it: {problem}", file=sys.stderr, flush=True)
    aborted = True
    if failed and world.device.type == "cuda":
        aborted = abort_all(opened)
    else:
        for communicator in opened:
            communicator.close(abort=failed)
    world.control.close()
    if not failed and not joined and dist.is_initialized():
        dist.destroy_process_group()
    if not aborted:
        print(f"rank {world.rank} ends at once: NCCL does not abort its communicators", file=sys.stderr, flush=True)
    if problem is not None or not aborted:
        logging.shutdown()
        sys.stdout.flush()
        # An exit handler cannot set the status otherwise, and a launcher would blame another rank.
        os._exit(departure.code or 1)
