"""SourcedParameter: a loaded parameter that no rank holds whole until it is sharded."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..base.torch_internals import make_subclass
from ..comm.agreement import fingerprint
from ..comm.communicator import Communicator
from ..runtime.world import World

GATHERED_NUMEL = 1 << 20
"""At most about so many elements are gathered at a time."""


class SourcedParameter(torch.nn.Parameter):
    """A whole parameter on the meta device, whose values are in a file, or divided equally among the ranks.

    It stands for a parameter in a model that auto_wrap will shard, from the time its values were read: which elements a
    rank's shard will hold is known only when the model is complete.

    values: 1-D; None once they are sharded. mapped: they are all of them, in a file that this process has mapped, and
    take no memory of its own. Otherwise they are this rank's share, in host memory, as long on every rank, the end
    filled with zeros. fingerprint: of the whole, to be compared between the ranks.
    """

    values: torch.Tensor | None
    mapped: bool
    fingerprint: str

    @classmethod
    def scatter(cls, full: torch.Tensor, rank: int, size: int, dtype: torch.dtype | None = None) -> SourcedParameter:
        """Take the values of `full`, a tensor on the CPU that has the same ones on all `size` ranks.

        dtype: that of the parameter, if it is not that of `full`.
        """
        dtype = full.dtype if dtype is None else dtype
        made: Any = make_subclass(cls, torch.empty_like(full, device="meta", dtype=dtype), full.requires_grad)
        made.values, made.mapped = full.detach().reshape(-1), dtype == full.dtype and is_mapped(full)
        made.fingerprint = fingerprint(made.values)
        if not made.mapped:
            made.divide(rank, size)
        return made

    def divide(self, rank: int, size: int) -> None:
        """Copy the share of `rank`, and let go of the rest."""
        assert self.values is not None
        values = _share_of(self.values, rank, size)
        self.values, self.mapped = _allocate(-(-len(self.values) // size), self.dtype), False
        self.values[: len(values)] = values

    def has_share_of(self, other: SourcedParameter, rank: int, size: int) -> bool:
        """Return whether this rank's share of `other` has the same values, and `other` the same shape."""
        shares = [
            _share_of(each.values, rank, size) if each.mapped else each.values
            for each in (self, other)
            if each.values is not None
        ]
        if len(shares) < 2 or self.shape != other.shape:
            return False
        count = min(map(len, shares))  # without the zeros at the end
        return torch.equal(shares[0][:count], shares[1][:count])

    @torch.no_grad()
    def move(self, part: torch.Tensor, start: int, communicator: Communicator) -> None:
        """Fill `part`, 1-D, with the whole's elements from `start` on, and drop the values. Collective.

        `mapped` must be the same on all ranks.
        """
        if self.values is None:
            raise RuntimeError(f"The values of a parameter of shape {tuple(self.shape)} were moved to a shard before.")
        share, self.values = self.values, None
        if self.mapped:
            part.copy_(share[start : start + len(part)])
            return
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


def divide_unless_mapped_everywhere(parameters: Mapping[str, SourcedParameter], world: World) -> None:
    """Divide the values that are not in a mapped file on every rank. Collective, with the same names on all ranks."""
    mapped = world.gather_objects({name for name, parameter in parameters.items() if parameter.mapped})
    for name, parameter in parameters.items():
        if parameter.mapped and not all(name in names for names in mapped):
            parameter.divide(world.rank, world.size)


def _share_of(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    length = -(-len(values) // size)
    return values[rank * length : (rank + 1) * length]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether the memory of `tensor` is a file's, False where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not tensor.is_contiguous() or not maps.exists():
        return False
    address = tensor.data_ptr()
    for line in maps.read_text().splitlines():
        places, *_, path = line.split(" ", 1)
        start, stop = (int(place, 16) for place in places.split("-"))
        if start <= address < stop:
            return "/" in path and not path.endswith("(deleted)")
    return False


def _allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros (numel,) in a mapping of their own, which the system gets back when they are dropped.

    In malloc's heap the short-lived whole tensors of the loading would leave holes between the shares.
    """
    if numel * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
