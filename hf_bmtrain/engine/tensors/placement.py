"""Where the elements of one whole tensor are: which of them this rank's slice holds, and how to gather the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..comm.communicator import Communicator
from ..comm.layout import Layout, Range


@dataclass(frozen=True, eq=False)
class Placement:
    """How a whole tensor of `shape` is cut into slices: as tensor `index` of `layout`.

    A view of a slice has the same placement with another `shape`. communicator: of all ranks; slices are gathered and
    reduced on it.
    """

    layout: Layout
    index: int
    shape: torch.Size
    communicator: Communicator

    @cached_property
    def range(self) -> Range:
        """This rank's piece."""
        return self.layout.range_of(self.index, self.communicator.rank)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return self.layout.numels[self.index]

    def matches(self, other: Placement) -> bool:
        """Return whether two tensors are cut alike on every rank. The same on every rank."""
        if self is other:
            return True
        mine, theirs = (
            (each.shape, each.layout.offsets[each.index], each.layout.shard_numel) for each in (self, other)
        )
        return mine == theirs

    def with_shape(self, shape: torch.Size) -> Placement:
        """Return the placement of a view of the whole tensor, in `shape` and in the same order of elements."""
        return replace(self, shape=shape)

    def as_real(self) -> Placement:
        """Return the placement of the real and imaginary parts of a complex tensor, in its last dimension."""
        layout = self.layout
        twice = replace(
            layout,
            numels=tuple(2 * numel for numel in layout.numels),
            offsets=tuple(2 * offset for offset in layout.offsets),
            shard_numel=2 * layout.shard_numel,
        )
        return replace(self, layout=twice, shape=torch.Size([*self.shape, 2]))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `full`, of `shape`, as a 1-D view (of a copy, if that is not contiguous)."""
        return full.reshape(-1)[self.range.tensor_start : self.range.tensor_stop]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return a new whole tensor made of every rank's `part` of it, 1-D tensors of one dtype. Collective."""
        local_ranges = [self.layout.range_of(self.index, rank) for rank in range(self.layout.world_size)]
        longest = max(local_range.length for local_range in local_ranges)
        mine = part.new_zeros(longest)
        mine[: len(part)] = part
        every = part.new_empty(len(local_ranges) * longest)
        self.communicator.all_gather(every, mine).wait()
        rows = every.view(len(local_ranges), longest)
        return torch.cat([row[: local_range.length] for row, local_range in zip(rows, local_ranges)]).view(self.shape)
