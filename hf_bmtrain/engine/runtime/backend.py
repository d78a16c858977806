"""Choose the ranks between which shards are divided, and open the communicators of this rank.

Communicators use gloo on the CPU and NCCL on GPUs. Ranks of one host may also exchange shards and gradients by peer
copies, with which a rank reads or writes the memory of another rank directly.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Import this module before a default process group exists, because default arguments in it refer to the group that
# exists during the import. If an optimizer imported it later, this reference would keep the threads of the group
# running until the interpreter ends, even after the group is destroyed.
import torch.distributed.nn.functional

from ..comm.agreement import agree
from ..comm.communicator import (
    CollectiveGather,
    Communicator,
    Gather,
    GlooCommunicator,
    Groups,
    OpenGroup,
    SingleProcess,
    group_of,
)
from ..comm.groups import EqualSums, HostGather, ReplicatedReduction, ShardGroup, TwoLevels
from ..comm.nccl import NcclCommunicator, abort_all, import_nccl
from ..comm.object_comm import ObjectComm
from ..comm.peer_gather import PeerGather
from ..comm.peer_memory import CudaMemory, HostMemory
from ..comm.peer_reduce import PeerReduction
from ..comm.reduce import CollectiveReduction, LocalReduction, Reduction
from ..comm.streams import finish
from .launcher import find_host
from .monitor import Monitor

_log = logging.getLogger("hf_bmtrain")
GATHERS = ("auto", "collective", "peer", "two-level")
SHARD_OVER = ("world", "host", "host+world", "auto")
SLOW_LINK = 0.5
"""With `shard_over="auto"`, every host stores a copy of all weights if the bandwidth between hosts is less than this
fraction of the bandwidth inside a host."""
STATES, WEIGHTS = 16, 2
"""Bytes per parameter with bf16 weights and AdamW. STATES: for weights, gradients, float32 masters and both moments.
WEIGHTS: for the weights alone."""
_TRACE_ON_TIMEOUT = "TORCH_NCCL_DUMP_ON_TIMEOUT"
MEASURED = 4 << 20  # size in bytes of each rank's shard in the all-gathers that measure bandwidths
SMALLEST_PULLED = 16 << 20
"""The smallest size in bytes of a shard that is gathered with peer copies by default. Peer copies read the memory of
other ranks directly. From this size on, they are faster than NCCL between H200s. With `gather="peer"`, smaller shards
are gathered with peer copies, too."""


class Backend(NamedTuple):
    """The communicators of this rank, and the objects that communicate through them.

    Attributes:
        gather: the communicator of all ranks for all-gathers.
        reduce: the communicator of all ranks for reductions. Its operations do not wait for those of `gather`.
        shards: allocates and all-gathers shards.
        shard_group: the communicator of the ranks that store different shards, for sums over all shards, such as
            gradient norms.
        saves_shards: whether this rank writes its shard to checkpoints. If every host stores all shards, only the ranks
            of the first host write them.
        blocks: averages the gradients of blocks (transformer layers).
        outside: averages the gradients of root parameters, which are outside blocks or shared by several.
        control: exchanges Python objects between the ranks.
        opened: all communicators with other ranks that have been opened so far. Communicators that are opened later are
            appended to it.
        open_group: a collective function `(size, stride=1)` that divides all ranks into groups of `size` ranks, and
            returns the communicator of this rank's group. The ranks of a group are `stride` apart: with 4 ranks,
            `open_group(2)` makes the groups (0, 1) and (2, 3), and `open_group(2, stride=2)` makes (0, 2) and (1, 3).
            The same arguments give the same communicator again.
    """

    gather: Communicator
    reduce: Communicator
    shards: Gather
    shard_group: Communicator
    saves_shards: bool
    blocks: Reduction
    outside: Reduction
    control: ObjectComm
    opened: list[Communicator]
    open_group: OpenGroup


class _Division(NamedTuple):
    """The ranks between which the shards are divided, and the communicators of these ranks.

    Attributes:
        gather: the communicator for all-gathers between the ranks that store different shards.
        reduce: the communicator of the same ranks for reductions of gradients.
        sums: the communicator of the same ranks for sums over all shards, such as gradient norms.
        members: the ranks of the world that these communicators connect. If all of them are on one host, they are in
            the order of their shards.
        rail: the communicator of the ranks that store the same shard as this rank, or None if each shard is stored by
            only one rank.
    """

    gather: Communicator
    reduce: Communicator
    sums: Communicator
    members: Sequence[int]
    rail: Communicator | None


def check_addresses(gather: str, shard_over: str, init_method: str) -> None:
    """Raise ValueError unless these arguments of `init_distributed` are valid, alone and in combination.

    `init_distributed` calls this before it connects to other ranks. After connecting, `open_backend` checks whether
    `gather` and `shard_over` are possible on the hosts of the ranks.

    Two combinations are not valid: gather="two-level" with shard_over="host", and gather="collective" with
    shard_over="host+world".

    Args:
        gather: how shards are all-gathered: "auto", "collective", "peer" or "two-level".
        shard_over: the ranks over which parameters are sharded: "world", "host", "host+world" or "auto".
        init_method: the URL at which the ranks meet, as for `torch.distributed.init_process_group`; for example
            "env://" or "tcp://HOST:PORT".
    """
    if not isinstance(shard_over, str) or shard_over not in SHARD_OVER:
        raise ValueError(f"shard_over must be one of {', '.join(SHARD_OVER)}, not {shard_over!r}")
    if gather == "two-level" and shard_over == "host":
        raise ValueError(
            "gather='two-level' does not work with shard_over='host', because then nothing is all-gathered across "
            "hosts. Use gather='auto'."
        )
    if gather == "collective" and shard_over == "host+world":
        raise ValueError(
            "gather='collective' does not work with shard_over='host+world', because then parameters are all-gathered "
            "first across hosts and then inside each host. Use gather='auto' or 'two-level'."
        )
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
    shard_over: str,
    init_method: str,
    facts: Mapping[str, Any],
    monitor: Monitor,
) -> Backend:
    """Initialize torch's default process group, if that was not done before, and open this rank's communicators.

    Collective: every rank must call it. With one rank, no process group is needed, and none is initialized. After an
    error, `monitor` is stopped, and only the process group may still be open.

    Args:
        rank: this process's rank.
        size: the number of ranks.
        device: this rank's device.
        timeout: the longest time for which an operation waits for other ranks.
        gather: how shards are all-gathered: "auto", "collective", "peer" or "two-level", as in `init_distributed`.
        shard_over: the ranks over which parameters are sharded: "world", "host", "host+world" or "auto", as in
            `init_distributed`.
        init_method: the URL at which the ranks meet, as for `torch.distributed.init_process_group`.
        facts: further values that must be equal on all ranks, by name, for example {"zero_level": 3}.
        monitor: watches the other ranks and the communicators. With more than one rank, this function starts it.

    Returns:
        The communicators, and the objects built on them.

    Raises:
        RuntimeError: `device` is a GPU, and CuPy is missing or several NCCL libraries are loaded.
        RuntimeError: `init_method` is "env://", and MASTER_ADDR or MASTER_PORT is not set.
        RuntimeError: not all ranks called this in time.
        RuntimeError: arguments, package versions or `facts` differ between ranks.
        RuntimeError: the value of `gather` or `shard_over` is not possible on these hosts.
    """
    if size == 1:
        single, local = SingleProcess(), LocalReduction()
        control = ObjectComm(1, timeout)
        shards = CollectiveGather(single)
        return Backend(
            single, single, shards, single, True, local, local, control, [], lambda group_size, stride=1: single
        )
    if device.type == "cuda":
        import_nccl()  # if CuPy is missing, this raises an error now, before this rank waits for others
    _join(rank, size, device, timeout, init_method, monitor)
    control, opened = ObjectComm(size, timeout), []
    own = {"device": device.type, "gather": gather, "shard_over": shard_over, "timeout": timeout.total_seconds()}
    try:
        agree(control, "init_distributed", {**_versions(device), **own, **facts})
        return _open_all(rank, size, device, timeout, gather, shard_over, control, opened, monitor)
    except BaseException:
        close_backend(device, control, opened, monitor)
        raise


def close_backend(device: torch.device, control: ObjectComm, opened: Sequence[Communicator], monitor: Monitor) -> None:
    """Stop `monitor` and close the communicators, after an error in `init_distributed`.

    The program may catch the error, and call `init_distributed` again. A monitor that still ran would then report
    everything twice, and could end the process.

    Args:
        device: this rank's device.
        control: exchanges objects between the ranks.
        opened: all communicators with other ranks.
        monitor: watches the other ranks and the communicators.
    """
    monitor.stop()
    if device.type == "cuda":
        abort_all(opened)
    else:
        for communicator in opened:
            communicator.close(abort=True)
    control.close()


def _open_all(
    rank: int,
    size: int,
    device: torch.device,
    timeout: timedelta,
    gather: str,
    shard_over: str,
    control: ObjectComm,
    opened: list[Communicator],
    monitor: Monitor,
) -> Backend:
    """Start the monitor and open the communicators.

    The result, and the arguments that are not listed here, are as in `open_backend`.

    Collective: every rank must call it.

    control: exchanges objects between the ranks.
    opened: an empty list, to which each communicator is appended when it is opened.
    """

    def interrupt() -> None:
        # On the CPU, nothing needs to be aborted: an operation that waits for other ranks checks once a second whether
        # the monitor has found a problem, and then raises an error by itself.
        if device.type == "cuda":
            abort_all(opened)

    def busy() -> bool:
        return device.type == "cuda" and not torch.cuda.default_stream(device).query()

    def open_communicator(name: str, groups: Groups = (range(size),), alike: bool = True) -> Communicator:
        """Open one communicator for each of `groups`. Return the communicator of this rank's group.

        Collective: every rank must call it.

        name: the communicator's name, for messages.
        groups: the groups of equal size into which all ranks are divided, each as a list of ranks.
        alike: whether all groups exchange tensors of the same sizes. If so, the monitor, which looks for mismatched
            collectives, also compares ranks in different groups. Otherwise, it compares only ranks of the same group.
        """
        members = next(group for group in groups if rank in group)
        if len(members) == 1:
            return SingleProcess()
        if device.type == "cpu":
            opened.append(GlooCommunicator(name, timeout, groups))
        else:
            place = members.index(rank)
            ids = control.gather(import_nccl().get_unique_id() if place == 0 else None)
            opened.append(NcclCommunicator(name, place, len(members), ids[members[0]], device))
        opened[-1].collective_log.ranks = None if alike else members
        monitor.add(opened[-1])
        return opened[-1]

    monitor.open(control, rank, interrupt, busy)
    gathering, reducing = open_communicator("gather"), open_communicator("reduce")
    hosts = _hosts(control.gather(find_host()))
    open_inside = functools.cache(lambda name: open_communicator(f"{name} inside hosts", hosts))
    open_rail = functools.cache(lambda name: open_communicator(f"{name} between hosts", [*zip(*hosts)]))
    if shard_over == "auto":
        shard_over = _choose_ranks(rank, device, gather, hosts, open_inside, open_rail, control.gather)
    divided = _divide(rank, device, gather, shard_over, hosts, gathering, reducing, open_inside, open_rail)
    shards, reduction = CollectiveGather(divided.gather), CollectiveReduction(divided.reduce, device)
    if shard_over == "host+world" and isinstance(divided.gather, TwoLevels):
        shards = HostGather(divided.gather)

    def replicated(inside: Reduction) -> Reduction:
        return inside if divided.rail is None else ReplicatedReduction(inside, divided.rail, device)

    @functools.cache
    def open_groups(groups: tuple[range, ...]) -> Communicator:
        name = f"groups of {len(groups[0])} at a distance of {groups[0].step}"
        # The ranks of a group of consecutive ranks (step 1) exchange activations with each other. Different groups
        # process different rows of the batch, so the sizes of these activations may differ between groups.
        return open_communicator(name, groups, alike=groups[0].step > 1)

    def open_group(group_size: int, stride: int = 1) -> Communicator:
        return open_groups(tuple(dict.fromkeys(group_of(each, group_size, stride) for each in range(size))))

    found = Backend(
        gathering, reducing, shards, divided.sums, divided.rail is None or rank in hosts[0], replicated(reduction),
        replicated(reduction), control, opened, open_group,
    )  # fmt: skip
    smallest = _smallest_copied(rank, device, gather, divided.members, hosts, control.gather)
    if smallest is None:
        return found
    members = divided.members
    # Create two objects, one for all-gathers (`pulled`) and one for reductions (`pushed`). On GPUs, each copies on
    # streams of its own, so that their copies do not wait for each other.
    pulled, pushed = (HostMemory() if device.type == "cpu" else CudaMemory(device) for _ in range(2))

    def exchange(value: Any) -> list[Any]:
        """Return the values that the ranks `members` pass. Collective: all ranks must call it, not only `members`."""
        values = control.gather(value)
        return [values[member] for member in members]

    updates = functools.partial(open_communicator, "updates", [range(size)] if divided.rail is None else hosts)
    return found._replace(
        shards=PeerGather(divided.gather, shards, pulled, control.gather, smallest, device, updates, members),
        blocks=replicated(PeerReduction(reduction, pushed, exchange, smallest, device)),
    )


def _divide(
    rank: int,
    device: torch.device,
    gather: str,
    shard_over: str,
    hosts: Groups,
    gathering: Communicator,
    reducing: Communicator,
    open_inside: Callable[[str], Communicator],
    open_rail: Callable[[str], Communicator],
) -> _Division:
    """Return the ranks between which the shards are divided according to `shard_over`, and their communicators.

    Collective: every rank must call it. With several hosts, the result is also logged, unless parameters are sharded
    over all ranks and `gather` is "peer".

    Args:
        rank: this process's rank.
        device: this rank's device.
        gather: how shards are all-gathered, one of GATHERS.
        shard_over: the ranks over which parameters are sharded, one of SHARD_OVER except "auto".
        hosts: the ranks of each host.
        gathering: the communicator of all ranks for all-gathers.
        reducing: the communicator of all ranks for reductions.
        open_inside: a collective function that takes a name, and returns a communicator of the ranks of this host.
        open_rail: a collective function that takes a name, and returns a communicator of the ranks, one on each host,
            that have the same index on their hosts as this rank has on its host.

    Raises:
        RuntimeError: `gather` or `shard_over` is not possible on these hosts.
    """
    ranks = [number for host in hosts for number in host]
    flat = _Division(gathering, reducing, reducing, range(len(ranks)), None)
    counts, several, numbers = {len(host) for host in hosts}, len(hosts) > 1, _describe(hosts)
    equal = len(counts) == 1
    if shard_over == "host" and several:
        if not equal:
            raise RuntimeError(
                f"init_distributed(shard_over='host'): there are {numbers}, so the hosts' shards would differ. Start "
                "the same number of ranks on every host, or use shard_over='world'."
            )
        members = next(host for host in hosts if rank in host)
        inside, rail = [open_inside(name) for name in ("gather", "reduce")], open_rail("reduce")
        _log.info(
            "rank %d (%s): parameters are sharded over the ranks of each host, and gradients are also averaged across "
            "hosts",
            rank, numbers,
        )  # fmt: skip
        return _Division(
            ShardGroup(inside[0], gathering, hosts[0]),
            ShardGroup(inside[1], reducing, hosts[0]),
            EqualSums(inside[1], reducing, hosts[0], rail, device),
            members, rail,
        )  # fmt: skip
    reason = None if several else "there is one host"
    if several and not equal:
        reason = "the hosts have different numbers of ranks"
    elif several and counts == {1}:
        reason = "each host has one rank"
    if gather == "two-level" and reason is not None:
        raise RuntimeError(
            "init_distributed(gather='two-level') needs several hosts with the same number of ranks, at least two on "
            f"each, but {reason} ({numbers}). Use gather='auto'."
        )
    if shard_over == "host+world" and several and reason is not None:
        raise RuntimeError(
            "init_distributed(shard_over='host+world') needs hosts with the same number of ranks, at least two on "
            f"each, but {reason} ({numbers}). Use shard_over='world'."
        )
    if not several or gather == "peer":
        return flat
    if gather == "collective" or reason is not None:
        why = reason or "gather='collective'"
        _log.info(
            "rank %d (%s): parameters are all-gathered over all ranks at once, not first across hosts, because %s",
            rank, numbers, why,
        )  # fmt: skip
        return flat
    order = [number for rail in zip(*hosts) for number in rail]
    two = [
        TwoLevels(open_inside(name), open_rail(name), all_ranks, order, device)
        for name, all_ranks in (("gather", gathering), ("reduce", reducing))
    ]
    once = "once per training step" if shard_over == "host+world" else "once per all-gather"
    _log.info(
        "rank %d (%s): parameters are all-gathered in two steps. Between hosts, each host receives every shard of the "
        "other hosts %s. Then the ranks of each host exchange them. Both steps use %s",
        rank, numbers, once, "gloo" if device.type == "cpu" else "NCCL",
    )  # fmt: skip
    return flat._replace(gather=two[0], reduce=two[1], sums=two[1])


def _choose_ranks(
    rank: int,
    device: torch.device,
    gather: str,
    hosts: Groups,
    open_inside: Callable[[str], Communicator],
    open_rail: Callable[[str], Communicator],
    exchange: Callable[[Any], list[Any]],
) -> str:
    """Choose the value of `shard_over` if the user passed "auto", and log the reason.

    The choice depends on the hosts, on `gather`, and on measured bandwidths inside and between hosts.

    Collective: every rank must call it. All ranks get the same value:

    * "world": weights and optimizer states are sharded over all ranks.
    * "host": both are sharded over the ranks of each host, so every host stores all of them.
    * "host+world": weights are sharded over the ranks of each host, and optimizer states over all ranks.

    Args:
        rank: this process's rank.
        device: this rank's device.
        gather: how shards are all-gathered, one of GATHERS.
        hosts: the ranks of each host.
        open_inside: a collective function that takes a name, and returns a communicator of the ranks of this host.
        open_rail: a collective function that takes a name, and returns a communicator of the ranks, one on each host,
            that have the same index on their hosts as this rank has on its host.
        exchange: a collective function that returns the Python objects that all ranks pass, in rank order.
    """
    if len(hosts) == 1:
        _log.info("rank %d: shard_over='auto' selects 'world', because there is one host", rank)
        return "world"
    if {len(host) for host in hosts} != {len(hosts[0])} or len(hosts[0]) == 1:
        _log.info(
            "rank %d: shard_over='auto' selects 'world', because there are %s. It selects another value only if all "
            "hosts have the same number of ranks, at least two",
            rank, _describe(hosts),
        )  # fmt: skip
        return "world"
    if gather == "peer":
        _log.info("rank %d: shard_over='auto' selects 'host', because gather='peer' works only inside a host", rank)
        return "host"
    mine = [_bytes_a_second(each, device) for each in (open_inside("gather"), open_rail("reduce"))]
    inside, between = (min(values) for values in zip(*exchange(mine)))
    # Prefer "host+world" to "host". Both send the same amount of data between hosts. "host+world" needs little more
    # memory than "world". "host" may be faster, but all optimizer states must fit on one host. Whether they do is
    # unknown here, because there is no model yet. With gather="collective", "host+world" is not possible, because
    # "host+world" all-gathers in two steps: first across hosts and then inside each host.
    kept = "host" if gather == "collective" else "host+world"
    chosen = kept if between < SLOW_LINK * inside else "world"
    faster = ""
    if chosen == "host+world":
        on_host = STATES / len(hosts[0])
        faster = (
            "; shard_over='host' may be faster, but with bf16 weights and AdamW each rank stores "
            f"{on_host:.1f} GB per billion parameters instead of {on_host / len(hosts) + WEIGHTS / len(hosts[0]):.1f}"
        )
    _log.info(
        "rank %d: shard_over='auto' selects '%s', because a rank receives %.2f GB/s from other hosts, and %.2f GB/s "
        "from its own host%s",
        rank, chosen, between / 1e9, inside / 1e9, faster,
    )  # fmt: skip
    return chosen


def _bytes_a_second(communicator: Communicator, device: torch.device) -> float:
    """Measure how many bytes per second this rank receives in an all-gather, and return the highest of three results.

    Collective: every rank must call it.

    communicator: the communicator that does the all-gather. It has at least two ranks.
    device: this rank's device.
    """
    shard = torch.zeros(MEASURED, dtype=torch.uint8, device=device)
    full, seconds = shard.new_empty(communicator.size * MEASURED), []
    for _ in range(4):  # the first all-gather also connects the ranks, so its time is not used
        finish(device)
        begin = time.perf_counter()
        communicator.all_gather(full, shard).wait()
        finish(device)
        seconds.append(time.perf_counter() - begin)
    return (communicator.size - 1) * MEASURED / min(seconds[1:])


def _describe(hosts: Groups) -> str:
    """Return a phrase such as "2 hosts with 4 ranks each", for messages. hosts: the ranks of each host."""
    least, most = (extreme(len(host) for host in hosts) for extreme in (min, max))
    ranks = f"{least} to {most} ranks" if least < most else f"{most} rank{'s' * (most > 1)}"
    return f"{len(hosts)} host{'s' * (len(hosts) > 1)} with {ranks} each"


def _hosts(names: Sequence[Any]) -> list[list[int]]:
    """Group the ranks by host: return one list of ranks per host, beginning with the host of rank 0.

    names: for each rank, a value that identifies its host.
    """
    found: dict[Any, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return [*found.values()]


def _join(rank: int, size: int, device: torch.device, timeout: timedelta, init_method: str, monitor: Monitor) -> None:
    """Initialize torch's default process group, if that was not done before. Collective: every rank must call it.

    rank: this process's rank.
    size: the number of ranks.
    device: this rank's device. If it is a GPU, the group uses NCCL for GPU tensors and gloo for CPU tensors.
    timeout: the longest time to wait for other ranks.
    init_method: the URL at which the ranks meet.
    monitor: its method `meet` is called first. It waits until all ranks have arrived. If some ranks do not arrive in
        time, it raises an error that names them.
    """
    if dist.is_initialized():
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and init_method == "env://":
        raise RuntimeError(
            f"WORLD_SIZE={size}, but these environment variables are not set: {' and '.join(missing)}. Start the "
            "script with torchrun or accelerate launch."
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    met = monitor.meet(rank, size, timeout, init_method)
    # By default, torch's NCCL backend asks the key-value store every second whether a rank has timed out, in order to
    # save a trace of its operations. If rank 0, which serves the store, is killed, these requests fail, and log some 60
    # lines that do not say which rank failed. Only then does `monitor` name that rank. This environment variable
    # switches the requests off. The backend reads it only during init_process_group, so it is deleted afterwards.
    chosen = _TRACE_ON_TIMEOUT in os.environ
    os.environ.setdefault(_TRACE_ON_TIMEOUT, "0")
    where: dict[str, Any] = {"init_method": init_method}
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if isinstance(met, dist.TCPStore) and restarts != "0":
        # torchrun keeps its key-value store when it restarts the ranks. The store still contains the addresses of the
        # ranks that have ended, to which the new ranks would try to connect. So the new ranks use keys with a prefix.
        met.set_timeout(timeout)
        where = {"store": dist.PrefixStore(f"restart {restarts}", met)}
    begun = time.monotonic()
    try:
        dist.init_process_group(backend, **where, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the {size} ranks did not connect to each other in init_distributed (error after "
            f"{time.monotonic() - begun:.0f} s). Another rank raised an error or ended earlier (look for the first "
            "error in the logs of all ranks), hangs, was not started, or was given a different address. "
            f"({str(error).strip().splitlines()[0]})"
        ) from None
    finally:
        if not chosen:
            del os.environ[_TRACE_ON_TIMEOUT]
    del met  # needed until now, because it may be the server of the store through which init_process_group connects


def _versions(device: torch.device) -> dict[str, Any]:
    """Return {package: version} for the packages whose versions must be equal on all ranks.

    device: this rank's device. The versions of CUDA, NCCL and CuPy are included only if it is a GPU.
    """
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


def _smallest_copied(
    rank: int,
    device: torch.device,
    gather: str,
    members: Sequence[int],
    hosts: Groups,
    exchange: Callable[[Any], list[Any]],
) -> int | None:
    """Return the minimum size in bytes of a shard that is exchanged with peer copies, or None to use only collectives.

    Peer copies read and write the memory of other ranks directly. Only collectives are used if `gather` is "collective"
    or "two-level", or if the ranks `members` cannot access each other's memory. With `gather="auto"`, only collectives
    are used on the CPU, where peer copies are slower. Collective: every rank must call it.

    rank: this process's rank, for the log.
    device: this rank's device.
    gather: how shards are all-gathered, one of GATHERS. "peer" raises RuntimeError if peer copies are impossible.
    members: the ranks between which the shards are divided, including this rank.
    hosts: the ranks of each host.
    exchange: a collective function that takes any object and returns the objects of all ranks, in rank order.
    """
    if gather in ("collective", "two-level") or len(members) == 1:
        return None
    reason = _hindrance(device, members, hosts, exchange)
    if reason is not None and gather == "peer":
        raise RuntimeError(
            f"init_distributed(gather='peer') needs ranks that can access each other's memory, but {reason}. Use "
            "gather='auto' or 'collective'."
        )
    if reason is not None:
        _log.info(
            "rank %d: ranks exchange parameters and gradients with collectives, not with peer-to-peer copies, "
            "because %s",
            rank, reason,
        )  # fmt: skip
        return None
    if gather == "auto" and device.type == "cpu":
        return None
    smallest = 0 if gather == "peer" else SMALLEST_PULLED
    _log.info(
        "rank %d: ranks exchange parameters and gradients by copying between their memories if a shard has at least "
        "%d MiB, and with collectives otherwise",
        rank, smallest >> 20,
    )  # fmt: skip
    return smallest


def _hindrance(
    device: torch.device, members: Sequence[int], hosts: Groups, exchange: Callable[[Any], list[Any]]
) -> str | None:
    """Return the reason why the ranks of a shard group cannot access each other's memory, or None if they can.

    Collective: every rank must call it, with the members of its own shard group. The result is equal on all ranks.

    device: this rank's device.
    members: the ranks between which this rank's shards are divided, including this rank.
    hosts: the ranks of each host.
    exchange: a collective function that takes any object and returns the objects of all ranks, in rank order.
    """
    if not any(set(members) <= set(host) for host in hosts):
        return f"the ranks are on {len(hosts)} hosts"
    if device.type == "cpu":
        return None
    places = exchange((os.environ.get("CUDA_VISIBLE_DEVICES"), device.index))
    mine, report = [places[member] for member in members], None
    others = [index for _, index in mine if index != device.index]
    blocked = [other for other in others if not torch.cuda.can_device_access_peer(device.index, other)]
    if len({visible for visible, _ in mine}) > 1:
        report = "CUDA_VISIBLE_DEVICES differs between the ranks"
    elif blocked:
        report = f"cuda:{device.index} cannot access the memory of GPUs {blocked}"
    return next((found for found in exchange(report) if found), None)
