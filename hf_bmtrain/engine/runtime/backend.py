"""The choice of how ranks communicate: one process, gloo on CPU, NCCL on CUDA, copies within one host."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# The default arguments of its functions are the default group at the time of its import: imported later (by an
# optimizer), it would keep the group's threads, even of a destroyed group, until the interpreter ends.
import torch.distributed.nn.functional

from ..comm.agreement import agree
from ..comm.communicator import CollectiveGather, Communicator, Gather, GlooCommunicator, SingleProcess
from ..comm.nccl import NcclCommunicator, abort_all, import_nccl
from ..comm.object_comm import ObjectComm
from ..comm.peer_gather import PeerGather
from ..comm.peer_memory import CudaMemory, HostMemory
from ..comm.peer_reduce import PeerReduction
from ..comm.reduce import CollectiveReduction, LocalReduction, Reduction
from .monitor import Monitor

_log = logging.getLogger("hf_bmtrain")
GATHERS = ("auto", "collective", "peer")
SMALLEST_PULLED = 16 << 20
"""Bytes of a shard from which pulling beats NCCL between H200s; only `gather="peer"` pulls smaller ones."""


class Backend(NamedTuple):
    """The channels between the ranks of a world.

    gather, reduce: communicators whose operations do not wait for one another. shards: allocates and gathers shards.
    blocks, outside: average the gradients of parameters in blocks and outside them. control: exchanges Python objects.
    opened: all communicators that are open.
    """

    gather: Communicator
    reduce: Communicator
    shards: Gather
    blocks: Reduction
    outside: Reduction
    control: ObjectComm
    opened: list[Communicator]


def check_addresses(gather: str, init_method: str) -> None:
    """Raise ValueError unless the two arguments of `open_backend` are known, in words."""
    if not isinstance(gather, str) or gather not in GATHERS:
        raise ValueError(f"gather must be one of {', '.join(GATHERS)}, not {gather!r}")
    if not isinstance(init_method, str) or "://" not in init_method:
        raise ValueError(f"init_method must be env://, tcp://HOST:PORT or file://PATH, not {init_method!r}")


def open_backend(
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    gather: str,
    init_method: str,
    facts: Mapping[str, Any],
    monitor: Monitor,
) -> Backend:
    """Join the process group and open the channels of this world. Collective.

    monitor: watches the channels, from here on. Raises RuntimeError unless the arguments, the versions and `facts` are
    equal on all ranks.
    """
    if size == 1:
        single, local = SingleProcess(), LocalReduction()
        return Backend(single, single, CollectiveGather(single), local, local, ObjectComm(1, timeout), [])
    if device.type == "cuda":
        import_nccl()  # report a missing CuPy before anything waits for other ranks
    _join(rank, size, device, timeout, init_method, monitor)
    control = ObjectComm(size, timeout)
    own = {"device": device.type, "gather": gather, "timeout": timeout.total_seconds()}
    _agree(control, {**_versions(device), **own, **facts})
    opened: list[Communicator] = []

    def interrupt() -> None:
        if device.type == "cuda":  # on CPU what waits looks for the problem
            abort_all(opened)

    def open_communicator(name: str) -> Communicator:
        if device.type == "cpu":
            opened.append(GlooCommunicator(name, timeout))
        else:
            unique_id = control.broadcast_object(import_nccl().get_unique_id() if rank == 0 else None)
            opened.append(NcclCommunicator(name, rank, size, unique_id, device))
        monitor.add(opened[-1])
        return opened[-1]

    monitor.open(control, rank, interrupt)
    gathering, reducing = open_communicator("gather"), open_communicator("reduce")
    shards, reduction = CollectiveGather(gathering), CollectiveReduction(reducing, device)
    found = Backend(gathering, reducing, shards, reduction, reduction, control, opened)
    smallest = _smallest_copied(rank, device, gather, control.gather)
    if smallest is None:
        return found
    # Two memories, since each has its own streams.
    pulled, pushed = (HostMemory() if device.type == "cpu" else CudaMemory(device, size) for _ in range(2))
    updates = functools.partial(open_communicator, "updates")
    return found._replace(
        shards=PeerGather(gathering, shards, pulled, control.gather, smallest, device, updates),
        blocks=PeerReduction(reduction, pushed, control.gather, smallest, device),
    )


def _join(rank: int, size: int, device: torch.device, timeout: timedelta, init_method: str, monitor: Monitor) -> None:
    """Initialize torch's default process group if it is not initialized."""
    if dist.is_initialized():
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and init_method == "env://":
        raise RuntimeError(
            f"WORLD_SIZE={size}, but {' and '.join(missing)} not set: start the script with torchrun or "
            "accelerate launch."
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    met = monitor.meet(rank, size, timeout, init_method)
    try:
        dist.init_process_group(backend, init_method, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not meet in init_distributed within {timeout.total_seconds():.0f} s: "
            "another one raised or ended before (look at the first error among the ranks' logs), hangs, was not "
            f"started, or was given another address. ({str(error).strip().splitlines()[0]})"
        ) from None
    del met  # its server is the process group's now


def _agree(control: ObjectComm, facts: Mapping[str, Any]) -> None:
    try:
        agree(control, "init_distributed", facts)
    except RuntimeError:
        control.close()
        raise


def _versions(device: torch.device) -> dict[str, Any]:
    """Return the versions on which the ranks' arithmetic and messages depend."""
    package: Any = sys.modules[__name__.split(".")[0]]
    found = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        package.__name__: package.__version__,
        "torch": str(torch.__version__),
    }
    if device.type == "cuda":
        nccl, cupy = import_nccl().get_version(), sys.modules["cupy"].__version__
        found |= {"CUDA": torch.version.cuda, "NCCL": nccl, "cupy": cupy}
    return found


def _smallest_copied(rank: int, device: torch.device, gather: str, exchange) -> int | None:
    """Return the least bytes of a shard that is gathered and reduced by copies; None for collectives alone.

    Copies need access of all ranks to each other's memory, and are slower on CPU. Collective.
    """
    if gather == "collective":
        return None
    reason = _hindrance(device, exchange)
    if reason is not None and gather == "peer":
        raise RuntimeError(f"init_distributed(gather='peer'): {reason}. Use gather='auto' or 'collective'.")
    if reason is not None:
        _log.info("rank %d: gathers and reductions by collectives, because %s", rank, reason)
        return None
    if gather == "auto" and device.type == "cpu":
        return None
    smallest = 0 if gather == "peer" else SMALLEST_PULLED
    _log.info("rank %d: blocks with shards from %d MiB are gathered and reduced by copies", rank, smallest >> 20)
    return smallest


def _hindrance(device: torch.device, exchange) -> str | None:
    """Return the reason why the ranks cannot access each other's memory, or None; equal on all ranks. Collective."""
    places = exchange((socket.gethostname(), _boot(), os.environ.get("CUDA_VISIBLE_DEVICES"), device.index))
    hosts = {place[:2] for place in places}
    if len(hosts) > 1:
        return f"the ranks are on {len(hosts)} hosts"
    if device.type == "cpu":
        return None
    if len({place[2] for place in places}) > 1:
        return "the ranks see different CUDA devices (CUDA_VISIBLE_DEVICES)"
    others = [place[3] for place in places if place[3] != device.index]
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
    reports = [report for report in exchange(blocked and f"cuda:{device.index} cannot reach {blocked}") if report]
    return reports[0] if reports else None


def _boot() -> str:
    """Return the boot identifier, which differs between hosts of equal names; empty where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
