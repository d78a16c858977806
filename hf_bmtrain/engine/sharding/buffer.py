"""ShardedBuffer: parameters in one flat buffer, of which every rank stores a shard."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from ..base.torch_internals import make_subclass
from ..comm.collective_log import code
from ..comm.layout import ALIGNMENT_BYTES, Layout
from ..comm.reduce import Reduction
from ..comm.resizable import ResizableStorage, shares_storage
from ..comm.streams import Ticket
from ..runtime.world import World
from ..tensors.placement import Placement
from .gradient import GradientBuffer
from .pending_update import PendingUpdate
from .sourced import ScatteredParameter
from .unused import UnusedParameters


class ShardedBuffer:
    """Parameters of one dtype and device in one flat buffer, of which every rank stores 1/N.

    The slices, views of `shard`, keep the buffer alive, and it refers to them weakly: a dropped model is freed at once.

    shard: (n,) this rank's elements, never reallocated. stored: the memory that holds them, here the shard.
    wholes: a Parameter in its own shape for each, views of the full buffer, readable only while that is whole (after
    `gather` and `wait`, until `release`). A parameter that is stored in this rank's shard completely is a view of the
    shard instead, and is not copied. With one rank that holds for all of them: the full buffer *is* the shard.
    number: among the buffers of this world, the same on every rank.
    pieces: the part of each parameter in this rank's shard. update: the shard's last asynchronous update.
    stays_whole: `release` does nothing while no parameter is trainable; the same on every rank. The next `gather`
    after a write to the shard fills the full buffer anew.
    """

    def __init__(self, world: World, parameters: Sequence[torch.nn.Parameter], reduction: Reduction) -> None:
        """Store `parameters`, with rank 0's values. Collective. reduction: averages the gradients."""
        world.buffers.made += 1
        dtype = parameters[0].dtype
        assert all(p.dtype == dtype for p in parameters), "one dtype a buffer"
        self._gather, self._communicator = world.shards, world.shards.communicator
        self.rank, size = self._communicator.rank, self._communicator.size
        self.layout = self._lay_out([p.numel() for p in parameters], size, dtype)
        self.placements = [Placement(self.layout, i, p.shape, world.reduce) for i, p in enumerate(parameters)]
        self.pieces = [placement.piece for placement in self.placements]
        self._cut = self.layout.cut_ranges(self.rank)
        self.update = PendingUpdate(self._gather)
        self._poison = world.poison
        self._allocate(world, dtype)
        self._target, self._source = self._full, self.stored  # what `gather` fills, and with what of every rank
        self.wholes = [torch.nn.Parameter(self._view(i, p.shape), p.requires_grad) for i, p in enumerate(parameters)]
        for whole in self.wholes:
            whole.is_whole = True  # pyright: ignore[reportAttributeAccessIssue]
        reducer = reduction.reducer(self.layout, [p.shape for p in parameters], self.shard, world.poison)
        self.number = world.buffers.made
        self.names: list[str | None] = [None] * len(parameters)
        unused = UnusedParameters(world.control, self.number)
        # Gathers by copies are no collectives.
        self._journal = self._communicator.journal if self._gather.is_collective(self.stored) else None
        self._entries = [code(kind, self.number) for kind in ("gather of", "gather without gradients of")]
        self._inside = world.inside
        self.gradient = GradientBuffer(self.placements, reducer, self.wholes, self.shard, unused)
        self.stays_whole = False
        self._ticket: Ticket | None = None
        self._filled_version = -1
        self._fill(parameters)

    # -- construction -------------------------------------------------------------------------------------------

    def _lay_out(self, numels: Sequence[int], size: int, dtype: torch.dtype) -> Layout:
        return Layout.build(numels, size, self._grain(dtype))

    def _grain(self, dtype: torch.dtype) -> int:
        """Return the elements of which shards hold multiples, see `Layout`."""
        return max(1, ALIGNMENT_BYTES // dtype.itemsize)

    def _allocate(self, world: World, dtype: torch.dtype) -> None:
        """Make `shard`, `stored` and the full buffer, which has memory until it is released. Collective."""
        numel, layout = self.layout.shard_numel, self.layout
        self.shard = self.stored = self._gather.allocate(numel, dtype, world.device, self.update.wait)
        alone = layout.world_size == 1
        self._full = None if alone else ResizableStorage(layout.numel, dtype, world.device, world.poison)

    def _view(self, index: int, shape: torch.Size) -> torch.Tensor:
        piece = self.pieces[index]
        if self._full is not None and piece.length < shape.numel():
            return self._full.view(self.layout.offsets[index], shape)
        shard = self.shard if self._full is None else self.shard.data  # `.data` has a version counter of its own
        return shard[piece.shard_start : piece.shard_stop].view(shape)

    @torch.no_grad()
    def _fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Store rank 0's values, so that ranks that drew different random weights agree."""
        if any(isinstance(parameter, ScatteredParameter) for parameter in parameters):
            self._fill_singly(parameters)
            return
        if self._full is None:
            for whole, parameter in zip(self.wholes, parameters):
                whole.copy_(parameter)
            return
        flat = self._full.allocate().zero_()
        for offset, parameter in zip(self.layout.offsets, parameters):
            self._full.view(offset, parameter.shape).copy_(parameter)
        self._communicator.broadcast(flat, 0).wait()
        self.shard.copy_(flat.view(self.layout.world_size, -1)[self.rank])
        self._full.free()

    def _fill_singly(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Store the values of scattered parameters, and rank 0's of others, without the full buffer."""
        if self._full is not None:
            self._full.free()
        for parameter, piece in zip(parameters, self.pieces):
            part = self.shard[piece.shard_start : piece.shard_stop]
            if isinstance(parameter, ScatteredParameter):
                parameter.move(part, piece.tensor_start, self._communicator)
                continue
            values = parameter.detach().to(part.device, copy=True).reshape(-1)
            if len(values):
                self._communicator.broadcast(values, 0).wait()
            part.copy_(values[piece.tensor_start : piece.tensor_stop])

    def make_slices(self, cls: type[torch.nn.Parameter], parameters: Sequence[torch.nn.Parameter]) -> list[Any]:
        """Return this rank's slices of `parameters`, whose storage this buffer is, as instances of `cls`."""
        slices: list[Any] = []
        for index, (parameter, piece) in enumerate(zip(parameters, self.pieces)):
            view = self.shard[piece.shard_start : piece.shard_stop]
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
        return [slice_ for reference in self.gradient.slices if (slice_ := reference()) is not None]

    # -- gather, use, release -----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """A number that changes whenever the weights are written."""
        return self.shard._version

    def gather(self) -> None:
        """Start to gather the present weights, unless the buffer is whole with them or is being gathered."""
        if self.update.ticket is not None:
            self.update.wait()
        target = self._target
        if target is None or (target.allocated and self._filled_version == self.shard._version):
            return
        if target.allocated:
            self.release()
        target.allocate()
        self._filled_version = self.shard._version
        try:
            self._note_gather()
            self._ticket = self._gather.gather(target.tensor, self._source, self._cut)
        except BaseException:
            target.free()
            raise

    def _note_gather(self) -> None:
        """Note a gather for the comparison of the ranks, where an evaluation on one rank differs from training."""
        if self._journal is not None:
            evaluates = self._inside.depth > 0 and not torch.is_grad_enabled()
            self._journal.note(self._entries[evaluates])

    def wait(self) -> None:
        """Make the current stream wait until the buffer is whole."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None

    def release(self) -> None:
        """Free what `gather` has filled, unless it is the shard or kept."""
        if self._target is not None:
            self.wait()
            if not (self.stays_whole and self.is_kept):
                self._target.free()

    @property
    def is_kept(self) -> bool:
        """True if it is frozen and stays whole from its next gather on."""
        return self.stays_whole and not self.gradient.trainable

    @property
    def sharded(self) -> bool:
        """True if there are other ranks; otherwise the full buffer is the shard and always whole."""
        return self._full is not None

    @property
    def whole_nbytes(self) -> int:
        """Bytes of what `gather` fills; 0 if the full buffer is the shard."""
        return 0 if self._full is None else self.layout.numel * self.shard.itemsize

    @property
    def is_whole(self) -> bool:
        """True while what is gathered has memory: always with one rank, otherwise from `gather` to `release`."""
        return self._target is None or self._target.allocated

    @property
    def gathered_views(self) -> list[torch.Tensor]:
        """Tensors over all memory that `gather` may fill."""
        return [*self.wholes]

    @property
    def shards(self) -> list[torch.Tensor]:
        """What this rank stores."""
        return [self.stored]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of a whole. The same on every rank, unlike which wholes view the shard."""
        return self._full is not None and (self._full.holds(tensor) or shares_storage(tensor, self.shard))

    @contextmanager
    def whole_now(self) -> Iterator[None]:
        """Make the wholes readable under `with`; then they are as before, and shards may be written. Collective."""
        was_whole = self.is_whole
        self.gather()
        self.wait()
        try:
            yield
        finally:
            if not was_whole:
                self.release()
            self._gather.quiesce()

    def prepare_write(self) -> None:
        """Wait until no rank reads the shard, before it is written outside an optimizer's step. Collective."""
        self._gather.quiesce()

    def gather_like_slices(self, values: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Assemble whole tensors from every rank's `values`, laid out like the slices of their indices. Collective.

        The values have one dtype. One all-gather; the results are views of one new flat tensor on the shard's device.
        """
        first = next(iter(values.values()))
        flat = torch.zeros(self.layout.shard_numel, dtype=first.dtype, device=self.shard.device)
        for index, part in values.items():
            piece = self.pieces[index]
            flat[piece.shard_start : piece.shard_stop] = part.detach().as_subclass(torch.Tensor)
        full = flat.new_empty(self.layout.numel)
        self._communicator.all_gather(full, flat).wait()
        parts = full.split_with_sizes(self.layout.sizes)[1::2]
        return {index: parts[index].view(self.wholes[index].shape) for index in values}

    # -- refused ------------------------------------------------------------------------------------------------

    def check_unwritten(self, copies: Sequence[torch.nn.Parameter] = ()) -> None:
        """Raise RuntimeError if a forward wrote into a whole, or cast it.

        The change would be lost with the full buffer, or stay on the one rank that stores the parameter completely.
        copies: Parameters over the same memory that were written. Wholes that were cast are restored.
        """
        dtype, written = self.shard.dtype, [*copies]
        for whole in self.wholes:
            if whole.dtype is not dtype:
                self._refuse_cast()
            if whole._version:
                written.append(whole)
        if written and self._full is not None:
            raise RuntimeError(
                f"The forward modified a sharded parameter in place (shapes {[tuple(whole.shape) for whole in written]}"
                f"); with {self._communicator.size} ranks the change is lost but for what lies on one rank. Load the "
                "weights again, and keep such state in a buffer (register_buffer), or exclude this module."
            )

    def _refuse_cast(self) -> NoReturn:
        kinds = {(whole.shape, whole.dtype) for whole in self.wholes if whole.dtype is not self.shard.dtype}
        for index, whole in enumerate(self.wholes):
            whole.data = self._view(index, whole.shape)
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds)
        raise RuntimeError(
            f"The forward cast sharded parameters of shapes {shapes} from {self.shard.dtype} to {kinds.pop()[1]}: the "
            "copies would not follow the optimizer. Cast that module so before auto_wrap (a router that computes in "
            "float32, say), or the activations in its forward."
        )
