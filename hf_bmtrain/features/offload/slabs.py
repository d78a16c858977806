"""Optimizer state in page-locked host memory. It is allocated in slabs, and copied to the device in chunks.

A slab is a large piece of memory with the state of several runs, and a chunk is a range of a slab.
A run is a contiguous range of parameters that are updated together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.base.pinned import pinned_bytes
from ...engine.optim.runs import Run, StateTensors
from ...engine.sharding.buffer import ShardedBuffer

SLAB_ELEMENTS = 1 << 28
"""The largest number of elements in a slab (a piece of host memory) that several runs (parameters that are updated
together) share. A run with more elements gets a larger slab of its own."""
CHUNK_ELEMENTS = 1 << 22
"""The largest number of elements in a chunk, which is copied to the device as one piece. In float32, this is 16 MiB:
large enough to reach PCIe's full speed, and small enough that one copy takes little time compared with a step."""
ALIGNMENT = 64
"""The state of each run (parameters that are updated together) starts at a multiple of this many elements in its slab.
Its alignment is then at least that of the weights in their shard."""

_INSTEAD = "train on more ranks (each then stores less), or keep the state on the GPU with AdamOptimizer"


@dataclass(frozen=True)
class Place:
    """Where the optimizer state of one run (parameters that are updated together) is in host memory.

    Attributes:
        slab: the slab, a large piece of page-locked memory that contains the state of several runs.
        start: the index of the run's first element in the slab.
    """

    slab: StateTensors
    start: int


@dataclass(frozen=True)
class Part:
    """The part of a chunk (a range of the optimizer state in host memory) that belongs to one run of parameters.

    Attributes:
        run: the index of the run, whose parameters are updated together.
        of_run: the indices of the part's elements in the run.
        of_chunk: the indices of the same elements in the chunk.
    """

    run: int
    of_run: slice
    of_chunk: slice


@dataclass(eq=False)
class Chunk:
    """A range of a slab (a large piece of host memory) that is copied to the device and updated there as one piece.

    Attributes:
        owner: the flat buffer, or the unsharded parameter, to which the state in this chunk belongs.
        slab: the slab.
        start: the index of the first element in the slab.
        stop: the index after the last element in the slab.
        parts: one Part for each run (parameters that are updated together) that has elements in the chunk.
    """

    owner: ShardedBuffer | torch.nn.Parameter
    slab: StateTensors
    start: int
    stop: int
    parts: list[Part]


def allocate_slabs(
    runs: Sequence[Run], masters: Sequence[torch.dtype | None], exp_avg_dtype: torch.dtype
) -> dict[Run, Place]:
    """Allocate slabs (large pieces) of page-locked host memory for the Adam state of all runs, in the given order.

    Args:
        runs: the runs (parameters that are updated together).
        masters: for each run, the dtype in which its master weights are stored, or None if it needs none. Runs with
            different dtypes get different slabs.
        exp_avg_dtype: the dtype of the first moment.

    Returns:
        {run: its Place, the slab and the index at which its state starts}.

    Raises:
        RuntimeError: there is too little host memory, or it cannot be page-locked.
    """
    places: dict[Run, Place] = {}
    first = 0
    while first < len(runs):
        last, end, starts = first, 0, []
        while last < len(runs) and masters[last] == masters[first]:
            numel = -(-runs[last].weights.numel() // ALIGNMENT) * ALIGNMENT
            if starts and end + numel > SLAB_ELEMENTS:
                break
            starts.append(end)
            end, last = end + numel, last + 1
        members = runs[first:last]
        purpose = f"the Adam state of {end:,} elements in {sum(len(run.parameters) for run in members)} parameters"
        dtypes = [dtype for dtype in (masters[first], exp_avg_dtype, torch.float32) if dtype is not None]
        sizes = [end * dtype.itemsize for dtype in dtypes]
        memory = pinned_bytes(sum(sizes), members[0].weights.device, purpose, _INSTEAD)
        *master, exp_avg, exp_avg_sq = (part.view(dtype) for part, dtype in zip(memory.split(sizes), dtypes))
        slab = StateTensors(master[0] if master else None, exp_avg, exp_avg_sq)
        places.update({run: Place(slab, start) for run, start in zip(members, starts)})
        first = last
    return places


def cut(runs: Sequence[Run], places: dict[Run, Place], order: Sequence[int]) -> list[Chunk]:
    """Cut the Adam state of runs into chunks, the ranges that are copied to the device and updated there one by one.

    Args:
        runs: the runs (parameters that are updated together).
        places: {run: the Place of its state}, as `allocate_slabs` returns it.
        order: the indices of the runs whose state is cut. The chunks are returned in this order.

    Returns:
        The chunks. Each is a range of at most CHUNK_ELEMENTS elements of one slab (a large piece of page-locked host
        memory). Runs of the same flat buffer that are adjacent in `order` and in the slab may share a chunk.
    """
    chunks: list[Chunk] = []
    chunk = None
    for number in order:
        place, owner = places[runs[number]], runs[number].owner
        at, end = place.start, place.start + runs[number].weights.numel()
        while at < end:
            if (
                chunk is None
                or chunk.owner is not owner
                or chunk.slab is not place.slab
                or not chunk.stop <= at < chunk.start + CHUNK_ELEMENTS
            ):
                chunk = Chunk(owner, place.slab, at, at, [])
                chunks.append(chunk)
            chunk.stop = min(end, chunk.start + CHUNK_ELEMENTS)
            of_run = slice(at - place.start, chunk.stop - place.start)
            chunk.parts.append(Part(number, of_run, slice(at - chunk.start, chunk.stop - chunk.start)))
            at = chunk.stop
    return chunks
