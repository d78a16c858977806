"""Norms of gradients over all ranks, measured together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

from ..comm.collective_log import CollectiveLog, value_code
from ..comm.communicator import Communicator
from ..ops.grad_norm import Segments, segmented_squared_norm

_CALLERS = 12
"""Functions among which `torch.nn.utils.clip_grad_norm_` is looked for."""


class SegmentNorms:
    """The 2-norms over all ranks of the segments of a flat shard, by one pass and one all-reduce for all of them.

    They are cached until the shard's version counter changes; kernels that write the shard through raw pointers
    increment it. All ranks write and ask alike, so all of them measure again, or none.

    shard: (n,) float32, float16 or bfloat16. segments: of the shard; elements between the end of a segment and the next
    one are zero. squares: this rank's part of the segments' squares, (k,) float64, if the present shard has been
    measured already.
    """

    def __init__(
        self, shard: torch.Tensor, segments: Segments, communicator: Communicator, squares: torch.Tensor | None = None
    ) -> None:
        self._shard, self._segments, self.communicator = shard, segments, communicator
        self._norms = torch.empty(0)
        self._version = -1
        self._squares, self._measured = squares, shard._version

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the norm of segment `index`, a new float32 scalar. Collective if it must be measured."""
        return self.all()[index]

    def all(self) -> Sequence[torch.Tensor]:
        """Return the norms of all segments, float32 scalars in new memory. Collective if they must be measured."""
        measure([self])
        return self._norms.clone().unbind()

    def local_squares(self) -> torch.Tensor:
        """Return this rank's part of the squared norms, (k,) float64."""
        if self._squares is not None and self._measured == self._shard._version:
            return self._squares
        return segmented_squared_norm(self._shard, self._segments)


def measure(norms: Iterable[SegmentNorms]) -> None:
    """Measure the stale ones again, by one all-reduce. Collective."""
    stale = [each for each in norms if each._version != each._shard._version]
    if not stale:
        return
    note_clipping(stale[0].communicator.collective_log)
    parts = [each.local_squares() for each in stale]
    squares = torch.cat(parts)
    stale[0].communicator.all_reduce(squares).wait()
    for each, part in zip(stale, squares.split([len(part) for part in parts])):
        each._norms = part.sqrt().float()
        each._version = each._shard._version


def note_clipping(collective_log: CollectiveLog) -> None:
    """Note what `torch.nn.utils.clip_grad_norm_` clips to, if it asks for a norm, so that the ranks compare it.

    It tells none of the functions that it calls, and the gradients are only multiplied by a factor on the device.
    """
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            return
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals["__name__"] == "torch.nn.utils.clip_grad":
            for kind, name in ("clipping by the norm of order", "norm_type"), ("clipping to the norm", "max_norm"):
                value = frame.f_locals.get(name)
                if isinstance(value, (int, float)):  # a tensor may be on a device that has not computed it yet
                    collective_log.note(value_code(kind, value))
            return
        frame = frame.f_back
