"""Optimizer state in host memory: runs side by side in slabs, cut into chunks that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops.pinned import pinned_bytes
from .runs import Run

SLAB_ELEMENTS = 1 << 28
"""A run with more gets a slab of its own."""
CHUNK_ELEMENTS = 1 << 22
"""16 MiB of float32: long enough for full speed over PCIe, short beside a step."""
ALIGNMENT = 64
"""Elements between which runs begin, so that a run lies in a slab as it does in a shard."""


@dataclass(frozen=True, eq=False)
class Slab:
    """The state of several runs, page-locked: float32 (n,) each, exp_avg perhaps bfloat16; master may be None."""

    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def allocate(cls, numel: int, with_master: bool, exp_avg_dtype: torch.dtype, device: torch.device, purpose: str):
        """Zeroed state of `numel` elements, in one piece of memory that `device` reads directly."""
        dtypes = [torch.float32] * with_master + [exp_avg_dtype, torch.float32]
        sizes = [numel * dtype.itemsize for dtype in dtypes]
        memory = pinned_bytes(sum(sizes), device, purpose)
        tensors = [part.view(dtype) for part, dtype in zip(memory.split(sizes), dtypes)]
        return cls(tensors[0] if with_master else None, *tensors[-2:])

    def part(self, start: int, stop: int) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        master = None if self.master is None else self.master[start:stop]
        return master, self.exp_avg[start:stop], self.exp_avg_sq[start:stop]


@dataclass(frozen=True)
class Place:
    """Where a run lies in its slab."""

    slab: Slab
    start: int


@dataclass(frozen=True)
class Part:
    """Elements `of_run` of run number `run`, which are elements `of_chunk` of a chunk."""

    run: int
    of_run: slice
    of_chunk: slice


@dataclass(eq=False)
class Chunk:
    """Neighbouring elements of one slab, moved at once; parts: what of it belongs to which run."""

    slab: Slab
    start: int
    stop: int
    parts: list[Part]


def allocate_slabs(runs: Sequence[Run], with_master: Sequence[bool], exp_avg_dtype: torch.dtype) -> dict[Run, Place]:
    """A place for every run, side by side in the order given. RuntimeError where memory does not suffice."""
    places: dict[Run, Place] = {}
    first = 0
    while first < len(runs):
        last, end, starts = first, 0, []
        while last < len(runs) and with_master[last] == with_master[first]:
            numel = -(-runs[last].weights.numel() // ALIGNMENT) * ALIGNMENT
            if starts and end + numel > SLAB_ELEMENTS:
                break
            starts.append(end)
            end, last = end + numel, last + 1
        members = runs[first:last]
        purpose = f"the Adam state of {end:,} elements in {sum(len(run.parameters) for run in members)} parameters"
        slab = Slab.allocate(end, with_master[first], exp_avg_dtype, members[0].weights.device, purpose)
        places.update({run: Place(slab, start) for run, start in zip(members, starts)})
        first = last
    return places


def cut(runs: Sequence[Run], places: dict[Run, Place], order: Sequence[int]) -> list[Chunk]:
    """The chunks that hold `runs`, whose numbers are taken in the `order` given."""
    chunks: list[Chunk] = []
    for number in order:
        place, numel = places[runs[number]], runs[number].weights.numel()
        at, end = place.start, place.start + numel
        while at < end:
            chunk = chunks[-1] if chunks else None
            if chunk is None or chunk.slab is not place.slab or not chunk.stop <= at < chunk.start + CHUNK_ELEMENTS:
                chunk = Chunk(place.slab, at, at, [])
                chunks.append(chunk)
            chunk.stop = min(end, chunk.start + CHUNK_ELEMENTS)
            of_run = slice(at - place.start, chunk.stop - place.start)
            chunk.parts.append(Part(number, of_run, slice(at - chunk.start, chunk.stop - chunk.start)))
            at = chunk.stop
    return chunks
