"""Storage of split parameters, which converts between the parts of a tensor and the whole tensor of checkpoints."""

from __future__ import annotations

import torch

from ...engine.runtime.world import Grid
from ...engine.sharding.storage import Storage, StorageKind


class WholeStorage(Storage):
    """Stores plain elements. Parameters that are moved to another buffer keep this kind of storage."""

    def __init__(self, kind: StorageKind) -> None:
        self.kind = kind


class PartStorage(WholeStorage):
    """Stores plain elements of parameters that are parts of whole tensors.

    Args:
        kind: the kind of storage.
        grid: the groups of ranks. Each rank of a group has one part.
        dim: the dimension on which the tensors are split.
    """

    is_part = True

    def __init__(self, kind: StorageKind, grid: Grid, dim: int) -> None:
        super().__init__(kind)
        self.grid, self.dim = grid, dim

    def whole_shape(self, index: int) -> torch.Size:
        shape = [*super().whole_shape(index)]
        shape[self.dim] *= self.grid.size
        return torch.Size(shape)

    def whole(self, index: int, full: torch.Tensor) -> torch.Tensor:
        part = full.detach().contiguous()
        parts = part.new_empty((self.grid.size, *part.shape))
        if part.numel():
            self.grid.together.all_gather(parts.view(-1), part.view(-1)).wait()
        return torch.cat(parts.unbind(), self.dim)

    def saved_as(self, index: int) -> tuple[torch.Size, int]:
        """As in `Storage`. The parts are stacked, because a part of rows is contiguous in the whole tensor, but a part
        of columns is not. For a split on dimension 0, the stack has the elements and the shape of the whole tensor.
        """
        part, first = super().saved_as(index)
        stacked = self.whole_shape(index) if self.dim == 0 else torch.Size([self.grid.size, *part])
        return stacked, self.grid.place * part.numel() + first

    def own(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        shape = self.whole_shape(index)
        if whole.shape != shape:
            raise ValueError(
                f"`full` must be the whole tensor, which {self.grid.size} ranks split into parts: its shape must be "
                f"{tuple(shape)}, but is {tuple(whole.shape)}"
            )
        return whole.chunk(self.grid.size, self.dim)[self.grid.place]
