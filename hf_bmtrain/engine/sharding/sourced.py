"""SourcedParameter: a loaded parameter whose values stay in a file or divided among the ranks until it is sharded."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import torch

from ..base.torch_internals import make_subclass
from ..comm.agreement import fingerprint
from ..comm.communicator import Communicator
from ..runtime.world import World

GATHERED_NUMEL = 1 << 20
"""The approximate maximum number of elements that one all-gather of `SourcedParameter.move` receives."""


class SourcedParameter(torch.nn.Parameter):
    """A parameter of the full shape on the meta device, whose values are in a file or divided equally among the ranks.

    A loaded model contains such parameters until auto_wrap shards it. Only then is it known which elements belong in
    which rank's shard. Meanwhile, no rank needs memory for all elements of the parameter.

    Attributes:
        values: a 1-D tensor; None after `move`. If `mapped` is True, it contains all elements. If `mapped` is False, it
            contains only this rank's share of the elements, in host memory. The shares of all ranks have the same
            length, so a share may be padded with zeros at its end.
        mapped: whether `values` is in a memory-mapped file, so that it needs no memory of its own.
        fingerprint: a hash of the full values, by which ranks compare them.
    """

    values: torch.Tensor | None
    mapped: bool
    fingerprint: str

    @classmethod
    def scatter(cls, full: torch.Tensor, rank: int, size: int, dtype: torch.dtype | None = None) -> SourcedParameter:
        """Return a SourcedParameter with the values of `full`. Not collective.

        Called when a parameter is loaded from a file. The result replaces the parameter in the model, until the model
        is sharded. If `full` is memory-mapped from the file and needs no cast, the result refers to `full`. Otherwise,
        the result contains a copy of this rank's share, that is, of 1/size of the elements.

        Args:
            full: a tensor on the CPU with the same values on all `size` ranks.
            rank: the index of this rank, from 0 to size - 1.
            size: the number of ranks.
            dtype: the dtype of the parameter; None for that of `full`.
        """
        dtype = full.dtype if dtype is None else dtype
        made: Any = make_subclass(cls, torch.empty_like(full, device="meta", dtype=dtype), full.requires_grad)
        made.values, made.mapped = full.detach().reshape(-1), dtype == full.dtype and is_mapped(full)
        made.fingerprint = fingerprint(made.values)
        if not made.mapped:
            made.divide(rank, size)
        return made

    def divide(self, rank: int, size: int) -> None:
        """Replace `values`, which must contain all elements, by a copy of this rank's share in host memory.

        Called for a loaded parameter, unless it is memory-mapped from a file on every rank. The share is one of `size`
        equal parts of the elements. If the number of elements is not a multiple of `size`, the last shares are padded
        with zeros.

        Args:
            rank: the index of this rank, from 0 to size - 1.
            size: the number of ranks.
        """
        assert self.values is not None
        values = _share_of(self.values, rank, size)
        self.values, self.mapped = _allocate(-(-len(self.values) // size), self.dtype), False
        self.values[: len(values)] = values

    def has_share_of(self, other: SourcedParameter, rank: int, size: int) -> bool:
        """Return whether this loaded parameter and `other` have the same shape and equal elements in this rank's share.

        Called to find out whether two loaded weights are equal, so that they may be tied. A rank compares only its own
        share (one of `size` equal parts of the elements), because it may not have loaded the other shares. The weights
        are equal if the result is True on all ranks. Not collective. Returns False if one of the two has been sharded,
        so that its values were dropped.

        Args:
            other: another loaded parameter.
            rank: the index of this rank, from 0 to size - 1.
            size: the number of ranks.
        """
        shares = [
            _share_of(each.values, rank, size) if each.mapped else each.values
            for each in (self, other)
            if each.values is not None
        ]
        if len(shares) < 2 or self.shape != other.shape:
            return False
        count = min(map(len, shares))  # a copied share may be padded with zeros at its end
        return torch.equal(shares[0][:count], shares[1][:count])

    @torch.no_grad()
    def move(self, part: torch.Tensor, start: int, communicator: Communicator) -> None:
        """Copy the elements of the parameter that belong in this rank's shard to `part`, and set `values` to None.

        Called when the parameter is sharded, for example by `auto_wrap`. Collective: every rank must call it.

        * If `mapped` is True, the attribute `values` is a memory-mapped file with all elements, from which each rank
          reads those of its shard.
        * Otherwise `values` contains this rank's share, which is one of N equal parts of the elements, for N ranks. A
          share is not a shard: the elements that belong in a rank's shard may be in any rank's share. So the ranks
          all-gather their shares, piece by piece, and each rank copies the elements of its shard from the result.

        Args:
            part: (n,) the part of this rank's shard of the flat buffer that belongs to this parameter. It is filled.
            start: the index of the first of these n elements in the flattened parameter.
            communicator: connects the ranks among which the values are divided. `mapped` must be the same on all ranks.

        Raises:
            RuntimeError: the values were dropped already, by an earlier call.
        """
        if self.values is None:
            raise RuntimeError(
                f"The values of a loaded parameter of shape {tuple(self.shape)} were moved to a shard already, by an "
                "earlier auto_wrap. Load the model again to shard it again."
            )
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
                first = rank * len(share) + at  # the index of values[0] in the flattened parameter
                low, high = max(start, first), min(stop, first + len(values))
                if low < high:
                    part[low - start : high - start] = values[low - first : high - first]


def divide_unless_mapped_everywhere(model: torch.nn.Module, world: World) -> None:
    """Make each loaded parameter of a model either mapped from a file on all ranks, or divided among them in memory.

    If a parameter is mapped on this rank but not on all ranks, copy this rank's share of its elements to memory. (On
    ranks where it is not mapped, it is divided already.) Afterwards, `mapped` of each parameter is equal on all ranks,
    as `SourcedParameter.move` requires. Collective: every rank must call it.

    model: the model. Its SourcedParameters must have the same names on all ranks. Other parameters do not change.
    """
    parameters = {name: p for name, p in model.named_parameters() if isinstance(p, SourcedParameter)}
    mapped = world.gather_objects({name for name, parameter in parameters.items() if parameter.mapped})
    for name, parameter in parameters.items():
        if parameter.mapped and not all(name in names for names in mapped):
            parameter.divide(world.shard_group.rank, world.shard_group.size)


def _share_of(values: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    length = -(-len(values) // size)
    return values[rank * length : (rank + 1) * length]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is in a memory-mapped file, so that a reference to it needs no memory of its own.

    `SourcedParameter.scatter` does not copy such a tensor, unless a cast is needed. Returns False for a tensor that is
    not contiguous, and on systems without /proc/self/maps.
    """
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
    """Return zeros (numel,) on the CPU for this rank's share (1/N) of a loaded tensor.

    Shares of at least one page get their own memory mapping. In malloc's heap, the full tensors that are freed during
    loading would lie between the shares, and their memory could not be returned to the system.
    """
    if numel * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(numel, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)
