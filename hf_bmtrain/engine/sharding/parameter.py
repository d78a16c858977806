"""DistributedParameter, a parameter whose elements are divided between the ranks. Each rank stores its own part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from ..base.arguments import expect_callable, expect_flag, expect_kind, expect_number, expect_tensor
from ..runtime.world import current_world
from ..tensors.backward import double_backward
from ..tensors.tensor import ShardBase, ShardTensor
from .buffer import ShardedBuffer
from .on_demand import OnDemandGather
from .storage import PLAIN, StorageKind


class Origin(NamedTuple):
    """Where `auto_wrap` found a parameter.

    Attributes:
        model: a number that is larger for models that were wrapped later. Messages about several models sort parameters
            by it.
        number: the parameter's position in `model.named_parameters()`, from 0.
        block: the block that contains the parameter, by its name in the model; "" if the parameter is outside blocks or
            in several.
        name: the parameter's name in this block or, if `block` is "", in the model.
    """

    model: int
    number: int
    block: str
    name: str

    @property
    def path(self) -> str:
        """The parameter's name in the model."""
        return f"{self.block}.{self.name}" if self.block else self.name


class DistributedParameter(ShardBase, torch.nn.Parameter):
    """A sharded parameter. `model.parameters()` yields such parameters, and optimizers update them.

    `DistributedParameter(data)` shards a tensor over all ranks, as in BMTrain. Collective: every rank must call it.

    The parameter has the full shape, but its memory contains only this rank's elements, possibly none. The memory is a
    1-D view of this rank's shard of a flat buffer (which contains one or several parameters), so that writing to the
    parameter writes to the shard. `part` returns this rank's elements as a plain tensor. A forward that reads the
    parameter as an attribute of a `DistributedModule` gets the full parameter.

    A backward averages the gradient over all ranks, and adds this rank's elements of the mean to `.grad`. Ranks that
    did not use the parameter contribute zeros. If no rank used it, `.grad` does not change (it is None at first), as in
    plain torch. With tensor parallelism (`tp_size` of `init_distributed`), `tp_mode` decides how a gradient is reduced.

    Args:
        data: the full values, of any shape; all ranks get rank 0's values. If the tensor is split (`tp_split_dim`),
            pass this rank's part instead; all ranks with the same part get the values of the first tensor-parallel
            group.
        requires_grad: whether the parameter requires a gradient.
        init_method: a function that fills a full tensor in place; `init_parameters` calls it.
        group: a name by which `grouped_parameters` groups parameters.
        tp_mode: whether the ranks of a tensor-parallel group use the parameter for the same rows of the batch. Ignored
            without tensor parallelism. True: each rank has the gradient for all rows of its group, so it is averaged
            over all ranks or, if the tensor is split, over the ranks that have the same part. False: each rank of a
            group uses different rows, so the gradient is summed over the ranks of a group, and averaged over the
            groups.
        tp_split_dim: the dimension along which the tensor is split over the ranks of a tensor-parallel group; -1 if it
            is not split. Ignored unless `tp_mode` is True. The parameter has the shape of one part, and is sharded over
            the ranks that have the same part, one in each group. State dicts contain the whole tensor, before the
            split.

    Attributes:
        full_shape: the shape of the full parameter, equal to `shape`.
        origin: where `auto_wrap` found the parameter; None if it was created in another way.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: in these cases:

            * `data` is on the meta device.
            * `requires_grad` is True, but the dtype of `data` is neither floating-point nor complex.
            * `data` has no dimension `tp_split_dim`.
    """

    is_parameter = True
    buffer: ShardedBuffer
    on_demand: OnDemandGather | None
    index: int
    init_method: Callable[[torch.Tensor], object] | None
    group: str | None
    origin: Origin | None
    _gradient_hooks: OrderedDict[int, Callable]

    if TYPE_CHECKING:  # for type checkers, from which torch's metaclass hides the signature of __new__

        def __init__(
            self, data, requires_grad: bool = True, init_method=None, group: str | None = None, tp_mode: bool = False,
            tp_split_dim: int = -1,
        ) -> None: ...  # fmt: skip

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method=None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
    ):
        expect_tensor("data", data)
        expect_flag("requires_grad", requires_grad)
        if requires_grad and not (data.is_floating_point() or data.is_complex()):
            raise ValueError(
                f"data has dtype {data.dtype}, but only floating-point and complex tensors can require a gradient. "
                "Convert it, or pass requires_grad=False."
            )
        if init_method is not None:
            expect_callable("init_method", init_method, "a function that fills a tensor, or None")
        expect_kind("group", group, (str, type(None)), "a name (str) or None")
        if data.is_meta:
            raise ValueError(
                "data is a meta tensor, but a DistributedParameter must be created from a tensor on a real device, "
                "even if init_method= is given. Pass, for example, torch.empty(shape), and init_method= if "
                "init_parameters() is to fill in the values later."
            )
        full = torch.nn.Parameter(data.detach(), requires_grad=requires_grad)
        expect_flag("tp_mode", tp_mode)
        expect_number(
            "tp_split_dim", tp_split_dim, "a dimension of data, or -1", lambda dim: -1 <= dim < data.dim(), integer=True
        )
        world = current_world()
        kind = PLAIN if world.split_kind is None or not tp_mode else world.split_kind(tp_split_dim)
        ranks, mean = kind.share(world, world.schedule.outside)
        buffer = ShardedBuffer(ranks, [full], mean, kind.make([full], 0))
        (sharded,) = buffer.make_local(cls, [full])
        sharded.init_method, sharded.group = init_method, group
        return sharded

    @property
    def full(self) -> torch.nn.Parameter:
        """The full parameter. Its values are readable only while its flat buffer is unsharded (all-gathered)."""
        return self.buffer.full_params[self.index]

    @property
    def ds_shape(self) -> torch.Size:
        """The same as `full_shape`. PEFT reads this attribute of ZeRO-3 parameters."""
        return self.full_shape

    @property
    def requires_grad(self) -> bool:
        return self.buffer.gradient.requires_grad[self.index]

    @requires_grad.setter
    def requires_grad(self, required: bool) -> None:
        torch.Tensor.requires_grad.__set__(self, required)  # pyright: ignore[reportAttributeAccessIssue]
        self.buffer.gradient.requires_grad[self.index] = required

    def requires_grad_(self, requires_grad: bool = True) -> DistributedParameter:
        self.requires_grad = requires_grad
        return self

    @property
    def trained(self) -> bool:
        """Whether the parameter was ever trained, even if it is frozen now.

        Checkpoints of only the trained parameters contain every parameter for which this is True. (A parameter may be
        frozen temporarily: PEFT freezes adapters while they are inactive.)

        The value is True if the parameter required a gradient when the gradients of its flat buffer were reduced, in
        any backward so far, or if a loaded checkpoint says that it was trained.
        """
        return self.buffer.gradient.trained[self.index]

    @trained.setter
    def trained(self, trained: bool) -> None:
        self.buffer.gradient.trained[self.index] = trained

    def detach_(self) -> DistributedParameter:
        return self.requires_grad_(False)

    def settle(self) -> None:
        """Make the current stream wait for an asynchronous optimizer step that still writes this rank's elements.

        You need not call it: reading `part`, and functions of torch that use the elements, include this wait.
        """
        self.buffer.update.wait()

    def autograd_leaves(self) -> list[torch.Tensor]:
        """Return the leaves of autograd's graph that get this parameter's gradient on this rank.

        Forwards read full parameters, so the full parameters are leaves of the graph. This parameter itself is a leaf
        only in graphs that use the result of its method `gather`. `loss.backward(inputs=[parameter])` therefore passes
        all of these leaves to autograd. You need not call this method yourself.

        Returns:
            The Parameter object that blocks read; one Parameter object for each module outside blocks that has read
            this parameter so far; and this parameter itself. All except the last are full parameters, over the same
            memory. Tensors that require no gradient are left out. If none requires a gradient, the list contains only
            this parameter, so that autograd raises its usual error.
        """
        read = [] if self.on_demand is None else self.on_demand.full_params(self.index)
        leaves: list[torch.Tensor] = [each for each in (self.full, *read, self) if each.requires_grad]
        return leaves or [self]  # if `leaves` is empty, autograd raises its error for tensors that require no gradient

    def read_full(self) -> torch.Tensor:
        """Return the full parameter. For internal use: users call `gather`, which returns the same.

        Sharded tensors of all classes have this method. Torch functions that need all elements call it.
        Collective: every rank must call it.

        Returns:
            A new tensor of `full_shape`. If gradients are enabled, it is differentiable in the same way as the result
            of `gather`.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            schedule = current_world().schedule
            gather = OnDemandGather.of(self, schedule)
            if schedule.in_forward and not schedule.in_backward:
                schedule.add_reader(gather)
            else:
                gather.note_read()
            return _ReadWhole.apply(self)
        with self.buffer.unsharded():
            return self.full.detach().clone()

    def gather(self) -> torch.Tensor:
        """Return the full parameter, in new memory on this rank's device.

        Collective: every rank must call it.

        Returns:
            A tensor of `full_shape`. If tensor parallelism splits the parameter (see `tp_split_dim`), this is the part
            that belongs to this rank; `gather_all` joins the parts. If gradients are enabled, and the parameter
            requires one, the result is differentiable: backward averages its gradient over the ranks (see `tp_mode` for
            tensor parallelism), and adds this rank's elements of the mean to the parameter's `.grad`.
        """
        return self.read_full()

    def gather_all(self) -> torch.Tensor:
        """Return the whole tensor on every rank, in new memory, detached from autograd.

        Collective: every rank must call it. `gather_all` and `tp_gather` are two names of the same method.

        Returns:
            The full parameter, of `full_shape`. If tensor parallelism splits the tensor, `full_shape` is the shape of
            one part, and the result consists of all parts, joined on dimension `tp_split_dim`. On this dimension, the
            result is tp_size times as large as one part.
        """
        return self.buffer.storage.whole(self.index, self.gather().detach())

    tp_gather = gather_all

    @property
    def storage_kind(self) -> StorageKind:
        """The StorageKind with which a full copy of this parameter is sharded later.

        A StorageKind defines the form in which shards are stored and sent, and the ranks over which they are divided.
        Full copies are made when the parameter or its model is deep-copied, and when the parameter is sharded again.
        `mark` sets this StorageKind as an attribute of the copy, unless it is PLAIN.

        * With tensor parallelism, it is the parameter's own StorageKind if the parameter is a part of a split tensor,
          or was created with `tp_mode=True` (all ranks of a tensor-parallel group use it for the same rows of the
          batch). The copy is then sharded, and its gradient averaged, over the same ranks.
        * Otherwise it is PLAIN, even if the parameter is quantized or all-gathered in 8 bits. The storage of the copy
          is then chosen in the same way as that of a new parameter.
        """
        return self.buffer.storage.kind or PLAIN

    def mark(self, full: Any) -> None:
        """Give `full`, a full copy of this parameter, the attributes that it needs if it is sharded later.

        These are `init_method` and `group`. If this parameter was created with `tp_mode=True`, or is a part of a tensor
        that tensor parallelism splits, the copy also gets the attribute `storage_kind`, so that it is later sharded
        over the same ranks. You need not call this method: `copy.deepcopy` calls it, and so does `auto_wrap` when it
        shards a sharded parameter again.

        Args:
            full: a tensor with the values of the full parameter.
        """
        full.init_method, full.group = self.init_method, self.group
        # PLAIN is the default. Do not store it, so that a pickle of the copy contains no class of this package.
        if self.storage_kind != PLAIN:
            full.storage_kind = self.storage_kind

    def gather_gradient(self) -> torch.Tensor | None:
        """Return the full gradient on every rank. Call it after backward, for example to inspect the gradient.

        Collective: every rank must call it.

        Returns:
            The averaged gradient, as a new tensor of `full_shape`. Each rank contributes the elements in its `.grad`.
            None if `.grad` is None. Either all ranks or no rank must have a `.grad`; after a backward, this is always
            so.
        """
        return None if self.grad is None else self.placement.gather(self.grad.as_subclass(torch.Tensor))

    def take(self, full: torch.Tensor) -> ShardTensor:
        """Return this rank's elements of a full tensor, those at the positions that this rank stores. Not collective.

        Args:
            full: a tensor of `full_shape`, of any dtype and device.

        Returns:
            A sharded tensor. Its memory is a view of `full`, or of a contiguous copy if `full` is not contiguous. On
            some ranks it may be empty.

        Raises:
            ValueError: the shape of `full` is not `full_shape`.

        Example::

            with torch.no_grad():
                parameter.copy_(parameter.take(full))
        """
        expect_tensor("full", full)
        if full.shape != self.full_shape:
            raise ValueError(
                f"the tensor must have the full shape of the sharded parameter, {tuple(self.full_shape)}, but it has "
                f"shape {tuple(full.shape)}. Pass the full tensor, not one rank's elements"
            )
        # The caller may copy the result into the shard, to which an asynchronous optimizer step may still write.
        self.buffer.update.wait()
        return ShardTensor.of(self.placement.cut(full), self.placement)

    def take_whole(self, whole: torch.Tensor) -> ShardTensor:
        """Return this rank's elements of a whole tensor, such as one from a state dict. Not collective.

        This differs from `take` only if tensor parallelism splits the parameter (see `tp_split_dim`): this rank's
        elements are then taken from its part of `whole`.

        Args:
            whole: a tensor of any dtype and device. Its shape must be `full_shape` or, if the parameter is split, the
                shape before the split, in which dimension `tp_split_dim` is tp_size times as large.

        Returns:
            A sharded tensor. Its memory is a view of `whole`, or of a copy if this rank's part of `whole` is not
            contiguous. On some ranks it may be empty.

        Raises:
            ValueError: `whole` does not have this shape.
        """
        expect_tensor("whole", whole)
        return self.take(self.buffer.storage.own(self.index, whole))

    def register_post_accumulate_grad_hook(self, hook):
        """Register a hook that is called after a backward has added the gradient, averaged over ranks, to `.grad`.

        Register the hook on every rank. All ranks call their hooks in the same order, even ranks that did not use the
        parameter in the backward. So a hook may be collective.

        If no rank used the parameter in the backward, `.grad` keeps its values. The hook may nevertheless be called, in
        two cases:

        * The parameter has a `.grad` from an earlier backward (gradient accumulation).
        * The parameter is frozen, but another parameter of its flat buffer is trained.

        Args:
            hook: a function that takes this parameter.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        expect_callable("hook", hook, "a function of the parameter")
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def __repr__(self) -> str:
        return (
            f"DistributedParameter(full_shape={tuple(self.full_shape)}, dtype={self.dtype}, device='{self.device}', "
            f"requires_grad={self.requires_grad}, {self.placement.range.length} elements on rank {self.buffer.rank})"
        )

    # -- refused ------------------------------------------------------------------------------------------------

    def register_hook(self, hook):
        """Raise RuntimeError. Use `register_post_accumulate_grad_hook` instead.

        Autograd never computes a gradient of a sharded parameter, only of full parameters. So it would never call the
        hook.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "A tensor hook on a sharded parameter would never be called, because its gradient comes from the reduction "
            "over the ranks, not from autograd. Use register_post_accumulate_grad_hook, which sees the averaged "
            "gradient in `.grad`."
        )

    def __reduce_ex__(self, protocol):
        raise RuntimeError(
            f"A sharded parameter of shape {tuple(self.full_shape)} cannot be pickled, because this rank stores only "
            f"{self.placement.range.length} of its elements. Call bmt.save(model, file) on all ranks, or pickle the "
            "result of model.state_dict() or parameter.gather(), which all ranks must call."
        )

    def __deepcopy__(self, memo):
        """Return a full Parameter in new memory, so that a deep copy of a module has full parameters.

        Collective: every rank must call it.
        """
        self.refuse_copy()
        full: Any = torch.nn.Parameter(self.gather().detach(), self.requires_grad)
        self.mark(full)
        return memo.setdefault(id(self), full)

    def refuse_copy(self) -> None:
        """Raise an error if the parameter cannot be deep-copied. `copy.deepcopy` of it or of its module calls this.

        Raises:
            RuntimeError: the parameter is quantized.
        """
        if self.buffer.storage.read_only is not None:
            raise RuntimeError(
                f"A quantized parameter of shape {tuple(self.full_shape)} cannot be deep-copied. Copy the model before "
                "auto_wrap, or load its state_dict() into another model."
            )


def is_part(parameter: object) -> bool:
    """Return whether `parameter` is sharded and is one part of a tensor that tensor parallelism splits."""
    return isinstance(parameter, DistributedParameter) and parameter.buffer.storage.is_part


def is_read_only(parameter: object) -> bool:
    """Return whether `parameter` is a quantized sharded parameter, which can be neither written nor trained.

    Called when a checkpoint of the full model is saved, which cannot contain such parameters, and when a checkpoint is
    loaded, because loaded values cannot be written to such a parameter.
    """
    return isinstance(parameter, DistributedParameter) and parameter.buffer.storage.read_only is not None


class _ReadWhole(torch.autograd.Function):
    """The autograd function that copies the full values of a sharded parameter into a new tensor.

    It runs when `gather`, or a function of torch, reads the sharded parameter while autograd records. In backward, the
    gradient of the copy is averaged over the ranks, together with the parameter's other gradients.
    """

    @staticmethod
    def forward(ctx, parameter: DistributedParameter) -> torch.Tensor:
        ctx.parameter = parameter
        with parameter.buffer.unsharded():
            return parameter.full.detach().clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise double_backward()
        schedule = current_world().schedule
        OnDemandGather.of(ctx.parameter, schedule).collect(ctx.parameter.index, gradient)
