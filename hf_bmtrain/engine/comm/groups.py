"""Communicators for training on several hosts, built from communicators inside each host and across hosts.

A *rail* is a group with one rank of each host: the ranks that have the same index on their hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .collective_log import CollectiveLog
from .communicator import CollectiveGather, Communicator, Ranges
from .layout import Layout
from .reduce import Destination, PendingReduce, Reducer, Reduction
from .streams import After, Immediate, Ticket, WorkStream, work_stream


class ShardGroup:
    """A communicator for tensors that are sharded over the ranks of each host. Every host stores all shards.

    This is used with `init_distributed(shard_over="host")`. All collectives except `broadcast` connect only the ranks
    of this host. So gradients are averaged across hosts separately, by ReplicatedReduction.

    `broadcast(tensor, root)` connects all ranks of all hosts, so that all hosts get the same values. `root` is an index
    into the ranks of the first host: the values of rank `first[root]` are sent.

    Args:
        inside: the communicator of the ranks of this host.
        world: the communicator of all ranks.
        first: the ranks of the first host, in the order of their shards.
    """

    def __init__(self, inside: Communicator, world: Communicator, first: Sequence[int]) -> None:
        self.rank, self.size, self.collective_log = inside.rank, inside.size, world.collective_log
        self._inside, self._world, self._first = inside, world, first

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return self._inside.all_gather(full, shard)

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        return self._inside.reduce_scatter_mean(shard, full)

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        return self._inside.all_reduce_mean(tensor)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        return self._inside.all_reduce(tensor, maximum)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return self._world.broadcast(tensor, self._first[root])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        return self._inside.all_to_all(received, sent, receive_counts, send_counts)

    def unfinished(self) -> bool:
        return self._inside.unfinished() or self._world.unfinished()

    def close(self, abort: bool) -> None:
        """Do nothing and ignore `abort`, because the code that opened the communicators closes them."""


class EqualSums(ShardGroup):
    """A communicator of the ranks of this host, whose `all_reduce` gives bit-identical sums on all hosts.

    This is used if every host stores all shards. All hosts then sum the same values, but may add them in different
    orders, so their sums may differ in the last bit. With different gradient norms, the hosts would clip their
    gradients differently, and their copies of the weights would drift apart. Therefore `all_reduce` sends the sums of
    the first host to the other hosts. Maxima do not depend on the order, and are not sent.

    Args:
        inside: the communicator of the ranks of this host.
        world: the communicator of all ranks.
        first: the ranks of the first host, in the order of their shards.
        rail: the communicator of the ranks that have this rank's index on their hosts, one on each host.
        device: this rank's device.
    """

    def __init__(
        self, inside: Communicator, world: Communicator, first: Sequence[int], rail: Communicator, device: torch.device
    ) -> None:
        super().__init__(inside, world, first)
        self._rail, self._stream = rail, work_stream(device, priority=-1)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        found = super().all_reduce(tensor, maximum)
        return found if maximum else _then(self._stream, found, lambda: self._rail.broadcast(tensor, 0))


class TwoLevels:
    """The communicator of all ranks of several hosts, which all-gathers first across hosts and then inside each host.

    Each host thus receives every shard of the other hosts only once. A reduce-scatter takes the opposite order: first
    inside each host, then across hosts. Other collectives use the communicator of all ranks. Every host must have the
    same number of ranks.

    Args:
        inside: the communicator of the ranks of this host.
        rail: the communicator of the ranks that have this rank's index on their hosts, one on each host.
        world: the communicator of all ranks.
        order: the rank that stores shard 0, the rank that stores shard 1, and so on.
        device: this rank's device.
    """

    def __init__(
        self,
        inside: Communicator,
        rail: Communicator,
        world: Communicator,
        order: Sequence[int],
        device: torch.device,
    ) -> None:
        # Shards are numbered so that the ranks with the same index on their hosts (a rail) store consecutive shards.
        # The result of an all-gather across hosts is then one contiguous part of the full buffer.
        self.rank, self.size = inside.rank * rail.size + rail.rank, world.size
        self.collective_log: CollectiveLog = world.collective_log
        self.inside, self.rail, self._world, self._order = inside, rail, world, order
        self._number = {rank: number for number, rank in enumerate(order)}
        self._stream = work_stream(device, priority=-1)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return self.all_gather_through(full.detach().view(self.inside.size, -1)[self.inside.rank], full, shard)

    def all_gather_through(self, part: torch.Tensor, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        """Start to all-gather `shard` across hosts into `part`, and then `part` inside the host into `full`.

        Unlike `all_gather`, this lets the caller choose the memory for `part`. HostGather keeps `part`, so that it can
        all-gather the same shards again without sending anything across hosts.

        Collective: every rank must call it. Call `wait` of the returned ticket before you use `part` or `full`, or
        write `shard`.

        Args:
            part: (hosts * n,), written with the shards of this rank's rail (the ranks that have the same index on their
                hosts, one rank on each host), in the order of the hosts.
            full: (size * n,), written with all shards, rail by rail: first the shards of the ranks with index 0 on
                their hosts, then those of the ranks with index 1, and so on.
            shard: (n,), this rank's shard.
        """
        arrived = self.rail.all_gather(part, shard)
        return _then(self._stream, arrived, lambda: self.inside.all_gather(full, part))

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        part = full.new_empty(full.numel() // self.inside.size)
        reduced = self.inside.reduce_scatter_mean(part, full)
        ticket = _then(self._stream, reduced, lambda: self.rail.reduce_scatter_mean(shard, part))
        return After(ticket, lambda part=part: None)  # the lambda keeps `part` alive until `wait`

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        return self._world.all_reduce_mean(tensor)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        return self._world.all_reduce(tensor, maximum)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return self._world.broadcast(tensor, self._order[root])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        # The parts of `sent` and `received` are in the order of the ranks' shards. The communicator of all ranks needs
        # them in rank order.
        numbers = [self._number[rank] for rank in range(self.size)]  # for each rank, the index of its shard
        parts, places = sent.split([*send_counts]), received.split([*receive_counts])
        ordered, arriving = torch.cat([parts[number] for number in numbers]), torch.empty_like(received)
        counts = [[each[number] for number in numbers] for each in (receive_counts, send_counts)]
        ticket = self._world.all_to_all(arriving, ordered, *counts)

        def sort() -> None:
            for number, part in zip(numbers, arriving.split(counts[0])):
                places[number].copy_(part)

        return After(ticket, sort)

    def unfinished(self) -> bool:
        return any(each.unfinished() for each in (self.inside, self.rail, self._world))

    def close(self, abort: bool) -> None:
        """Do nothing and ignore `abort`, because the code that opened the communicators closes them."""


class HostGather(CollectiveGather):
    """All-gathers shards first across hosts and then inside each host, and keeps the shards from other hosts.

    This is used with `init_distributed(shard_over="host+world")`. The first all-gather of a flat buffer after a change
    of its weights sends shards across hosts. Each rank keeps the shards of its rail (the ranks that have the same index
    on their hosts, one rank on each host). Together, the ranks of a host thus keep all shards. Until the weights change
    again, all-gathers of the buffer stay inside the host.

    To detect a change, each rank looks only at its own shard's version counter (torch's count of in-place writes). So
    if one rank changes its shard of a buffer, every rank must change its shard too, before the buffer is all-gathered
    again. Otherwise, only some ranks would call the all-gather across hosts, and would deadlock.

    Args:
        levels: the communicator of all ranks, which all-gathers first across hosts and then inside each host.
    """

    def __init__(self, levels: TwoLevels) -> None:
        super().__init__(levels)
        self._levels = levels

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        noted: Any = shard
        if not hasattr(shard, "host_part"):
            with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
                noted.host_part, noted.host_version = shard.new_empty(shard.numel() * self._levels.rail.size), -1
        if noted.host_version == shard._version:
            return self._levels.inside.all_gather(full, noted.host_part)
        ticket = self._levels.all_gather_through(noted.host_part, full, shard)
        noted.host_version = shard._version  # set last: if the gather raises, `host_part` is not up to date
        return ticket


class ReplicatedReduction(Reduction):
    """Averages gradients over all ranks: first over the ranks of each host, and then each shard across hosts.

    This is used with `init_distributed(shard_over="host")` and several hosts. Every host then stores all shards, and
    the reduction `inside` computes only the mean over the ranks of one host. All hosts have the same number of ranks,
    so the mean of the hosts' means is the mean over all ranks.

    Args:
        inside: the reduction that averages over the ranks of this host.
        rail: the communicator of the ranks that store the same shard, one rank on each host.
        device: this rank's device.
    """

    def __init__(self, inside: Reduction, rail: Communicator, device: torch.device) -> None:
        self.inside, self.rail, self.stream = inside, rail, work_stream(device, priority=-1)
        self.ahead = inside.ahead

    @property
    def mapped_bytes(self) -> int:
        return self.inside.mapped_bytes

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _ReplicatedReducer(self, self.inside.reducer(layout, shapes, like, poison))

    def free(self) -> None:
        self.inside.free()


class _ReplicatedReducer:
    def __init__(self, owner: ReplicatedReduction, inside: Reducer) -> None:
        self._owner, self._inside = owner, inside

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        self._inside.collect(index, gradient, destination)

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        # Do not pass the running sum `total` to the reduction inside the host, which would add the mean over this host
        # to it. `PendingReduce.wait` adds the mean over all hosts instead. Do not pass on `pending.squares` (for
        # gradient norms) either: they are the sums of squares of the mean over this host.
        mean = shard if total is None else torch.empty_like(shard)
        pending, owner = self._inside.send(gradients, mean, None), self._owner
        arrived = _then(owner.stream, pending.arrived, lambda: owner.rail.all_reduce_mean(mean))
        added = None if total is None else (mean, total, shard)
        return PendingReduce(arrived, pending.gradients, pending.memory, added)

    def discard(self) -> None:
        self._inside.discard()


def _then(stream: WorkStream | Immediate, first: Ticket, second: Callable[[], Ticket]) -> Ticket:
    """Issue a second operation that begins when the first is complete, and return the second's ticket.

    A ticket is the handle by which a stream or the host waits for an asynchronous operation. The second operation also
    waits for the work that is already queued on the current stream. On the CPU, the host waits for the first operation.

    Args:
        stream: the stream that waits for the first operation, and on which the second is then issued.
        first: the ticket of the first operation.
        second: a function that issues the second operation and returns its ticket.
    """
    issued: list[Ticket] = []

    def issue() -> None:
        first.wait()
        issued.append(second())

    stream.follow()
    stream.run(issue)
    return issued[0]
