"""How the gradients of a flat buffer become their mean over the ranks, in the shard: by collectives, or by one process.

Packing runs on a stream of its own, beside the backward of the next block. Who waits for what:
* the packing stream first waits for what the current stream has queued at `send`, hence for the gradients;
* the lane's operation follows the packing, as it follows the current stream elsewhere; the current stream waits for it
  in `land`. Whoever sends calls `land` or `cancel` before the buffer is sent again;
* the gradients are kept until then, so that the allocator, which recycles memory in the order of the current stream,
  does not hand them out too early.
Beside what the buffers hold in any case, two blocks' gradients are there at most as autograd made them (`Step` sees to
that), and two packed. With one process gradients are packed on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .collectives import Communicator, Ticket
from .layout import Layout
from .packing import Packing
from .storage import Elastic
from .streams import work_stream


class Flight(Protocol):
    """Gradients on their way to their shard."""

    @property
    def squares(self) -> torch.Tensor | None:
        """Where the reduction measures what it writes, the sum of squares of each gradient's part of the shard, (k,)
        float64, to be read after `land`."""
        ...

    def land(self) -> None:
        """The current stream goes on when the shard, and the running sum where there is one, is up to date.

        What autograd made is dropped.
        """
        ...

    def cancel(self) -> None:
        """The current stream goes on when nothing is under way any more; the shard may hold anything."""
        ...


class Reducer(Protocol):
    """Averages the gradients of one flat buffer, again and again."""

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        """Start to write the mean over ranks of `gradients`, in the order of the layout, into `shard` (n,).

        A gradient that is None counts as zero. total: a running sum (n,), in float32 or wider, to which the mean is
        added; `shard` then becomes the sum, rounded once. It may be `shard` itself. Collective.
        """
        ...


class Reduction(Protocol):
    """Makes reducers.

    ahead: how many blocks' gradients may travel while the backward of another block runs.
    """

    ahead: int

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        """One for parameters of `shapes` that lie as in `layout`, of the dtype and on the device of `like`."""
        ...

    def free(self) -> None:
        """Give back memory that is kept from one gradient to the next. Collective."""
        ...


class CollectiveReduction:
    """Reduces by the lane's reduce-scatter. A buffer that travels holds its packed gradients, all of them."""

    ahead = 1

    def __init__(self, lane: Communicator, device: torch.device) -> None:
        self.lane, self.stream = lane, work_stream(device, priority=-1)

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _CollectiveReducer(self, layout, shapes, like, poison)

    def free(self) -> None:
        pass


class _CollectiveReducer:
    """A gradient that fills its buffer from end to end is reduced where it lies."""

    def __init__(self, owner: CollectiveReduction, layout: Layout, shapes, like: torch.Tensor, poison: bool) -> None:
        self._owner, self._layout, self._shapes, self._poison = owner, layout, shapes, poison
        self._dtype, self._device = like.dtype, like.device
        self._full: Elastic | None = None
        self._packing: Packing | None = None

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        arriving = shard if total is None else torch.empty_like(shard)
        if self._poison:
            arriving.fill_(float("nan"))
        packing = None if self._fills(gradients) else self._room()
        tickets: list[Ticket] = []

        def reduce() -> None:
            packed = gradients[0] if packing is None else packing.complete(gradients)
            assert packed is not None
            tickets.append(self._owner.lane.reduce_scatter_mean(arriving, packed.view(-1)))

        stream = self._owner.stream
        stream.follow()
        stream.run(reduce)
        return _CollectiveFlight(tickets[0], gradients, self._full, arriving, shard, total)

    def _fills(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the first gradient is all that there is to pack, and its bytes lie as they would be packed."""
        first = gradients[0]
        if first is None or self._layout.numels != (self._layout.numel,):
            return False
        plain = first.layout == torch.strided and not first.is_conj() and not first.is_neg()
        return plain and first.dtype == self._dtype and first.is_contiguous()

    def _room(self) -> Packing:
        """Where all gradients are packed, its bytes allocated; made when it is needed first."""
        if self._full is None or self._packing is None:
            self._full = Elastic(self._layout.numel, self._dtype, self._device, self._poison)
            self._packing = Packing(self._full.tensor, self._layout, self._shapes)
        self._full.allocate()
        return self._packing


class _CollectiveFlight:
    squares = None

    def __init__(self, arrived: Ticket, gradients, full: Elastic | None, arriving, shard, total) -> None:
        self._arrived, self._full = arrived, full
        self._gradients: Sequence[torch.Tensor | None] | None = gradients
        self._arriving, self._shard, self._total = arriving, shard, total

    def land(self) -> None:
        self.cancel()
        if self._total is not None:
            self._total.add_(self._arriving)
            if self._total is not self._shard:
                self._shard.copy_(self._total)

    def cancel(self) -> None:
        self._arrived.wait()
        self._gradients = None
        if self._full is not None:
            self._full.free()


class LocalReducer:
    """One process: gradients are packed into the shard itself, or beside it where a running sum is to take them."""

    def __init__(self, layout: Layout, shapes: Sequence[torch.Size], poison: bool) -> None:
        self._layout, self._shapes, self._poison = layout, shapes, poison
        self._shard_packing: Packing | None = None
        self._full: Elastic | None = None
        self._full_packing: Packing | None = None
        self._open: Packing | None = None

    def add(self, index: int, gradient: torch.Tensor, shard: torch.Tensor, total: torch.Tensor | None) -> None:
        """Pack one gradient ahead of `send`, or add it to what came before."""
        self._begin(shard, total).add(index, gradient)

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        packed = self._begin(shard, total).complete(gradients)
        self._open = None
        return _LocalFlight(packed, self._full, shard, total)

    def reset(self) -> None:
        """Forget what was packed."""
        if self._open is not None:
            self._open.reset()
            self._open = None
        if self._full is not None:
            self._full.free()

    def leave(self) -> None:
        """The shard is to be dropped."""
        self._shard_packing = None

    def _begin(self, shard: torch.Tensor, total: torch.Tensor | None) -> Packing:
        if self._open is None:
            self._open = self._into_shard(shard) if total is None else self._beside(shard)
        return self._open

    def _into_shard(self, shard: torch.Tensor) -> Packing:
        if self._shard_packing is None:
            self._shard_packing = Packing(shard, self._layout, self._shapes)
        if self._poison:
            shard.fill_(float("nan"))
        return self._shard_packing

    def _beside(self, shard: torch.Tensor) -> Packing:
        if self._full is None or self._full_packing is None:
            self._full = Elastic(self._layout.numel, shard.dtype, shard.device, self._poison)
            self._full_packing = Packing(self._full.tensor, self._layout, self._shapes)
        self._full.allocate()
        return self._full_packing


class _LocalFlight:
    squares = None

    def __init__(self, packed: torch.Tensor, full: Elastic | None, shard, total) -> None:
        self._packed, self._full, self._shard, self._total = packed, full, shard, total

    def land(self) -> None:
        if self._total is not None:
            self._total.add_(self._packed)
            if self._total is not self._shard:
                self._shard.copy_(self._total)
        self.cancel()

    def cancel(self) -> None:
        if self._full is not None:
            self._full.free()


class LocalReduction:
    """With one process nothing travels."""

    ahead = 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> LocalReducer:
        return LocalReducer(layout, shapes, poison)

    def free(self) -> None:
        pass
