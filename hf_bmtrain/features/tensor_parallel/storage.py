"""Storage of tensor-parallel parameters. It converts between a rank's part and the whole tensor of checkpoints."""

from __future__ import annotations

import torch

from ...engine.runtime.world import Grid
from ...engine.sharding.storage import Storage, StorageKind


class WholeStorage(Storage):
    """Storage of unsplit parameters that all ranks of a tensor-parallel group use for the same rows of the batch.

    In a model with BMTrain's layers, these are the unsplit parameters that were created with `tp_mode=True`. In a model
    that was split by a tensor-parallel plan, these are all unsplit parameters, except those that each rank applies only
    to its own features. The elements are stored as in `Storage`.

    Args:
        kind: the StorageKind that made this storage. It determines over which ranks the gradient is averaged. If a full
            copy of a parameter is made and sharded again, for example after a deep copy of the model, the copy gets the
            same StorageKind, so that its gradient is averaged over the same ranks.
    """

    has_fixed_addresses = False

    def __init__(self, kind: StorageKind) -> None:
        self.kind = kind


class PartStorage(WholeStorage):
    """Storage of this rank's parts of tensors that are split over a tensor-parallel group.

    It stores the elements of this rank's part unchanged, and converts parts to and from whole tensors for checkpoints.

    Args:
        kind: the StorageKind that made this storage. It determines that the part is sharded over the ranks with the
            same part. If a full copy of a part is made and sharded again, for example after a deep copy of the model,
            the copy gets the same StorageKind, and so is sharded over the same ranks.
        grid: the tensor-parallel groups. Each rank of a group has one part.
        dim: the dimension on which the whole tensors are split.
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
        """Return where a checkpoint stores this rank's elements of a split parameter.

        Checkpoints contain the parts one after another, so that the elements of each rank are contiguous. If the tensor
        is split on dimension 0, the saved shape is that of the whole tensor. If it is split on another dimension, the
        parts are saved as a stack, (tp_size, *shape of a part).

        index: the index of the parameter in its flat buffer.

        Returns:
            (the shape of the saved tensor, the index of this rank's first element in the flattened saved tensor).
        """
        part, first = super().saved_as(index)
        stacked = self.whole_shape(index) if self.dim == 0 else torch.Size([self.grid.size, *part])
        return stacked, self.grid.place * part.numel() + first

    def own(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        shape = self.whole_shape(index)
        if whole.shape != shape:
            raise ValueError(
                f"A tensor for this parameter must have shape {tuple(shape)}, because each of the {self.grid.size} "
                "ranks of a tensor-parallel group (tp_size) takes its part of the whole tensor. The given tensor has "
                f"shape {tuple(whole.shape)}. Pass the whole tensor on every rank, not a part of it."
            )
        return whole.chunk(self.grid.size, self.dim)[self.grid.place]
