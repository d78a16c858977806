"""Averages the gradients of a flat buffer over the ranks into the shard: by collectives, or for one process.

Packing runs on a stream of its own, beside the backward of the next block. Who waits for what:
* the packing stream first waits for what the current stream has queued at `send`, hence for the gradients;
* the collective follows the packing, as it follows the current stream elsewhere; the current stream waits for it
  in `land`. Whoever sends calls `land` or `cancel` before the buffer is sent again;
* the gradients are kept until then, so that the allocator, which recycles memory in the order of the current stream,
  does not hand them out too early.
Beside what the buffers hold in any case, two blocks' gradients are there at most as autograd made them (`Schedule` sees
to that), and two packed. With one process gradients are packed on the current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..ops.torch_internals import foreach_copy_, foreach_zero_
from .collectives import Communicator
from .layout import Layout
from .storage import ResizableStorage
from .streams import Ticket, work_stream


class Flight(Protocol):
    """A reduction that has been sent and not yet waited for."""

    @property
    def squares(self) -> torch.Tensor | None:
        """The sum of squares of each gradient's part of the shard, (k,) float64, to be read after `land`.

        None where the reduction does not measure what it writes.
        """
        ...

    def land(self) -> None:
        """Make the current stream wait until the shard, and the running sum if there is one, holds the result.

        Drops the gradients that autograd made.
        """
        ...

    def cancel(self) -> None:
        """Make the current stream wait until nothing is in flight; the shard's contents are undefined."""
        ...


Destination = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Returns (shard, running sum or None), which it prepares at the first call."""


class Reducer(Protocol):
    """Averages the gradients of one flat buffer, once per backward."""

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        """Take over gradient `index` before `send`; several for one index are added up."""
        ...

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        """Start to write the mean over ranks of `gradients`, in the order of the layout, into `shard` (n,). Collective.

        A gradient that is None and was not collected counts as zero. total: a running sum (n,), in float32 or wider,
        to which the mean is added; `shard` then becomes the sum, rounded once. It may be `shard` itself.
        """
        ...

    def discard(self) -> None:
        """Forget what was collected."""
        ...


class Reduction(Protocol):
    """Makes reducers.

    ahead: how many blocks' gradients may be in flight while the backward of another block runs.
    """

    ahead: int

    @property
    def mapped_bytes(self) -> int:
        """Bytes outside torch's allocator, whose statistics do not include them."""
        ...

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        """Make the reducer of parameters of `shapes` placed by `layout`, with the dtype and device of `like`."""
        ...

    def free(self) -> None:
        """Free memory that is kept from one gradient to the next. Collective."""
        ...


class Packing:
    """Writes every gradient to its place in `flat`. Padding, and parameters without a gradient, become zero."""

    def __init__(self, flat: torch.Tensor, layout: Layout, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        # `.data` has a version counter of its own: packing is nothing autograd should see.
        parts = flat.data.split_with_sizes(layout.sizes)
        self._views = [part.view(shape) for part, shape in zip(parts[1::2], shapes)]
        self._gaps = [gap for gap in parts[::2] if gap.numel()]
        self._targets = [*self._views, *self._gaps]
        zeros = flat.new_zeros(max([gap.numel() for gap in self._gaps], default=0))
        self._zeros = [zeros[: gap.numel()] for gap in self._gaps]
        self._present: set[int] = set()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Pack one gradient, or add it to one that was packed before."""
        if index in self._present:
            self._views[index].add_(gradient)
        else:
            self._views[index].copy_(gradient)
            self._present.add(index)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Pack the rest in one launch, and return `flat`."""
        if self._present or [gradient for gradient in gradients if gradient is None]:
            views, sources, zeros = self._sort(gradients)
        else:
            views, sources, zeros = self._targets, [*gradients, *self._zeros], []
        if views:
            foreach_copy_(views, sources)
        if zeros:
            foreach_zero_(zeros)
        self._present.clear()
        return self.flat

    def _sort(self, gradients: Sequence[torch.Tensor | None]) -> tuple[list, list, list]:
        """Return views to write, their gradients, and views to zero; gradients packed before are added to."""
        views, sources, zeros = [], [], list(self._gaps)
        for index, (view, gradient) in enumerate(zip(self._views, gradients)):
            if gradient is not None and index in self._present:
                view.add_(gradient)
            elif gradient is not None:
                views.append(view)
                sources.append(gradient)
            elif index not in self._present:
                zeros.append(view)
        return views, sources, zeros

    def reset(self) -> None:
        """Forget what was packed."""
        self._present.clear()


class CollectingReducer:
    """Keeps the gradients that are taken over before `send` as they are."""

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
            assert complete[index] is None, "read in and outside of blocks"
            complete[index] = gradient
        self._collected.clear()
        return complete

    def discard(self) -> None:
        self._collected.clear()


class CollectiveReduction:
    """Reduces by reduce-scatter. A buffer in flight holds all of its packed gradients."""

    ahead = 1
    mapped_bytes = 0

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self.communicator, self.stream = communicator, work_stream(device, priority=-1)

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _CollectiveReducer(self, layout, shapes, like, poison)

    def free(self) -> None:
        pass


class _CollectiveReducer(CollectingReducer):
    """Packs the gradients and reduces them. A gradient that fills its buffer is reduced where autograd left it."""

    def __init__(self, owner: CollectiveReduction, layout: Layout, shapes, like: torch.Tensor, poison: bool) -> None:
        super().__init__()
        self._owner, self._layout, self._shapes, self._poison = owner, layout, shapes, poison
        self._single = layout.numels == (layout.numel,)  # one tensor is all of the buffer
        self._dtype, self._device = like.dtype, like.device
        self._full: ResizableStorage | None = None
        self._packing: Packing | None = None

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        gradients = self.with_collected(gradients)
        arriving = shard if total is None else torch.empty_like(shard)
        if self._poison:
            arriving.fill_(float("nan"))
        packing = None if self._fills(gradients) else self._allocated_packing()
        tickets: list[Ticket] = []

        def reduce() -> None:
            packed = gradients[0] if packing is None else packing.complete(gradients)
            assert packed is not None
            tickets.append(self._owner.communicator.reduce_scatter_mean(arriving, packed.view(-1)))

        stream = self._owner.stream
        stream.follow()
        stream.run(reduce)
        return _CollectiveFlight(tickets[0], gradients, self._full, arriving, shard, total)

    def _fills(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether the first gradient is the whole buffer, stored as it would be packed."""
        first = gradients[0]
        if first is None or not self._single:
            return False
        plain = first.layout == torch.strided and not first.is_conj() and not first.is_neg()
        return plain and first.dtype == self._dtype and first.is_contiguous()

    def _allocated_packing(self) -> Packing:
        """Return the packing of all gradients, made when it is first needed, with its memory allocated."""
        if self._full is None or self._packing is None:
            self._full = ResizableStorage(self._layout.numel, self._dtype, self._device, self._poison)
            self._packing = Packing(self._full.tensor, self._layout, self._shapes)
        self._full.allocate()
        return self._packing


class _CollectiveFlight:
    squares = None

    def __init__(self, arrived: Ticket, gradients, full: ResizableStorage | None, arriving, shard, total) -> None:
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


class LocalReduction:
    """The reduction of a world of one rank: gradients are packed and nothing is sent."""

    ahead = 0
    mapped_bytes = 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _LocalReducer(layout, shapes, poison)

    def free(self) -> None:
        pass


class _LocalReducer:
    """Packs gradients into the shard itself, or into memory of their own where a running sum is to take them.

    A gradient that is collected is packed at once, so that its own memory is free during the rest of the backward.
    """

    def __init__(self, layout: Layout, shapes: Sequence[torch.Size], poison: bool) -> None:
        self._layout, self._shapes, self._poison = layout, shapes, poison
        self._full: ResizableStorage | None = None
        self._full_packing: Packing | None = None
        self._open: Packing | None = None

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        self._begin(*destination()).add(index, gradient)

    def send(self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None) -> Flight:
        packed = self._begin(shard, total).complete(gradients)
        self._open = None
        return _LocalFlight(packed, self._full, shard, total)

    def discard(self) -> None:
        self._open = None
        if self._full_packing is not None:
            self._full_packing.reset()
        if self._full is not None:
            self._full.free()

    def _begin(self, shard: torch.Tensor, total: torch.Tensor | None) -> Packing:
        if self._open is None:
            self._open = self._into_shard(shard) if total is None else self._into_memory(shard)
        return self._open

    def _into_shard(self, shard: torch.Tensor) -> Packing:
        if self._poison:
            shard.fill_(float("nan"))
        return Packing(shard, self._layout, self._shapes)

    def _into_memory(self, shard: torch.Tensor) -> Packing:
        if self._full is None or self._full_packing is None:
            self._full = ResizableStorage(self._layout.numel, shard.dtype, shard.device, self._poison)
            self._full_packing = Packing(self._full.tensor, self._layout, self._shapes)
        self._full.allocate()
        return self._full_packing


class _LocalFlight:
    squares = None

    def __init__(self, packed: torch.Tensor, full: ResizableStorage | None, shard, total) -> None:
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
