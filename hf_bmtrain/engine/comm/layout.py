"""The positions of tensors in a flat buffer that is cut into equal shards. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 128
"""Alignment of every tensor and every shard. Vector loads, cuBLAS and NCCL all need at least 16."""


@dataclass(frozen=True)
class Range:
    """The part of one tensor that is stored in one shard, as ranges of the tensor's and of the shard's elements.

    It is empty if the shard holds nothing of the tensor.
    """

    tensor_start: int
    tensor_stop: int
    shard_start: int
    shard_stop: int

    @property
    def length(self) -> int:
        return self.tensor_stop - self.tensor_start


@dataclass(frozen=True)
class Layout:
    """Tensors of `numels` elements, stored at `offsets` of a buffer of `world_size` shards of `shard_numel` elements.

    The pieces of all ranks tile every tensor exactly; elements that belong to no tensor are padding.

    grain: in elements. Every tensor begins on a multiple of it, counted from the start of the buffer, and so does every
    shard. So a tensor is cut at multiples of the grain from its own start alone: what has a meaning only whole (64
    elements with one scale, rows of a matrix) is never divided between ranks. `offsets` do not depend on the number
    of shards. Padding is less than one grain after each tensor (but for what `build` leaves free), and less than
    `world_size` + 1 grains at the end: the last ranks may store less than the others, perhaps nothing. A grain as large
    as the largest tensor gives whole tensors to ranks.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @classmethod
    def build(cls, numels: Sequence[int], world_size: int, grain: int, spread: tuple[int, int] = (0, 1)) -> Layout:
        """Lay out tensors of `numels` elements.

        spread: (n, times). The first n tensors together get `times` as many elements as they need, all in the first
        shard; what is left is padding behind them.
        """
        assert world_size >= 1 and grain >= 1, (world_size, grain)
        offsets, end, room = [], 0, 0
        for index, numel in enumerate(numels):
            if index == spread[0]:
                end = room = end * spread[1]
            offsets.append(end)
            end = _round_up(end + numel, grain)
        shard_numel = max(_round_up(-(-end // world_size), grain), room)
        return cls(tuple(numels), tuple(offsets), shard_numel, world_size)

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_numel * self.world_size

    @property
    def extent(self) -> int:
        """Elements up to the end of the last tensor. It does not depend on the number of shards, nor do `offsets`."""
        return self.offsets[-1] + self.numels[-1] if self.numels else 0

    def range_of(self, index: int, rank: int) -> Range:
        """Return the piece of tensor `index` that `rank` holds."""
        shard_begin = rank * self.shard_numel
        begin, end = self.offsets[index], self.offsets[index] + self.numels[index]
        start = min(max(begin, shard_begin), end)
        stop = max(min(end, shard_begin + self.shard_numel), start)
        shard_start = min(max(start - shard_begin, 0), self.shard_numel)
        return Range(start - begin, stop - begin, shard_start, shard_start + stop - start)

    def cut_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of `rank`'s shard that belong to tensors stored on several ranks."""
        local_ranges = [(numel, self.range_of(index, rank)) for index, numel in enumerate(self.numels)]
        return [
            (local_range.shard_start, local_range.shard_stop)
            for numel, local_range in local_ranges
            if 0 < local_range.length < numel
        ]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each part of the flat buffer: gap, tensor, gap, …, tensor, gap. A gap is padding, often empty."""
        return _alternating([(o, o + n) for o, n in zip(self.offsets, self.numels)], self.numel)

    def shard_sizes(self, rank: int) -> list[int]:
        """Return the elements of each part of `rank`'s shard: gap, piece, gap, …, piece, gap."""
        local_ranges = [self.range_of(index, rank) for index in range(len(self.numels))]
        return _alternating(
            [(local_range.shard_start, local_range.shard_stop) for local_range in local_ranges], self.shard_numel
        )


def _alternating(ranges: Sequence[tuple[int, int]], end: int) -> list[int]:
    sizes, position = [], 0
    for start, stop in ranges:
        sizes += [start - position, stop - start]
        position = stop
    return [*sizes, end - position]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
