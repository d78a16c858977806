"""A flat gradient cut into chunks: which part of which tensor goes to which rank. Integers only."""

from __future__ import annotations

from typing import NamedTuple

from .layout import Layout


class Piece(NamedTuple):
    """Elements start:stop of tensor number `index`, which begin at `at` of a chunk."""

    index: int
    start: int
    stop: int
    at: int


class Chunk(NamedTuple):
    """What lies from element `begin` on in each rank's shard. pieces: by rank."""

    begin: int
    pieces: list[list[Piece]]


def cut(layout: Layout, length: int) -> list[Chunk]:
    """Chunks of `length` elements of every shard, the last one shorter. Together they hold every element once."""
    begins = range(0, layout.shard_numel, length)
    return [Chunk(b, [_pieces(layout, rank, b, b + length) for rank in range(layout.world_size)]) for b in begins]


def _pieces(layout: Layout, rank: int, begin: int, end: int) -> list[Piece]:
    """What `rank` has between these elements of its shard."""
    pieces = []
    for index in range(len(layout.numels)):
        place = layout.piece(index, rank)
        first, last = max(place.shard_start, begin), min(place.shard_stop, end)
        if first < last:
            shift = place.tensor_start - place.shard_start
            pieces.append(Piece(index, first + shift, last + shift, first - begin))
    return pieces
