"""Which lanes a world gets: one process, gloo on CPU, NCCL on CUDA, peer gathers inside one host."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .comm import Communicator, GlooCommunicator, NcclCommunicator, SingleProcess, import_nccl
from .peer import PeerCommunicator
from .peer_memory import CudaMemory, HostMemory

_log = logging.getLogger("hf_bmtrain")
GATHERS = ("auto", "collective", "peer")
SMALLEST_PULLED = 16 << 20
"""Bytes of a shard from which pulling beats NCCL between H200s; only `gather="peer"` pulls smaller ones."""


def open_lanes(
    rank: int, size: int, device: torch.device, timeout: timedelta, gather: str
) -> tuple[Communicator, Communicator, dist.ProcessGroup | None]:
    """The gather lane, the reduce lane and the control group. Collective."""
    if gather not in GATHERS:
        raise ValueError(f"gather must be one of {', '.join(GATHERS)}, not {gather!r}")
    if size == 1:
        return SingleProcess(), SingleProcess(), None
    if device.type == "cuda":
        import_nccl()  # a missing CuPy is told before anything waits for other ranks
    _join(rank, size, device, timeout)
    control: Any = dist.new_group(backend="gloo", timeout=timeout)

    def open_lane(name: str) -> Communicator:
        if device.type == "cpu":
            return GlooCommunicator(name, timeout)
        unique_id = [import_nccl().get_unique_id() if rank == 0 else None]
        dist.broadcast_object_list(unique_id, src=0, group=control)
        assert unique_id[0] is not None
        return NcclCommunicator(name, rank, size, unique_id[0], device)

    gathering, reducing = open_lane("gather"), open_lane("reduce")
    if gather != "collective":
        gathering = _with_peers(gathering, device, control, gather == "peer", open_lane)
    return gathering, reducing, control


def _join(rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
    """torch's own process group, unless it is up."""
    if dist.is_initialized():
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE={size}, but {' and '.join(missing)} not set: start the script with torchrun or "
            "accelerate launch."
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)


def _with_peers(
    below: Communicator, device: torch.device, control: Any, forced: bool, open_lane: Callable[[str], Communicator]
) -> Communicator:
    """The gather lane with peer gathers where all ranks can read each other's memory and it is faster."""

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * below.size
        dist.all_gather_object(values, value, group=control)
        return values

    reason = _hindrance(device, exchange)
    if reason is None and device.type == "cpu" and not forced:
        return below
    if reason is not None:
        if forced:
            raise RuntimeError(f"init_distributed(gather='peer'): {reason}. Use gather='auto' or 'collective'.")
        _log.info("rank %d: gathers by collectives, because %s", below.rank, reason)
        return below
    memory = HostMemory() if device.type == "cpu" else CudaMemory(device, below.size)
    smallest = 0 if forced else SMALLEST_PULLED
    _log.info("rank %d: shards from %d MiB are gathered by pulling from peers", below.rank, smallest >> 20)
    return PeerCommunicator(below, memory, exchange, smallest, device, lambda: open_lane("updates"))


def _hindrance(device: torch.device, exchange) -> str | None:
    """Why the ranks cannot read each other's memory; the same answer on every rank."""
    place = (socket.gethostname(), _boot(), os.environ.get("CUDA_VISIBLE_DEVICES"), device.index)
    places = exchange(place)
    if len({place[:2] for place in places}) > 1:
        return f"the ranks are on {len({place[:2] for place in places})} hosts"
    if device.type == "cpu":
        return None
    if len({place[2] for place in places}) > 1:
        return "the ranks see different CUDA devices (CUDA_VISIBLE_DEVICES)"
    blocked = [
        other[3]
        for other in places
        if other[3] != device.index and not torch.cuda.can_device_access_peer(device.index, other[3])
    ]
    reports = [report for report in exchange(blocked and f"cuda:{device.index} cannot reach {blocked}") if report]
    return reports[0] if reports else None


def _boot() -> str:
    """Tells hosts of one name apart."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
