"""Placement: which elements of a sharded tensor each rank stores, and the all-gather of the full tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..comm.communicator import Communicator
from ..comm.layout import Layout, Range


@dataclass(frozen=True, eq=False)
class Placement:
    """Describes which elements of one sharded tensor each rank stores.

    A view of a sharded tensor has the same placement, except for `shape`.

    Attributes:
        layout: the layout of the flat buffer that contains the tensor. It gives the position of each tensor in the
            buffer, and the part of the buffer that each rank stores (its shard).
        index: the tensor's index in the layout.
        shape: the shape of the full tensor.
        communicator: the communicator of the ranks over which the tensor is sharded.
        norms: the communicator for norms and for the search for inf and nan. If the full tensor is one part of a tensor
            that tensor parallelism splits, `norms` also includes the ranks that store the other parts.
    """

    layout: Layout
    index: int
    shape: torch.Size
    communicator: Communicator
    norms: Communicator

    @cached_property
    def range(self) -> Range:
        """The range of the full tensor's elements that this rank stores."""
        return self.layout.range_of(self.index, self.communicator.rank)

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return self.layout.numels[self.index]

    def matches(self, other: Placement) -> bool:
        """Return whether the two placements have the same shape, offset in the flat buffer, and shard size.

        If so, each rank stores the same elements of both tensors, so an element-wise function of the two tensors needs
        no communication. This method returns the same value on every rank.
        """
        if self is other:
            return True
        mine, theirs = (
            (each.shape, each.layout.offsets[each.index], each.layout.shard_numel) for each in (self, other)
        )
        return mine == theirs

    def with_shape(self, shape: torch.Size) -> Placement:
        """Return the placement of a view of this tensor that has the full shape `shape` and the same order of elements.

        Each rank stores the same elements of the view as of the tensor.
        """
        return replace(self, shape=shape)

    def as_real(self) -> Placement:
        """Return the placement of `torch.view_as_real(x)`, where x is a complex tensor with this placement."""
        layout = self.layout
        twice = replace(
            layout,
            numels=tuple(2 * numel for numel in layout.numels),
            offsets=tuple(2 * offset for offset in layout.offsets),
            shard_numel=2 * layout.shard_numel,
        )
        return replace(self, layout=twice, shape=torch.Size([*self.shape, 2]))

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of a full tensor, as a 1-D view (as a copy if `full` is not contiguous)."""
        return full.reshape(-1)[self.range.tensor_start : self.range.tensor_stop]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor, all-gathered into new memory. Collective: every rank must call it.

        part: (n,), this rank's elements of the tensor.
        """
        local_ranges = [self.layout.range_of(self.index, rank) for rank in range(self.layout.world_size)]
        longest = max(local_range.length for local_range in local_ranges)
        mine = part.new_zeros(longest)
        mine[: len(part)] = part
        every = part.new_empty(len(local_ranges) * longest)
        self.communicator.all_gather(every, mine).wait()
        rows = every.view(len(local_ranges), longest)
        return torch.cat([row[: local_range.length] for row, local_range in zip(rows, local_ranges)]).view(self.shape)
