"""Make Accelerate's data loaders give the ranks of a group the same batches.

Accelerate is not imported here. If the program has imported it, its state is read from `sys.modules`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class _Dimension:
    ranks: int

    def size(self) -> int:
        return self.ranks


class GroupMesh:
    """Stands for a DeviceMesh in Accelerate's data loaders: groups of `size` consecutive ranks get the same data.

    Accelerate divides the ranks by the size of the dimension "cp", and reads no other attributes.
    """

    mesh_dim_names = ("dp_shard", "cp")

    def __init__(self, size: int, ranks: int) -> None:
        self._sizes = {"dp_shard": ranks // size, "cp": size}

    def __getitem__(self, name: str) -> _Dimension:
        return _Dimension(self._sizes[name])


def share_batches(size: int, ranks: int) -> None:
    """Make data loaders give groups of `size` ranks the same batches, if the current Accelerator prepares them later.

    Does nothing without an Accelerator.
    """
    module = sys.modules.get("accelerate.state")
    if module is not None and module.AcceleratorState._shared_state:
        module.AcceleratorState().device_mesh = GroupMesh(size, ranks)
