"""Runs: ranges of neighbouring parameters, updated in one launch and measured in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter


@dataclass(eq=False)
class Run:
    """Neighbouring slices of one shard, or one ordinary parameter; the padding between slices is zero.

    parameters: in the order of the buffer. weights: (n,) the range of storage that they cover. buffer: None for
    an ordinary parameter. start: the first element of the range in the buffer's shard.
    """

    parameters: list[torch.nn.Parameter]
    weights: torch.Tensor
    buffer: ShardedBuffer | None
    start: int

    @classmethod
    def over(cls, parameters: list[torch.nn.Parameter]) -> Run:
        """The run of `parameters`, which are neighbours. ValueError for an ordinary one that is not contiguous."""
        first, last = parameters[0], parameters[-1]
        if isinstance(first, DistributedParameter) and isinstance(last, DistributedParameter):
            start = first.buffer.pieces[first.index].shard_start
            stop = first.buffer.pieces[last.index].shard_stop
            return cls(parameters, first.buffer.shard[start:stop], first.buffer, start)
        if not first.is_contiguous():
            raise ValueError(f"AdamOptimizer needs contiguous parameters, got shape {tuple(first.shape)}")
        return cls(parameters, first.detach().view(-1), None, 0)

    @property
    def owner(self) -> ShardedBuffer | torch.nn.Parameter:
        """The buffer, or the ordinary parameter."""
        return self.parameters[0] if self.buffer is None else self.buffer

    def begin(self, parameter: torch.nn.Parameter) -> int:
        """The first element of `parameter` in the range."""
        if not isinstance(parameter, DistributedParameter):
            return 0
        return parameter.buffer.pieces[parameter.index].shard_start - self.start

    def flat_gradient(self) -> torch.Tensor | None:
        """(n,) the `.grad`s as one tensor, not copied; None if the user has replaced one by another tensor."""
        if self.buffer is None:
            gradient = self.parameters[0].grad
            assert gradient is not None
            return gradient.reshape(-1)
        if not self.buffer.gradient.intact:
            return None
        assert self.buffer.gradient.shard is not None
        return self.buffer.gradient.shard[self.start : self.start + self.weights.numel()]

    def gradient(self) -> torch.Tensor:
        """(n,) the float32 running sum of an accumulation if there is one, otherwise the `.grad`s. To be read only."""
        flat = self.flat_gradient()
        if flat is None:
            return self._assembled()
        wide = None
        if self.buffer is not None:
            wide = self.buffer.gradient.wide(self.start, self.start + self.weights.numel())
        return flat if wide is None else wide

    def _assembled(self) -> torch.Tensor:
        """(n,) float32, a copy of the `.grad`s, of which some are tensors of the user's own."""
        flat = torch.zeros(self.weights.numel(), dtype=torch.float32, device=self.weights.device)
        for parameter in self.parameters:
            assert parameter.grad is not None
            start = self.begin(parameter)
            flat[start : start + parameter.numel()] = parameter.grad
        return flat


def neighbours(
    parameters: Sequence[torch.nn.Parameter], kind: Callable[[torch.nn.Parameter], object] = lambda parameter: None
) -> list[list[torch.nn.Parameter]]:
    """Divide `parameters` into maximal lists that are adjacent in one buffer and of one `kind`; an ordinary parameter
    is a list of its own."""
    runs: list[list[torch.nn.Parameter]] = [[p] for p in parameters if not isinstance(p, DistributedParameter)]
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    buffers = {buffer: number for number, buffer in enumerate(dict.fromkeys(p.buffer for p in slices))}
    slices.sort(key=lambda piece: (buffers[piece.buffer], piece.index))
    for earlier, later in zip([None, *slices], slices):
        follows = (
            earlier is not None
            and later.buffer is earlier.buffer
            and later.index == earlier.index + 1
            and kind(later) == kind(earlier)
        )
        if follows:
            runs[-1].append(later)
        else:
            runs.append([later])
    return runs


def index_bases(groups: Sequence[dict]) -> dict[Any, int]:
    """Number all elements of the `groups` in their order; return the first of every buffer (or ordinary parameter)."""
    bases, end = {}, 0
    for parameter in (p for group in groups for p in group["params"]):
        sliced = isinstance(parameter, DistributedParameter)
        owner = parameter.buffer if sliced else parameter
        if owner not in bases:
            bases[owner] = end
            end += parameter.buffer.layout.extent if sliced else parameter.numel()
    return bases
