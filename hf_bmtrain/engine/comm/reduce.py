"""Average the gradients of a flat buffer over the ranks, and write this rank's part of the mean to its shard.

This file contains the interface, an implementation with collectives, and one for a single rank. With several ranks,
gradients are packed into one flat tensor on a separate stream, while the next block computes its backward. The streams
are ordered as follows:

* The packing stream first waits for the work that was queued on the current stream when `send` was called, which
  includes the computation of the gradients. The collective waits for the packing.
* `PendingReduce.wait` makes the current stream wait for the collective. Between two calls of `send` for the same flat
  buffer, `wait` or `cancel` must be called.
* The gradients are referenced until `wait` or `cancel`. Otherwise the allocator would reuse their memory while the
  packing stream still reads it.
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
from .streams import DONE, After, Ticket, work_stream


@dataclass(eq=False)
class PendingReduce:
    """A reduction of gradients that has been started and not yet waited for.

    Attributes:
        arrived: a ticket (handle to wait for) that completes when the result has arrived.
        gradients: the gradients that are being reduced, referenced until `wait` so that they are not freed.
        memory: the memory of the flat tensor into which the gradients are copied, freed by `wait`. None if there is no
            memory to free.
        added: (mean, total, shard), three tensors (n,) for gradient accumulation. `mean` is this rank's part of the
            gradient of this backward, averaged over the ranks. `total` is the running sum over several backwards.
            `shard` is this rank's shard of the flat gradient, and may be the same tensor as `total`. `wait` adds `mean`
            to `total`, and copies `total` to `shard`. None if there is no running sum, or if the reduction itself adds
            the mean to it.
        squares: (k,) float64, for gradient norms, where k is the number of tensors in the flat buffer. For each tensor,
            the sum of squares of the elements that the reduction writes to this rank's shard. Read it after `wait`.
            None if the reduction does not compute it.
    """

    arrived: Ticket
    gradients: Sequence[torch.Tensor | None]
    memory: ResizableStorage | None = None
    added: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    squares: torch.Tensor | None = None

    def wait(self) -> None:
        """Make the current stream wait until this rank's shard contains its part of the mean gradient.

        Under gradient accumulation, the shard then contains the running sum, to which the mean has been added. This
        object drops its references to autograd's gradients, and frees the flat tensor into which they were copied.
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
        """Make the current stream wait until the reduction has ended, and discard its result.

        Called instead of `wait`, for example after an exception in a backward. If the attribute `added` is not None,
        the shard and the running sum are unchanged, because only `wait` would have written to them. If it is None, the
        reduction itself may have written to them, so their contents are undefined.
        """
        self.added = None
        self.wait()


Destination = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""A function that returns the tensors into which a backward's gradients are reduced: (shard, running sum or None). Its
first call in a backward allocates them."""


class Reducer(Protocol):
    """Averages the gradients of one flat buffer over the ranks, once per backward.

    In each backward, call `collect` for gradients that are ready early, and then `send` once.
    """

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        """Accept the full gradient of one tensor before `send`. Several gradients of the same tensor are summed.

        Args:
            index: the index of the tensor in the layout.
            gradient: the gradient, in the tensor's full shape. The reducer may keep a reference until
                `PendingReduce.wait`, but does not write to it.
            destination: a function without arguments that returns the tensors (shard, total) that the next `send` will
                get. Its first call in a backward allocates them. It is called only if there is only one rank to average
                over. The shard then has room for full gradients, so the reducer copies each gradient at once, and the
                gradient's memory can be freed early. If `total`, the running sum over several backwards, is None, the
                gradient may be copied to `shard`. Otherwise it must be copied to other memory, because `shard` contains
                the gradients of earlier backwards.
        """

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        """Start to average the gradients over ranks. Call `wait` of the result before you use `shard` or `total`.

        Collective: every rank must call it.

        Args:
            gradients: for each tensor of the layout, its full gradient, or None. A gradient is added to those that
                `collect` has accepted for the same tensor. If there is no gradient at all for a tensor, it counts as
                zero.
            shard: (n,), written with this rank's part of the mean. With a running sum, it is written with the new sum
                instead, rounded to the shard's dtype.
            total: (n,) in float32 or wider, the running sum of gradient accumulation, to which this rank's part of the
                mean is added. It may be `shard` itself. None if nothing is accumulated.
        """
        ...

    def discard(self) -> None:
        """Drop the gradients that `collect` has accepted since the last `send`.

        Called instead of `send` if the gradients are not wanted, for example after an exception in a backward.
        """


class Reduction(Protocol):
    """A way to average gradients over ranks, for example by a reduce-scatter.

    The method `reducer` returns an object that averages the gradients of one flat buffer.

    Attributes:
        ahead: the number of blocks whose reductions may be pending while another block computes its backward.
    """

    ahead = 1

    @property
    def mapped_bytes(self) -> int:
        """The number of bytes that this reduction has allocated outside torch's allocator.

        Code that reports or predicts memory use adds this number, because torch's memory statistics do not include it.
        """
        return 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        """Return a new reducer for the gradients of one flat buffer.

        Args:
            layout: the layout of the flat buffer.
            shapes: the full shapes of its tensors.
            like: a tensor of the gradients' dtype, on their device.
            poison: whether to fill memory with NaN before results are written to it, for debugging.
        """
        ...

    def free(self) -> None:
        """Free the memory that is kept from one reduction to the next, if any. Collective: every rank must call it.

        Called, for example, when models have been deleted and no reduction is pending. The next reduction allocates the
        memory again.
        """


class Packing:
    """Copies gradients to their places in a flat tensor, so that one collective can average all of them.

    In each backward, call `add` for gradients that are ready early, and then `complete` once, with all others.
    `complete` also sets the padding and the places of missing gradients to zero.

    Args:
        flat: (layout.numel,), the flat tensor, which is overwritten.
        layout: the layout of the flat buffer.
        shapes: the full shapes of its tensors.
    """

    def __init__(self, flat: torch.Tensor, layout: Layout, shapes: Sequence[torch.Size]) -> None:
        self.flat = flat
        # `.data` has a separate version counter, so that packing does not count as a write to `flat` for autograd.
        parts = flat.data.split_with_sizes(layout.sizes)
        self._views = [part.view(shape) for part, shape in zip(parts[1::2], shapes)]
        self._gaps = [gap for gap in parts[::2] if gap.numel()]
        # The gaps (padding) are filled by copying zeros, so that one kernel writes both the gradients and the gaps.
        zeros = flat.new_zeros(max([gap.numel() for gap in self._gaps], default=0))
        self._zeros = [zeros[: gap.numel()] for gap in self._gaps]
        self._packed: set[int] = set()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Copy the gradient of tensor `index` to its place in the flat tensor, or add it to a gradient already there.

        Called for gradients that are ready before `complete` is called, so that their memory can be freed early.
        """
        if index in self._packed:
            self._views[index].add_(gradient)
        else:
            self._views[index].copy_(gradient)
            self._packed.add(index)

    def complete(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Copy `gradients` to their places in the flat tensor, set the padding to zero, and return the flat tensor.

        gradients: for each tensor, a gradient or None. A gradient is added to those that `add` has copied for the same
            tensor, if any. For None, the place keeps what `add` has copied, if anything; otherwise it is set to zero.
        """
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
    """A base class of reducers that keep gradients until `send`, without copying them.

    A reducer is an object that averages the gradients of one flat buffer over the ranks. `collect`, called for a
    gradient that is ready early, keeps a reference to it. If there is a second gradient of the same tensor, their sum
    is kept, in new memory. A subclass implements `send`. Its `send` first calls `with_collected(gradients)`, which
    returns `gradients` together with the kept ones.
    """

    def __init__(self) -> None:
        self._collected: dict[int, torch.Tensor] = {}
        self._summed: set[int] = set()  # indices of the tensors whose kept gradient is a sum

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        kept = self._collected.get(index)
        if kept is None:
            self._collected[index] = gradient
        elif index in self._summed:
            kept.add_(gradient)  # in place, because this object has allocated `kept`
        else:  # not in place: `kept` may share memory with another gradient, or be an expanded view of a smaller tensor
            self._collected[index] = kept + gradient
            self._summed.add(index)

    def with_collected(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return `gradients` together with those that `collect` has accepted since the last `send`.

        The subclasses' `send` calls this first. Afterwards this object has no reference to the accepted gradients.

        gradients: for each tensor of the flat buffer, the gradient passed to `send`, or None.

        Returns:
            For each tensor, the gradient from `gradients` or from `collect`, their sum if there are both, or None.
        """
        if not self._collected:
            return gradients
        complete = list(gradients)
        for index, gradient in self._collected.items():
            other = complete[index]  # a second gradient, if code outside the block has also read the parameter
            complete[index] = gradient if other is None else other + gradient
        self._collected.clear()
        self._summed.clear()
        return complete

    def discard(self) -> None:
        self._collected.clear()
        self._summed.clear()


class CollectiveReduction(Reduction):
    """Averages gradients over ranks: copies them into one flat tensor, and averages this tensor with a reduce-scatter.

    The flat tensor stays in memory until `PendingReduce.wait`.

    Args:
        communicator: the communicator of the ranks over which gradients are averaged.
        device: this rank's device.
        summed: a factor by which the mean over all ranks is multiplied. By default (1), the result is the plain mean.
            If groups of ranks compute one loss together (tensor parallelism), pass the number of ranks in a group.
            Gradients are then summed in each group, and averaged over the groups. The mean is computed first and then
            multiplied, because plain sums could overflow in half precision.
    """

    def __init__(self, communicator: Communicator, device: torch.device, summed: int = 1) -> None:
        self.communicator, self.summed, self.stream = communicator, summed, work_stream(device, priority=-1)

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _CollectiveReducer(self, layout, shapes, like, poison)


class _CollectiveReducer(CollectingReducer):
    """Copies the gradients of a flat buffer into one flat tensor and averages this tensor with a reduce-scatter.

    If a single gradient has the size of the whole buffer, it is averaged directly, without the copy.
    """

    def __init__(self, owner: CollectiveReduction, layout: Layout, shapes, like: torch.Tensor, poison: bool) -> None:
        super().__init__()
        self._owner, self._layout, self._shapes, self._like, self._poison = owner, layout, shapes, like, poison
        self._single = layout.numels == (layout.numel,)  # True if the buffer has one tensor and no padding

    @cached_property
    def _packing(self) -> tuple[ResizableStorage, Packing]:
        """The memory of the flat tensor, and the `Packing` that copies gradients into the flat tensor.

        The memory is freed between reductions.
        """
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
        # If the ticket is DONE, replace it by an event on `stream`. DONE comes from the communicator of a single rank
        # (on a host with one rank), which has only queued a copy on `stream`. The wait of DONE does nothing, but a
        # later mean over hosts must wait for the copy.
        arrived = stream.record_event() if tickets[0] is DONE else tickets[0]
        factor = self._owner.summed
        if factor != 1:
            arrived = After(arrived, lambda: arriving.mul_(factor))
        return PendingReduce(arrived, gradients, memory, None if total is None else (arriving, total, shard))

    def _fills(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Return whether the gradient can be reduced directly, without being copied into a flat tensor first.

        This is possible if the flat buffer has only one tensor and no padding, and the tensor's gradient is dense,
        contiguous and of the dtype of the flat tensor.

        gradients: the full gradients of the buffer's tensors; None for a tensor that has no gradient.
        """
        first = gradients[0]
        if first is None or not self._single:
            return False
        plain = first.layout == torch.strided and not first.is_conj() and not first.is_neg()
        return plain and first.dtype == self._like.dtype and first.is_contiguous()


class LocalReduction(Reduction):
    """Averages gradients over a single rank: copies them into the shard, and sends nothing."""

    ahead = 0

    def reducer(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> Reducer:
        return _LocalReducer(layout, shapes, like, poison)


class _LocalReducer:
    """Averages the gradients of one flat buffer over a single rank, that is, only copies them.

    Gradients are copied to the shard or, under gradient accumulation, to new memory, which `PendingReduce.wait` adds to
    the running sum. `collect` copies its gradient immediately, so that the gradient's memory can be freed before the
    backward ends.
    """

    def __init__(self, layout: Layout, shapes: Sequence[torch.Size], like: torch.Tensor, poison: bool) -> None:
        self._layout, self._shapes, self._poison = layout, shapes, poison
        zeros = like.new_zeros(max(layout.sizes[::2]))
        self._padding = [(each, zeros[:numel]) for each, numel in enumerate(layout.sizes[::2]) if numel]
        self._open: Packing | None = None

    def collect(self, index: int, gradient: torch.Tensor, destination: Destination) -> None:
        self._packing(*destination()).add(index, gradient)

    def send(
        self, gradients: Sequence[torch.Tensor | None], shard: torch.Tensor, total: torch.Tensor | None
    ) -> PendingReduce:
        present = [gradient for gradient in gradients if gradient is not None]
        if self._open is None and len(present) == len(self._shapes):
            packed, parts = self._memory(shard, total), [gradient.reshape(-1) for gradient in present]
            for position, zeros in reversed(self._padding):
                parts.insert(position, zeros)
            torch.cat(parts, out=packed)
        else:
            packed = self._packing(shard, total).complete(gradients)
            self._open = None
        return PendingReduce(DONE, (), added=None if total is None else (packed, total, shard))

    def discard(self) -> None:
        self._open = None

    def _packing(self, shard: torch.Tensor, total: torch.Tensor | None) -> Packing:
        """Return the `Packing` that copies the gradients of the current backward to their places in one flat tensor.

        The first call in a backward creates it.

        shard: used as the flat tensor if `total` is None. Otherwise the flat tensor is new memory.
        total: the running sum of gradient accumulation, or None.
        """
        if self._open is None:
            self._open = Packing(self._memory(shard, total), self._layout, self._shapes)
        return self._open

    def _memory(self, shard: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        flat = shard if total is None else torch.empty_like(shard)
        return flat.fill_(float("nan")) if self._poison else flat
