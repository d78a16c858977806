"""Averages the gradients of a flat buffer over the ranks into the shard: by collectives, or for one process.

Packing runs on a stream of its own, alongside the backward of the next block. The order is kept by these waits:
* the packing stream first waits for what the current stream has queued at `send`, hence for the gradients;
* the collective follows the packing, as it follows the current stream elsewhere; the current stream waits for it
  in `wait`. The caller of `send` calls `wait` or `cancel` before it sends the buffer again;
* the gradients are kept until then, so that the allocator, which recycles memory in the order of the current stream,
  does not hand them out too early.
Apart from what the buffers hold in any case, at most two blocks' gradients are there as autograd made them (`Schedule`
limits them), and two packed. With one process gradients are packed on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from ..base.torch_internals import foreach_copy_, foreach_zero_
from .communicator import Communicator
from .layout import Layout
from .resizable import ResizableStorage
from .streams import DONE, Ticket, work_stream


@dataclass(eq=False)
class PendingReduce:
    """A reduction that has been sent and not yet waited for.

    arrived: the ticket of the result. gradients: kept until then. memory: where they are packed, freed after it.
    added: (mean, running sum, shard) if `wait` has to add the mean to the sum and write that to the shard. squares: the
    sum of squares of each gradient's part of the shard, (k,) float64, to be read after `wait`; None where the reduction
    does not measure what it writes.
    """

    arrived: Ticket
    gradients: Sequence[torch.Tensor | None]
    memory: ResizableStorage | None = None
    added: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    squares: torch.Tensor | None = None

    def wait(self) -> None:
        """Make the current stream wait until the shard, and the running sum if there is one, holds the result.

        Drops the gradients that autograd made.
        """
        self.arrived.wait()
        self.gradients = ()
        if self.added is not None:
            mean, total, shard = self.added
            total.add_(mean)
            if total is not shard:
                shard.copy_(total)
        if self.memory is not None:
            self.memory.free()

    def cancel(self) -> None:
        """Make the current stream wait until nothing is in flight; the shard's contents are undefined."""
        self.added = None
        self.wait()


Destination = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Returns (shard, running sum or None), which it prepares at the first call."""


class Reducer(Protocol):
    """Averages the gradients of one flat buffer, once per backward."""

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        """Accept gradient `index` before `send`; several for one index are added up."""

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        """Start to write the mean over ranks of `gradients`, in the order of the layout, into `shard` (n,). Collective.

        A gradient that is None and was not collected counts as zero. total: a running sum (n,), in float32 or wider,
        to which the mean is added; `shard` then becomes the sum, rounded once. It may be `shard` itself.
        """
        ...

    def discard(self) -> None:
        """Drop what was collected."""


class Reduction(Protocol):
    """Makes reducers. ahead: the number of blocks whose gradients may be in flight during another block's backward."""

    ahead = 1

    @property
    def mapped_bytes(self) -> int:
        """Bytes outside torch's allocator, whose statistics do not include them; 0 by default."""
        return 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        """Make the reducer of parameters of `shapes` placed by `layout`, with the dtype and device of `like`."""
        ...

    def free(self) -> None:
        """Free memory that is kept from one gradient to the next, if there is any. Collective."""


class Packing:
    """Writes every gradient to its place in `flat`. Padding, and parameters without a gradient, become zero."""

    def __init__(self, flat: torch.Tensor, layout: Layout, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        # `.data` has a version counter of its own: autograd must not take packing for a modification.
        parts = flat.data.split_with_sizes(layout.sizes)
        self._views = [part.view(shape) for part, shape in zip(parts[1::2], shapes)]
        self._gaps = [gap for gap in parts[::2] if gap.numel()]
        zeros = flat.new_zeros(max([gap.numel() for gap in self._gaps], default=0))
        self._zeros = [zeros[: gap.numel()] for gap in self._gaps]  # so that one launch copies all
        self._packed: set[int] = set()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Pack one gradient, or add it to one that was packed before."""
        if index in self._packed:
            self._views[index].add_(gradient)
        else:
            self._views[index].copy_(gradient)
            self._packed.add(index)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Pack the remaining gradients in one launch, zero what has none, and return `flat`."""
        views, sources, missing = self._views, [gradient for gradient in gradients if gradient is not None], []
        if self._packed or len(sources) < len(views):
            for index in self._packed:
                if (again := gradients[index]) is not None:
                    views[index].add_(again)
            rest = [pair for index, pair in enumerate(zip(views, gradients)) if index not in self._packed]
            views = [view for view, gradient in rest if gradient is not None]
            sources = [gradient for _, gradient in rest if gradient is not None]
            missing = [view for view, gradient in rest if gradient is None]
        if views or self._gaps:
            foreach_copy_([*views, *self._gaps], [*sources, *self._zeros])
        if missing:
            foreach_zero_(missing)
        self._packed.clear()
        return self.flat


class CollectingReducer:
    """Keeps the gradients that it collects before `send` as they are."""

    def __init__(self) -> None:
        self._collected: dict[int, torch.Tensor] = {}

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        if index in self._collected:
            self._collected[index].add_(gradient)
        else:
            self._collected[index] = gradient

    def with_collected(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return `gradients` with those that were collected, and forget these."""
        if not self._collected:
            return gradients
        complete = list(gradients)
        for index, gradient in self._collected.items():
            other = complete[index]  # that of the block itself, if the parameter is read outside of it as well
            complete[index] = gradient if other is None else other + gradient
        self._collected.clear()
        return complete

    def discard(self) -> None:
        self._collected.clear()


class CollectiveReduction(Reduction):
    """Reduces by reduce-scatter. A buffer in flight holds all its packed gradients."""

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator, self.stream = communicator, work_stream(device, priority=-1)

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _CollectiveReducer(self, layout, shapes, like, poison)


class _CollectiveReducer(CollectingReducer):
    """Packs the gradients and reduces them. A gradient that fills its buffer is reduced where autograd left it."""

    def __init__(self, owner: CollectiveReduction, layout: Layout, shapes, like: torch.Tensor, poison: bool) -> None:
        super().__init__()
        self._owner, self._layout, self._shapes, self._like, self._poison = owner, layout, shapes, like, poison
        self._single = layout.numels == (layout.numel,)  # one tensor is all of the buffer

    @cached_property
    def _packing(self) -> tuple[ResizableStorage, Packing]:
        """Memory that is freed between reductions, and the packing into it."""
        memory = ResizableStorage(self._layout.numel, self._like.dtype, self._like.device, self._poison)
        return memory, Packing(memory.tensor, self._layout, self._shapes)

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        gradients = self.with_collected(gradients)
        arriving = shard if total is None else torch.empty_like(shard)
        if self._poison:
            arriving.fill_(float("nan"))
        memory = packing = None
        if not self._fills(gradients):
            memory, packing = self._packing
            memory.allocate()
        tickets: list[Ticket] = []

        def reduce() -> None:
            packed = gradients[0] if packing is None else packing.complete(gradients)
            assert packed is not None
            tickets.append(self._owner.communicator.reduce_scatter_mean(arriving, packed.view(-1)))

        stream = self._owner.stream
        stream.follow()
        stream.run(reduce)
        return PendingReduce(tickets[0], gradients, memory, None if total is None else (arriving, total, shard))

    def _fills(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether the first gradient is the whole buffer, stored as it would be packed."""
        first = gradients[0]
        if first is None or not self._single:
            return False
        plain = first.layout == torch.strided and not first.is_conj() and not first.is_neg()
        return plain and first.dtype == self._like.dtype and first.is_contiguous()


class LocalReduction(Reduction):
    """The reduction of a world of one rank: gradients are packed and nothing is sent."""

    ahead = 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _LocalReducer(layout, shapes, poison)


class _LocalReducer:
    """Packs gradients into the shard itself or, where they are added to a running sum, into memory of their own.

    A gradient that is collected is packed at once, so that its own memory is free during the rest of the backward.
    """

    def __init__(self, layout: Layout, shapes: Sequence[torch.Size], poison: bool) -> None:
        self._layout, self._shapes, self._poison = layout, shapes, poison
        self._open: Packing | None = None

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        self._begin(*destination()).add(index, gradient)

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        packed = self._begin(shard, total).complete(gradients)
        self._open = None
        return PendingReduce(DONE, (), added=None if total is None else (packed, total, shard))

    def discard(self) -> None:
        self._open = None

    def _begin(self, shard: torch.Tensor, total: torch.Tensor | None) -> Packing:
        """Return the packing of this backward, which begins if it is the first call."""
        if self._open is None:
            flat = shard if total is None else torch.empty_like(shard)
            if self._poison:
                flat.fill_(float("nan"))
            self._open = Packing(flat, self._layout, self._shapes)
        return self._open
