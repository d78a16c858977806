"""The gradient of a flat buffer: packed, averaged over ranks into the shard, accumulated, handed to the slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.layout import Layout
from ..comm.reduce import Flight, LocalReducer, Reducer, Reduction
from ..ops.grad_norm import Segments
from ..runtime.schedule import Step
from .grad_slice import GradSlice
from .segment_norms import SegmentNorms


class GradientBuffer:
    """Owns `shard` (1/N of the elements, while a slice has a `.grad`); a reducer brings the gradients there.

    wholes: the whole parameters, whose `.grad` autograd fills; they give it up when it is sent.
    slices: this rank's 1-D parameters, whose `.grad` becomes a view of `shard`. `slice.grad is None` is the only
    sign that a new accumulation begins. While several backwards add up, half-precision gradients are summed in
    float32 (`total`) and rounded once into `shard`. A parameter without a gradient on this rank counts as zero.
    required: whether each slice requires a gradient; the slices write it.
    """

    def __init__(
        self,
        step: Step,
        layout: Layout,
        wholes: list[torch.nn.Parameter],
        slices: list,
        shard: torch.Tensor,
    ) -> None:
        self._step, self._layout = step, layout
        self._wholes, self._slices, self._like = wholes, slices, shard
        self.required = [whole.requires_grad for whole in wholes]
        self._followed = list(self.required)
        self._shapes = [whole.shape for whole in wholes]
        self._local = LocalReducer(layout, self._shapes, step.poison) if step.reduce.size == 1 else None
        self._reducer: Reducer | None = self._local
        self._begun = False
        self._flight: Flight | None = None
        self._squares: torch.Tensor | None = None
        self._collected: dict[int, torch.Tensor] = {}
        self.shard: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._handed: list[torch.Tensor | None] = [None] * len(slices)
        sizes = layout.shard_sizes(step.reduce.rank)
        present = [position for position, size in enumerate(sizes) if size or position % 2]  # gaps that are not empty
        self._sizes = [sizes[position] for position in present]
        self._pieces = [number for number, position in enumerate(present) if position % 2]
        self._segments = self._make_segments()
        self._version = -1

    @property
    def trainable(self) -> bool:
        return any(self.required)

    def follow_requires_grad(self) -> None:
        """The wholes require gradients as their slices do, which may have changed since the last forward."""
        if self.required != self._followed:
            for whole, required in zip(self._wholes, self.required):
                whole.requires_grad_(required)
            self._followed = list(self.required)

    def let_go(self) -> None:
        """Drop the shard when no slice has a `.grad`, so that its memory is free during the next forward."""
        if self.shard is not None and not self._begun and self._flight is None and self._unused:
            self.shard = self._total = self._squares = None
            if self._local is not None:
                self._local.leave()
            self._handed = [None] * len(self._slices)

    @property
    def _unused(self) -> bool:
        for piece in self._slices:
            if piece.grad is not None:
                return False
        return True

    # -- one backward -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self, index: int, gradient: torch.Tensor) -> None:
        """Take over one parameter's gradient ahead of `send`: added up, or packed where the bytes are there anyway."""
        if not self.required[index]:
            return  # frozen since the forward
        if self._local is not None:
            self._local.add(index, gradient, self._begin(), self._total)
        elif index in self._collected:
            self._collected[index].add_(gradient)
        else:
            self._collected[index] = gradient

    @property
    def under_way(self) -> bool:
        """Whether it was sent and not received."""
        return self._flight is not None

    def send(self, reduction: Reduction) -> None:
        """Start packing the gradients of the wholes and averaging them over the ranks."""
        shard = self._begin()
        # What was frozen since the forward gets no more gradient.
        gradients = [whole.grad if required else None for whole, required in zip(self._wholes, self.required)]
        for index, gradient in self._collected.items():
            assert gradients[index] is None, "read in and outside of blocks"
            gradients[index] = gradient
        self.drop()
        if self._reducer is None:
            self._reducer = reduction.reducer(self._layout, self._shapes, self._like, self._step.poison)
        self._flight = self._reducer.send(gradients, shard, self._total)
        self._begun = False

    def receive(self) -> None:
        """Wait for the average, which is added where an accumulation runs, and set the slices' `.grad`."""
        assert self._flight is not None
        self._flight.land()
        self._squares, self._flight = self._flight.squares, None
        self._hand_out()

    def discard(self) -> None:
        """Forget what was collected or sent."""
        self._collected.clear()
        if self._flight is not None:
            self._flight.cancel()  # which may have written the shard
            self._flight = self._squares = None
        if self._local is not None:
            self._local.reset()
        self._begun = False

    def drop(self) -> None:
        """Forget what autograd has made."""
        self._collected.clear()
        for whole in self._wholes:
            whole.grad = None

    def _begin(self) -> torch.Tensor:
        """The shard that this backward's average comes to, and the running sum if one has begun."""
        if self._begun:
            assert self.shard is not None
            return self.shard
        assert self._flight is None, "the previous gradient was not received"
        self.let_go()
        fresh = self._unused
        if self.shard is None:
            self.shard = torch.empty_like(self._like) if fresh else torch.zeros_like(self._like)
        if fresh:
            self._total = None
        else:
            self._resume_total()
        self._begun = True
        return self.shard

    # -- accumulation -------------------------------------------------------------------------------------------

    @property
    def intact(self) -> bool:
        """Whether every slice's `.grad` is still the view of `shard` that was handed out."""
        for piece, handed in zip(self._slices, self._handed):
            gradient = piece.grad
            if gradient is not None and gradient is not handed:
                return False
        return True

    def is_handed(self, index: int) -> bool:
        """Whether slice `index` has the `.grad` that the last backward gave it, and nobody has written to any since."""
        handed = self._handed[index]
        return handed is not None and self._slices[index].grad is handed and self._unwritten

    @property
    def _unwritten(self) -> bool:
        return self.shard is not None and self.shard._version == self._version

    def squares(self, indices: Sequence[int]) -> torch.Tensor | None:
        """Sums of squares of these slices' `.grad`s, (k,) float64, or None where they are still to be measured."""
        if self._squares is None or not all(self.is_handed(index) for index in indices):
            return None
        return self._squares[indices[0] : indices[-1] + 1]

    def wide(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements start:stop of the float32 running sum, or None where `.grad` itself is the best there is."""
        if self._total is None or not self._unwritten:
            return None
        return self._total[start:stop]

    def _resume_total(self) -> None:
        """Make the running sum what the slices' `.grad` say it is."""
        assert self.shard is not None
        if self._total is None or not self._unwritten:
            wide = torch.promote_types(self.shard.dtype, torch.float32)
            self._total = self.shard if wide == self.shard.dtype else self.shard.to(wide)
        for index, piece in enumerate(self._slices):
            if piece.grad is self._handed[index] and piece.grad is not None:
                continue
            place = self._layout.piece(index, self._step.reduce.rank)
            target = self._total[place.shard_start : place.shard_stop]
            target.zero_() if piece.grad is None else target.copy_(piece.grad)

    def _hand_out(self) -> None:
        assert self.shard is not None
        torch.autograd.graph.increment_version(self.shard)  # a reduction and packing do not count their writes
        self._version = self.shard._version
        lane = self._step.reduce
        norms = None if self._segments is None else SegmentNorms(self.shard, self._segments, lane, self._squares)
        parts = self.shard.split_with_sizes(self._sizes)
        required, handed, hooked = self.required, self._handed, []
        with torch._C.DisableTorchFunctionSubclass():  # else each attribute of a slice looks for overrides
            for index, piece in enumerate(self._slices):
                if required[index] and (handed[index] is None or piece.grad is not handed[index]):
                    part = parts[self._pieces[index]]
                    GradSlice.become(part, lane, norms, index)
                    handed[index] = piece.grad = part
                if piece._gradient_hooks:
                    hooked.append(piece)
        for piece in hooked:
            piece.run_gradient_hooks()

    def _make_segments(self) -> Segments | None:
        if self._like.dtype == torch.float64:
            return None  # torch measures these
        places = [self._layout.piece(index, self._step.reduce.rank) for index in range(len(self._slices))]
        return Segments([place.shard_start for place in places] + [places[-1].shard_stop], self._like.device)
