"""The positions of tensors in a flat buffer that is divided into equal shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT_BYTES = 128
"""The minimum alignment, in bytes, of every tensor and every shard in a flat buffer, unless the storage of the buffer
chooses another layout. Vector loads, cuBLAS and NCCL need at least 16."""


@dataclass(frozen=True)
class Range:
    """The elements of one tensor that one shard stores, possibly none.

    Elements tensor_start:tensor_stop of the flattened tensor are elements shard_start:shard_stop of the shard.
    """

    tensor_start: int
    tensor_stop: int
    shard_start: int
    shard_stop: int

    @property
    def length(self) -> int:
        """The number of elements in the range."""
        return self.tensor_stop - self.tensor_start


@dataclass(frozen=True)
class Layout:
    """The positions of tensors in a flat buffer that is divided into equal shards, one for each rank.

    A shard stores a range of each tensor, possibly empty. The ranges of all shards together cover each tensor exactly
    once. Elements of the buffer that belong to no tensor are padding. Create a layout with `build`.

    Attributes:
        numels: the number of elements of each tensor.
        offsets: the index in the flat buffer of each tensor's first element. It does not depend on the number of
            shards.
        shard_numel: the number of elements of each shard.
        world_size: the number of shards.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_numel: int
    world_size: int

    @classmethod
    def build(cls, numels: Sequence[int], world_size: int, grain: int, spread: tuple[int, int] = (0, 1)) -> Layout:
        """Return a layout with the tensors one after another. There may be padding after each tensor and at the end.

        Args:
            numels: the number of elements of each tensor.
            world_size: the number of shards.
            grain: a number of elements. All tensors and all shards begin at multiples of it, so a tensor is divided
                between ranks only at multiples of `grain` from its own start. This keeps related elements together,
                such as 64 elements with a common scale, or the rows of a matrix. If `grain` is at least as large as the
                largest tensor, no tensor is divided.
            spread: (n, itemsize), for a buffer that is all-gathered with one byte per element. Its first n tensors,
                such as norms and biases, are an exception: they are sent unrounded, with `itemsize` bytes per element.
                Therefore the layout reserves one element for each of their bytes: tensor n begins at `itemsize` times
                its usual offset (if `itemsize` is 2, at 2048 instead of 1024). Everything before tensor n is in the
                first shard. n must be less than the number of tensors. The default, (0, 1), reserves nothing.
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
        """The number of elements of the flat buffer, including padding."""
        return self.shard_numel * self.world_size

    @property
    def extent(self) -> int:
        """The number of elements of the flat buffer up to the end of the last tensor.

        Unlike `numel`, it does not depend on the number of shards. Optimizers use it to number the elements of all flat
        buffers: the random bits of stochastic rounding depend on these numbers, which must be the same for any number
        of ranks.
        """
        return self.offsets[-1] + self.numels[-1] if self.numels else 0

    def range_of(self, index: int, rank: int) -> Range:
        """Return the range of tensor `index` that the shard of `rank` stores, possibly empty."""
        shard_begin = rank * self.shard_numel
        begin, end = self.offsets[index], self.offsets[index] + self.numels[index]
        start = min(max(begin, shard_begin), end)
        stop = max(min(end, shard_begin + self.shard_numel), start)
        shard_start = min(max(start - shard_begin, 0), self.shard_numel)
        return Range(start - begin, stop - begin, shard_start, shard_start + stop - start)

    def ranges(self, rank: int) -> list[Range]:
        """Return the range of each tensor that the shard of `rank` stores, possibly empty."""
        return [self.range_of(index, rank) for index in range(len(self.numels))]

    def cut_ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the (start, stop) ranges of `rank`'s shard that belong to tensors that are split between ranks.

        A split tensor is read in the full buffer. So in an all-gather, the rank must copy these ranges from its shard
        to its own full buffer. A tensor that the shard stores completely is read in the shard, and needs no copy.
        """
        return [
            (local_range.shard_start, local_range.shard_stop)
            for numel, local_range in zip(self.numels, self.ranges(rank))
            if 0 < local_range.length < numel
        ]

    @cached_property
    def sizes(self) -> list[int]:
        """The sizes, in elements, of the parts of the flat buffer: gap, tensor, gap, …, tensor, gap.

        A gap is padding, and may be empty. With these sizes, `torch.split_with_sizes` divides a full buffer into views
        of the tensors (at odd indices) and of the padding.
        """
        return _alternating([(o, o + n) for o, n in zip(self.offsets, self.numels)], self.numel)

    def shard_sizes(self, rank: int) -> list[int]:
        """Return the sizes of the parts of `rank`'s shard in elements: gap, range, gap, …, range, gap.

        There is one range for each tensor: the elements of it that the shard stores. A gap is padding. Ranges and gaps
        may be empty. With these sizes, `torch.split_with_sizes` divides a shard into views of the ranges (at odd
        indices) and of the padding.
        """
        return _alternating([(each.shard_start, each.shard_stop) for each in self.ranges(rank)], self.shard_numel)


def _alternating(ranges: Sequence[tuple[int, int]], end: int) -> list[int]:
    sizes, position = [], 0
    for start, stop in ranges:
        sizes += [start - position, stop - start]
        position = stop
    return [*sizes, end - position]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
