"""Who holds which bytes of the parameters, and when."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from ..comm import layout as _layout
from ..comm.collectives import Ticket
from ..comm.storage import Elastic, shares_storage
from ..runtime.schedule import Step
from ..runtime.world import current_world
from .gradient import GradientBuffer
from .on_demand import Reads
from .pending_update import PendingUpdate
from .refusals import Refusals, refuse_cast, refuse_writes


class DistributedParameter(Refusals, torch.nn.Parameter):
    """This rank's 1-D slice of one parameter: what optimizers see, `model.parameters()` yields and `.grad` fits.

    `DistributedParameter(data)` shards `data` (any shape; rank 0's values count) over the current world, as in
    BMTrain; read inside the forward of a `DistributedModule` it is whole. Its elements are a view of the flat
    shard of its `ShardedBuffer`: writing to them writes the shard. It may be empty on a rank.

    full_shape: the shape of the whole parameter. init_method: fills a whole tensor, see `init_parameters`.
    group: a name for `grouped_parameters`.
    After a backward `.grad` is set for every parameter whose block (or, outside blocks, whose model) it went
    through; where no rank used the parameter itself it is zero, where plain torch would leave None (also under
    `torch.autograd.grad` for inputs alone).
    """

    buffer: ShardedBuffer
    index: int
    init_method: Callable[[torch.Tensor], object] | None
    group: str | None
    _gradient_hooks: OrderedDict[int, Callable]

    if TYPE_CHECKING:  # torch's metaclass hides what __new__ takes

        def __init__(self, data, requires_grad: bool = True, init_method=None, group: str | None = None) -> None: ...

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, init_method=None, group: str | None = None):
        if data.is_meta:
            raise ValueError(
                "A DistributedParameter needs values to shard, and a meta tensor has none: create it on a real "
                "device, with init_method= for values that init_parameters() fills in."
            )
        whole = torch.nn.Parameter(data.detach(), requires_grad=requires_grad)
        world = current_world()
        piece = ShardedBuffer(world.step, [whole], world.device).slices[0]
        piece.init_method, piece.group = init_method, group
        return piece

    @property
    def full_shape(self) -> torch.Size:
        return self.buffer.wholes[self.index].shape

    @property
    def ds_shape(self) -> torch.Size:
        """`full_shape` under the name by which PEFT asks a sharded parameter for it."""
        return self.full_shape

    @property
    def requires_grad(self) -> bool:
        return self.buffer.gradient.required[self.index]

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, required)  # pyright: ignore[reportAttributeAccessIssue]
        self.buffer.gradient.required[self.index] = required

    def requires_grad_(self, requires_grad: bool = True) -> DistributedParameter:
        self.requires_grad = requires_grad
        return self

    def detach_(self) -> DistributedParameter:
        return self.requires_grad_(False)

    @property
    def data(self) -> torch.Tensor:
        """The slice as a plain tensor; writes to it are seen as writes to the weights."""
        self.buffer.update.settle()
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Copy: a slice must keep its place in the flat shard."""
        if (values.shape, values.dtype, values.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                f"`.data` of a sharded parameter can only be set to what fits its slice ({tuple(self.shape)}, "
                f"{self.dtype}, {self.device}), not {tuple(values.shape)}, {values.dtype}, {values.device}. Cast "
                "before auto_wrap; to write a whole tensor use parameter.copy_(parameter.take(whole))."
            )
        with torch.no_grad():
            self.copy_(values)

    def gather(self) -> torch.Tensor:
        """The whole parameter, a new detached tensor of `full_shape` on this device. Collective."""
        with self.buffer.whole_now():
            return self.buffer.wholes[self.index].detach().clone()

    def gather_gradient(self) -> torch.Tensor | None:
        """The whole gradient, a new tensor of `full_shape`, or None where there is none. Collective."""
        return None if self.grad is None else self.buffer.gather_piecewise(self.index, self.grad)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a `whole` tensor of `full_shape`: a 1-D view. Not collective."""
        if whole.shape != self.full_shape:
            raise ValueError(f"expected a whole tensor of shape {tuple(self.full_shape)}, got {tuple(whole.shape)}")
        self.buffer.update.settle()  # who takes a part is about to write it
        place = self.buffer.piece(self.index)
        return whole.reshape(-1)[place.tensor_start : place.tensor_stop]

    def register_post_accumulate_grad_hook(self, hook):
        """`hook(parameter)` is called when the gradient, averaged over ranks, has been added to `.grad`."""
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def run_gradient_hooks(self) -> None:
        for hook in list(self._gradient_hooks.values()):
            hook(self)

    def __reduce_ex__(self, protocol):
        return self.data.clone().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return (
            f"DistributedParameter(full_shape={tuple(self.full_shape)}, dtype={self.dtype}, device='{self.device}', "
            f"requires_grad={self.requires_grad}, {self.numel()} elements on rank {self.buffer.rank})"
        )


class ShardedBuffer:
    """Parameters alike in dtype and device in one flat buffer, of which every rank keeps 1/N.

    shard: (n,) this rank's elements, for ever. slices: a DistributedParameter each, views of `shard`. wholes: a
    Parameter each in its own shape, views of the full buffer, readable only while it is whole (`gather`, `wait`,
    … `release`); but one that lies in this rank's shard from end to end is a view of it, and is not copied. With one
    rank that is so for all: the full buffer *is* the shard, and always whole.

    before_first: called once, and dropped, when the process makes its first buffer. By it a folder to the right, which
    this one may not import, prepares for slices (optim/checks.py).
    """

    before_first: ClassVar[list[Callable[[], object]]] = []

    def __init__(self, step: Step, parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        while ShardedBuffer.before_first:
            ShardedBuffer.before_first.pop()()
        dtype = parameters[0].dtype
        assert all(p.dtype == dtype for p in parameters), "one dtype a buffer"
        lane = step.gather
        self._step, self._lane, self.rank = step, lane, lane.rank
        alignment = max(1, _layout.ALIGNMENT_BYTES // dtype.itemsize)
        self.layout = _layout.Layout.build([p.numel() for p in parameters], lane.size, alignment)
        self._cut = self.layout.cut_ranges(lane.rank)
        self.update = PendingUpdate(lane)
        self.shard = lane.allocate(self.layout.shard_numel, dtype, device, self.update.settle)
        self._full = None if lane.size == 1 else Elastic(self.layout.numel, dtype, device, step.poison)
        self.wholes = [torch.nn.Parameter(self._view(i, p.shape), p.requires_grad) for i, p in enumerate(parameters)]
        self.slices = [self._make_slice(i, p) for i, p in enumerate(parameters)]
        self.gradient = GradientBuffer(step, self.layout, self.wholes, self.slices, self.shard)
        self.reads = Reads(step, self)
        self._ticket: Ticket | None = None
        self._filled_version = -1
        self._fill(parameters)
        step.buffers_made += 1

    # -- making -------------------------------------------------------------------------------------------------

    def _view(self, index: int, shape: torch.Size) -> torch.Tensor:
        place = self.piece(index)
        if self._full is not None and place.length < shape.numel():
            return self._full.view(self.layout.offsets[index], shape)
        shard = self.shard if self._full is None else self.shard.data  # `.data` has a version counter of its own
        return shard[place.shard_start : place.shard_stop].view(shape)

    def _make_slice(self, index: int, parameter: torch.nn.Parameter) -> DistributedParameter:
        place = self.piece(index)
        view = self.shard[place.shard_start : place.shard_stop]
        piece = torch.Tensor._make_subclass(DistributedParameter, view, parameter.requires_grad)
        piece.buffer, piece.index = self, index
        piece.init_method, piece.group = getattr(parameter, "init_method", None), getattr(parameter, "group", None)
        piece._gradient_hooks = OrderedDict()
        return piece

    @torch.no_grad()
    def _fill(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Rank 0's values, so that ranks that drew different random weights agree."""
        if self._full is None:
            for whole, parameter in zip(self.wholes, parameters):
                whole.copy_(parameter)
            return
        flat = self._full.allocate().zero_()
        for offset, parameter in zip(self.layout.offsets, parameters):
            self._full.view(offset, parameter.shape).copy_(parameter)
        self._lane.broadcast(flat, 0).wait()
        self.shard.copy_(flat.view(self.layout.world_size, -1)[self.rank])
        self._full.free()

    def piece(self, index: int) -> _layout.Piece:
        """Where this rank's part of parameter `index` lies."""
        return self.layout.piece(index, self.rank)

    # -- gather, use, release -----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Changes whenever the weights do."""
        return self.shard._version

    def gather(self) -> None:
        """Start to make the full buffer whole, unless it is, or is about to be, with the present weights."""
        self.update.settle()
        full = self._full
        if full is None or (full.allocated and self._filled_version == self.shard._version):
            return
        if full.allocated:
            self.release()
        full.allocate()
        self._filled_version = self.shard._version
        self._ticket = self._lane.all_gather(full.tensor, self.shard, self._cut)

    def wait(self) -> None:
        """The current stream waits until the buffer is whole."""
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None

    def release(self) -> None:
        if self._full is None:
            return
        if self._ticket is not None:
            self._ticket.wait()
            self._ticket = None
        self._full.free()

    @property
    def sharded(self) -> bool:
        """Whether there are other ranks: with one, the full buffer is the shard and always whole."""
        return self._full is not None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in a whole: the same on every rank, unlike which of them are views of the shard."""
        return self._full is not None and (self._full.holds(tensor) or shares_storage(tensor, self.shard))

    def check_unwritten(self, besides: Sequence[torch.nn.Parameter] = ()) -> None:
        """Raise where a forward wrote into a whole parameter, or cast it: the change would vanish with it, or stay in
        the shard of the rank where it lies whole.

        besides: other Parameters over the same memory that were written.
        """
        dtype, written = self.shard.dtype, [*besides]
        for whole in self.wholes:
            if whole.dtype is not dtype:
                self._raise_cast()
            if whole._version:
                written.append(whole)
        if written and self._full is not None:
            refuse_writes([tuple(whole.shape) for whole in written], self._lane.size)

    def _raise_cast(self) -> NoReturn:
        cast = [index for index, whole in enumerate(self.wholes) if whole.dtype != self.shard.dtype]
        kinds = {(self.wholes[index].shape, self.wholes[index].dtype) for index in cast}
        for index in cast:
            self.wholes[index].data = self._view(index, self.wholes[index].shape)
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds)
        refuse_cast(shapes, self.shard.dtype, kinds.pop()[1])

    @contextmanager
    def whole_now(self) -> Iterator[None]:
        """`with buffer.whole_now():` the wholes are readable; released after it unless they were before. Collective.

        What is read may be written back afterwards.
        """
        was_whole = self._full is None or self._full.allocated
        self.gather()
        self.wait()
        try:
            yield
        finally:
            if not was_whole:
                self.release()
            self._lane.quiesce()

    def prepare_write(self) -> None:
        """Before the shard is written outside of an optimizer's step: no rank is reading it. Collective."""
        self._lane.quiesce()

    # -- other collectives --------------------------------------------------------------------------------------

    def gather_piecewise(self, index: int, values: torch.Tensor) -> torch.Tensor:
        """Whole tensor `index` made of every rank's `values`, laid out like the slices of this buffer."""
        place = self.piece(index)
        flat = torch.zeros(self.layout.shard_numel, dtype=values.dtype, device=self.shard.device)
        flat[place.shard_start : place.shard_stop] = values.detach().as_subclass(torch.Tensor)
        full = flat.new_empty(self.layout.numel)
        self._lane.all_gather(full, flat).wait()
        offset, shape = self.layout.offsets[index], self.wholes[index].shape
        return full[offset : offset + shape.numel()].view(shape).clone()
