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
    """The state of several runs, page-locked, (n,) each.

    master: float32; None where the weights are float32 themselves; or the int16 residuals of bfloat16 weights, and
    then exp_avg_sq carries their marks (ops/residual.py). exp_avg: float32 or bfloat16. exp_avg_sq: float32.
    """

    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @classmethod
    def allocate(
        cls, numel: int, master: torch.dtype | None, exp_avg: torch.dtype, device: torch.device, purpose: str
    ) -> Slab:
        """Zeroed state of `numel` elements, in one piece of memory that `device` reads directly."""
        dtypes = [dtype for dtype in (master, exp_avg, torch.float32) if dtype is not None]
        sizes = [numel * dtype.itemsize for dtype in dtypes]
        memory = pinned_bytes(sum(sizes), device, purpose)
        tensors = [part.view(dtype) for part, dtype in zip(memory.split(sizes), dtypes)]
        return cls(None if master is None else tensors[0], *tensors[-2:])

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


def allocate_slabs(
    runs: Sequence[Run], masters: Sequence[torch.dtype | None], exp_avg_dtype: torch.dtype
) -> dict[Run, Place]:
    """A place for every run, side by side in the order given. RuntimeError where memory does not suffice.

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
        slab = Slab.allocate(end, masters[first], exp_avg_dtype, members[0].weights.device, purpose)
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
