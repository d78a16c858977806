"""Where the elements of one whole tensor are: which of them this rank's slice holds, and how to gather the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..comm.communicator import Communicator
from ..comm.layout import Layout, Piece


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
    def piece(self) -> Piece:
        """This rank's piece."""
        return self.layout.piece(self.index, self.communicator.rank)

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

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `whole`, of `shape`, as a 1-D view (of a copy, if that is not contiguous)."""
        return whole.reshape(-1)[self.piece.tensor_start : self.piece.tensor_stop]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return a new whole tensor made of every rank's `part` of it, 1-D tensors of one dtype. Collective."""
        pieces = [self.layout.piece(self.index, rank) for rank in range(self.layout.world_size)]
        longest = max(piece.length for piece in pieces)
        mine = part.new_zeros(longest)
        mine[: len(part)] = part
        every = part.new_empty(len(pieces) * longest)
        self.communicator.all_gather(every, mine).wait()
        rows = every.view(len(pieces), longest)
        return torch.cat([row[: piece.length] for row, piece in zip(rows, pieces)]).view(self.shape)
