"""What tests look at inside the library: the one place for each, so that a renamed attribute is followed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hf_bmtrain as bmt
from hf_bmtrain.engine.comm.peer_gather import PeerGather
from hf_bmtrain.engine.comm.peer_reduce import PeerReduction
from hf_bmtrain.engine.optim.runs import Run
from hf_bmtrain.engine.runtime.world import simulated
from hf_bmtrain.features.memory import MemoryPlanner
from hf_bmtrain.features.offload.slabs import Chunk


def state_of(block: Any) -> Any:
    """Return the BlockState of a block: its options, buffers, neighbours and recomputation."""
    return block._bmt


@contextmanager
def device_memory(memory: Any) -> Iterator[None]:
    """Plan for `memory` under `with`: it stands for the device's, as DeviceMemory does on a GPU."""
    world = dataclasses.replace(bmt.current_world(), device_memory=memory)
    with simulated(world):
        try:
            yield
        finally:
            planner = world.schedule.observer(MemoryPlanner)
            if planner is not None:
                world.schedule.observers.remove(planner)


def memory_planner() -> MemoryPlanner:
    """Return what plans for the memory of the device."""
    planner = bmt.current_world().schedule.observer(MemoryPlanner)
    assert planner is not None
    return planner


def peer_gather() -> PeerGather:
    """Return the communicator of a world that gathers by copies between ranks."""
    gather: Any = bmt.current_world().shards
    assert isinstance(gather, PeerGather)
    return gather


def peer_reduction() -> PeerReduction:
    """Return the reduction of blocks' gradients in a world that reduces by copies between ranks."""
    reduction: Any = bmt.current_world().schedule.blocks
    assert isinstance(reduction, PeerReduction)
    return reduction


def chunks_of(optimizer: bmt.optim.AdamOffloadOptimizer) -> list[Chunk]:
    """Return the chunks in which the optimizer's state comes to the device, in the order of the last arrangement."""
    return optimizer._chunks


def run_of(optimizer: bmt.optim.AdamOptimizer, number: int) -> Run:
    """Return the run of this number."""
    return optimizer._states[number].run


def note_parts(optimizer: bmt.optim.AdamOptimizer) -> list[tuple[bool, int]]:
    """Return a list to which every part of a later step adds (whether it is in a backward, how many runs)."""
    parts: list[tuple[bool, int]] = []
    original = optimizer._step_runs

    def noting(numbers: Sequence[int]) -> None:
        parts.append((bmt.current_world().schedule.in_backward, len(numbers)))
        original(numbers)

    optimizer._step_runs = noting
    return parts
