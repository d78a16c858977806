"""The rule by which torch's functions act on slices.

* Where autograd records, a parameter is whole: a function of it gathers it, and its gradient is averaged over the
  ranks like any other.
* Under `no_grad` it is this rank's slice in element-wise functions, and so are gradients, `.data` and the optimizer's
  state at any time. The result is a slice again. A whole operand, or one that broadcasts to the whole shape, is cut.
* Any other function of slices runs on whole tensors, on every rank: what it returns is whole, and what it writes is
  written back. Sums, means, norms and the like gather one number instead.

All but the element-wise ones are collective.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ..base.torch_internals import WithoutTorchFunction, foreach_norm, is_tracing, schema_of
from ..comm.resizable import shares_storage
from ..runtime.world import current_world
from .backward import backward_to, refuse_grad
from .collectives import override_collectives
from .functions import (
    CONVERSIONS,
    ELEMENT_WISE,
    LIKE,
    METADATA,
    RANDOM,
    SHAPES,
    VIEWS,
    find_tensors,
    is_array,
    name_of,
    replace_tensors,
)
from .norms import SegmentNorms
from .placement import Placement
from .reductions import REDUCTIONS


class ShardBase:
    """The base of tensors that hold this rank's 1-D part of a whole tensor.

    Its shape, strides and number of elements are the whole's; the memory is that of `part`.

    placement: where the part is in the whole. is_parameter: autograd records what is computed from it. in_memory: if
    False, the class itself makes the elements that a function reads, and is asked before other slices are.
    """

    placement: Placement
    is_parameter: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = False  # optimizers ask each gradient
    grad_now: torch.Tensor | None = None

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.placement.shape

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements, (n,): an ordinary tensor that shares their memory and version."""
        self.settle()
        with WithoutTorchFunction():
            return self.detach().as_subclass(torch.Tensor)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def data(self) -> ShardTensor:
        """The slice without its history. Writes to it count as writes to this tensor."""
        return self.detach()  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Copy `values`, a slice or whole, into the slice. Raises RuntimeError if shape, dtype or device differ."""
        me: Any = self
        shapes = me.part.shape, me.full_shape
        if values.shape not in shapes or (values.dtype, values.device) != (me.dtype, me.device):
            raise RuntimeError(
                f"`.data` of a slice can only be set to what fits it ({tuple(shapes[0])}, or {tuple(me.full_shape)} as "
                f"a whole, {me.dtype}, {me.device}), not {tuple(values.shape)}, {values.dtype}, {values.device}: cast "
                "before auto_wrap."
            )
        with torch.no_grad():
            me.copy_(values)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, laid out like the slice.

        A Python attribute beside torch's own, which would be read through `__torch_function__` at 15 times the cost:
        clipping reads each gradient four times a step, and an optimizer three times.
        """
        return self.grad_now

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        me: Any = self
        with WithoutTorchFunction():
            if gradient is not None and me.shape != gradient.shape == self.full_shape:
                gradient = ShardTensor.of(self.placement.cut(gradient), self.placement)
            SET_GRAD(self, gradient)
            self.grad_now = gradient

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def settle(self) -> None:
        """Make the current stream wait until the values are there."""

    def read_full(self) -> torch.Tensor:
        """Return the whole tensor in new memory, recorded by autograd if this is a parameter. Collective."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in METADATA:
            with WithoutTorchFunction():
                return func(*args, **kwargs)
        if func == SET_GRAD:
            args[0].grad = args[1]
            return None
        if func is torch.autograd.backward:
            return backward_to(*args, **kwargs)
        if func is torch.autograd.grad:
            return refuse_grad()
        name = name_of(func)
        if name in SHAPES:
            with WithoutTorchFunction():
                if is_tracing():  # torch.compile describes the memory
                    return func(*args, **kwargs)
                return func(*replace_tensors(_on_meta, args), **replace_tensors(_on_meta, kwargs))
        if name == "data_ptr":
            return _data_ptr(*args)
        if name == "type" and len(args) + len(kwargs) == 1:
            return args[0].as_subclass(torch.Tensor).type()
        if cls.in_memory and not all(getattr(kind, "in_memory", True) for kind in types):
            return NotImplemented
        if not torch.is_grad_enabled():
            if func is foreach_norm:
                with WithoutTorchFunction():
                    return REDUCTIONS[func](*args, **kwargs)
            if getattr(func, "__name__", None) in _ON_LISTS:
                result = _on_alike(func, name, args, kwargs)
                if result is not NotImplemented:
                    return result
        return _Call(func, name, args, kwargs).run()

    @staticmethod
    def reads_elements(func: Callable) -> bool:
        """Return whether a function of torch uses more of a tensor than `METADATA` and `SHAPES` do."""
        return func not in METADATA and name_of(func) not in SHAPES


class ShardTensor(ShardBase, torch.Tensor):
    """This rank's 1-D part of a gradient, of optimizer state, or of what arithmetic makes of slices.

    In element-wise operations it behaves as a plain tensor does, and the result is a ShardTensor again; see the module
    for any other. Its norm is that of the whole and its found-inf flag that of any rank, so
    `torch.nn.utils.clip_grad_norm_`, `torch.amp.GradScaler` and what Trainer and Accelerate build on them are right
    without changes. It is pickled as a plain tensor, its `part`.

    segment: measures the flat gradient of which this is a segment, and the segment's number.
    """

    segment: tuple[SegmentNorms, int] | None = None

    @classmethod
    def of(cls, part: torch.Tensor, placement: Placement) -> ShardTensor:
        """Return a plain tensor as this rank's part of a larger one.

        Args:
            part: (n,), whose memory and version the result shares.
            placement: where the part is in the full tensor.
        """
        made = part.as_subclass(cls)
        made.placement = placement
        return made

    def read_full(self) -> torch.Tensor:
        """Return the full tensor. Collective.

        Raises:
            RuntimeError: this tensor requires a gradient of its own.
        """
        with WithoutTorchFunction():
            if self.requires_grad:
                raise RuntimeError(
                    f"A slice of a tensor of shape {tuple(self.full_shape)} that requires a gradient of its own "
                    "cannot be gathered by autograd: make the leaf from parameter.gather()."
                )
            return self.placement.gather(self.as_subclass(torch.Tensor))

    def detach_(self) -> ShardTensor:
        return self  # it has no history

    def __deepcopy__(self, memo) -> ShardTensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None) -> str:
        part = repr(self.as_subclass(torch.Tensor))
        return f"ShardTensor(full_shape={tuple(self.full_shape)}, rank={self.placement.communicator.rank}, {part})"


class WholeCopy(torch.Tensor):
    """A view of a whole copy of a slice. It can be read; writing to it raises RuntimeError, since it would be lost."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ShardBase) for kind in types):
            return NotImplemented  # theirs treats this one as a plain tensor
        kwargs = kwargs or {}
        with WithoutTorchFunction():
            copies = [each for each in find_tensors((args, kwargs)) if isinstance(each, WholeCopy)]
            versions = [each._version for each in copies]
            result = func(*args, **kwargs)
            if versions != [each._version for each in copies]:
                raise RuntimeError(
                    f"{name_of(func)} writes to a view of a sharded parameter, of shape {tuple(copies[0].shape)}, "
                    "which is a copy: the change would be lost. Write to the parameter itself (parameter[rows] = "
                    "values), or do it under `with bmt.gathered(model, modify=True):`."
                )
            return replace_tensors(lambda each: _read_only(each, copies), result)


def _read_only(value: Any, copies: Sequence[torch.Tensor]) -> Any:
    """Return a view of one of `copies` as a WholeCopy, and other tensors as they are."""
    if is_array(value):
        value.setflags(write=False)
    elif isinstance(value, torch.Tensor) and any(shares_storage(value, copy) for copy in copies):
        return value.as_subclass(WholeCopy)
    return value


class _Call:
    """One call of a function of torch with slices among its arguments.

    full: a parameter, or another operand, is recorded by autograd.
    """

    def __init__(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        with WithoutTorchFunction():
            self.tensors = list(find_tensors((args, kwargs)))
            self.slices: list[Any] = [each for each in self.tensors if isinstance(each, ShardBase)]
            recorded = any(getattr(each, "is_parameter", each.requires_grad) for each in self.tensors)
            initializes = getattr(func, "__module__", "") == "torch.nn.init"  # whose functions write under no_grad
            self.full = recorded and torch.is_grad_enabled() and not initializes
            self.in_place = name.endswith("_") and not name.startswith("__")
            self.base = name[:-1] if self.in_place else name
        self.many = getattr(func, "__name__", "").startswith(("_foreach_", "_fused_"))

    def run(self) -> Any:
        if getattr(self.func, "__module__", "").startswith("torch.distributed"):
            return self._communicate()
        collective = REDUCTIONS.get(self.func)
        if collective is not None and not self.full:
            with WithoutTorchFunction():
                result = collective(*self.args, **self.kwargs)
            if result is not NotImplemented:
                return result
        first = self.args[0] if self.args else None
        mine = isinstance(first, ShardBase)
        if "out" in self.kwargs:
            return self._on_full()
        if self.name in LIKE and mine:
            return self._local(first)
        if self.base in CONVERSIONS and not mine:
            with WithoutTorchFunction():
                return self.func(*self.args, **self.kwargs)
        if self.name in RANDOM and mine:
            return self._draw(first)
        if self.name == "view_as_real" and mine and not self.full:
            with WithoutTorchFunction():
                return ShardTensor.of(torch.view_as_real(self.args[0].detach()).view(-1), first.placement.as_real())
        if self.many:
            return self._on_many()
        if self.base in ELEMENT_WISE and (not self.full or (self.in_place and mine)):
            return self._element_wise()
        if not self.full and mine and self.base in CONVERSIONS:
            return self._local(first)
        if not self.full and mine and self.base in VIEWS and not any(isinstance(a, torch.dtype) for a in self.args):
            return self._view(first)
        return self._on_full()

    # -- slices ---------------------------------------------------------------------------------------------------

    def _local(self, first: Any) -> Any:
        """Apply the function to this rank's part, with a slice as the result."""
        first.settle()
        with WithoutTorchFunction():
            result = self.func(*self.args, **self.kwargs)
            return result if result is first else ShardTensor.of(result.detach(), first.placement)

    def _view(self, first: Any) -> Any:
        with WithoutTorchFunction():
            shape = self.func(*replace_tensors(_on_meta, self.args), **replace_tensors(_on_meta, self.kwargs)).shape
            first.settle()
            return ShardTensor.of(first.detach(), first.placement.with_shape(shape))

    def _draw(self, first: Any) -> Any:
        """Draw the whole tensor's random elements, as one process would, and keep this rank's."""
        with WithoutTorchFunction():
            if self.in_place and self.full and first.requires_grad:
                return self.func(*self.args, **self.kwargs)  # torch refuses to write to a leaf
            full = torch.empty(first.full_shape, dtype=first.dtype, device=first.device)
            part = first.placement.cut(self.func(full, *self.args[1:], **self.kwargs))
            if not self.in_place:
                return ShardTensor.of(part.clone(), first.placement)
            first.settle()
            with torch.no_grad():
                first.copy_(part)
            return first

    def _element_wise(self) -> Any:
        with WithoutTorchFunction():
            like = self.slices[0]
            operands = {id(each): _operand(each, like) for each in self.tensors}
            if any(each is None for each in operands.values()):
                return self._on_full()
            written = self.args[0]
            if self.in_place and not isinstance(written, ShardBase):
                return self._write_ordinary(written, like, operands)
            for each in self.slices:
                each.settle()
            replace = lambda each: operands.get(id(each), each)  # noqa: E731
            args, kwargs = replace_tensors(replace, self.args), replace_tensors(replace, self.kwargs)
            if self.in_place:
                return self._write(written, args, kwargs)
            result = self.func(*args, **kwargs)
            single = [each.shape for each in self.tensors if not isinstance(each, ShardBase) and each.numel() == 1]
            shape = torch.broadcast_shapes(like.full_shape, *single) if single else like.full_shape
            placement = like.placement if shape == like.full_shape else like.placement.with_shape(shape)
            return ShardTensor.of(result, placement)

    def _write(self, written: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Apply an in-place function to slices: writes have no history, but torch refuses to write to a leaf."""
        leaf = any(written is each and each.requires_grad for each in self.slices)
        with torch.set_grad_enabled(self.full and leaf):
            self.func(*args, **kwargs)
        return written

    def _write_ordinary(self, target: Any, like: Any, operands: dict[int, Any]) -> Any:
        """Apply an in-place function to an ordinary tensor, which is whole, or laid out like the slices.

        One rank may hold all of a vector and cannot tell these apart, so vectors are gathered in either case.
        """
        if target.shape != like.shape or target.shape == like.full_shape:
            return self._on_full()
        if len(like.full_shape) < 2:
            barrier_outside(f"{self.name} of a sharded tensor")
            for key, each in {id(each): each for each in self.slices}.items():
                operands[key] = each.placement.cut(each.read_full())
        replace = lambda each: operands.get(id(each), each)  # noqa: E731
        return self._write(target, replace_tensors(replace, self.args), replace_tensors(replace, self.kwargs))

    def _on_many(self) -> Any:
        """Apply an operation on lists of tensors, such as `torch._foreach_add_`, position by position to slices."""
        if self.full and not self.in_place:
            return self._on_full()
        with WithoutTorchFunction():
            lists = [value for value in self.args if isinstance(value, (list, tuple)) and value]
            aligned = [self._aligned(members) for members in zip(*lists)]
            if self.name not in ("norm", "max") and not any(each is None for each in aligned):
                columns = iter(zip(*aligned))
                args = [
                    [*next(columns)] if isinstance(value, (list, tuple)) and value else value for value in self.args
                ]
                for each in self.slices:
                    each.settle()
                with torch.set_grad_enabled(self.full):
                    result = self.func(*args, **self.kwargs)
                return self._many_results(lists, result)
        return self._on_full()

    def _aligned(self, members: Sequence[Any]) -> Sequence[Any] | None:
        """Return the operands at one position of the lists, None if they need whole tensors."""
        like: Any = next((each for each in members if isinstance(each, ShardBase)), None)
        if like is None:
            return members
        operands = [
            each if each is like or not isinstance(each, torch.Tensor) else _operand(each, like) for each in members
        ]
        if self.in_place and not isinstance(members[0], ShardBase) and members[0].shape != like.shape:
            _refuse_full_target(self.name, members[0], like)
        return None if any(each is None for each in operands) else operands

    def _many_results(self, lists: Sequence[Any], result: Any) -> Any:
        if not isinstance(result, (list, tuple)):
            return result
        if self.in_place:
            return lists[0]
        likes = [next((each for each in members if isinstance(each, ShardBase)), None) for members in zip(*lists)]
        return [part if like is None else ShardTensor.of(part, like.placement) for part, like in zip(result, likes)]

    def _communicate(self) -> Any:
        """Run a collective of torch.distributed on the whole tensors; with one rank on the slices' memory."""
        if current_world().size == 1:  # the parts are whole
            own = lambda each: each.part.view(each.full_shape) if isinstance(each, ShardBase) else each  # noqa: E731
            return self.func(*replace_tensors(own, self.args), **replace_tensors(own, self.kwargs))
        given = inspect.signature(self.func).bind(*self.args, **self.kwargs).arguments
        some = given.get("group") not in (None, torch.distributed.group.WORLD)
        if some or given.get("async_op") or self.name in ("send", "recv", "isend", "irecv"):
            raise RuntimeError(
                f"torch.distributed.{self.name} of slices gathers them first, so all ranks must call it, and wait for "
                "it: no subgroup, no async_op=True. Use parameter.gather() on all ranks, and communicate the copy."
            )
        self.full = False
        return self._on_full(counted=False)

    # -- whole tensors --------------------------------------------------------------------------------------------

    def _on_full(self, counted: bool = True) -> Any:
        """Run the function on whole copies on every rank, and write back what it has written to them. Collective.

        counted: torch counts its writes. Otherwise the values are compared. An operator of torch.ops declares them.
        """
        unique = {id(each): each for each in self.slices}
        barrier_outside(f"{self.name} of a sharded tensor")
        with torch.inference_mode(False), torch.set_grad_enabled(self.full):
            full_params = {key: each.read_full() for key, each in unique.items()}
        versions = {key: full._version if counted else full.clone() for key, full in full_params.items()}
        replace = lambda each: full_params.get(id(each), each)  # noqa: E731
        try:
            result = self.func(*replace_tensors(replace, self.args), **replace_tensors(replace, self.kwargs))
        except RuntimeError as error:
            self._explain(error)
            raise
        same = (lambda full, seen: full._version == seen) if counted else torch.equal
        declared = self._declared_writes()
        written = {
            id(full): unique[key]
            for key, full in full_params.items()
            if (not same(full, versions[key]) if declared is None else key in declared)
        }
        for key, full in full_params.items():
            if id(full) in written:
                self._write_back(unique[key], full)
        copies = [*full_params.values()]
        return replace_tensors(lambda each: written.get(id(each), _read_only(each, copies)), result)

    def _declared_writes(self) -> set[int] | None:
        """Return the ids of the arguments that an operator of torch.ops writes, None for any other function.

        Operators of other libraries write by kernels that torch does not see, or through `.data`.
        """
        schema = schema_of(self.func)
        if schema is None:
            return None
        given = {argument.name: value for argument, value in zip(schema.arguments, self.args)} | self.kwargs
        written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        return {id(each) for each in find_tensors(written)}

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that helps if another tensor has the shape of a slice, of which the whole is used."""
        with WithoutTorchFunction():
            for piece in self.slices:
                for each in self.tensors:
                    if not isinstance(each, ShardBase) and each.dim() == 1 and each.shape == piece.shape:
                        raise RuntimeError(
                            f"{self.name}: a tensor of this rank's {len(each)} elements meets a parameter of shape "
                            f"{tuple(piece.full_shape)}, whole here. Make it of parameter.full_shape. ({error})"
                        ) from error

    def _write_back(self, target: Any, full: torch.Tensor) -> None:
        with WithoutTorchFunction():
            if self.full and target.requires_grad:
                raise RuntimeError(
                    f"{self.name}: a sharded parameter that requires grad is being written in place while autograd "
                    "records: use torch.no_grad()."
                )
            if full.shape != target.full_shape or full.dtype != target.dtype:
                raise RuntimeError(
                    f"{self.name} of a sharded tensor changes its shape {tuple(target.full_shape)} or its dtype "
                    f"{target.dtype}, which are fixed by auto_wrap: resize and cast before it."
                )
            target.settle()
            with torch.no_grad():
                target.copy_(target.placement.cut(full))


def barrier_outside(occasion: str) -> None:
    """Wait for every rank, and name those that do not come, unless a forward or backward runs."""
    world = current_world()
    if world.size > 1 and not (world.schedule.in_forward or world.schedule.in_backward):
        world.barrier(occasion)


SET_GRAD: Callable[[Any, Any], None] = getattr(torch.Tensor, "grad").__set__  # noqa: B009, types take it for a value
"""Sets torch's own `.grad`; whoever calls it sets `grad_now` as well."""


def _data_ptr(tensor: Any) -> int:
    """Return the address of a slice, unless code that trusts `numel()` would read beyond it."""
    with WithoutTorchFunction():
        if tensor.placement.communicator.size > 1:
            raise RuntimeError(
                f"data_ptr() of a slice of a tensor of shape {tuple(tensor.full_shape)}: this rank stores "
                f"{len(tensor)} of its elements there. Pass `tensor.part` to kernels that are element-wise."
            )
        return tensor.data_ptr()


def _on_alike(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an element-wise function on lists to the slices in them, if those at each position have one placement.

    Most functions of an optimizer are such, with a position for each parameter, and are slow by the general rule.
    Ordinary tensors may be among the arguments if each has one element. Returns NotImplemented for any other call.
    """
    if is_tracing():
        return NotImplemented
    placements: list[Placement] = []
    single = [*kwargs.values()]
    unsettled: list[Any] = []
    for value in args:
        if not isinstance(value, (list, tuple)):
            single.append(value)
        elif value and type(value[0]) is torch.Tensor:
            single += value
        elif value and not isinstance(value[0], _NUMBERS):
            found = map(_PLACEMENT, value)
            try:
                if not placements:
                    placements = [*found]
                elif not all(map(operator.is_, found, placements)):
                    return NotImplemented
            except AttributeError:  # an ordinary tensor
                return NotImplemented
            if {*map(type, value)} != {ShardTensor}:
                unsettled += value
    ordinary = [each for each in single if isinstance(each, torch.Tensor)]
    if not placements or not all(type(each) is torch.Tensor and each.numel() == 1 for each in ordinary):
        return NotImplemented
    for each in unsettled:
        each.settle()
    with WithoutTorchFunction():
        result = func(*args, **kwargs)
        if not isinstance(result, (list, tuple)):
            return result
        if name.endswith("_"):
            return args[0]
        for each, placement in zip(result, placements):
            each.__class__ = ShardTensor  # nothing else refers to it, and `of` would make a second tensor
            each.placement = placement
        return result


_ON_LISTS = {f"_fused_{optimizer}_" for optimizer in ("adagrad", "adam", "adamw", "sgd")}
_ON_LISTS |= {f"_foreach_{name}{suffix}" for name in ELEMENT_WISE for suffix in ("", "_")}
"""Functions of torch on lists of tensors that do to every element the same."""
_NUMBERS = (int, float, complex)
_PLACEMENT = operator.attrgetter("placement")


def _on_meta(value: Any) -> Any:
    """Return a meta tensor of the whole shape for a slice, and any other tensor on the meta device."""
    shape = getattr(value, "full_shape", value.shape)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _operand(value: torch.Tensor, like: Any) -> torch.Tensor | None:
    """Return what of `value` an element-wise function of the slice `like` uses; None if it has to be gathered.

    A tensor that broadcasts with the whole shape is whole, otherwise one with as many elements as the slice is laid out
    like it. Raises ValueError if it may be either.
    """
    if isinstance(value, ShardBase):
        alike = value.placement is like.placement or value.placement.matches(like.placement)
        return value if alike else None
    if value.numel() == 1:
        return value
    shape = like.full_shape
    try:
        result = torch.broadcast_shapes(value.shape, shape)
    except RuntimeError:
        return value if value.shape == like.shape else None
    if value.shape == like.shape and value.shape != shape:
        raise ValueError(
            f"A tensor of shape {tuple(value.shape)} meets a slice of a parameter of shape {tuple(shape)}: it may be "
            f"this rank's {value.numel()} elements, or a whole tensor to be broadcast. Make the former by "
            "torch.zeros_like(parameter) or parameter.take(whole), and .expand() the latter to the whole shape."
        )
    return like.placement.cut(value.expand(shape)) if result == shape else None


def _refuse_full_target(name: str, target: torch.Tensor, like: Any) -> None:
    raise RuntimeError(
        f"{name} would write this rank's {like.numel()} elements of a sharded tensor of shape "
        f"{tuple(like.full_shape)} to an ordinary tensor of shape {tuple(target.shape)}. Use parameter.gather() for "
        "the whole values, or keep such tensors as slices: parameter.detach().clone()."
    )


if torch.__version__ < "2.12":  # before, some or all functions of torch.distributed did not ask a tensor's class
    override_collectives((ShardBase, WholeCopy))
