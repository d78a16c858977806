"""ShardedBuffer: parameters in one flat buffer, of which every rank stores a shard."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NoReturn

import torch

from ..base.torch_internals import make_subclass
from ..comm.collective_log import code
from ..comm.reduce import Reduction
from ..comm.resizable import ResizableStorage
from ..comm.streams import Ticket
from ..runtime.world import World
from ..tensors.placement import Placement
from .gradient import GradientBuffer
from .pending_update import PendingUpdate
from .storage import Storage
from .unused import UnusedParameters


class State(Enum):
    """The state of a flat buffer's full parameters: not in memory, being all-gathered, or readable.

    If there is only one shard, and its parameters are not quantized, the shard itself is the full buffer. The full
    parameters are then always readable without an all-gather, but this state stays SHARDED. Use
    `ShardedBuffer.is_unsharded`, which is True in this case.
    """

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedBuffer:
    """Parameters of one dtype and device in one flat buffer, of which every rank stores an equal part, its shard.

    The optimizer updates `shard`. `gather` allocates the full buffer, with memory for the elements of all ranks, and
    fills it by an all-gather; `reshard` frees it. After a write to the shard, the next `gather` fills the full buffer
    again.

    A local parameter contains this rank's elements of one parameter, as a view of `shard`. Local parameters keep this
    object alive. This object refers to local parameters only weakly, so that they are freed with their module.

    The constructor shards `parameters`. All ranks get rank 0's values, except for a SourcedParameter, whose values come
    from its own source, such as a file. Collective: every rank must call it.

    Args:
        world: the ranks over which the parameters are sharded.
        parameters: the full parameters, all of one dtype.
        reduction: averages the gradients over the ranks.
        storage: determines how the shard is stored and what an all-gather sends.

    Attributes:
        storage: determines how the shard is stored and what an all-gather sends.
        shard: (n,) this rank's elements of the flat buffer. It is never reallocated. If the parameters are quantized,
            only `storage` has their values, and those of `shard` are undefined.
        full_params: for each parameter, a Parameter of the full shape. It is readable after `gather` and `wait`, and
            until `reshard`.
        attributes: for each parameter, {name: value} of the attributes that the user's code had set on it before it was
            sharded, such as Mamba's `_no_weight_decay`. Only numbers, bools and strings are kept. The local and the
            full parameter get the same attributes. Empty if the parameter's class is a subclass of torch.nn.Parameter.
        number: the number of this buffer in the order of creation, from 1. It is the same on every rank.
        local_ranges: for each parameter, which of its elements this rank's shard stores, and where in the shard.
        gradient: averages the gradients of the parameters over the ranks, and sets the `.grad` of local parameters.
        update: the last update of the shard that an optimizer has started asynchronously. `update.wait()` must be
            called before the shard is read or written; `gather` calls it.
        keeps_address: whether the full buffer keeps its memory when it is resharded, see `keep_address`.
        resident: if True, `reshard` keeps the full buffer, but only while all parameters are frozen. The value is the
            same on every rank.
    """

    shard: torch.Tensor
    _target: ResizableStorage | None
    _ticket: Ticket | None = None
    keeps_address = False

    def __init__(
        self, world: World, parameters: Sequence[torch.nn.Parameter], reduction: Reduction, storage: Storage
    ) -> None:
        world.buffers.made += 1
        self.number = world.buffers.made
        dtype = parameters[0].dtype
        assert all(p.dtype == dtype for p in parameters), "all parameters of a buffer must have the same dtype"
        self._gather, self.communicator = world.shards, world.shards.communicator
        self.rank, size = self.communicator.rank, self.communicator.size
        self.storage = storage
        storage.buffer = self
        self.layout = storage.layout([p.numel() for p in parameters], size, dtype)
        group = world.shard_group
        norms = world.norms or group
        self.placements = [Placement(self.layout, i, p.shape, group, norms) for i, p in enumerate(parameters)]
        self.local_ranges = [placement.range for placement in self.placements]
        self.update = PendingUpdate(self._gather)
        self._entries = [code(kind, self.number) for kind in ("gather of", "gather without gradients of")]
        self._inside = world.inside
        self._state = State.SHARDED
        self.storage.allocate(world, dtype)
        self._alone = self.storage.full is None
        self.full_params = [
            torch.nn.Parameter(self.storage.view(i, p.shape), p.requires_grad) for i, p in enumerate(parameters)
        ]
        self.attributes = [_attributes(parameter) for parameter in parameters]
        for full, attributes in zip(self.full_params, self.attributes):
            vars(full).update(attributes, is_unsharded=True)
        reducer = reduction.reducer(self.layout, [p.shape for p in parameters], self.shard, world.poison)
        unused = UnusedParameters(world.control, self.number)
        self.gradient = GradientBuffer(self.placements, reducer, self.full_params, self.shard, unused)
        self.resident = False
        self.storage.fill(parameters)

    # -- construction -------------------------------------------------------------------------------------------

    def route(
        self, source: torch.Tensor, target: ResizableStorage | None, cut: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Set the tensor that later all-gathers send, and the memory that they fill.

        Called when the memory is allocated, and again if all-gathers are to send another tensor from then on, such as a
        copy of the shard that is rounded to 8 bits. Before the call, the full buffer must be resharded, and no
        all-gather of it may be running.

        Args:
            source: (n,) the tensor that this rank sends: the shard, or another form of it, such as a rounded copy.
            target: the memory for the result: n elements from each rank, in rank order. None if nothing needs to be
                gathered.
            cut: the ranges (start, stop) of this rank's own `source` that an all-gather must copy to `target`. The
                rest of this rank's part of `target` may stay unwritten. (Elements of other ranks are always copied.)
                Pass [(0, n)] if all full parameters are views of `target`. None, the default, selects only the elements
                of parameters that are split between ranks. Other parameters must then be read from `source`.
        """
        if self.keeps_address:
            if self._target is not None and self._target is not target:
                self._target.release_address()
            if target is not None:
                target.keep_address()
        self._source, self._target = source, target
        self._cut = self.layout.cut_ranges(self.rank) if cut is None else cut
        # The ranks compare their collective logs to find mismatched collectives. An all-gather by peer copies (from the
        # memory of other ranks) is not a collective, and is therefore not recorded in the log.
        self._collective_log = self.communicator.collective_log if self._gather.is_collective(source) else None
        self._filled_version = -1

    def make_local(self, cls: type[torch.nn.Parameter], parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
        """Create and return the local parameters. Each contains this rank's elements of one parameter.

        Args:
            cls: the class of the local parameters. Their memory is a 1-D view of `shard`.
            parameters: the full parameters, in the order of the buffer. Their `requires_grad` is copied, and so are
                their attributes `init_method` and `group` (of BMTrain), and those in `attributes`.
        """
        slices: list[Any] = []
        for index, (parameter, local_range) in enumerate(zip(parameters, self.local_ranges)):
            view = self.shard[local_range.shard_start : local_range.shard_stop]
            made = make_subclass(cls, view, parameter.requires_grad)
            made.buffer, made.index, made.placement = self, index, self.placements[index]
            made.on_demand, made.origin, made._gradient_hooks = None, None, OrderedDict()
            made.init_method, made.group = getattr(parameter, "init_method", None), getattr(parameter, "group", None)
            attributes = self.attributes[index].items()
            vars(made).update({name: value for name, value in attributes if not hasattr(made, name)})
            slices.append(made)
        self.gradient.slices = [weakref.ref(made) for made in slices]
        return slices

    @property
    def slices(self) -> list[Any]:
        """The local parameters: this rank's slice (its elements) of each parameter, in the order of the buffer.

        Local parameters that were freed together with their module are left out.
        """
        return [local for reference in self.gradient.slices if (local := reference()) is not None]

    # -- all-gather, use, reshard -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Torch's version counter of the shard, which every write to the shard increments."""
        return self.shard._version

    def gather(self) -> None:
        """Start to all-gather the weights, unless the full buffer contains them already or is being filled with them.

        First make the current stream wait for any update of the shard that an optimizer has started asynchronously.
        Collective if `needs_collective` is True.
        """
        if self.update.ticket is not None:
            self.update.wait()
        if self._alone:
            return
        if self.storage.prepares:
            self.storage.before_gather()
        version = self.shard._version
        if self._state is not State.SHARDED:
            if self._filled_version == version:
                return
            self.reshard()
        self._filled_version = version
        target = self._target
        if target is not None:
            target.allocate()
            try:
                self._note_gather()
                self._ticket = self._gather.gather(target.tensor, self._source, self._cut)
            except BaseException:
                target.free()
                raise
        self._state = State.GATHERING

    def keep_address(self) -> None:
        """Keep the memory of the full buffer when the buffer is resharded, so that its address does not change.

        A CUDA graph needs this: it always reads the full parameters at the addresses they had when the graph was
        recorded. `gather` still fills the memory again after each `reshard`. If `route` later sets another `target`
        (the memory that `gather` fills), the address changes, and from then on the memory of the new target is kept.
        """
        self.keeps_address = True
        if self._target is not None:
            self._target.keep_address()

    @property
    def needs_collective(self) -> bool:
        """Whether `gather` may issue a collective if it is called now. If False, it certainly issues none.

        Used in an uneven model, whose ranks may run different blocks. If True, this rank must wait before `gather`
        until all ranks agree that this all-gather is the next collective. If False, it can call `gather` at once.
        """
        if self._alone or (self._state is not State.SHARDED and self._filled_version == self.shard._version):
            return False
        return self.storage.prepares or (self._target is not None and self._gather.is_collective(self._source))

    def take_part(self) -> None:
        """Take part in an all-gather of this flat buffer that only other ranks need, and discard the result.

        Called in an uneven model, whose ranks may enter different blocks. For example, this rank calls it when other
        ranks enter a block that this rank does not enter. Collective: every rank must call either this or `gather`. If
        this rank's full buffer is filled already, the buffer stays filled, and the result is received in temporary
        memory.
        """
        if self._state is State.SHARDED or self._filled_version != self.shard._version:
            self.gather()
            self.reshard()
            return
        if self.storage.prepares:
            self.storage.before_gather()
        if self._target is not None:
            self._note_gather()
            self._gather.gather(torch.empty_like(self._target.tensor), self._source, self._cut).wait()

    def _note_gather(self) -> None:
        """Record an all-gather in the collective log, by which the ranks check that they run the same operations.

        The entry for a forward without gradients differs from that for training, so that the ranks notice if one rank
        evaluates while others train.
        """
        if self._collective_log is not None:
            evaluates = self._inside.depth > 0 and not torch.is_grad_enabled()
            self._collective_log.note(self._entries[evaluates])

    def wait(self) -> None:
        """Make the current stream wait for the all-gather that `gather` started, if any.

        Later work on this stream can then read the full parameters.
        """
        if self._state is State.GATHERING:
            if self._ticket is not None:
                self._ticket.wait()
                self._ticket = None
            self._state = State.UNSHARDED
            if self.storage.unpacks:
                self.storage.after_gather()

    def reshard(self) -> None:
        """Free the memory of the full parameters.

        Nothing is freed if the full parameters are to stay in memory from step to step (`is_resident`), or if they are
        views of the shard (`sharded` is False).
        """
        if self._state is State.SHARDED:
            return
        if self.resident and self.is_resident:
            self.wait()
            return
        self.drop()

    def drop(self) -> None:
        """Free the memory of the full parameters, even if they are to stay in memory from step to step (`is_resident`).

        Called by `reshard`. It is also called before all-gathers are changed to send another tensor (`route`), and when
        all parameters of the buffer were deleted from their block.
        """
        # A ticket means that `wait` was not called after `gather`. The all-gather may still be writing to the memory.
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        self.storage.reshard()
        self._state = State.SHARDED

    @property
    def is_resident(self) -> bool:
        """Whether `reshard` keeps the full parameters in memory: `resident` is True and all parameters are frozen."""
        return self.resident and not self.gradient.trainable

    @property
    def sharded(self) -> bool:
        """Whether the full buffer has its own memory. If False, the shard itself is the full buffer.

        The shard is the full buffer if there is only one shard (as with one rank), unless the parameters are quantized.
        """
        return not self._alone

    @property
    def is_unsharded(self) -> bool:
        """Whether the full buffer has been gathered, or is being gathered.

        True after `gather`, until `reshard` or `drop` frees the full buffer. The full parameters are readable only
        after `wait`. Always True if the shard is the full buffer (with one rank, unless the parameters are quantized).
        """
        return self._alone or self._state is not State.SHARDED

    @property
    def full_nbytes(self) -> int:
        """The bytes that an all-gather allocates for the full buffer; 0 if the shard is the full buffer."""
        return self.storage.memory().nbytes

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context manager inside which the full parameters are readable, for example to save or copy them.

        Collective: every rank must call it. At the end, the buffer is resharded, unless it was unsharded before the
        context.

        Other ranks may still be reading this rank's shard by peer copies. So the context ends by making the current
        stream wait for all such reads, and shards may be written afterwards.
        """
        try:
            with self.storage.full_values():
                yield
        finally:
            self._gather.wait_for_readers()

    def prepare_write(self) -> None:
        """Make the current stream wait until no other rank reads this rank's shard, so that it may be written.

        Called before code other than an optimizer writes the shard, for example when a checkpoint is loaded. An
        optimizer's step need not call it, because every backward ends with this wait. Collective: every rank must call
        it.
        """
        self._gather.wait_for_readers()

    def gather_like_local(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Gather sharded tensors, such as the optimizer states of the parameters, in one all-gather.

        Collective: every rank must call it. Each tensor is divided between the ranks like its parameter.

        Args:
            values: {index of a parameter: a 1-D tensor with this rank's elements}. Each tensor has as many elements as
                the local parameter. All tensors have the same dtype.

        Returns:
            {index: tensor of the parameter's full shape}. All are views of one new flat tensor on the shard's device.
        """
        first = next(iter(values.values()))
        flat = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=self.shard.device)
        for index, part in values.items():
            local_range = self.local_ranges[index]
            flat[local_range.shard_start : local_range.shard_stop] = part.detach().as_subclass(torch.Tensor)
        full = flat.new_empty(self.layout.numel)
        self.communicator.all_gather(full, flat).wait()
        parts = full.split_with_sizes(self.layout.sizes)[1::2]
        return {index: parts[index].view(self.full_params[index].shape) for index in values}

    # -- refused writes and casts -------------------------------------------------------------------------------

    def check_unwritten(self, copies: Sequence[torch.nn.Parameter] = ()) -> None:
        """Raise RuntimeError if a forward cast a full parameter to a different dtype, or wrote to it in place.

        Called at the end of each forward that has read the parameters, before the full buffer may be freed. Casts and
        writes are refused, because training would go wrong silently:

        * A cast: the optimizer would not update the cast values. The cast is undone before the error is raised.
        * A write: it would be lost when the buffer is resharded. Only a rank whose shard contains the whole parameter
          would keep it, because the full parameter is a view of the shard there. A write is allowed if the shard is the
          full buffer (with one rank, unless the parameters are quantized).

        Args:
            copies: other Parameters that share memory with those in `full_params`, and that the forward has written.
                These writes are refused in the same way. Outside blocks, each module that reads a parameter gets its
                own Parameter object with its own version counter. The caller must check these counters, and pass the
                Parameters that were written.
        """
        dtype, written, alone = self.shard.dtype, [*copies], self._alone
        for full in self.full_params:
            if full.dtype is not dtype:
                self._refuse_cast()
            if full._version and not alone:
                written.append(full)
        if written and not alone:
            raise RuntimeError(
                f"The forward modified sharded parameters in place (shapes {[tuple(full.shape) for full in written]}"
                f"). They are sharded over {self.communicator.size} rank(s), so the change would be lost, or would "
                "reach only one rank. The weights may be wrong now, so create the model again and load its weights. "
                "Keep values that a forward changes in a buffer (register_buffer), or do not wrap the module that "
                "changes them."
            )

    def _refuse_cast(self) -> NoReturn:
        kinds = {(full.shape, full.dtype) for full in self.full_params if full.dtype is not self.shard.dtype}
        for index, full in enumerate(self.full_params):
            full.data = self.storage.view(index, full.shape)
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds)
        raise RuntimeError(
            f"The forward cast sharded parameters of shapes {shapes} from {self.shard.dtype} to {kinds.pop()[1]}, but "
            "the optimizer would not update the cast values. Cast the module that has these parameters before "
            "auto_wrap (for example a router that computes in float32), or cast the activations in its forward instead."
        )


def _attributes(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the attributes to copy from a parameter to its local and full parameters: numbers, bools and strings.

    This is the parameter's entry in `ShardedBuffer.attributes`. It is empty for a subclass of torch.nn.Parameter.
    """
    if type(parameter) is not torch.nn.Parameter:
        return {}
    plain = {name: value for name, value in vars(parameter).items() if isinstance(value, (int, float, str))}
    plain.pop("is_unsharded", None)
    return plain
