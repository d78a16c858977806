"""Open the communicators of a world: for one process, with gloo on the CPU, or with NCCL and peer copies on CUDA."""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# This import must come before a default process group exists, because the imported functions get that group as the
# default value of an argument. If an optimizer imported it later, this reference would keep the group's threads running
# until the interpreter ends, even after the group is destroyed.
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
"""The smallest size in bytes of a shard that is gathered with peer copies, which are then faster than NCCL between
H200s. Smaller shards are gathered with peer copies only if `gather="peer"`."""


class Backend(NamedTuple):
    """The objects through which the ranks of a world communicate.

    Attributes:
        gather: the communicator for all-gathers.
        reduce: the communicator for reductions, whose operations do not wait for those of `gather`.
        shards: allocates and all-gathers shards.
        blocks: averages the gradients of blocks.
        outside: averages the gradients of root parameters.
        control: exchanges Python objects.
        opened: all communicators that have been opened.
        open_group: a collective function that divides the ranks into groups of a number of consecutive ranks, and
            returns the communicator of this rank's group. Called with the same number again, it returns the same
            communicator.
    """

    gather: Communicator
    reduce: Communicator
    shards: Gather
    blocks: Reduction
    outside: Reduction
    control: ObjectComm
    opened: list[Communicator]
    open_group: Callable[[int], Communicator]


def check_addresses(gather: str, init_method: str) -> None:
    """Raise ValueError unless `gather` and `init_method`, arguments of `open_backend`, have valid values."""
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
    """Initialize torch's process group, unless it is initialized, and open the communicators of a world.

    Collective: every rank must call it.

    Args:
        rank: this process's rank.
        size: the number of ranks.
        device: this rank's device.
        timeout: the time for which operations wait for other ranks.
        gather: how shards are all-gathered, one of GATHERS.
        init_method: the URL at which the ranks meet, as for `torch.distributed.init_process_group`.
        facts: other values that must be equal on all ranks.
        monitor: watches the communicators. This function opens it.

    Returns:
        The communicators, and the objects built on them.

    Raises:
        RuntimeError: a package is missing, the ranks did not meet in time, the arguments, versions or `facts` differ
            between ranks, or `gather="peer"` is not possible.
    """
    if size == 1:
        single, local = SingleProcess(), LocalReduction()
        control = ObjectComm(1, timeout)
        return Backend(single, single, CollectiveGather(single), local, local, control, [], lambda group_size: single)
    if device.type == "cuda":
        import_nccl()  # report a missing CuPy before anything waits for other ranks
    _join(rank, size, device, timeout, init_method, monitor)
    control = ObjectComm(size, timeout)
    own = {"device": device.type, "gather": gather, "timeout": timeout.total_seconds()}
    _agree(control, {**_versions(device), **own, **facts})
    opened: list[Communicator] = []

    def interrupt() -> None:
        if device.type == "cuda":  # on the CPU, waiting operations check for a problem themselves
            abort_all(opened)

    def busy() -> bool:
        return device.type == "cuda" and not torch.cuda.default_stream(device).query()

    def open_communicator(name: str, group_size: int = size) -> Communicator:
        if device.type == "cpu":
            opened.append(GlooCommunicator(name, timeout, group_size))
        else:
            place = rank % group_size
            ids = control.gather(import_nccl().get_unique_id() if place == 0 else None)
            opened.append(NcclCommunicator(name, place, group_size, ids[rank - place], device))
        monitor.add(opened[-1])
        return opened[-1]

    monitor.open(control, rank, interrupt, busy)
    gathering, reducing = open_communicator("gather"), open_communicator("reduce")
    shards, reduction = CollectiveGather(gathering), CollectiveReduction(reducing, device)
    open_group = functools.cache(lambda group_size: open_communicator(f"groups of {group_size}", group_size))
    found = Backend(gathering, reducing, shards, reduction, reduction, control, opened, open_group)
    smallest = _smallest_copied(rank, device, gather, control.gather)
    if smallest is None:
        return found
    # There are two objects, so that gathers and reductions copy on separate streams.
    pulled, pushed = (HostMemory() if device.type == "cpu" else CudaMemory(device) for _ in range(2))
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
            f"WORLD_SIZE={size}, but these variables are not set: {' and '.join(missing)}. Start the script with "
            "torchrun or accelerate launch."
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    met = monitor.meet(rank, size, timeout, init_method)
    try:
        dist.init_process_group(backend, init_method, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not meet in init_distributed within {timeout.total_seconds():.0f} s. "
            "Another rank raised an error or ended earlier (look for the first error in the logs of all ranks), hangs, "
            f"was not started, or was given another address. ({str(error).strip().splitlines()[0]})"
        ) from None
    del met  # `met` kept the store open until the process group had connected to it


def _agree(control: ObjectComm, facts: Mapping[str, Any]) -> None:
    """Check that `facts` are equal on all ranks. If they are not, close `control` and raise.

    Collective: every rank must call it.
    """
    try:
        agree(control, "init_distributed", facts)
    except RuntimeError:
        control.close()
        raise


def _versions(device: torch.device) -> dict[str, Any]:
    """Return {package: version} for versions that must be equal on all ranks, as results may depend on them."""
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
    """Return the smallest size in bytes of a shard that is gathered and reduced with peer copies.

    Collective: every rank must call it. Returns None if collectives are used for all shards: if the user chose them, if
    the ranks cannot access each other's memory, or by default on the CPU, where peer copies are slower.
    """
    if gather == "collective":
        return None
    reason = _hindrance(device, exchange)
    if reason is not None and gather == "peer":
        raise RuntimeError(f"init_distributed(gather='peer'): {reason}. Use gather='auto' or 'collective'.")
    if reason is not None:
        _log.info("rank %d: shards are gathered and reduced with collectives, because %s", rank, reason)
        return None
    if gather == "auto" and device.type == "cpu":
        return None
    smallest = 0 if gather == "peer" else SMALLEST_PULLED
    _log.info("rank %d: shards of at least %d MiB are gathered and reduced with peer copies", rank, smallest >> 20)
    return smallest


def _hindrance(device: torch.device, exchange) -> str | None:
    """Return why the ranks cannot access each other's memory, or None if they can. Collective: every rank must call it.

    The result is equal on all ranks.
    """
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
    reports = [report for report in exchange(blocked and f"cuda:{device.index} cannot access GPUs {blocked}") if report]
    return reports[0] if reports else None


def _boot() -> str:
    """Return the kernel's boot identifier, which distinguishes hosts of the same name, or "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
