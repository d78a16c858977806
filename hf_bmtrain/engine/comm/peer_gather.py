"""Gathers without collectives within one host: every rank copies the other ranks' shards from their memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .communicator import Communicator, Gather, Ranges
from .peer_memory import PeerMemory
from .streams import Ticket, work_stream


@dataclass(eq=False)
class _Shared:
    """One shard that all ranks have mapped.

    sources: the mapped shards by rank, None for this one. alive: returns None once the shard's memory is no longer
    referenced. published: the version that the other ranks may read. meeting: a ticket behind which every rank's
    announced update is done. read: True if this rank has gathered the shard since the last `wait_for_readers`.
    """

    shard: weakref.ref[torch.Tensor]
    nbytes: int
    sources: list[Any]
    handle: Any
    alive: Callable[[], object]
    wait_for_update: Callable[[], None]
    published: int = -1
    meeting: Ticket | None = None
    read: bool = False


class PeerGather(Gather):
    """Gathers by pulling; shards that are not mapped are gathered by `collective`.

    Its contract (why no rank has to meet the others at every gather):
    * A shard made by `allocate` is stored in memory that every rank has mapped. `gather` copies all ranks' shards
      into `full` on streams of its own, which first wait for what is queued on the compute stream.
    * Weights change at few points. The first gather after a change *publishes*: an all-reduce of one element, which
      each rank enters behind its own writes and which its later copies wait for. So they read what was written.
    * Updates that an optimizer makes alongside the computation are not published so: the first gather would come behind
      the last of them. `announce` publishes each on its own: an all-reduce on a communicator of its own, behind that
      update alone and no other work, which the gathers of that shard wait for. All ranks announce in the optimizer's
      step, the same shards in the same order, so they meet in the same order however they gather afterwards; and a
      meeting waits for updates alone, which wait for no gather, so it comes to pass even where a rank gathers nothing.
    * An update inside a backward (`update_in_backward`) writes a shard that is gathered since the last
      `wait_for_readers`, and may: its gradient has been reduced, to which every rank gave its part behind its own last
      gather of that shard in this backward. It is not announced, but published by the next gather, as other writes are.
    * `wait_for_readers` is the same meeting in the other direction: behind it, all copies that were started before it
      on any rank are done, and weights may be written. The end of a backward is one, the explicit collectives are
      others.
    * Weights that were written although they were gathered since the last `wait_for_readers` may have been read half
      written by a slower rank. The next gather then raises.
    Ranks may gather different numbers of times between two changes.
    """

    def __init__(
        self,
        communicator: Communicator,
        collective: Gather,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
        open_meetings: Callable[[], Communicator],
    ) -> None:
        """exchange: all-gathers a Python object. smallest: the least bytes of a shard that is pulled.

        open_meetings: makes the communicator of announced updates when the first is announced. Collective.
        """
        self.communicator, self.collective = communicator, collective
        self._memory, self._exchange, self._smallest = memory, exchange, smallest
        self._rank, self._size = communicator.rank, communicator.size
        self._token = torch.zeros(1, dtype=torch.float32, device=device)
        self._shared: dict[int, _Shared] = {}
        self._made = 0
        self._update_stream = work_stream(device)
        self._update_token = torch.zeros_like(self._token)
        self._update_stream.follow()  # the token has been written
        self._meetings = functools.cache(open_meetings)

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes < max(self._smallest, 1):
            return self.collective.allocate(numel, dtype, device, wait_for_update)
        self.free_dropped()
        shard, handle, alive = self._memory.allocate(numel, dtype)
        sources = [
            None if rank == self._rank else self._memory.map(other, nbytes)
            for rank, other in enumerate(self._exchange(handle))
        ]
        self._exchange(None)  # all have mapped
        self._memory.unlink(handle)
        self._made += 1
        note: Any = shard
        note.shared = _Shared(weakref.ref(shard), nbytes, sources, handle, alive, wait_for_update)
        self._shared[self._made] = note.shared
        return shard

    def free_dropped(self) -> None:
        dropped = [number for number, shared in self._shared.items() if shared.alive() is None]
        everywhere = set.intersection(*(set(numbers) for numbers in self._exchange(dropped)))
        gone = [self._shared.pop(number) for number in sorted(everywhere)]
        for shared in gone:
            for rank, source in enumerate(shared.sources):
                if rank != self._rank:
                    self._memory.unmap(source)
        if gone:
            self._exchange(None)  # no rank has them mapped
        for shared in gone:
            self._memory.free(shared.handle)

    @property
    def mapped_bytes(self) -> int:
        return sum(shared.nbytes for shared in self._shared.values())

    # -- gathers ------------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor, own: Ranges) -> Ticket:
        shared: _Shared | None = getattr(shard, "shared", None)
        if shared is None:
            return self.collective.gather(full, shard, own)
        if shared.meeting is not None:
            shared.meeting.wait()
            shared.meeting = None
        if shard._version != shared.published:
            self._publish()
        shared.read = True
        parts = full.detach().data.view(self._size, -1)
        order = [(self._rank + distance) % self._size for distance in range(1, self._size)]  # not all from one at once
        pairs = [[(parts[rank], shared.sources[rank])] for rank in order]
        here, mine = parts[self._rank], shard.detach()
        pairs.append([(here[begin:end], mine[begin:end]) for begin, end in own])
        return self._memory.copy(pairs)

    def is_collective(self, shard: torch.Tensor) -> bool:
        return not hasattr(shard, "shared")

    def _publish(self) -> None:
        """Make this rank's writes, and every other rank's, visible to the copies that follow."""
        living = [(shared, shard) for shared in self._shared.values() if (shard := shared.shard()) is not None]
        changed = [(shared, shard) for shared, shard in living if shard._version != shared.published]
        self._check_unread([shared for shared, _ in changed])
        for shared, _ in changed:
            shared.wait_for_update()
        self.communicator.all_reduce(self._token).wait()
        for shared, shard in changed:
            shared.published = shard._version

    def _check_unread(self, changed: list[_Shared]) -> None:
        if any(shared.read and shared.published >= 0 for shared in changed):
            raise RuntimeError(
                f"rank {self._rank}: weights were written after a forward that no backward has followed; a slower rank "
                "may have read them half written. Call hf_bmtrain.synchronize() between the forward and the write, "
                "or use init_distributed(gather='collective')."
            )

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        shared: _Shared | None = getattr(shard, "shared", None)
        if shared is None:
            return  # gathered by a collective
        self._check_unread([shared])
        meetings = self._meetings()

        def meet() -> None:
            update.wait()
            shared.meeting = meetings.all_reduce(self._update_token)

        self._update_stream.run(meet)
        shared.published = shard._version

    def wait_for_readers(self) -> None:
        self._memory.order()
        self.communicator.all_reduce(self._token).wait()
        for shared in self._shared.values():
            shared.read = False
