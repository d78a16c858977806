"""Make Accelerate's data loaders give the same batches to the ranks of a group, which share rows (sequences)."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.runtime.world import World


@dataclass(frozen=True)
class _Dimension:
    ranks: int

    def size(self) -> int:
        return self.ranks


class GroupMesh:
    """Replacement for the DeviceMesh from which Accelerate's data loaders compute which batches a rank gets.

    With it, each group of `size` consecutive ranks gets the same batches, as in context parallelism: the dimension "cp"
    has the size of a group. Accelerate reads nothing but the names and sizes of the dimensions.

    Args:
        size: the number of ranks in a group.
        ranks: the total number of ranks.
    """

    mesh_dim_names = ("dp_shard", "cp")

    def __init__(self, size: int, ranks: int) -> None:
        self._sizes = {"dp_shard": ranks // size, "cp": size}

    def __getitem__(self, name: str) -> _Dimension:
        return _Dimension(self._sizes[name])


def share_batches(size: int, world: World) -> None:
    """Make the data loaders that Accelerate prepares from now on give each group of `size` ranks the same batches.

    This has no effect if no Accelerator has been created.
    """
    if world.accelerator is not None:
        world.accelerator.device_mesh = GroupMesh(size, world.size)
