"""The gradient of a flat buffer: packed, averaged over ranks into the shard, accumulated, handed to the slices."""

from __future__ import annotations

import torch

from .comm import DONE, Ticket
from .elastic import Elastic
from .grad_slice import GradSlice
from .layout import Layout
from .step import Step


class GradientBuffer:
    """Owns `full` (bytes only while it travels) and `shard` (from the first backward on, 1/N of the elements).

    wholes: the whole parameters, whose `.grad` autograd fills; they give it up when it is packed.
    slices: this rank's 1-D parameters, whose `.grad` becomes a view of `shard`. `slice.grad is None` is the only
    sign that a new accumulation begins. While several backwards add up, half-precision gradients are summed in
    float32 (`total`) and rounded once into `shard`. A parameter without a gradient on this rank counts as zero.
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
        self._single = step.reduce.size == 1
        self._full: Elastic | None = None
        self._full_views: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.shard: torch.Tensor | None = None
        self._total: torch.Tensor | None = None
        self._handed: list[torch.Tensor | None] = [None] * len(slices)
        self._version = -1
        self._arriving: tuple[Ticket, torch.Tensor] | None = None

    # -- one backward -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Pack the gradients of the wholes and start averaging them over the ranks."""
        assert self._arriving is None, "the previous gradient was not received"
        fresh = all(piece.grad is None for piece in self._slices)
        if self.shard is None:
            self.shard = torch.zeros_like(self._like)
        if not fresh:
            self._resume_total()
        if self._single:
            # The whole gradient is the shard, and an addition reads it where it was packed.
            packed = self._pack_into_shard() if fresh else self._pack_into_full()
            self._arriving = DONE, packed
            return
        arriving = self.shard if fresh else torch.empty_like(self.shard)
        if self._step.poison:
            arriving.fill_(float("nan"))
        self._arriving = self._step.reduce.reduce_scatter_mean(arriving, self._pack_into_full()), arriving

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the average, add it where an accumulation runs, and set the slices' `.grad`."""
        assert self._arriving is not None
        ticket, arriving = self._arriving
        ticket.wait()
        self._arriving = None
        if arriving is self.shard:
            self._total = None
        else:
            self._accumulate(arriving)
        if self._full is not None:
            self._full.free()
        self._hand_out()

    def discard(self) -> None:
        """Wait for what was sent, and forget it."""
        if self._arriving is not None:
            self._arriving[0].wait()
            self._arriving = None
        if self._full is not None:
            self._full.free()

    def drop(self) -> None:
        """Forget what autograd left in the wholes."""
        for whole in self._wholes:
            whole.grad = None

    def _pack_into_shard(self) -> torch.Tensor:
        assert self.shard is not None
        if self._step.poison:
            self.shard.fill_(float("nan"))
        self._pack(*self._views(self.shard))
        return self.shard

    def _pack_into_full(self) -> torch.Tensor:
        if self._full is None:
            self._full = Elastic(self._layout.numel, self._like.dtype, self._like.device, self._step.poison)
            self._full_views = self._views(self._full.tensor)
        self._full.allocate()
        self._pack(*self._full_views)
        return self._full.tensor

    def _views(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the flat gradient: one a parameter in its shape, one a gap of padding."""
        data, offsets = flat.data, self._layout.offsets
        tensors = [data[o : o + whole.numel()].view(whole.shape) for o, whole in zip(offsets, self._wholes)]
        return tensors, [data[start:stop] for start, stop in self._layout.gaps()]

    def _pack(self, views: list[torch.Tensor], gaps: list[torch.Tensor]) -> None:
        gradients = [whole.grad for whole in self._wholes]
        present = [(view, gradient) for view, gradient in zip(views, gradients) if gradient is not None]
        zeros = gaps + [view for view, gradient in zip(views, gradients) if gradient is None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [gradient for _, gradient in present])
        if zeros:
            torch._foreach_zero_(zeros)
        self.drop()

    # -- accumulation -------------------------------------------------------------------------------------------

    @property
    def intact(self) -> bool:
        """Whether every slice's `.grad` is still the view of `shard` that was handed out."""
        return all(piece.grad is handed for piece, handed in zip(self._slices, self._handed) if piece.grad is not None)

    def wide(self, start: int, stop: int) -> torch.Tensor | None:
        """Elements start:stop of the float32 running sum, or None where `.grad` itself is the best there is."""
        if self._total is None or self.shard is None or self.shard._version != self._version:
            return None
        return self._total[start:stop]

    def _resume_total(self) -> None:
        """Make the running sum what the slices' `.grad` say it is."""
        assert self.shard is not None
        intact = self.shard._version == self._version
        if self._total is None or not intact:
            wide = torch.promote_types(self.shard.dtype, torch.float32)
            self._total = self.shard if wide == self.shard.dtype else self.shard.to(wide)
        for index, piece in enumerate(self._slices):
            if piece.grad is self._handed[index] and piece.grad is not None:
                continue
            place = self._layout.piece(index, self._step.reduce.rank)
            target = self._total[place.shard_start : place.shard_stop]
            target.zero_() if piece.grad is None else target.copy_(piece.grad)

    def _accumulate(self, arriving: torch.Tensor) -> None:
        assert self._total is not None and self.shard is not None
        self._total.add_(arriving)
        if self._total is not self.shard:
            self.shard.copy_(self._total)

    def _hand_out(self) -> None:
        assert self.shard is not None
        rank = self._step.reduce.rank
        for index, piece in enumerate(self._slices):
            if not piece.requires_grad:
                continue
            if piece.grad is None or piece.grad is not self._handed[index]:
                place = self._layout.piece(index, rank)
                self._handed[index] = GradSlice.of(self.shard[place.shard_start : place.shard_stop], self._step.reduce)
                piece.grad = self._handed[index]
        self._version = self.shard._version
        for piece in self._slices:
            piece.run_gradient_hooks()
