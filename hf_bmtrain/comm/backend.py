"""Which lanes a world gets: one process, gloo on CPU, NCCL on CUDA, pulling inside one host."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its functions have the default group of the moment as their default arguments: imported later (by an optimizer), it
# would keep the group's threads until the interpreter ends, destroyed or not.
import torch.distributed.nn.functional

from .collectives import Communicator, GlooCommunicator, SingleProcess
from .control import Control
from .nccl import NcclCommunicator, import_nccl
from .peer_gather import PeerCommunicator
from .peer_memory import CudaMemory, HostMemory, PeerMemory
from .peer_reduce import PeerReduction
from .reduce import CollectiveReduction, LocalReduction, Reduction

_log = logging.getLogger("hf_bmtrain")
GATHERS = ("auto", "collective", "peer")
SMALLEST_PULLED = 16 << 20
"""Bytes of a shard from which pulling beats NCCL between H200s; only `gather="peer"` pulls smaller ones."""


class Lanes(NamedTuple):
    """gather, reduce: communicators. blocks, apart: how the gradients of blocks, and of what lies outside, are averaged
    over the ranks. control: agreement between the ranks' Python."""

    gather: Communicator
    reduce: Communicator
    blocks: Reduction
    apart: Reduction
    control: Control


def open_lanes(rank: int, size: int, device: torch.device, timeout: timedelta, gather: str) -> Lanes:
    """What this world's ranks talk through. Collective."""
    if gather not in GATHERS:
        raise ValueError(f"gather must be one of {', '.join(GATHERS)}, not {gather!r}")
    if size == 1:
        return Lanes(SingleProcess(), SingleProcess(), LocalReduction(), LocalReduction(), Control(1, timeout))
    if device.type == "cuda":
        import_nccl()  # a missing CuPy is told before anything waits for other ranks
    _join(rank, size, device, timeout)
    control = Control(size, timeout)

    def open_lane(name: str) -> Communicator:
        if device.type == "cpu":
            return GlooCommunicator(name, timeout)
        unique_id = control.share(import_nccl().get_unique_id() if rank == 0 else None)
        return NcclCommunicator(name, rank, size, unique_id, device)

    gathering, reducing = open_lane("gather"), open_lane("reduce")
    apart = CollectiveReduction(reducing, device)
    found = Lanes(gathering, reducing, apart, apart, control)
    return found if gather == "collective" else _with_peers(found, apart, device, gather == "peer", open_lane)


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
    lanes: Lanes,
    apart: CollectiveReduction,
    device: torch.device,
    forced: bool,
    open_lane: Callable[[str], Communicator],
) -> Lanes:
    """With shards pulled and gradients pushed where all ranks can read each other's memory and it is faster."""
    rank, size, exchange = lanes.gather.rank, lanes.gather.size, lanes.control.gather

    def memory() -> PeerMemory:  # each with streams of its own
        return HostMemory() if device.type == "cpu" else CudaMemory(device, size)

    reason = _hindrance(device, exchange)
    if reason is None and device.type == "cpu" and not forced:
        return lanes
    if reason is not None:
        if forced:
            raise RuntimeError(f"init_distributed(gather='peer'): {reason}. Use gather='auto' or 'collective'.")
        _log.info("rank %d: gathers and reductions by collectives, because %s", rank, reason)
        return lanes
    smallest = 0 if forced else SMALLEST_PULLED
    _log.info("rank %d: blocks with shards from %d MiB are gathered and reduced by copies", rank, smallest >> 20)
    return lanes._replace(
        gather=PeerCommunicator(lanes.gather, memory(), exchange, smallest, device, lambda: open_lane("updates")),
        blocks=PeerReduction(apart, memory(), exchange, smallest, device),
    )


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
