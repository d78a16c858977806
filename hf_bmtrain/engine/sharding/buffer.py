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
    """Of the full parameters: without memory; being gathered; readable."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()


class ShardedBuffer:
    """Parameters of one dtype and device in one flat buffer, of which every rank stores 1/N.

    The slices, views of `shard`, keep the buffer alive, and it refers to them weakly: a dropped model is freed at once.

    storage: how the shard is kept and sent. shard: (n,) this rank's elements, never reallocated.
    wholes: a Parameter in its own shape for each, readable only while the buffer is unsharded (after `gather` and
    `wait`, until `reshard`). number: among the buffers of this world, the same on every rank.
    local_ranges: the part of each parameter in this rank's shard. update: the shard's last asynchronous update.
    resident: `reshard` does nothing while no parameter is trainable; the same on every rank. The next `gather`
    after a write to the shard fills the full buffer anew.
    """

    shard: torch.Tensor
    _ticket: Ticket | None = None

    def __init__(
        self,
        world: World,
        parameters: Sequence[torch.nn.Parameter],
        reduction: Reduction,
        storage: Storage | None = None,
    ) -> None:
        """Store `parameters`, with rank 0's values. Collective. reduction: averages the gradients."""
        world.buffers.made += 1
        self.number = world.buffers.made
        dtype = parameters[0].dtype
        assert all(p.dtype == dtype for p in parameters), "one dtype a buffer"
        self._gather, self.communicator = world.shards, world.shards.communicator
        self.rank, size = self.communicator.rank, self.communicator.size
        self.storage = storage or Storage()
        self.storage.buffer = self
        self.layout = self.storage.layout([p.numel() for p in parameters], size, dtype)
        self.placements = [Placement(self.layout, i, p.shape, world.reduce) for i, p in enumerate(parameters)]
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
        for full in self.full_params:
            full.is_unsharded = True  # pyright: ignore[reportAttributeAccessIssue]
        reducer = reduction.reducer(self.layout, [p.shape for p in parameters], self.shard, world.poison)
        self.names: list[str | None] = [None] * len(parameters)
        unused = UnusedParameters(world.control, self.number)
        self.gradient = GradientBuffer(self.placements, reducer, self.full_params, self.shard, unused)
        self.resident = False
        self.storage.fill(parameters)

    # -- construction -------------------------------------------------------------------------------------------

    def route(
        self, source: torch.Tensor, target: ResizableStorage | None, cut: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Set what an all-gather sends, and where it arrives. The buffer must be sharded.

        source: of this rank. target: None if nothing is sent. cut: the ranges of the source that other ranks read; None
        for those of parameters that are stored on several ranks.
        """
        self._source, self._target = source, target
        self._cut = self.layout.cut_ranges(self.rank) if cut is None else cut
        # Peer copies are not collectives, so they are not recorded in the log.
        self._collective_log = self.communicator.collective_log if self._gather.is_collective(source) else None
        self._filled_version = -1

    def make_local(self, cls: type[torch.nn.Parameter], parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
        """Return this rank's slices of `parameters`, whose storage this buffer is, as instances of `cls`."""
        slices: list[Any] = []
        for index, (parameter, local_range) in enumerate(zip(parameters, self.local_ranges)):
            view = self.shard[local_range.shard_start : local_range.shard_stop]
            made = make_subclass(cls, view, parameter.requires_grad)
            made.buffer, made.index, made.placement = self, index, self.placements[index]
            made.on_demand, made.origin, made._gradient_hooks = None, None, OrderedDict()
            made.init_method, made.group = getattr(parameter, "init_method", None), getattr(parameter, "group", None)
            slices.append(made)
        self.gradient.slices = [weakref.ref(made) for made in slices]
        return slices

    @property
    def slices(self) -> list[Any]:
        """This rank's slices, but for those that were dropped together with their modules."""
        return [local for reference in self.gradient.slices if (local := reference()) is not None]

    # -- gather, use, release -----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that changes whenever the weights are written."""
        return self.shard._version

    def gather(self) -> None:
        """Start to gather the present weights, unless the buffer is whole with them or is being gathered."""
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

    def _note_gather(self) -> None:
        """Note a gather for the comparison of the ranks, where an evaluation on one rank differs from training."""
        if self._collective_log is not None:
            evaluates = self._inside.depth > 0 and not torch.is_grad_enabled()
            self._collective_log.note(self._entries[evaluates])

    def wait(self) -> None:
        """Make the current stream wait until the buffer is whole."""
        if self._state is State.GATHERING:
            if self._ticket is not None:
                self._ticket.wait()
                self._ticket = None
            self._state = State.UNSHARDED
            if self.storage.unpacks:
                self.storage.after_gather()

    def reshard(self) -> None:
        """Free what `gather` has filled, unless it is the shard or kept."""
        if self._state is State.SHARDED:
            return
        if self.resident and self.is_resident:
            self.wait()
            return
        self.drop()

    def drop(self) -> None:
        """Free what `gather` has filled, also if it is kept."""
        if self._ticket is not None:  # nothing has read it: it need not be unpacked
            self._ticket.wait()
            self._ticket = None
        self.storage.reshard()
        self._state = State.SHARDED

    @property
    def is_resident(self) -> bool:
        """True if it is frozen and stays whole from its next gather on."""
        return self.resident and not self.gradient.trainable

    @property
    def sharded(self) -> bool:
        """True if the full buffer is memory of its own; otherwise it is the shard, and always whole."""
        return not self._alone

    @property
    def is_unsharded(self) -> bool:
        """True while what is gathered has memory: always with one rank, otherwise from `gather` to `reshard`."""
        return self._alone or self._state is not State.SHARDED

    @property
    def full_nbytes(self) -> int:
        """Bytes of what `gather` fills; 0 if the full buffer is the shard."""
        return self.storage.memory().nbytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of a whole. The same on every rank, unlike which wholes view the shard."""
        return self.storage.holds(tensor)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Make the wholes readable under `with`; then they are as before, and shards may be written. Collective."""
        try:
            with self.storage.full_values():
                yield
        finally:
            self._gather.wait_for_readers()

    def prepare_write(self) -> None:
        """Wait until no rank reads the shard, before it is written outside an optimizer's step. Collective."""
        self._gather.wait_for_readers()

    def gather_like_local(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Assemble whole tensors from every rank's `values`, laid out like the slices of their indices. Collective.

        The values have one dtype. One all-gather; the results are views of one new flat tensor on the shard's device.
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

    # -- refused ------------------------------------------------------------------------------------------------

    def check_unwritten(self, copies: Sequence[torch.nn.Parameter] = ()) -> None:
        """Raise RuntimeError if a forward wrote into a whole, or cast it.

        The change would be lost with the full buffer, or stay on the one rank that stores the parameter completely.
        copies: Parameters over the same memory that were written. Wholes that were cast are restored.
        """
        dtype, written = self.shard.dtype, [*copies]
        for full in self.full_params:
            if full.dtype is not dtype:
                self._refuse_cast()
            if full._version:
                written.append(full)
        if written and self.sharded:
            raise RuntimeError(
                f"The forward modified a sharded parameter in place (shapes {[tuple(full.shape) for full in written]}"
                f"); with {self.communicator.size} ranks the change is lost but for what lies on one rank. Load the "
                "weights again, and keep such state in a buffer (register_buffer), or exclude this module."
            )

    def _refuse_cast(self) -> NoReturn:
        kinds = {(full.shape, full.dtype) for full in self.full_params if full.dtype is not self.shard.dtype}
        for index, full in enumerate(self.full_params):
            full.data = self.storage.view(index, full.shape)
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds)
        raise RuntimeError(
            f"The forward cast sharded parameters of shapes {shapes} from {self.shard.dtype} to {kinds.pop()[1]}: the "
            "copies would not follow the optimizer. Cast that module so before auto_wrap (a router that computes in "
            "float32, say), or the activations in its forward."
        )
