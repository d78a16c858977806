"""Storage: the form in which a flat buffer stores this rank's shard, and in which its all-gather sends the shard.

`Storage` itself stores elements as they are. A subclass may store or send them in another form, for example quantized.
A `StorageKind` creates the storage of a buffer, and `shard_places` chooses the kind of each parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm.layout import ALIGNMENT_BYTES, Layout
from ..comm.reduce import Reduction
from ..comm.resizable import ResizableStorage, shares_storage
from ..runtime.world import World
from .sourced import SourcedParameter

if TYPE_CHECKING:
    from .buffer import ShardedBuffer
    from .parameter import DistributedParameter


class Memory(NamedTuple):
    """The memory of a flat buffer, for memory estimates and messages.

    Attributes:
        stored: the tensors that this rank always keeps.
        gathered: views that together cover all memory that an all-gather may fill.
        nbytes: the number of bytes that an all-gather allocates; 0 if the shard is the full buffer.
    """

    stored: list[torch.Tensor]
    gathered: list[torch.Tensor]
    nbytes: int


class Storage:
    """Keeps the shard of one flat buffer, and determines what its all-gather sends and fills.

    This class stores elements as they are: the all-gather sends the shard itself and fills the memory of the full
    parameters. With one rank, the shard is the full buffer, and nothing is gathered or freed. Subclasses store or send
    the elements in another form, such as quantized.

    Attributes:
        buffer: the flat buffer that owns this storage, referred to weakly. It is set before any method is called.
        prepares: whether `before_gather` does anything. If False, `before_gather` is not called.
        unpacks: whether `after_gather` does anything. If False, `after_gather` is not called.
        read_only: None if the parameters can be written and trained. Otherwise a text for error messages: why the
            parameters can be neither written nor trained, and what the user can do instead.
        full: the memory of the full parameters in their own dtype; None if the shard is the full buffer.
        has_fixed_addresses: whether everything that layers read of the parameters stays at the same addresses from step
            to step, once `ShardedBuffer.keep_address` was called. CUDA graphs need this.
        is_part: whether the full parameters are parts of tensors that tensor parallelism splits (see `whole_shape`).
        kind: the StorageKind of full copies of the parameters. It is used if the copies, such as the parameters of a
            deep copy of the model, are sharded later. None: the StorageKind of a copy is chosen in the same way as that
            of a new parameter.
    """

    _buffer: weakref.ref[ShardedBuffer]
    prepares = False
    unpacks = False
    read_only: str | None = None
    full: ResizableStorage | None = None
    kind: StorageKind | None = None
    has_fixed_addresses = True
    is_part = False

    @property
    def buffer(self) -> ShardedBuffer:
        buffer = self._buffer()
        assert buffer is not None, "the flat buffer of this storage was garbage-collected"
        return buffer

    @buffer.setter
    def buffer(self, buffer: ShardedBuffer) -> None:
        self._buffer = weakref.ref(buffer)

    def layout(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> Layout:
        """Return the positions of the parameters in the flat buffer and its shards.

        Args:
            numels: the number of elements of each full parameter.
            world_size: the number of shards into which the buffer is divided.
            dtype: the dtype of the parameters. Parameters begin at aligned addresses, so the item size of the dtype
                determines the element indices at which they may begin.
        """
        return Layout.build(numels, world_size, max(1, ALIGNMENT_BYTES // dtype.itemsize))

    def allocate(self, world: World, dtype: torch.dtype) -> None:
        """Allocate the shard and the full buffer, and register them with the flat buffer (`ShardedBuffer.route`).

        From then on, all-gathers send the shard and fill the full buffer. An override may register other tensors, such
        as a quantized shard. With one rank, the shard is the full buffer, and nothing else is allocated. Collective:
        every rank must call it.

        The full buffer must be allocated here, because the caller next creates the full parameters (`view`), which are
        views of the buffer. Finally the caller calls `fill`, which writes the shard and frees the full buffer.

        Args:
            world: the ranks over which the parameters are sharded.
            dtype: the dtype of the shard and the full buffer.
        """
        buffer, layout = self.buffer, self.buffer.layout
        buffer.shard = world.shards.allocate(layout.shard_numel, dtype, world.device, buffer.update.wait)
        if layout.world_size > 1:
            self.full = ResizableStorage(layout.numel, dtype, world.device, world.poison)
        buffer.route(buffer.shard, self.full)

    def view(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return the full parameter `index` as a tensor of `shape`, which is readable while the buffer is unsharded.

        The result is a view of this rank's shard if the shard contains all elements of the parameter, otherwise of the
        full buffer.
        """
        buffer = self.buffer
        local_range = buffer.local_ranges[index]
        if self.full is not None and local_range.length < shape.numel():
            return self.full.view(buffer.layout.offsets[index], shape)
        # The full parameter is a view of the shard. If the shard is the full buffer (with a single rank), the two share
        # a version counter. Otherwise `.data` gives the view its own counter. The counter shows whether a forward has
        # written to the full parameter, which is refused. An optimizer's write to the shard must not increment it.
        shard = buffer.shard if self.full is None else buffer.shard.data
        return shard[local_range.shard_start : local_range.shard_stop].view(shape)

    @torch.no_grad()
    def fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Write the values of `parameters` to the shards of all ranks, and free the full buffer.

        The values are those of rank 0, because random initial values differ between ranks. The exception is a
        SourcedParameter (loaded from a file): its values come from the file, or from the ranks among which they are
        divided. If the shard is the full buffer, nothing is freed. Collective: every rank must call it.

        parameters: the full parameters with their initial or loaded values, in the order of the flat buffer.
        """
        buffer = self.buffer
        if any(isinstance(parameter, SourcedParameter) for parameter in parameters):
            self._fill_singly(parameters)
            return
        if self.full is None:
            for full, parameter in zip(buffer.full_params, parameters):
                full.copy_(parameter)
            # This rank stores all elements. If each host has one rank, and every host stores all elements, the
            # broadcast gives rank 0's values to the other hosts. Otherwise there is no receiver, and it does nothing.
            buffer.communicator.broadcast(buffer.shard, 0).wait()
            return
        flat = self.full.allocate().zero_()
        for offset, parameter in zip(buffer.layout.offsets, parameters):
            self.full.view(offset, parameter.shape).copy_(parameter)
        buffer.communicator.broadcast(flat, 0).wait()
        buffer.shard.copy_(flat.view(buffer.layout.world_size, -1)[buffer.rank])
        self.full.free()

    def _fill_singly(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Do the work of `fill` for one parameter after another, so that no memory for the full buffer is needed.

        Collective: every rank must call it.

        parameters: the full parameters, in the order of the flat buffer. A SourcedParameter is read from its own
            source, such as a file. For other parameters, all ranks get rank 0's values.
        """
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
        """Fill the memory that the all-gather sends, for example with a quantized shard. By default, do nothing.

        A class that overrides this method sets the attribute `prepares` to True. Then `ShardedBuffer.gather` calls the
        method each time, even if no all-gather follows because the full parameters are up to date. It is also called
        by `ShardedBuffer.take_part`, by which a rank takes part in an all-gather that only other ranks need.

        There are two kinds of calls. An override can tell them apart by the shard's version counter:

        * The very first call, and the first call after each change of the shard. Every rank makes such a call, because
          the new values must be all-gathered. An override may issue collectives in it.
        * Any other call. Perhaps only this rank makes it, so an override must not issue collectives in it.
        """

    def after_gather(self) -> None:
        """Compute the full parameters from the result of the all-gather, on the current stream.

        If `unpacks` is True, the first `ShardedBuffer.wait` after a `gather` calls this method. It is not called if the
        buffer is resharded before `wait`, because the result is then discarded. By default, it does nothing.
        """

    def reshard(self) -> None:
        """Free the memory that the last all-gather has filled, and the memory of the full parameters.

        Called when the flat buffer is resharded. If the result of an all-gather is discarded, for example because only
        other ranks need it (`ShardedBuffer.take_part`), `after_gather` is not called before this method. An override
        must work in this case, too.
        """
        if self.full is not None:
            self.full.free()

    @contextmanager
    def full_values(self) -> Iterator[None]:
        """Context manager that makes the full parameters readable, with exactly the values of all ranks' shards.

        Collective: every rank must call it. When the context ends, the full parameters are freed, unless they were
        readable before it began. Subclasses whose usual all-gather sends rounded values override this method.
        """
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
        """Return whether `tensor` is a view of a full parameter. Such a view may become invalid at the next reshard.

        This is checked for the outputs of a forward: a view is copied before the reshard. For parameters outside
        blocks, it is also checked for the tensors that autograd saves: before backward reads a view, the buffer is
        all-gathered again if it was resharded.

        False if the shard is the full buffer, because nothing is freed then. Otherwise, the result is also True for a
        view of the shard: on a rank that stores all elements of a parameter, the full parameter is such a view. The
        view stays valid there, but the result must be the same on every rank.
        """
        return self.full is not None and shares_storage(tensor, self.full.tensor, self.buffer.shard)

    # With tensor parallelism, a full parameter may be one part of a larger tensor, and the other parts are full
    # parameters of other ranks. The following methods call the larger tensor `whole`. State dicts contain whole
    # tensors, and initializers fill whole tensors.

    def whole_shape(self, index: int) -> torch.Size:
        """Return the shape that parameter `index` had before tensor parallelism split it.

        In this base class nothing is split, so it is the shape of the full parameter.
        """
        return self.buffer.full_params[index].shape

    def whole(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """Join the parts of a tensor that tensor parallelism splits. Without tensor parallelism, return `full` itself.

        Called for state dicts of the model and the optimizer, which contain whole tensors. Collective: every rank must
        call it.

        index: the index of the parameter in the flat buffer.
        full: this rank's part, a tensor of the full parameter's shape, such as the full parameter or its optimizer
            state.
        """
        return full

    def own(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `whole` if tensor parallelism splits parameter `index`, else `whole` itself.

        Called when a tensor of the shape before the split is loaded, for example from a state dict. Not collective.
        This is the inverse of the method `whole`.

        Args:
            index: the index of the parameter in the flat buffer.
            whole: a tensor of the shape `whole_shape(index)`. In a subclass that splits, any other shape raises
                ValueError.
        """
        return whole

    def saved_as(self, index: int) -> tuple[torch.Size, int]:
        """Return where this rank's elements of a parameter are in a checkpoint.

        index: the index of the parameter in the flat buffer.

        Returns:
            (the shape of the saved tensor, the index of this rank's first element in the flattened saved tensor). This
            rank's elements are contiguous there.
        """
        return self.buffer.full_params[index].shape, self.buffer.local_ranges[index].tensor_start

    def memory(self) -> Memory:
        """Return the flat buffer's memory on this rank: its tensors, and the bytes that an all-gather allocates."""
        buffer = self.buffer
        nbytes = 0 if self.full is None else buffer.layout.numel * buffer.shard.itemsize
        return Memory([buffer.shard], [*buffer.full_params], nbytes)


@dataclass(frozen=True)
class StorageKind:
    """A form in which the shards of flat buffers are stored. This class is the plain form: elements as they are.

    `make` creates the storage of a flat buffer. Parameters may share a flat buffer if their kinds compare equal.
    """

    def make(self, parameters: Sequence[torch.nn.Parameter], small: int) -> Storage:
        """Return the storage (the object that stores and sends the elements) of a flat buffer of `parameters`.

        Args:
            parameters: the full parameters, in the order of the buffer.
            small: the number of parameters at the start that are of the plain kind (stored as they are). They share the
                buffer because `takes` has accepted them.
        """
        return Storage()

    def takes(self, small: Sequence[torch.nn.Parameter], own: Sequence[torch.nn.Parameter]) -> bool:
        """Return whether parameters of the plain kind may share a flat buffer with parameters of this kind.

        Called before flat buffers are created. If True is returned, the plain parameters, which usually are small
        (norms, biases), are put at the start of the buffer, and need no all-gather of their own. By default, the result
        is False.

        Args:
            small: the parameters of the plain kind (stored as they are). They have the dtype and `requires_grad` of
                `own`.
            own: the parameters whose storage kind is this object.
        """
        return False

    def share(self, world: World, reduction: Reduction) -> tuple[World, Reduction]:
        """Choose how flat buffers of this storage kind are sharded: over which ranks, and how gradients are averaged.

        Called before each flat buffer of this kind is created. For example, a subclass for tensors that are split by
        tensor parallelism shards each part over the ranks that have this part.

        Args:
            world: all ranks.
            reduction: the way to average the gradients of a buffer that stores elements as they are (the plain kind).

        Returns:
            (the ranks over which the buffer is sharded, the way to average its gradients). By default, these are the
            two arguments.
        """
        return world, reduction

    @property
    def parameter_class(self) -> type[DistributedParameter] | None:
        """The class of the local (sharded) parameters in flat buffers of this kind. None means DistributedParameter."""
        return None


PLAIN = StorageKind()
