"""`init_distributed`, which connects the ranks and sets up their communication and the detection of failed ranks."""

from __future__ import annotations

import atexit
import logging
import os
from datetime import timedelta

import torch.distributed as dist

from ..engine.base.arguments import expect_number
from ..engine.base.device_memory import DeviceMemory
from ..engine.blocks.schedule import ForwardDepth, Schedule
from ..engine.comm.reduce import CollectiveReduction
from ..engine.optim import compat
from ..engine.runtime.backend import check_addresses, close_backend, open_backend
from ..engine.runtime.launcher import check_seed, choose_device, find_place, seed_everything
from ..engine.runtime.monitor import Monitor
from ..engine.runtime.world import (
    SavedState,
    World,
    check_no_world,
    check_zero_level,
    enter_world,
    refuse_parallelism,
)
from ..engine.tensors.collectives import override_initializers
from ..engine.tensors.tensor import ShardBase, WholeCopy
from ..faults.bad_gradients import GradientWatcher
from ..faults.process import destroy_at_exit, install
from ..faults.watch import Watch
from ..features.auto_wrap import LayerFeatures
from ..features.float8.calibrate import float8_decision, restore_decision
from ..features.tensor_parallel.groups import Groups, make_grid
from ..features.tensor_parallel.same_rows import SameRowsCheck

_log = logging.getLogger("hf_bmtrain")
# How the log describes each class that all-gathers shards.
_GATHERS = {
    "PeerGather": "peer copies (small shards: collectives)", "CollectiveGather": "collectives",
    "HostGather": "collectives, across hosts only once after each change of the weights",
}  # fmt: skip


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
    shard_over: str = "world",
) -> None:
    """Connect the processes that the launcher started, or set up a single process if there is no launcher.

    Collective: every rank must call it. This function uses torch's process group if that is already initialized.
    Otherwise, it reads the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which
    torchrun, torch.distributed.launch and accelerate set. The device is CUDA if available (with NCCL through CuPy), and
    otherwise the CPU (with gloo). ACCELERATE_USE_CPU=true selects the CPU.

    Args:
        seed: the seed of `random`, NumPy and torch on every rank. CUDA generators get seed + rank instead, so that
            dropout differs between ranks.
        zero_level: 3 frees the full parameters of a block (a transformer layer) between forward and backward; 2 keeps
            them. The arguments `zero_level` of `auto_wrap` and CheckpointBlock override this value for one model or
            one block.
        loss_scale_factor: the factor by which an `OptimManager` multiplies or divides its loss scale, unless it is
            created with another factor.
        loss_scale_steps: the number of steps in a row without overflow after which an `OptimManager` raises its loss
            scale, unless it is created with another number.
        timeout: how many seconds a rank waits for other ranks before all ranks end with an error.
        gather: how weights and gradients are exchanged between the ranks over which they are sharded (`shard_over`).

            * "peer": each rank reads shards from, and writes gradients of blocks to, the memory of other ranks. All
              these ranks must be on one host. GPUs also need peer access.
            * "collective": with collectives of NCCL or gloo between all these ranks.
            * "two-level": with collectives of NCCL or gloo in two steps. Weights are exchanged first between hosts, so
              that each shard is sent to each host only once, and then inside each host. Gradients take the opposite
              order. This needs several hosts with the same number of ranks, at least two on each.
            * "auto": the first of these that is possible: "peer", "two-level", "collective". "auto" selects "peer" only
              on GPUs, and then still exchanges shards of less than 16 MiB with collectives.
        pipe_size: for compatibility with BMTrain; must be 1 or -1.
        tp_size: the number of consecutive ranks in a tensor-parallel group. Layers of `nn` such as ColumnParallelLinear
            split their weights over the group, and `auto_wrap` splits models from transformers by their `tp_plan`.
            `tp_size` must divide the number of ranks; 1 or -1 means no tensor parallelism. Give the ranks of a group
            the same rows of the data set; Trainer with BMTrainCallback and Accelerate do so for models with a
            `tp_plan`.
        init_method: the URL for the rendezvous, as in torch.distributed.init_process_group.
        num_micro_batches: for compatibility with BMTrain's pipeline; ignored.
        shard_over: the ranks over which weights, gradients and optimizer state are sharded. On one host, all values
            mean the same.

            * "world": all ranks.
            * "host": the ranks of one host (hybrid sharding, HSDP). Every host has a complete copy, and only gradients
              are exchanged between hosts. The hosts must have the same number of ranks. `gather` must not be
              "two-level".
            * "host+world": weights are sharded over the ranks of one host, gradients and optimizer state over all
              ranks. Hosts exchange the new weights once per step. This is slower than "host" but needs less memory. If
              there are several hosts, they must have the same number of ranks, at least two on each, and `gather` must
              not be "peer". `gather` must not be "collective", even on one host.
            * "auto": selects one of the above, and logs which one and why. The first of these rules that applies is
              used: (1) "world" if the hosts have different numbers of ranks, or one rank each. (2) "host" if the
              argument `gather` is "peer". (3) "world" if the measured bandwidth between hosts is at least half of the
              bandwidth inside a host. (4) "host" if the argument `gather` is "collective". (5) "host+world".

    Raises:
        RuntimeError: this function was called before.
        RuntimeError: a rank did not call it within `timeout`.
        RuntimeError: the ranks' arguments or versions of packages differ.
        RuntimeError: the launcher's variables are incomplete or contradict each other.
        RuntimeError: `gather` or `shard_over` is not possible on these hosts.
        NotImplementedError: `pipe_size` is neither 1 nor -1.
        TypeError: an argument has the wrong type.
        ValueError: an argument other than `pipe_size` is out of range.
        ValueError: `gather` and `shard_over` do not work together.
        ValueError: `tp_size` is above 1, but `shard_over` is not "world".
        ValueError: there are several ranks, and the environment variable HF_BMTRAIN_HANG_SECONDS is not a number above
            0.

    Example::

        bmt.init_distributed(seed=0)
    """
    seed = check_seed(seed)
    check_zero_level(zero_level)
    loss_scale_factor = expect_number(
        "loss_scale_factor", loss_scale_factor, "at least 1 and finite", lambda x: 1 <= x < float("inf")
    )
    loss_scale_steps = expect_number(
        "loss_scale_steps", loss_scale_steps, "at least 1", lambda steps: steps >= 1, integer=True
    )
    timeout = expect_number("timeout", timeout, "above 0 and at most 1e8 seconds", lambda seconds: 0 < seconds <= 1e8)
    check_addresses(gather, shard_over, init_method)
    expect_number("pipe_size", pipe_size, "1", integer=True)
    if pipe_size not in (1, -1):  # BMTrain accepts -1 too, and treats it as 1
        refuse_parallelism(f"pipe_size={pipe_size}")
    rank, size, local_rank = find_place()
    together = "1, or a number that divides the number of ranks"
    tp_size = expect_number(
        "tp_size", tp_size, f"{together}, which is {size}", lambda n: n == -1 or (n > 0 and size % n == 0), integer=True
    )
    check_no_world()
    if tp_size > 1 and shard_over != "world":
        raise ValueError(
            f"tp_size={tp_size} does not work with shard_over={shard_over!r}: tensor parallelism needs weights that "
            "are sharded over all ranks. Pass shard_over='world'."
        )
    device = choose_device(local_rank)
    seed_everything(seed, rank, device)
    joined = dist.is_initialized()
    poison = os.environ.get("HF_BMTRAIN_POISON", "0") == "1"
    facts = {"zero_level": zero_level, "tp_size": max(tp_size, 1), "HF_BMTRAIN_POISON": poison}
    facts |= {"loss_scale_factor": loss_scale_factor, "loss_scale_steps": loss_scale_steps}
    watch = Watch() if size > 1 else None
    monitor = watch or Monitor()
    waits = timedelta(seconds=timeout)
    found = grid = split_kind = None
    try:
        found = open_backend(rank, size, device, waits, gather, shard_over, init_method, facts, monitor)
        if tp_size > 1:
            grid = make_grid(rank, size, tp_size, found.open_group)
    except BaseException:
        if found is not None:
            close_backend(device, found.control, found.opened, monitor)
        if not joined and dist.is_initialized():
            destroy_at_exit()
        raise
    blocks, outside = found.blocks, found.outside
    if grid is not None:
        split_kind = Groups(grid, device, outside).kind
        assert isinstance(outside, CollectiveReduction)  # always, as tp_size > 1 requires shard_over="world"
        blocks = outside = CollectiveReduction(outside.communicator, device, summed=tp_size)
    inside = ForwardDepth()
    schedule = Schedule(found.shards, blocks, outside, inside, found.control)
    world = World(
        rank, size, local_rank, device, found.gather, found.reduce, found.shards, found.shard_group, found.control,
        monitor, inside, schedule, LayerFeatures(), zero_level, loss_scale_factor, loss_scale_steps, found.open_group,
        found.saves_shards, poison, grid=grid, split_kind=split_kind,
        device_memory=None if device.type == "cpu" else DeviceMemory(device),
    )  # fmt: skip
    schedule.observe(GradientWatcher(world))
    if grid is not None:
        SameRowsCheck(world)
    world.saved_states["float8"] = SavedState(float8_decision, restore_decision)
    enter_world(world)
    atexit.register(compat.install())
    if watch is not None:
        atexit.register(override_initializers((ShardBase, WholeCopy)))
        install(world, watch, found.opened, joined)
    _log.info(
        "rank %d of %d on %s: zero_level %d; shards are all-gathered with %s",
        rank, size, device, zero_level, _GATHERS[type(found.shards).__name__],
    )  # fmt: skip
