"""Norms of sharded gradients over all ranks, computed for all tensors of a flat buffer at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ..comm.collective_log import CollectiveLog, value_code
from ..comm.communicator import Communicator
from ..ops.grad_norm import Segments, segmented_squared_norm

_CALLERS = 12
"""The maximum number of stack frames in which to look for `torch.nn.utils.clip_grad_norm_`."""


class SegmentNorms:
    """Computes the 2-norm, over all ranks, of each tensor of a flat buffer, in one pass and one all-reduce.

    A segment is the part of this rank's shard that belongs to one tensor. It may also include the padding after this
    part, which must be zero.

    The norms are cached until the shard's version counter changes. (Kernels that write through raw pointers increment
    this counter, too.) All ranks write to the buffer at the same points of the program, so either all ranks compute new
    norms, or no rank does.

    Args:
        shard: (n,) float32, float16 or bfloat16, this rank's shard.
        segments: the segments of the shard, one for each tensor of the flat buffer.
        communicator: does the all-reduce.
        squares: (k,) float64, the squared norms of the k segments on this rank, if they were already computed;
            otherwise None.
        version: the shard's version counter when `squares` were computed.
    """

    def __init__(
        self,
        shard: torch.Tensor,
        segments: Segments,
        communicator: Communicator,
        squares: torch.Tensor | None = None,
        version: int = 0,
    ) -> None:
        self._shard, self._segments, self.communicator = shard, segments, communicator
        self._norms: torch.Tensor | None = None
        self._version = -1
        self._squares, self._measured = squares, version

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return the 2-norm, over all ranks, of one tensor of the flat buffer. The result is a new float32 scalar.

        Collective if the norms are not cached.

        index: the tensor's index in the flat buffer.
        """
        return norms_of([self])[self][index]

    def __len__(self) -> int:
        """Return the number of tensors in the flat buffer."""
        return len(self._segments)

    def local_squares(self) -> torch.Tensor:
        """Return, for each tensor of the flat buffer, the sum of squares of this rank's elements. Not collective.

        The result is (k,) float64, for the k tensors. `norms_of` adds up the results of all ranks.
        """
        if self._squares is not None and self._measured == self._shard._version:
            return self._squares
        return segmented_squared_norm(self._shard, self._segments)


def norms_of(buffers: Sequence[SegmentNorms]) -> dict[SegmentNorms, Sequence[torch.Tensor]]:
    """Return and cache the 2-norms, over all ranks, of the tensors of several flat buffers.

    Collective if the norms of any buffer are not cached yet: one all-reduce computes those of all such buffers.

    Args:
        buffers: the SegmentNorms of each flat buffer, at least one, all with the same communicator.

    Returns:
        A dictionary from each of `buffers` to the norms of its tensors, as float32 scalars. The scalars are new
        tensors, which the caller may write to.
    """
    _measure([each for each in buffers if each._version != each._shard._version])
    norms = torch.cat([each._norms for each in buffers if each._norms is not None])
    return {each: part.unbind() for each, part in zip(buffers, norms.split([len(each) for each in buffers]))}


def _measure(stale: Sequence[SegmentNorms]) -> None:
    """Compute and cache the 2-norms of the tensors of several flat buffers, with one all-reduce in total.

    Collective: every rank must call it, unless `stale` is empty.

    stale: the SegmentNorms of each flat buffer, all with the same communicator.
    """
    if not stale:
        return
    note_clipping(stale[0].communicator.collective_log)
    parts = [each.local_squares() for each in stale]
    squares = torch.cat(parts)
    stale[0].communicator.all_reduce(squares).wait()
    norms = squares.sqrt_().float()
    for each, part in zip(stale, norms.split([len(part) for part in parts])):
        each._norms = part
        each._version = each._shard._version


def note_clipping(collective_log: CollectiveLog) -> None:
    """Record in `collective_log` the arguments of `torch.nn.utils.clip_grad_norm_`, if it is on the call stack.

    The ranks compare their logs, and so find out if they clip to different norms. The arguments are read from the
    local variables of `clip_grad_norm_`, because it does not pass them to the functions that it calls.
    """
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None:
            return
        if frame.f_code.co_name == "clip_grad_norm_" and frame.f_globals["__name__"] == "torch.nn.utils.clip_grad":
            for kind, name in ("clipping by the norm of order", "norm_type"), ("clipping to the norm", "max_norm"):
                value = frame.f_locals.get(name)
                if isinstance(value, (int, float)):  # reading a tensor might make the host wait for the device
                    collective_log.note(value_code(kind, value))
            return
        frame = frame.f_back
