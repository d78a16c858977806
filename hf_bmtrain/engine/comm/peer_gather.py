"""All-gather inside one host with peer copies: each rank reads the shards directly from the other ranks' memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .communicator import Communicator, Gather, Ranges
from .peer_memory import PeerMemory
from .streams import Ticket, work_stream


@dataclass(eq=False)
class _Shared:
    """The shards of one flat buffer: this rank's, and those of the other ranks, mapped into this process.

    Attributes:
        shard: a weak reference to this rank's shard.
        nbytes: the size of the shard.
        sources: for each rank, its mapped shard; None for this rank.
        handle: the handle with which the other ranks map this rank's shard.
        alive: a function without arguments, which returns None if no tensor refers to the memory of this rank's shard
            any longer.
        wait_for_update: a function that makes the current stream wait for any asynchronous update that is still writing
            the shard.
        published: the version counter of this rank's shard when its values were last made readable for other ranks; -1
            if they never were.
        meeting: the ticket (handle to wait for) of an all-reduce, for which the next gather waits. It completes when
            every rank has updated its shard. None if no update was announced since the last gather.
        read: whether this rank has gathered the shards since the last `wait_for_readers`.
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
    """All-gathers shards by copying them from the memory of the other ranks. Small shards are gathered by collectives.

    A gather by copies is not collective: between two changes of the weights, ranks may gather different shards, and may
    gather them different numbers of times. Ranks wait for each other only when weights change:

    * After a change, every rank must call `publish`, or gather one of the changed shards. (This gather then calls
      `publish`.) `publish` is collective: it waits until every rank has written all of its changed shards. Later
      gathers need no such wait until the next change.
    * After an optimizer has started an asynchronous update of a shard, `announce` is called instead of `publish`. It is
      collective too. Later gathers of the same flat buffer, but not of others, wait until every rank has updated its
      shard.
    * Before a shard that was gathered is written again, every rank must call `wait_for_readers`. It is collective: it
      waits until all ranks have finished copying. Every backward ends with this call. A shard may be written before
      this call only by an optimizer that updates weights inside the backward (`update_in_backward`). Such an update
      begins after the shard's gradient was averaged over the ranks. A rank takes part in the averaging only after its
      last copy of the shard in this backward, so no rank copies the shard while it is written.
    * If a shard was gathered and then changed, and `wait_for_readers` was not called since the gather, the next
      `publish` (also one that a gather calls) raises RuntimeError. `announce` of this shard raises it, too.

    Args:
        communicator: the communicator whose all-reduces synchronize the copies with writes to the weights.
        collective: the gather for shards that are too small for peer copies.
        memory: allocates, maps and copies the shards.
        exchange: a collective function that returns the Python objects that all ranks pass, in rank order.
        smallest: the minimum size in bytes of a shard that is gathered with peer copies.
        device: this rank's device.
        open_meetings: a collective function that opens a separate communicator, on which the ranks wait for each
            other's asynchronous updates. It is called once, by the first `announce` of a shard that is gathered by
            copies.
        members: for each rank of `communicator`, its index in the result of `exchange`. None if the index equals the
            rank. For example [4, 5, 6, 7] on the second of two hosts with 4 ranks each, if `communicator` connects only
            the ranks of this host, but `exchange` connects all ranks.
    """

    # [Note: meetings of gathers]
    # Ranks wait for each other by meetings. A meeting is an all-reduce of one element: it completes on no rank before
    # the streams of all ranks have reached it. A gather copies the shards of other ranks on separate streams, which
    # first wait for the current stream. `publish` runs before a gather of shards that were written.
    # * A rank enters the meeting of `publish` after its own writes, and its later copies wait for the meeting, so they
    #   read the new values.
    # * Asynchronous updates are not published in this way. `publish` waits for the updates of all changed shards, so
    #   the first gather would wait for the last update. Instead, `announce` starts a separate meeting for each shard,
    #   on another communicator and stream. This meeting waits only for the update of that shard. All ranks announce the
    #   same shards in the same order. A rank enters the meeting after its update, whether it gathers the shard or not.
    # * If weights are written although they were gathered since the last `wait_for_readers`, a slower rank may have
    #   read them while they were being written. If no `wait_for_readers` follows before the next gather of a changed
    #   shard, that gather raises RuntimeError.
    # * Such a write is safe in one case: an update inside a backward (`update_in_backward`). By then the shard's
    #   gradient has been reduced, and every rank contributed to it only after its last gather of the shard in this
    #   backward. The update is not announced. The `wait_for_readers` at the end of the backward comes before the next
    #   gather, which publishes the update.

    def __init__(
        self,
        communicator: Communicator,
        collective: Gather,
        memory: PeerMemory,
        exchange: Callable[[Any], list[Any]],
        smallest: int,
        device: torch.device,
        open_meetings: Callable[[], Communicator],
        members: Sequence[int] | None = None,
    ) -> None:
        self.communicator, self.collective = communicator, collective
        self._memory, self._exchange, self._smallest = memory, exchange, smallest
        self._rank, self._size = communicator.rank, communicator.size
        self._token = torch.zeros(1, dtype=torch.float32, device=device)
        self._shared: dict[int, _Shared] = {}
        self._made = 0
        self._update_stream = work_stream(device)
        self._update_token = torch.zeros_like(self._token)
        self._update_stream.follow()  # wait until the current stream has initialized `_update_token`
        self._meetings = functools.cache(open_meetings)
        self._members = range(self._size) if members is None else members

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, wait_for_update: Callable[[], None]
    ) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes < max(self._smallest, 1):
            return self.collective.allocate(numel, dtype, device, wait_for_update)
        self.free_dropped()
        shard, handle, alive = self._memory.allocate(numel, dtype)
        handles = self._exchange(handle)
        sources = [
            None if rank == self._rank else self._memory.map(handles[member], nbytes)
            for rank, member in enumerate(self._members)
        ]
        self._exchange(None)  # a barrier: afterwards every rank has mapped the memory
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
            self._exchange(None)  # a barrier: afterwards no rank has the memory mapped
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
            self.publish()
        shared.read = True
        parts = full.detach().data.view(self._size, -1)
        # Each rank starts with the next rank, so that not all ranks copy from the same rank at once. Each rank copies
        # from one rank after another, because on 4 H200s, copies from three GPUs at once reach only 337 GB/s instead of
        # 380.
        order = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        pulled = [(parts[rank], shared.sources[rank]) for rank in order]
        here, mine = parts[self._rank], shard.detach()
        return self._memory.copy([pulled, [(here[begin:end], mine[begin:end]) for begin, end in own]])

    def is_collective(self, shard: torch.Tensor) -> bool:
        return not hasattr(shard, "shared")

    def publish(self) -> None:
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
                f"rank {self._members[self._rank]}: weights were changed after a forward that was not followed by a "
                "backward. A slower rank may still have been in its forward, and have computed with partly written "
                "weights. Call hf_bmtrain.synchronize() between the forward and the change, or use "
                "init_distributed(gather='collective')."
            )

    def announce(self, shard: torch.Tensor, update: Ticket) -> None:
        shared: _Shared | None = getattr(shard, "shared", None)
        if shared is None:
            return  # this shard is gathered by collectives, which each rank joins only after its own update
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
