"""Communicators of shards that are made of other communicators: of ranks on one host, and of ranks between hosts.

A *rail* is a group of the ranks that have the same place on their hosts: one rank of each host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .collective_log import CollectiveLog
from .communicator import Communicator
from .layout import Layout
from .reduce import Destination, PendingReduce, Reducer, Reduction
from .streams import Immediate, Ticket, WorkStream, work_stream


class ShardGroup:
    """The ranks of one host, which store all shards, where the ranks of every other host store the same shards again.

    Collectives are between the ranks of the host, except for broadcasts, which are from a rank of the first host to all
    ranks of all hosts.

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
        """Do nothing: whoever opened the communicators closes them."""


class EqualSums(ShardGroup):
    """A `ShardGroup` whose sums are bit for bit those of the first host on every host.

    Two hosts may add in different orders. Norms that differ in their last bit would clip the gradients of the replicas
    differently, and the replicas would drift apart.

    Args:
        inside, world, first: as for `ShardGroup`.
        rail: the communicator of this rank's rail.
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
    """All ranks of several hosts with equal numbers of ranks: gathers go between hosts first, then inside each host.

    Every shard enters a host once, where a flat all-gather over all ranks would also bring a host its own shards back.
    Shard number `place on the host · hosts + host` is a rank's, so that a rail fills one contiguous part of the full
    buffer, and the ranks of a host then exchange these parts. Means take the opposite way: inside each host first, then
    between hosts. Other collectives are those of the communicator of all ranks.

    Args:
        inside: the communicator of the ranks of this host.
        rail: the communicator of this rank's rail.
        world: the communicator of all ranks.
        order: the rank that has shard 0, 1, …
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
        self.rank, self.size = inside.rank * rail.size + rail.rank, world.size
        self.collective_log: CollectiveLog = world.collective_log
        self._inside, self._rail, self._world, self._order = inside, rail, world, order
        self._number = {rank: number for number, rank in enumerate(order)}
        self._stream = work_stream(device, priority=-1)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        part = full.detach().view(self._inside.size, -1)[self._inside.rank]
        arrived = self._rail.all_gather(part, shard)
        return _then(self._stream, arrived, lambda: self._inside.all_gather(full, part))

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        part = full.new_empty(full.numel() // self._inside.size)
        reduced = self._inside.reduce_scatter_mean(part, full)
        ticket = _then(self._stream, reduced, lambda: self._rail.reduce_scatter_mean(shard, part))
        return _After(ticket, lambda part=part: None)  # keeps `part` until `wait`

    def all_reduce_mean(self, tensor: torch.Tensor) -> Ticket:
        return self._world.all_reduce_mean(tensor)

    def all_reduce(self, tensor: torch.Tensor, maximum: bool = False) -> Ticket:
        return self._world.all_reduce(tensor, maximum)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Ticket:
        return self._world.broadcast(tensor, self._order[root])

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        numbers = [self._number[rank] for rank in range(self.size)]  # the ranks' shards, in the order of the ranks
        parts, places = sent.split([*send_counts]), received.split([*receive_counts])
        ordered, arriving = torch.cat([parts[number] for number in numbers]), torch.empty_like(received)
        counts = [[each[number] for number in numbers] for each in (receive_counts, send_counts)]
        ticket = self._world.all_to_all(arriving, ordered, *counts)

        def sort() -> None:
            for number, part in zip(numbers, arriving.split(counts[0])):
                places[number].copy_(part)

        return _After(ticket, sort)

    def unfinished(self) -> bool:
        return any(each.unfinished() for each in (self._inside, self._rail, self._world))

    def close(self, abort: bool) -> None:
        """Do nothing: whoever opened the communicators closes them."""


class ReplicatedReduction(Reduction):
    """Averages gradients inside each host as another reduction does, and then each shard between the hosts.

    Args:
        inside: averages over the ranks of this host. It is not used for anything else.
        rail: the communicator of this rank's rail, whose ranks store the same shard.
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
        # Not into the running sum, to which the mean over all hosts is added. The sums of squares of the mean over one
        # host are not those of the mean over all.
        mean = shard if total is None else torch.empty_like(shard)
        pending, owner = self._inside.send(gradients, mean, None), self._owner
        arrived = _then(owner.stream, pending.arrived, lambda: owner.rail.all_reduce_mean(mean))
        added = None if total is None else (mean, total, shard)
        return PendingReduce(arrived, pending.gradients, pending.memory, added)

    def discard(self) -> None:
        self._inside.discard()


class _After:
    """The ticket of an operation after which `wait` computes something on the current stream."""

    def __init__(self, ticket: Ticket, finish: Callable[[], None]) -> None:
        self._ticket, self._finish = ticket, finish

    def wait(self) -> None:
        self._ticket.wait()
        self._finish()
        self._finish = lambda: None


def _then(stream: WorkStream | Immediate, first: Ticket, second: Callable[[], Ticket]) -> Ticket:
    """Issue the operation `second`, which begins once the operation of `first` is complete, and return its ticket.

    It also begins after the work that was queued on the current stream, which `first` need not have waited for, as a
    communicator of one rank does nothing. On the CPU, where operations have no streams, the host waits for `first`.

    stream: a work stream for the order.
    """
    issued: list[Ticket] = []

    def issue() -> None:
        first.wait()
        issued.append(second())

    stream.follow()
    stream.run(issue)
    return issued[0]
