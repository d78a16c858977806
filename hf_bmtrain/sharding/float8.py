"""Weights of float8 layers that are gathered rounded to float8: a half of the bytes of bfloat16."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..comm.collectives import Communicator
from ..comm.journal import code
from ..comm.layout import ALIGNMENT_BYTES
from ..comm.storage import ResizableStorage
from ..ops.float8 import Float8, Pieces, measure_pieces, quantize_whole, round_pieces, scales_of, transpose
from .buffer import ShardedBuffer


class GatheredFactor(NamedTuple):
    """A weight (R, C) in float8 with one scale, readable while its buffer is whole.

    values: (R, C) float8_e4m3fn, contiguous. row_scales: (R, 1) float32, all the same. column_scales: (C, 1), as well.
    """

    values: torch.Tensor
    row_scales: torch.Tensor
    column_scales: torch.Tensor

    def factor(self, turned: bool) -> Float8:
        """Return the weight as a factor, or its transpose in new memory."""
        if turned:
            return Float8(transpose(self.values), self.column_scales)
        return Float8(self.values, self.row_scales)


class Rounding:
    """Rounds the shards of the Float8Buffers that have changed, with one exchange of their largest magnitudes.

    What an optimizer updates alongside the computation is rounded buffer by buffer instead, each behind its own update.
    It refers to the buffers weakly.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: list[weakref.ref[Float8Buffer]] = []

    def add(self, buffer: Float8Buffer) -> None:
        self._buffers.append(weakref.ref(buffer))

    @torch.no_grad()
    def round(self, gathered: Float8Buffer) -> None:
        """Round what has changed, `gathered` among it. Collective."""
        living = [buffer for reference in self._buffers if (buffer := reference()) is not None]
        changed = [each for each in living if each.is_stale and (each is gathered or not each.update.alongside)]
        counts = [len(buffer.pieces) for buffer in changed]
        bits = torch.zeros(sum(counts), dtype=torch.int32, device=gathered.shard.device)
        parts = bits.split(counts)
        for buffer, part in zip(changed, parts):
            self._communicator.journal.note(code("rounding to float8 of", buffer.number))
            buffer.measure(part)
        self._communicator.all_reduce(bits, maximum=True).wait()
        for buffer, part, scales in zip(changed, parts, scales_of(bits)[:, None].split(counts)):
            buffer.round(part, scales)


class Float8Buffer(ShardedBuffer):
    """Weights (matrices) of float8 layers, which are gathered in their own dtype at first, and then in float8.

    `use_float8` switches. From then on `gather` has this rank's pieces rounded, if the shard has changed since, and
    gathers them: the bits are those of `ops.float8.quantize_whole` of the whole weights. The layers compute with
    `factors`. The wholes have no memory then, and NaN in every element, so that whatever reads them sees it; in
    `whole_now` they have the values of the shards, in their own dtype.

    in_float8: whether `gather` gathers float8. factors: by index, a GatheredFactor of each weight; none before.
    """

    in_float8 = False
    factors: tuple[GatheredFactor, ...] = ()

    def _grain(self, dtype: torch.dtype) -> int:
        return ALIGNMENT_BYTES  # so that the rounded copy is aligned as well, of one byte an element

    def _view(self, index: int, shape: torch.Size) -> torch.Tensor:
        if self._memory.allocated:
            return super()._view(index, shape)
        return torch.full((1,), float("nan"), dtype=self.shard.dtype, device=self.shard.device).expand(shape)

    @property
    def _memory(self) -> ResizableStorage:
        """The full buffer of the weights in their own dtype."""
        assert self._full is not None, "float8 is gathered from other ranks"
        return self._full

    @property
    def gathered_views(self) -> list[torch.Tensor]:
        return [*super().gathered_views, *(factor.values for factor in self.factors)]

    @property
    def shards(self) -> list[torch.Tensor]:
        return [self.stored, self._rounded] if self.in_float8 else [self.stored]

    # -- the switch ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def use_float8(self, rounding: Rounding) -> None:
        """Gather float8 from now on. No backward may be to come for a forward before. Collective.

        rounding: rounds this buffer together with others.
        What is kept whole is gathered anew: where only some ranks run a frozen block, no later gather of it may be a
        collective. Raises RuntimeError if what is gathered has other bits than the rounded whole weights.
        """
        kept = self.is_whole and self.is_kept
        self.wait()
        self._memory.free()
        device, layout = self.shard.device, self.layout
        self._rounded = self._gather.allocate(layout.shard_numel, torch.uint8, device, self.update.wait)
        self._source = self._rounded  # zeros, which padding stays
        self._target = self._arrived = ResizableStorage(layout.numel, torch.uint8, device, self._poison)
        self._cut = [(0, layout.shard_numel)]
        self._journal = self._communicator.journal if self._gather.is_collective(self._rounded) else None
        ranges = [(piece.shard_start, piece.shard_stop) for piece in self.pieces]
        self._own = Pieces(ranges, self.shard.dtype, device)
        self._make_factors()
        self._arrived.free()
        self._rounded_version = -1
        self._filled_version = -1
        self.in_float8 = True
        self._rounding = rounding
        rounding.add(self)
        self._show()
        self.gather()
        self.wait()
        if not self.shard.is_meta:
            self._check()
        if not kept:
            self.release()

    def _check(self) -> None:
        with self.whole_now():
            for whole, found in zip(self.wholes, self.factors):
                values, scales = quantize_whole(whole.detach())
                same = torch.equal(_codes(values), _codes(found.values))
                if not (same and torch.equal(scales.nan_to_num(-1.0), found.row_scales.nan_to_num(-1.0))):
                    raise RuntimeError(
                        f"rank {self.rank}: a weight of shape {tuple(whole.shape)} that was gathered in float8 is not "
                        "the weight that was rounded whole: leave out float8 on this machine, and report it."
                    )

    def _make_factors(self) -> None:
        shapes, device = [whole.shape for whole in self.wholes], self.shard.device
        sides = [max(shape) for shape in shapes]
        self._scales = torch.empty(sum(sides), 1, dtype=torch.float32, device=device)
        owners = torch.arange(len(sides), device=device)
        self._owners = owners.repeat_interleave(torch.tensor(sides, device=device))  # of the elements of `_scales`
        scales = [part.data for part in self._scales.split(sides)]
        self.factors = tuple(
            GatheredFactor(
                self._arrived.view(offset, shape).view(torch.float8_e4m3fn).data,
                one[: shape[0]].data, one[: shape[1]].data,
            )
            for offset, shape, one in zip(self.layout.offsets, shapes, scales)
        )  # fmt: skip

    def _show(self) -> None:
        """Make the wholes views of the memory that there is."""
        for index, whole in enumerate(self.wholes):
            whole.data = self._view(index, whole.shape)

    # -- gather, use, release -----------------------------------------------------------------------------------

    def gather(self) -> None:
        if self.in_float8:
            self.update.wait()
            if self.is_stale:
                self._rounding.round(self)
        super().gather()

    @property
    def is_stale(self) -> bool:
        """True if the shard has changed since it was rounded. The same on every rank."""
        return self._rounded_version != self.shard._version

    def measure(self, bits: torch.Tensor) -> None:
        """Write the bits of the largest magnitude of each of this rank's pieces to `bits` (k,) int32, 0 before."""
        measure_pieces(self.shard.data, self._own, bits)

    def round(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Round this rank's pieces under the `scales` (k, 1) of the whole weights, which follow from their `bits`."""
        round_pieces(self.shard.data, self._own, bits, self._rounded)
        torch.index_select(scales, 0, self._owners, out=self._scales)
        torch.autograd.graph.increment_version(self._rounded)  # also where this rank has none
        self._rounded_version = self.shard._version

    @property
    def whole_nbytes(self) -> int:
        return self.layout.numel if self.in_float8 else super().whole_nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        return super().holds(tensor) or (self.in_float8 and self._arrived.holds(tensor))

    @contextmanager
    def whole_now(self) -> Iterator[None]:
        if not self.in_float8:
            with super().whole_now():
                yield
            return
        was_whole = self._memory.allocated
        if not was_whole:
            self.update.wait()
            self._gather.gather(self._memory.allocate(), self.shard, self.layout.cut_ranges(self.rank)).wait()
            self._show()
        try:
            yield
        finally:
            if not was_whole:
                self._memory.free()
                self._show()
            self._gather.quiesce()


def _codes(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float8 values, of which NaN has two."""
    codes = values.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)
