"""The norms of all pieces of a flat gradient, measured together."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..comm.collectives import Communicator
from ..ops.grad_norm import Segments, segmented_squared_norm


class SegmentNorms:
    """The 2-norms over all ranks of the segments of one flat shard: one pass and one all-reduce for all of them.

    They are kept until the shard's version counter moves; whoever writes the shard behind torch's back moves it.
    All ranks write and ask alike, so all of them measure anew, or none.

    shard: (n,) float32, float16 or bfloat16. segments: of the shard; what lies between a segment's last element and
    the next segment is zero. squares: this rank's part of the segments' squares, (k,) float64, where the shard as it is
    now has been measured already.
    """

    def __init__(
        self, shard: torch.Tensor, segments: Segments, lane: Communicator, squares: torch.Tensor | None = None
    ) -> None:
        self._shard, self._segments, self.lane = shard, segments, lane
        self._norms: list[torch.Tensor] = []
        self._version = -1
        self._squares, self._measured = squares, shard._version

    def __getitem__(self, index: int) -> torch.Tensor:
        """The norm of segment `index`, a new scalar of the shard's dtype. Collective where it is to be measured."""
        measure([self])
        return self._norms[index].clone()

    @property
    def stale(self) -> bool:
        return self._version != self._shard._version

    def local_squares(self) -> torch.Tensor:
        """This rank's part: float64, one element a segment."""
        if self._squares is not None and self._measured == self._shard._version:
            return self._squares
        return segmented_squared_norm(self._shard, self._segments)

    def keep(self, squares: torch.Tensor) -> None:
        self._norms = list(squares.sqrt().to(self._shard.dtype).unbind())
        self._version = self._shard._version


def measure(norms: Iterable[SegmentNorms]) -> None:
    """Bring those that are stale up to date, by one all-reduce. Collective."""
    stale = [each for each in norms if each.stale]
    if not stale:
        return
    parts = [each.local_squares() for each in stale]
    squares = torch.cat(parts)
    stale[0].lane.all_reduce(squares).wait()
    for each, part in zip(stale, squares.split([len(part) for part in parts])):
        each.keep(part)
