"""Weights of float8 layers that are gathered rounded to float8: a half of the bytes of bfloat16."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ...engine.comm.collective_log import code
from ...engine.comm.communicator import Communicator
from ...engine.comm.layout import ALIGNMENT_BYTES, Layout
from ...engine.comm.reduce import Reduction
from ...engine.comm.resizable import ResizableStorage, shares_storage
from ...engine.runtime.world import World
from ...engine.sharding.buffer import ShardedBuffer
from .arithmetic import Float8, Pieces, measure_pieces, quantize_whole, round_pieces, scales_of, transpose

LEAST_WEIGHTS = 32
"""Weights have at least so many elements for each byte of their companions, which take one for each of their bytes."""


class GatheredFactor(NamedTuple):
    """A weight (R, C) in float8 with one scale, to be read while its buffer is whole.

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

    It refers weakly to the buffers and to what owns them, and leaves out a buffer without an owner: an optimizer may
    keep its slices longer, on each rank for another while.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._buffers: list[tuple[weakref.ref[Float8Buffer], list[weakref.ref]]] = []

    def add(self, buffer: Float8Buffer, owners: Iterable[object]) -> None:
        self._buffers.append((weakref.ref(buffer), [weakref.ref(owner) for owner in owners]))

    @torch.no_grad()
    def round(self, gathered: Float8Buffer) -> None:
        """Round what has changed, `gathered` among it. Collective."""
        changed: list[Float8Buffer] = []
        for reference, owners in self._buffers:
            buffer = reference()
            if buffer is gathered:
                changed.append(gathered)
            elif buffer is not None and any(owner() is not None for owner in owners):
                if buffer.is_stale and not buffer.update.ever_asynchronous:
                    changed.append(buffer)
        counts = [buffer.count for buffer in changed]
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
    `factors`. The wholes of weights have no memory then, and NaN in every element, so that whatever reads them sees it;
    in `whole_now` they have the values of the shards, in their own dtype.

    companions: the number of other parameters of the block (norms, biases), which come first. They are few, all stored
    on the first rank, and gathered as they are, as bytes before the codes: with a buffer of their own every gather and
    every reduction would be two. So the layout gives them as many elements as they have bytes.

    in_float8: whether `gather` gathers float8. factors: by index, a GatheredFactor of each weight, None for a
    companion; none before.
    """

    in_float8 = False
    factors: tuple[GatheredFactor | None, ...] = ()

    def __init__(
        self,
        world: World,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        companions: int = 0,
    ) -> None:
        self._companions = companions
        self._shown: list[torch.Tensor] = []  # the wholes of companions as they are gathered
        super().__init__(world, parameters, reduction)

    @staticmethod
    def takes(companions: Sequence[torch.nn.Parameter], weights: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether `companions` are few beside `weights`. The same for any number of ranks."""
        nbytes = sum(parameter.numel() * parameter.itemsize for parameter in companions)
        return LEAST_WEIGHTS * nbytes <= sum(parameter.numel() for parameter in weights)

    def _lay_out(self, numels: Sequence[int], size: int, dtype: torch.dtype) -> Layout:
        grain = ALIGNMENT_BYTES  # so that the rounded copy is aligned as well, of one byte an element
        return Layout.build(numels, size, grain, spread=(self._companions, dtype.itemsize))

    def _view(self, index: int, shape: torch.Size) -> torch.Tensor:
        if self._memory.allocated:
            return super()._view(index, shape)
        if index < self._companions:
            return self._shown[index]
        return torch.full((1,), float("nan"), dtype=self.shard.dtype, device=self.shard.device).expand(shape)

    @property
    def _memory(self) -> ResizableStorage:
        """The full buffer of the weights in their own dtype."""
        assert self._full is not None, "float8 is gathered from other ranks"
        return self._full

    @property
    def gathered_views(self) -> list[torch.Tensor]:
        return [*super().gathered_views, *(factor.values for factor in self._weights)]

    @property
    def _weights(self) -> list[GatheredFactor]:
        return [factor for factor in self.factors if factor is not None]

    @property
    def shards(self) -> list[torch.Tensor]:
        return [self.stored, self._rounded] if self.in_float8 else [self.stored]

    # -- the switch ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def use_float8(self, rounding: Rounding, owners: Iterable[object]) -> None:
        """Gather float8 from now on. No backward may be to come for a forward before. Collective.

        rounding: rounds this buffer together with others. owners: objects of its layers alone. What is kept whole is
        gathered anew: where only some ranks run a frozen block, no later gather of it may be a collective. Raises
        RuntimeError if what is gathered is not the whole parameters, weights rounded.
        """
        kept = self.is_whole and self.is_kept
        self.wait()
        self._memory.free()
        device, layout = self.shard.device, self.layout
        self._rounded = self._gather.allocate(layout.shard_numel, torch.uint8, device, self.update.wait)
        self._source = self._rounded  # zeros, which padding stays
        self._target = self._arrived = ResizableStorage(layout.numel, torch.uint8, device, self._poison)
        self._journal = self._communicator.journal if self._gather.is_collective(self._rounded) else None
        ranges = [(piece.shard_start, piece.shard_stop) for piece in self.pieces[self._companions :]]
        self._pieces_here = Pieces(ranges, self.shard.dtype, device)
        self._companion_numel = layout.offsets[self._companions] // self.shard.itemsize if self.rank == 0 else 0
        self._make_factors()
        self._shown = [self._show_companion(index) for index in range(self._companions)]
        self._arrived.free()
        self._rounded_version = -1
        self._filled_version = -1
        self.in_float8 = True
        self._rounding = rounding
        rounding.add(self, owners)
        self._show()
        self.gather()
        self.wait()
        if not self.shard.is_meta:
            self._check()
        if not kept:
            self.release()

    def _check(self) -> None:
        shown = [companion.clone() for companion in self._shown]
        with self.whole_now():
            same = [
                torch.equal(whole.detach().reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8))
                for whole, found in zip(self.wholes, shown)
            ]
            for whole, found in zip(self.wholes[self._companions :], self._weights):
                values, scales = quantize_whole(whole.detach())
                known = torch.equal(scales.nan_to_num(-1.0), found.row_scales.nan_to_num(-1.0))
                same.append(known and torch.equal(_bits(values), _bits(found.values)))
        for whole, is_same in zip(self.wholes, same):
            if not is_same:
                raise RuntimeError(
                    f"rank {self.rank}: a parameter of shape {tuple(whole.shape)} that was gathered in float8 is not "
                    "the one that was rounded whole: leave out float8 on this machine, and report it."
                )

    def _make_factors(self) -> None:
        first, device = self._companions, self.shard.device
        shapes = [whole.shape for whole in self.wholes[first:]]
        sides = [max(shape) for shape in shapes]
        self._scales = torch.empty(sum(sides), 1, dtype=torch.float32, device=device)
        weights, repeats = torch.arange(len(sides), device=device), torch.tensor(sides, device=device)
        self._weight_of_scale = weights.repeat_interleave(repeats, output_size=sum(sides))
        scales = [part.data for part in self._scales.split(sides)]
        codes = [self._codes(index).view(torch.float8_e4m3fn) for index in range(first, len(self.wholes))]
        factors = [
            GatheredFactor(values.data, one[: shape[0]].data, one[: shape[1]].data)
            for values, shape, one in zip(codes, shapes, scales)
        ]
        self.factors = (*[None] * first, *factors)

    def _codes(self, index: int) -> torch.Tensor:
        """Return the rounded weight: in what is gathered, or in this rank's shard, if that has all of it."""
        piece, shape = self.pieces[index], self.wholes[index].shape
        if piece.length < shape.numel():
            return self._arrived.view(self.layout.offsets[index], shape)
        return self._rounded.data[piece.shard_start : piece.shard_stop].view(shape)

    def _show_companion(self, index: int) -> torch.Tensor:
        """Return a companion as it is gathered; where it is stored, as it is stored."""
        whole, dtype, offset = self.wholes[index], self.shard.dtype, self.layout.offsets[index]
        if self.rank == 0:
            return super()._view(index, whole.shape)
        nbytes = torch.Size([whole.numel() * dtype.itemsize])
        return self._arrived.view(offset * dtype.itemsize, nbytes).view(dtype).view(whole.shape).data

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
    def count(self) -> int:
        """The number of weights."""
        return len(self.wholes) - self._companions

    @property
    def is_stale(self) -> bool:
        """True if the shard has changed since it was rounded. The same on every rank."""
        return self._rounded_version != self.shard._version

    def measure(self, bits: torch.Tensor) -> None:
        """Write the bits of the largest magnitude of each weight's piece to `bits` (k,) int32, 0 before."""
        measure_pieces(self.shard.data, self._pieces_here, bits)

    def round(self, bits: torch.Tensor, scales: torch.Tensor) -> None:
        """Round this rank's pieces under the `scales` (k, 1) of the whole weights, which follow from their `bits`."""
        round_pieces(self.shard.data, self._pieces_here, bits, self._rounded)
        if self._companion_numel:  # this rank stores them
            companions = self.shard.data[: self._companion_numel].view(torch.uint8)
            self._rounded[: len(companions)].copy_(companions)
        torch.index_select(scales, 0, self._weight_of_scale, out=self._scales)
        torch.autograd.graph.increment_version(self._rounded)  # also where this rank has none
        self._rounded_version = self.shard._version

    @property
    def whole_nbytes(self) -> int:
        return self.layout.numel if self.in_float8 else super().whole_nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        if super().holds(tensor):
            return True
        return self.in_float8 and (self._arrived.holds(tensor) or shares_storage(tensor, self._rounded))

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


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float8 values, of which NaN has two."""
    codes = values.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)
