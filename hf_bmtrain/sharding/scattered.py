"""ScatteredParameter: a loaded parameter, of which each rank has an equal share until it is sharded."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from ..comm.collectives import Communicator
from ..ops.torch_internals import make_subclass

GATHERED_NUMEL = 1 << 20
"""At most about so many elements are gathered at a time."""


class ScatteredParameter(torch.nn.Parameter):
    """A whole parameter on the meta device, whose values are divided equally among the ranks, in host memory.

    It stands for a parameter in a model that auto_wrap will shard, from the time its values were read: which elements a
    rank's shard will hold is known only when the model is complete.

    share: this rank's elements, 1-D and as long on every rank, the end filled with zeros; None once they are sharded.
    """

    share: torch.Tensor | None

    @classmethod
    def scatter(cls, whole: torch.Tensor, rank: int, size: int) -> ScatteredParameter:
        """Copy the share of `rank` out of `whole`, a tensor on the CPU that has the same values on all `size` ranks."""
        length = -(-whole.numel() // size)
        values = whole.detach().reshape(-1)[rank * length : (rank + 1) * length]
        made: Any = make_subclass(cls, torch.empty_like(whole, device="meta"), whole.requires_grad)
        made.share = _allocate(length, values.dtype)
        made.share[: len(values)] = values
        return made

    def has_share_of(self, other: ScatteredParameter) -> bool:
        """Return whether this rank's share of `other` has the same values, and `other` the same shape."""
        if self.share is None or other.share is None:
            return False
        return self.shape == other.shape and torch.equal(self.share, other.share)

    @torch.no_grad()
    def move(self, part: torch.Tensor, start: int, communicator: Communicator) -> None:
        """Fill `part`, 1-D, with the whole's elements from `start` on, and drop this rank's share. Collective."""
        if self.share is None:
            raise RuntimeError(f"The values of a parameter of shape {tuple(self.shape)} were moved to a shard before.")
        share, self.share = self.share, None
        stop, step = start + len(part), max(1, GATHERED_NUMEL // communicator.size)
        for at in range(0, len(share), step):
            mine = share[at : at + step].to(part.device)
            every = mine.new_empty(communicator.size * len(mine))
            communicator.all_gather(every, mine).wait()
            for rank, values in enumerate(every.view(communicator.size, -1)):
                first = rank * len(share) + at  # the whole's element that is values[0]
                low, high = max(start, first), min(stop, first + len(values))
                if low < high:
                    part[low - start : high - start] = values[low - first : high - first]


def _allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (numel,) in a mapping of their own, which the system gets back when they are dropped.

    In malloc's heap the short-lived whole tensors of the loading would leave holes between the shares.
    """
    if numel * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(numel, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
