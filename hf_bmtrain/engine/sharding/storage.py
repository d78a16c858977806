"""How a flat buffer keeps this rank's shard, and what its all-gather sends.

`Storage` itself keeps plain elements. A feature that keeps or sends them in another form subclasses it, and names its
class by a `StorageKind`, which `shard_places` asks for each parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm.layout import ALIGNMENT_BYTES, Layout
from ..comm.resizable import ResizableStorage, shares_storage
from ..runtime.world import World
from .sourced import SourcedParameter

if TYPE_CHECKING:
    from .buffer import ShardedBuffer
    from .parameter import DistributedParameter


class Memory(NamedTuple):
    """What a buffer takes. stored: what this rank keeps. gathered: views of all memory that an all-gather may fill.

    nbytes: of what an all-gather fills, 0 if the full buffer is the shard.
    """

    stored: list[torch.Tensor]
    gathered: list[torch.Tensor]
    nbytes: int


class Storage:
    """Plain elements: the shard is sent as it is, and arrives where the parameters are read.

    With one rank the full buffer *is* the shard: nothing is gathered, and nothing is freed.

    buffer: set before any method is called; a weak reference, since the buffer owns its storage. prepares, unpacks:
    whether `before_gather` and `after_gather` do anything. read_only: why the parameters cannot be written or trained,
    and the way out; None if they can. full: the memory of the full parameters in their own dtype, None if it is the
    shard's.
    """

    _buffer: weakref.ref[ShardedBuffer]
    prepares = False
    unpacks = False
    read_only: str | None = None
    full: ResizableStorage | None = None

    @property
    def buffer(self) -> ShardedBuffer:
        buffer = self._buffer()
        assert buffer is not None, "the buffer was dropped"
        return buffer

    @buffer.setter
    def buffer(self, buffer: ShardedBuffer) -> None:
        self._buffer = weakref.ref(buffer)

    def layout(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> Layout:
        """Lay out tensors of `numels` elements."""
        return Layout.build(numels, world_size, max(1, ALIGNMENT_BYTES // dtype.itemsize))

    def allocate(self, world: World, dtype: torch.dtype) -> None:
        """Make the buffer's `shard`, and `route` what is sent. What is filled has memory until `fill`. Collective."""
        buffer, layout = self.buffer, self.buffer.layout
        buffer.shard = world.shards.allocate(layout.shard_numel, dtype, world.device, buffer.update.wait)
        if layout.world_size > 1:
            self.full = ResizableStorage(layout.numel, dtype, world.device, world.poison)
        buffer.route(buffer.shard, self.full)

    def view(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return parameter `index` in full: readable while the buffer is unsharded.

        One that is completely in this rank's shard is a view of that, and is not copied.
        """
        buffer = self.buffer
        local_range = buffer.local_ranges[index]
        if self.full is not None and local_range.length < shape.numel():
            return self.full.view(buffer.layout.offsets[index], shape)
        shard = buffer.shard if self.full is None else buffer.shard.data  # `.data` has a version counter of its own
        return shard[local_range.shard_start : local_range.shard_stop].view(shape)

    @torch.no_grad()
    def fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Store rank 0's values, so that ranks that drew different random weights agree. Collective."""
        buffer = self.buffer
        if any(isinstance(parameter, SourcedParameter) for parameter in parameters):
            self._fill_singly(parameters)
            return
        if self.full is None:
            for full, parameter in zip(buffer.full_params, parameters):
                full.copy_(parameter)
            return
        flat = self.full.allocate().zero_()
        for offset, parameter in zip(buffer.layout.offsets, parameters):
            self.full.view(offset, parameter.shape).copy_(parameter)
        buffer.communicator.broadcast(flat, 0).wait()
        buffer.shard.copy_(flat.view(buffer.layout.world_size, -1)[buffer.rank])
        self.full.free()

    def _fill_singly(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Store the values of scattered parameters, and rank 0's of others, without the full buffer."""
        buffer = self.buffer
        if self.full is not None:
            self.full.free()
        for parameter, local_range in zip(parameters, buffer.local_ranges):
            part = buffer.shard[local_range.shard_start : local_range.shard_stop]
            if isinstance(parameter, SourcedParameter):
                parameter.move(part, local_range.tensor_start, buffer.communicator)
                continue
            values = parameter.detach().to(part.device, copy=True).reshape(-1)
            if len(values):
                buffer.communicator.broadcast(values, 0).wait()
            part.copy_(values[local_range.tensor_start : local_range.tensor_stop])

    def before_gather(self) -> None:
        """Make what is sent current. It may be collective."""

    def after_gather(self) -> None:
        """Unpack what has arrived, on the current stream."""

    def reshard(self) -> None:
        """Free what an all-gather and `after_gather` allocated, also if the latter was never called."""
        if self.full is not None:
            self.full.free()

    @contextmanager
    def full_values(self) -> Iterator[None]:
        """Under `with`, the full parameters have the shards' values in their own dtype. Collective."""
        buffer = self.buffer
        was_unsharded = buffer.is_unsharded
        buffer.gather()
        buffer.wait()
        try:
            yield
        finally:
            if not was_unsharded:
                buffer.reshard()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of a full parameter. The same on every rank."""
        return self.full is not None and (self.full.holds(tensor) or shares_storage(tensor, self.buffer.shard))

    def memory(self) -> Memory:
        """Return what the buffer takes."""
        buffer = self.buffer
        nbytes = 0 if self.full is None else buffer.layout.numel * buffer.shard.itemsize
        return Memory([buffer.shard], [*buffer.full_params], nbytes)


@dataclass(frozen=True)
class StorageKind:
    """Which storage a parameter gets; parameters of equal kinds may share a buffer. This one: plain elements."""

    def make(self, parameters: Sequence[torch.nn.Parameter], small: int) -> Storage:
        """Return the storage of a buffer. small: how many of its first parameters `takes` has let in."""
        return Storage()

    def takes(self, small: Sequence[torch.nn.Parameter], own: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether plain parameters, of the same dtype and `requires_grad`, come first in the buffer of `own`."""
        return False

    @property
    def parameter_class(self) -> type[DistributedParameter] | None:
        """The class of the local parameters, None for DistributedParameter itself."""
        return None


PLAIN = StorageKind()
