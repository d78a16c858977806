"""Optimizer state in host memory: slabs, page-locked, of several runs each, cut into chunks for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...engine.base.pinned import pinned_bytes
from ...engine.optim.runs import Run, StateTensors
from ...engine.sharding.buffer import ShardedBuffer

SLAB_ELEMENTS = 1 << 28
"""A run with more gets a slab of its own."""
CHUNK_ELEMENTS = 1 << 22
"""16 MiB of float32: long enough for full speed over PCIe, short compared with a step."""
ALIGNMENT = 64
"""Runs begin at multiples of this many elements, so that a run is aligned in a slab as in a shard."""


@dataclass(frozen=True)
class Place:
    """The position of a run in its slab."""

    slab: StateTensors
    start: int


@dataclass(frozen=True)
class Part:
    """Elements `of_run` of run number `run`, which are elements `of_chunk` of a chunk."""

    run: int
    of_run: slice
    of_chunk: slice


@dataclass(eq=False)
class Chunk:
    """Adjacent elements of one slab and one owner, copied at once. parts: of the runs that it contains."""

    owner: ShardedBuffer | torch.nn.Parameter
    slab: StateTensors
    start: int
    stop: int
    parts: list[Part]


def allocate_slabs(
    runs: Sequence[Run], masters: Sequence[torch.dtype | None], exp_avg_dtype: torch.dtype
) -> dict[Run, Place]:
    """Allocate a place for every run, in the given order. Raises RuntimeError if memory is insufficient.

    masters: the dtype of each run's master, None for none; a slab holds those of one dtype.
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
        memory = pinned_bytes(sum(sizes), members[0].weights.device, purpose)
        *master, exp_avg, exp_avg_sq = (part.view(dtype) for part, dtype in zip(memory.split(sizes), dtypes))
        slab = StateTensors(master[0] if master else None, exp_avg, exp_avg_sq)
        places.update({run: Place(slab, start) for run, start in zip(members, starts)})
        first = last
    return places


def cut(runs: Sequence[Run], places: dict[Run, Place], order: Sequence[int]) -> list[Chunk]:
    """Cut the state of the runs with the numbers in `order` into chunks, in that order."""
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
