"""Make tensor-parallel groups, and define which ranks shard a tensor-parallel parameter and average its gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.comm.communicator import CollectiveGather, OpenGroup
from ...engine.comm.object_comm import ObjectComm
from ...engine.comm.reduce import CollectiveReduction, LocalReduction, Reduction
from ...engine.runtime.world import Grid, World
from ...engine.sharding.storage import Storage, StorageKind
from .storage import PartStorage, WholeStorage


def make_grid(rank: int, ranks: int, size: int, open_group: OpenGroup) -> Grid:
    """Divide the ranks into tensor-parallel groups of consecutive ranks, and open their communicators.

    Collective: every rank must call it.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        size: the number of ranks in each group. `ranks` must be a multiple of it.
        open_group: a function (see `OpenGroup`) that divides all ranks into groups, and returns the communicator of
            this rank's group. It gets the number of ranks in a group, and the distance between them (1 by default).

    Returns:
        A Grid: the size of the groups, this rank's index in its group, the number of groups, the index of this rank's
        group, and two communicators: one between the ranks of this rank's group, and one between the ranks that have
        the same index in their groups as this rank.
    """
    together, across = open_group(size), open_group(ranks // size, size)
    return Grid(size, rank % size, ranks // size, rank // size, together, across)


class Groups:
    """Defines which ranks shard a parameter with `tp_mode=True`, and over which ranks its gradient is averaged.

    `tp_mode` is an argument of DistributedParameter. True means that the ranks of a tensor-parallel group use the
    parameter for the same rows of the batch. There are two cases:

    * The parameter is a part of a tensor that is split over a tensor-parallel group. It is sharded, and its gradient is
      averaged, over the ranks that have the same part: one in each group.
    * The parameter is not split. It is sharded, and its gradient is averaged, over all ranks.

    Args:
        grid: the tensor-parallel groups.
        device: this rank's device.
        mean: the reduction that averages gradients over all ranks.
    """

    def __init__(self, grid: Grid, device: torch.device, mean: Reduction) -> None:
        self.grid, self.mean = grid, mean
        # If there is only one group, no two ranks have the same part, so gradients of parts need not be averaged.
        self.across = LocalReduction() if grid.groups == 1 else CollectiveReduction(grid.across, device)
        self._world: World | None = None

    def kind(self, dim: int) -> StorageKind:
        """Return the StorageKind of parameters with `tp_mode=True`: it defines over which ranks they are sharded.

        Args:
            dim: the dimension on which the whole tensors are split over a tensor-parallel group, or -1 if the tensors
                are not split.

        Returns:
            For `dim` >= 0, a `Part`. Each parameter is this rank's part of a tensor, such as the weight of a
            ColumnParallelLinear. It is sharded over the ranks that have the same part, one of each group.
            For `dim` = -1, a `SameRows`. Each parameter is a full tensor that every rank of a group uses for the same
            rows, such as the bias of a RowParallelLinear with all_reduce_output=True. It is sharded over all ranks.
            In both cases, the gradient is averaged over the ranks that shard the parameter. For example, 8 ranks with
            tp_size=2 form 4 groups: a `Part` is sharded over 4 ranks, a `SameRows` over 8.
        """
        return SameRows(self) if dim < 0 else Part(self, dim)

    def ranks_with_this_part(self, world: World) -> World:
        """Return a World of the ranks that have the same part of split tensors as this rank: one in each group.

        world: the World of all ranks.
        """
        if self._world is None:
            across = self.grid.across
            self._world = dataclasses.replace(
                world, rank=across.rank, size=across.size, gather=across, reduce=across,
                shards=CollectiveGather(across), shard_group=across,
                control=_Posts(world.control, across.size, self.grid.place), norms=world.reduce,
            )  # fmt: skip
        return self._world


@dataclass(frozen=True)
class SameRows(StorageKind):
    """The StorageKind of unsplit parameters with `tp_mode=True`.

    `tp_mode`, an argument of DistributedParameter, says that all ranks of a tensor-parallel group use the parameter for
    the same rows of the batch. These parameters are sharded over all ranks, and their gradients are averaged over all
    ranks.

    Attributes:
        groups: the Groups object, whose `mean` is the reduction that averages the gradients.
    """

    groups: Groups

    def share(self, world: World, reduction: Reduction) -> tuple[World, Reduction]:
        return world, self.groups.mean

    def make(self, parameters: Any, small: int) -> Storage:
        return WholeStorage(self)


@dataclass(frozen=True)
class Part(StorageKind):
    """The StorageKind of this rank's parts of tensors that are split over a tensor-parallel group.

    Each part is sharded over the ranks that have the same part, one in each group, and its gradient is averaged over
    these ranks.

    Attributes:
        groups: the Groups object, which knows the ranks that have the same part.
        dim: the dimension on which the tensors are split.
    """

    groups: Groups
    dim: int

    def share(self, world: World, reduction: Reduction) -> tuple[World, Reduction]:
        return self.groups.ranks_with_this_part(world), self.groups.across

    def make(self, parameters: Any, small: int) -> Storage:
        return PartStorage(self, self.groups.grid, self.dim)


class _Posts(ObjectComm):
    """Exchanges strings among the ranks that have the same part of split tensors: one rank per tensor-parallel group.

    A string lists, for example, the parameters that a rank has not used in a backward. The strings are stored in the
    key-value store that all ranks share, without collectives. Each key begins with the index of the part, so that ranks
    with other parts do not read these strings.

    control: the ObjectComm of all ranks.
    size: the number of ranks that have the same part.
    group: the index of this part among the parts of a tensor, 0 to tp_size - 1.
    """

    def __init__(self, control: ObjectComm, size: int, group: int) -> None:
        self.size, self._control, self._group = size, control, group

    def post(self, key: str, text: str) -> None:
        if self.size > 1:
            self._control.post(f"{self._group}/{key}", text)

    def read_posts(self, key: str) -> list[str]:
        return self._control.read_posts(f"{self._group}/{key}")

    def delete_posts(self, key: str) -> None:
        self._control.delete_posts(f"{self._group}/{key}")
