"""A world of any size, simulated in one process on the meta device. Collectives transfer no data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ...engine.blocks.schedule import ForwardDepth, Schedule
from ...engine.comm.communicator import CollectiveGather, Gather, SingleProcess
from ...engine.comm.object_comm import ObjectComm
from ...engine.comm.peer_gather import PeerGather
from ...engine.comm.peer_reduce import PeerReduction
from ...engine.comm.reduce import CollectiveReduction, LocalReduction, Reduction
from ...engine.comm.streams import DONE, Ticket
from ...engine.runtime.backend import SMALLEST_PULLED
from ...engine.runtime.monitor import Monitor
from ...engine.runtime.world import World
from ..auto_wrap import LayerFeatures

META = torch.device("meta")


class _Quiet(SingleProcess):
    """The communicator of rank 0 in a simulated world of `size` ranks. Its collectives transfer no data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Ticket:
        return DONE

    def reduce_scatter_mean(self, shard: torch.Tensor, full: torch.Tensor) -> Ticket:
        return DONE

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Ticket:
        return DONE


class _Echo(ObjectComm):
    """Exchanges Python objects between `size` simulated ranks, as if every rank sent the same object as this one."""

    def __init__(self, size: int) -> None:
        super().__init__(1, timedelta(0))
        self._ranks = size

    def gather(self, value: Any, occasion: str = "") -> list[Any]:
        return [value] * self._ranks


class _MetaPeers:
    """Replaces `PeerMemory` in a simulation: `allocate` returns tensors on the meta device, and copies do nothing.

    In training, `PeerMemory` allocates memory that the other GPUs of the host can access, outside torch's allocator.

    mapped: the meta tensors that were allocated.
    """

    def __init__(self) -> None:
        self.mapped: list[torch.Tensor] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, int, Callable[[], object]]:
        memory = torch.empty(numel, dtype=dtype, device=META)
        self.mapped.append(memory)
        return memory, 0, lambda: memory

    def map(self, handle: Any, nbytes: int) -> int:
        return 0

    def part(self, source: Any, start: int, stop: int) -> int:
        return 0

    def unlink(self, handle: Any) -> None:
        pass

    def unmap(self, source: Any) -> None:
        pass

    def free(self, handle: Any) -> None:
        self.mapped.clear()

    def copy(self, pairs: Sequence[Sequence[tuple[Any, Any]]]) -> Ticket:
        return DONE

    def order(self) -> None:
        pass


def quiet_world(size: int, memory: Any) -> World:
    """Return a simulated World, in which this process is rank 0 on the meta device.

    Collectives transfer no data. `current_world` does not change. With several ranks, large shards and their reductions
    are allocated as in training on one host whose GPUs copy from each other's memory (`gather="peer"`), so that this
    memory is predicted too.

    Args:
        size: the number of ranks.
        memory: an object with the methods of `DeviceMemory`, which return the memory of the simulated device.
    """
    communicator, control = _Quiet(size), _Echo(size)
    shards: Gather = CollectiveGather(communicator)
    blocks: Reduction = LocalReduction()
    outside = blocks
    if size > 1:
        outside = reduction = CollectiveReduction(communicator, META)
        exchange = control.gather
        blocks = PeerReduction(reduction, _MetaPeers(), exchange, SMALLEST_PULLED, META)
        shards = PeerGather(communicator, shards, _MetaPeers(), exchange, SMALLEST_PULLED, META, lambda: communicator)
    inside = ForwardDepth()
    schedule = Schedule(shards, blocks, outside, inside, control)
    return World(
        0, size, 0, META, communicator, communicator, shards, communicator, control, Monitor(), inside, schedule,
        LayerFeatures(), zero_level=3, loss_scale_factor=2.0, loss_scale_steps=1024,
        open_group=lambda size, stride=1: _Quiet(size), device_memory=memory,
    )  # fmt: skip
