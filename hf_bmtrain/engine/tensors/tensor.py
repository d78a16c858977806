"""Sharded tensors: each rank stores some elements of a full tensor, and torch's functions act on them as follows.

* While gradients are enabled, a function of a sharded parameter acts on the full parameter, which is gathered first.
  The parameter's gradient is averaged over the ranks as usual.
* Element-wise functions, conversions such as `to`, and functions such as `view` act on this rank's elements and return
  a sharded tensor in two cases: under `no_grad`, and if no argument is a parameter or a plain tensor that requires a
  gradient. (Gradients, `.data` and optimizer state are not parameters.) If another operand of an element-wise function
  has the full shape, or can be broadcast to it, its elements at the same positions are used.
* `detach`, `zeros_like` and similar functions, and functions that fill a tensor with random numbers, always return a
  sharded tensor.
* Functions that need no elements, such as `size`, describe the full tensor.
* Sums, means, norms and similar reductions compute one number over all ranks.
* Any other function acts on full tensors, which are gathered on every rank, and returns full tensors. If it writes to
  its arguments, the changes are copied back to the sharded tensors.

The following functions are collective, so every rank must call them: reductions, functions of full tensors, some
functions that write to a plain tensor (such as `plain.add_(sharded)`) and, if every host stores all shards, functions
that draw random numbers.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from ..base.torch_internals import WithoutTorchFunction, foreach_norm, is_tracing, schema_of
from ..comm.resizable import shares_storage
from ..runtime.world import current_world
from .aliases import SET_DATA, Aliases
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
    name_of,
    replace_tensors,
)
from .neighbours import join_neighbours
from .norms import SegmentNorms
from .placement import Placement
from .reductions import REDUCTIONS


class ShardBase:
    """Base class of sharded tensors, which store only this rank's elements of a full tensor.

    `shape`, `stride()` and `numel()` are those of the full tensor. The memory is 1-D and contains only this rank's
    elements, which `part` returns as a plain tensor.

    Attributes:
        placement: which elements of the full tensor each rank stores.
        is_parameter: whether the tensor is a parameter, so that autograd records the functions that are called on it.
        in_memory: whether the tensor's memory contains the elements themselves. False in the subclass for quantized
            parameters, whose elements are stored elsewhere as codes. If a quantized parameter is among the arguments of
            a torch function that may read elements, the `__torch_function__` of all other classes returns
            NotImplemented. Torch then calls the `__torch_function__` of the subclass, which unpacks the codes.
        grad_now: the same tensor as `.grad`, kept in a Python attribute, because torch's own `.grad` is slow to read.
        aliases: the sharded tensors that share this tensor's memory, such as earlier results of `.data`; None if there
            have been none.
    """

    placement: Placement
    is_parameter: ClassVar[bool] = False
    in_memory: ClassVar[bool] = True
    is_sparse: ClassVar[bool] = False  # optimizers read it for each gradient; torch's attribute is slower
    grad_now: torch.Tensor | None = None
    aliases: Aliases | None = None

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full tensor, on every rank.

        User code can read `shape`, which is the same. Where `__torch_function__` is disabled, as in many functions of
        this package, `shape` is that of this rank's elements, (n,), and only `full_shape` is the full shape.
        """
        return self.placement.shape

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements (n,), as a plain tensor that shares memory and version counter with this tensor."""
        self.settle()
        with WithoutTorchFunction():
            return self.detach().as_subclass(torch.Tensor)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def data(self) -> ShardTensor:
        """This tensor without autograd history, in the same memory. Unlike in torch, it shares the version counter."""
        return self.detach()  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Set this tensor to a copy of `values`: a full tensor, a sharded tensor, or this rank's elements (n,).

        As in torch, other tensors that share this tensor's memory, such as earlier results of `.data` and `detach`,
        keep the old values: they are moved to separate memory first. If `values` shares this tensor's memory already,
        nothing changes.

        Otherwise, unlike in torch, this tensor does not share memory with `values` afterwards, so a later write to
        `values` has no effect on it. The exception is an earlier result of this tensor's own `.data` or `detach`: after
        `old = p.data; p.data = new; p.data = old`, the tensors `p` and `old` share memory again.

        Raises RuntimeError if the shape, dtype or device does not match.
        """
        me: Any = self
        shapes = me.part.shape, me.full_shape
        if values.shape not in shapes or (values.dtype, values.device) != (me.dtype, me.device):
            raise RuntimeError(
                f"`.data` of a sharded tensor was set to a tensor of shape {tuple(values.shape)}, {values.dtype}, on "
                f"{values.device}. It can only be set to a tensor of shape {tuple(me.full_shape)} (the full tensor) or "
                f"{tuple(shapes[0])} (this rank's elements), {me.dtype}, on {me.device}. Cast or move the model "
                "before auto_wrap."
            )
        with WithoutTorchFunction():
            theirs = getattr(values, "aliases", None)
            same = values.is_conj() == me.is_conj() and values.is_neg() == me.is_neg()
            if values is me or (same and theirs is not None and theirs is self.aliases):
                return  # `values` already shares this tensor's memory
            if self.aliases is not None and self in self.aliases:
                self.aliases.remove(self, torch.empty_like(me.part))
            elif self.aliases is not None and self.aliases.leave(me.part):
                self.aliases = None
        with torch.no_grad():
            me.copy_(values)
        if same and theirs is not None and theirs.memory is not None and theirs.owner() is self:
            with WithoutTorchFunction():
                theirs.rejoin(me.part)
            self.aliases = theirs

    def set_(self, source: torch.Tensor | None = None, *args, **kwargs) -> ShardBase:
        """Set this tensor's elements to those of `source`, as `.data = source` does.

        Torch's own `set_` would separate this tensor from its flat buffer.

        Args:
            source: the new values, as for `.data`.
            *args: refused. (In torch, they are a storage's offset, size and stride.)
            **kwargs: refused, like `args`.

        Returns:
            This tensor.

        Raises:
            RuntimeError: `source` is not a tensor.
            RuntimeError: there are other arguments.
            RuntimeError: this tensor requires a gradient, and gradients are enabled.
            RuntimeError: the shape, dtype or device of `source` does not match, as for `.data`.
        """
        if not isinstance(source, torch.Tensor) or args or kwargs:
            raise RuntimeError(
                f"set_() on a sharded tensor of shape {tuple(self.full_shape)} accepts only a tensor of the same shape "
                "(no storage, offset, size or stride), because the memory of a sharded tensor is part of a flat "
                "buffer. Write `tensor.data = values` or `tensor.copy_(values)`."
            )
        if torch.is_grad_enabled() and self.requires_grad:  # pyright: ignore[reportAttributeAccessIssue]
            raise _recorded_write("set_")
        self.data = source
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient; None if there is none. It is sharded like this tensor.

        Each rank stores the same elements of the gradient as of this tensor.

        `.grad` may be set to None, a sharded tensor, a tensor (n,) of this rank's elements, or a full tensor. In the
        last case, the gradient is a view of this rank's elements in the full tensor (a copy of these elements if the
        full tensor is not contiguous).

        Setting this property stores the gradient both in torch's own `.grad` and in the Python attribute `grad_now`.
        Reading this property returns `grad_now`. Reading torch's own `.grad` would take 15 times as long, because it
        calls `__torch_function__`. Gradient clipping and the optimizer read every gradient several times per step.
        """
        return self.grad_now

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        me: Any = self
        with WithoutTorchFunction():
            # If this rank stores all elements of a vector, the full gradient and this rank's elements have the same
            # shape. Make a ShardTensor even then: on the other ranks, the gradient is a ShardTensor, whose norms and
            # other functions are collective, so this rank must call them too.
            if gradient is not None and not isinstance(gradient, ShardBase):
                if gradient.shape == self.full_shape:
                    gradient = self.placement.cut(gradient)
                if gradient.shape == me.shape:
                    gradient = ShardTensor.of(gradient, self.placement)
            SET_GRAD(self, gradient)
            self.grad_now = gradient

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def settle(self) -> None:
        """Make the current stream wait for any asynchronous operation that still writes this rank's elements.

        `part` and torch's functions call it before they access this rank's elements, so that users need not. In this
        base class, it does nothing. `DistributedParameter` overrides it, because an optimizer step may write parameters
        asynchronously.
        """

    def read_full(self) -> torch.Tensor:
        """Return the full tensor, of shape `full_shape`, all-gathered into new memory. Each subclass implements it.

        Collective: every rank must call it. Torch functions that need all elements of this tensor call it. Users call
        `DistributedParameter.gather`, which returns the same tensor. If tensor parallelism splits a tensor into parts,
        the result is this rank's part, which has the shape `full_shape`, and not the tensor before the split.

        The result is differentiable if gradients are enabled and this tensor is a parameter that requires a gradient.
        Backward then averages the gradient of the result over the ranks, and adds this rank's elements of the mean to
        `.grad` of the parameter. In all other cases, the result has no autograd history.
        """
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.is_complex and cls.is_parameter and args:
            return args[0].full.dtype.is_complex  # a fast path, because optimizers call this for every parameter
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
                if is_tracing():  # torch.compile needs the shape of this rank's elements
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
        """Return whether a function of torch may read or write tensor elements, and not only metadata.

        Quantized parameters call it from their `__torch_function__`, to unpack their elements only for such functions.

        Args:
            func: a function that torch passed to `__torch_function__`.

        Returns:
            False for functions that need only the shape, dtype, device or the like, and True for all others.
        """
        return func not in METADATA and name_of(func) not in SHAPES


class ShardTensor(ShardBase, torch.Tensor):
    """A sharded gradient, sharded optimizer state, or the result of arithmetic on sharded tensors.

    Element-wise functions, conversions such as `to`, and functions such as `view` act on this rank's elements and
    return a ShardTensor. Sums, norms and similar reductions compute one number over all ranks. Most other functions
    that read or write elements gather the full tensor first. (The docstring of this module gives all rules.) Reductions
    and functions that gather are collective: every rank must call them.

    Norms are those of the full tensor, and `torch.amp.GradScaler` skips a step on all ranks if any rank finds inf or
    NaN. Torch's own gradient clipping and loss scaling therefore give correct results. Pickling stores only this rank's
    elements, as a plain tensor.

    Attributes:
        segment: for a gradient that a backward has set, how to get its norm: a pair (function, index). `function()`
            returns a SegmentNorms, an object that computes the norms of all gradients of one flat buffer in one pass.
            `index` is the position of this gradient among those of the buffer. Gradient clipping thus needs one pass
            per flat buffer instead of one per gradient. None for all other tensors.
    """

    segment: tuple[Callable[[], SegmentNorms], int] | None = None

    @classmethod
    def of(cls, part: torch.Tensor, placement: Placement) -> ShardTensor:
        """Make a sharded tensor of this rank's elements.

        Args:
            part: (n,), this rank's elements. The result shares memory and version counter with it.
            placement: which elements of the full tensor each rank stores.
        """
        made = part.as_subclass(cls)
        made.placement = placement
        return made

    def read_full(self) -> torch.Tensor:
        """Return the full tensor, of shape `full_shape`, all-gathered into new memory, without autograd history.

        Collective: every rank must call it.

        Raises:
            RuntimeError: `requires_grad` of this tensor is True. The all-gather is differentiable only for sharded
                parameters, and not for a ShardTensor. Call `requires_grad_(False)` on the tensor.
        """
        with WithoutTorchFunction():
            if self.requires_grad:
                raise RuntimeError(
                    f"Autograd cannot gather a sharded tensor of shape {tuple(self.full_shape)} that requires grad and "
                    "is not a parameter. If you need no gradient of it, call requires_grad_(False) on it. Otherwise "
                    "compute it from full tensors, as parameter.gather() returns them."
                )
            return self.placement.gather(self.as_subclass(torch.Tensor))

    def separate(self) -> None:
        """Move this tensor, and its aliases, to new memory with the same values, outside the flat buffer.

        Called for an earlier `.grad`, to which user code may still refer, before the flat buffer's memory is written
        again. The caller must have disabled `__torch_function__` (see WithoutTorchFunction).
        """
        old = self.as_subclass(torch.Tensor).detach()
        new = old.clone()
        SET_DATA(self, new)
        self.segment = None  # it would return norms of the flat buffer, which this tensor has left
        if self.aliases is not None:
            self.aliases.move(old, new)

    def detach_(self) -> ShardTensor:
        return self  # a ShardTensor has no autograd history to be detached from

    def __deepcopy__(self, memo) -> ShardTensor:
        return memo.setdefault(id(self), self.detach().clone())

    def __reduce_ex__(self, protocol):
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None) -> str:
        part = repr(self.as_subclass(torch.Tensor))
        return f"ShardTensor(full_shape={tuple(self.full_shape)}, rank={self.placement.communicator.rank}, {part})"


class WholeCopy(torch.Tensor):
    """A view of a temporary full copy of a sharded tensor. Writes to the view are copied to the sharded tensor.

    For example, `parameter[0]` is such a view, so that `parameter[0].zero_()` under `no_grad` writes to the parameter.

    Attributes:
        source: the CopySource, which contains the sharded tensor and its full copy. After a write to the view, its
            method `pass_on` makes the same change in the sharded tensor. None if the view is of a parameter and was
            made while gradients were enabled: a write to such a view raises RuntimeError, because the sharded tensor
            would not change.
    """

    source: CopySource | None = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ShardBase) for kind in types):
            return NotImplemented  # `ShardBase.__torch_function__` runs next, and treats a WholeCopy as a plain tensor
        kwargs = kwargs or {}
        with WithoutTorchFunction():
            copies = [each for each in find_tensors((args, kwargs)) if isinstance(each, WholeCopy)]
            versions = [each._version for each in copies]
            sources = [each.source for each in copies if each.source is not None]
            result = func(*args, **kwargs)
            written = [each for each, version in zip(copies, versions) if each._version != version]
            if written:
                problem = (
                    "gradients were enabled when the view was made"
                    if any(each.source is None for each in written)
                    else None
                )
                if problem is None:
                    target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes the tensor by keyword
                    overwrites = name_of(func) in _OVERWRITES and isinstance(target, WholeCopy)
                    changed = list(dict.fromkeys(each.source for each in written if each.source is not None))
                    if name_of(func) in _DRAWS:
                        for source in changed:
                            source.agree(name_of(func))
                    problem = _pass_on(changed, target if overwrites else None)
                if problem is not None:
                    raise RuntimeError(
                        f"{name_of(func)} writes to a view of shape {tuple(written[0].shape)} of a sharded "
                        "parameter. The view is part of a temporary copy, and the change would be lost, because "
                        f"{problem}. Write to the parameter itself (parameter[rows] = values) under torch.no_grad(), "
                        "or write inside `with bmt.gathered(model, modify=True):`."
                    )
            return replace_tensors(lambda each: _read_only(each, copies, sources), result)


_OVERWRITES = frozenset(
    "fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_".split()
)
"""Functions that write every element of their first argument and read none."""

_DRAWS = RANDOM | {"bernoulli_", "kaiming_uniform_", "orthogonal_", "sparse_"}
"""Functions that draw random numbers. The ranks may draw different numbers."""


class CopySource:
    """A sharded tensor and a temporary full copy of it, with a method that copies writes back to the sharded tensor.

    Created when a function of torch runs on the full copy and autograd does not record it. If the function returns a
    view of the copy, users get it as a WholeCopy, which calls `pass_on` when the view is written. Every rank makes the
    same writes to its own copy, so `pass_on` does not communicate.

    Args:
        sharded: the sharded tensor.
        copy: its full copy, in temporary memory on this rank.
    """

    def __init__(self, sharded: Any, copy: torch.Tensor) -> None:
        self._sharded, self._copy, self._version = sharded, copy, sharded._version

    def holds(self, view: torch.Tensor) -> bool:
        return shares_storage(view, self._copy)

    def agree(self, name: str) -> None:
        """Overwrite the full copy of the sharded tensor with the first rank's copy, on every rank.

        Called after a random function has written to a view of the copy, because the ranks may have drawn different
        numbers.

        Collective: every rank must call it.

        name: the name of the function that drew the numbers, for error messages.
        """
        barrier_outside(f"{name} of a view of a sharded tensor")
        _broadcast(self._copy, self._sharded)

    def pass_on(self, view: torch.Tensor | None) -> str | None:
        """Copy this rank's elements of the full copy to the sharded tensor, after a view of the full copy was written.

        If the sharded tensor has not changed since the full copy was made, all elements are copied. If it has changed,
        the full copy is outdated outside the written view. In this case, only the elements of `view` are copied.

        Args:
            view: the written view, if the function that wrote it sets all elements of the view and reads none, such as
                `zero_`. None for any other function, because that function may have read outdated values.

        Returns:
            None if elements were copied. Otherwise, the reason for the error that the caller raises: the sharded tensor
            has changed, and `view` is None, so nothing was copied.
        """
        sharded, part = self._sharded, self._sharded.placement.cut(self._copy)
        sharded.settle()
        if sharded._version != self._version:
            if view is None:
                return "the parameter has changed since the view was made"
            written = torch.zeros_like(self._copy, dtype=torch.bool)
            written.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
            part = torch.where(sharded.placement.cut(written), part, sharded.as_subclass(torch.Tensor))
        with torch.no_grad():
            sharded.copy_(part)
        self._version = sharded._version
        return None


def _pass_on(sources: Sequence[CopySource], view: torch.Tensor | None) -> str | None:
    """Update sharded tensors after their temporary full copies were written.

    All elements are copied from a full copy to its sharded tensor. But if the sharded tensor has changed since the full
    copy was made, only the elements of `view` are copied.

    sources: the sharded tensors, each with its full copy.
    view: the written view of one of these copies, if the write replaced all elements of the view without reading them;
        otherwise None.

    Returns:
        None if all sharded tensors were updated. Otherwise, the reason for the error that the caller raises: a sharded
        tensor has changed since its full copy was made, and `view` is not a view of this copy.
    """
    for source in sources:
        problem = source.pass_on(view if view is not None and source.holds(view) else None)
        if problem is not None:
            return problem
    return None


def _read_only(value: Any, copies: Sequence[torch.Tensor], sources: Sequence[CopySource]) -> Any:
    """Return `value`, the result of a function, in a form in which later writes to it are passed on or refused.

    Writes would be lost if `value` is a view of a temporary full copy of a sharded tensor. A tensor that is a view of
    one of `copies` is therefore returned as a WholeCopy, which passes writes on to the sharded tensor or raises an
    error. A NumPy array becomes read-only, because it may be such a view. Any other value is returned unchanged.

    value: the result, or one tensor or array of it.
    copies: the full copies of sharded tensors with which the function was called.
    sources: the copies whose views may be written, each with its sharded tensor. Writes to a view of any other copy
        raise an error.
    """
    if isinstance(value, np.ndarray):
        value.setflags(write=False)
    elif isinstance(value, torch.Tensor) and any(shares_storage(value, copy) for copy in copies):
        view = value.as_subclass(WholeCopy)
        view.source = next((source for source in sources if source.holds(value)), None)
        return view
    return value


class _Call:
    """One call of a torch function that has sharded tensors among its arguments.

    Attributes:
        func: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        name: its name in the tables of functions.py.
        base: the name without the trailing `_` of in-place functions.
        in_place: whether the function writes to its first argument.
        many: whether the function takes lists of tensors, as `torch._foreach_add_` does.
        tensors: all tensors in the arguments.
        slices: the sharded tensors among `tensors`.
        full: whether autograd may record the call, so that the function must act on full tensors: gradients are
            enabled, and an argument is a sharded parameter (even a frozen one) or a plain tensor that requires a
            gradient. Always False for functions of torch.nn.init.
    """

    def __init__(self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        with WithoutTorchFunction():
            self.tensors = list(find_tensors((args, kwargs)))
            self.slices: list[Any] = [each for each in self.tensors if isinstance(each, ShardBase)]
            recorded = any(getattr(each, "is_parameter", each.requires_grad) for each in self.tensors)
            # Functions of torch.nn.init enter no_grad themselves, but only after this point. So autograd does not
            # record them, even if gradients are enabled here.
            self.full = recorded and torch.is_grad_enabled() and not _initializes(func)
            self.in_place = name.endswith("_") and not name.startswith("__")
            self.base = name[:-1] if self.in_place else name
        self.many = getattr(func, "__name__", "").startswith(("_foreach_", "_fused_"))

    def run(self) -> Any:
        """Apply the function to this rank's elements if possible, otherwise to full tensors, and return its result.

        For example, element-wise functions under `no_grad` act on this rank's elements, and a matrix product acts on
        full tensors, which are gathered first. The docstring of this module gives all rules.
        """
        if getattr(self.func, "__module__", "").startswith("torch.distributed"):
            return self._communicate()
        collective = REDUCTIONS.get(self.func)
        if collective is not None and not self.full and self.kwargs.get("out") is None:
            with WithoutTorchFunction():
                result = collective(*self.args, **self.kwargs)
            if result is not NotImplemented:
                return result
        first = self.args[0] if self.args else None
        mine = isinstance(first, ShardBase)
        if self.kwargs.get("out") is not None:
            return self._on_full()
        if mine and self.kwargs.get("requires_grad"):
            shape = tuple(first.full_shape)
            raise RuntimeError(
                f"{self.name}(requires_grad=True) of a sharded tensor of shape {shape} would return a sharded tensor "
                "that is not a parameter, and autograd computes no gradient for it. If it is to be trained, use "
                f"bmt.DistributedParameter(torch.zeros({shape})). If you need its gradient for other purposes, use a "
                f"full tensor, such as torch.zeros({shape}, requires_grad=True)."
            )
        if self.name in LIKE and mine:
            return self._local(first)
        if self.base in CONVERSIONS and not mine:
            with WithoutTorchFunction():
                return self.func(*self.args, **self.kwargs)
        if self.name in RANDOM and mine:
            return self._draw(first)
        if self.name == "view_as_real" and mine and not self.full:
            first.settle()
            with WithoutTorchFunction():
                return _alias(first, torch.view_as_real(self.args[0].detach()).view(-1), first.placement.as_real())
        if self.many:
            return self._on_many()
        if self.base in ELEMENT_WISE and (not self.full or (self.in_place and mine)):
            return self._element_wise()
        if not self.full and mine and self.base in CONVERSIONS:
            return self._local(first)
        cast = any(isinstance(each, torch.dtype) for each in (*self.args, *self.kwargs.values()))  # as in `view(dtype)`
        if not self.full and mine and self.base in VIEWS and not cast:
            return self._view(first)
        return self._on_full()

    # -- functions of this rank's elements ------------------------------------------------------------------------

    def _local(self, first: Any) -> Any:
        """Apply the torch function of this call to this rank's elements, and return a sharded tensor.

        first: the function's first argument, a sharded tensor.
        """
        first.settle()
        with WithoutTorchFunction():
            result = self.func(*self.args, **self.kwargs)
            if result is first:
                return result
            if self.name in _SAME_MEMORY:
                return _alias(first, result.detach(), first.placement)
            return ShardTensor.of(result.detach(), first.placement)

    def _view(self, first: Any) -> Any:
        """Apply a function that changes only the shape, such as `view`, to the sharded tensor `first`.

        Returns a sharded tensor that shares the memory of `first`. Its full shape is the shape of the function's result
        for the full tensor.
        """
        with WithoutTorchFunction():
            shape = self.func(*replace_tensors(_on_meta, self.args), **replace_tensors(_on_meta, self.kwargs)).shape
            first.settle()
            return _alias(first, first.detach(), first.placement.with_shape(shape))

    def _draw(self, first: Any) -> Any:
        """Apply a random function such as `normal_`, and keep this rank's elements of the result.

        Each rank draws all elements of the full tensor. If the random generators of all ranks are in the same state,
        the result is the same as with a single process. If every host stores all shards, all hosts get what the first
        rank has drawn, and this method is collective: every rank must call it.

        first: the first argument, a sharded tensor.
        """
        with WithoutTorchFunction():
            if self.in_place and self.full and first.requires_grad:
                return self.func(*self.args, **self.kwargs)  # torch raises its usual error for writes to leaves
            full = torch.empty(first.full_shape, dtype=first.dtype, device=first.device)
            full = self.func(full, *self.args[1:], **self.kwargs)
            if _hosts_store_copies():
                barrier_outside(f"{self.name} of a sharded tensor")
                _broadcast(full, first)
            part = first.placement.cut(full)
            if not self.in_place:
                return ShardTensor.of(part.clone(), first.placement)
            first.settle()
            with torch.no_grad():
                first.copy_(part)
            return first

    def _element_wise(self) -> Any:
        """Apply the element-wise function of this call to this rank's elements. Return a sharded tensor.

        An in-place function returns its first argument instead, which may be a plain tensor. If the operands cannot be
        combined element by element on this rank (see `_operand`), the function is applied to full tensors, which are
        gathered first.
        """
        with WithoutTorchFunction():
            like = self.slices[0]
            operands = {id(each): _operand(each, like) for each in self.tensors}
            if any(each is None for each in operands.values()):
                return self._on_full()
            written = self.args[0] if self.args else self.kwargs.get("input")
            if self.in_place and not isinstance(written, ShardBase):
                return self._write_ordinary(written, like, operands)
            for each in self.slices:
                each.settle()
            replace = lambda each: operands.get(id(each), each)  # noqa: E731
            args, kwargs = replace_tensors(replace, self.args), replace_tensors(replace, self.kwargs)
            if self.in_place:
                return self._write(written, args, kwargs)
            result = self.func(*args, **kwargs)
            if result is NotImplemented:  # `==` returns it for an object that is not a number
                return result
            if not isinstance(result, torch.Tensor):  # for example, `where(condition)` returns a tuple of indices
                return self._on_full()
            if any(result is each for each in self.slices):  # `contiguous`, for example, may return its argument
                return result
            single = [each.shape for each in self.tensors if not isinstance(each, ShardBase) and each.numel() == 1]
            shape = torch.broadcast_shapes(like.full_shape, *single) if single else like.full_shape
            placement = like.placement if shape == like.full_shape else like.placement.with_shape(shape)
            if self.name in _SAME_MEMORY:  # without detach(), the result would be a differentiable view of `like`
                return _alias(like, result.detach(), placement)
            return ShardTensor.of(result, placement)

    def _write(self, written: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Apply an in-place function to this rank's elements, without recording it for autograd, and return `written`.

        However, if gradients are enabled and `written` is a leaf that requires a gradient, gradients stay enabled
        during the call, so that torch raises its usual error.

        written: the argument that the function writes to.
        args, kwargs: the arguments of the function, in which full tensors are replaced by this rank's elements.
        """
        leaf = any(written is each and each.requires_grad for each in self.slices)
        with torch.set_grad_enabled(self.full and leaf):
            self.func(*args, **kwargs)
        return written

    def _write_ordinary(self, target: Any, like: Any, operands: dict[int, Any]) -> Any:
        """Apply an in-place function to a plain tensor and sharded ones, as in `plain.add_(sharded)`.

        If the plain tensor has the shape (n,), where n is the number of elements that this rank stores, the function
        acts on these elements. Otherwise it acts on full tensors, which is collective: every rank must call it. If the
        sharded tensors have fewer than two dimensions, this method is always collective, because (n,) may be the full
        shape on another rank.

        Args:
            target: the plain tensor, to which the function writes.
            like: a sharded tensor among the arguments.
            operands: {id(tensor argument): tensor to use instead when the function acts on this rank's elements}.
        """
        if target.shape != like.shape or target.shape == like.full_shape:
            return self._on_full()
        # If one rank stores all elements of a vector, `target` has the full shape on that rank, which therefore gathers
        # the vector in `_on_full`. Gathering is collective, so the other ranks gather the vector here.
        if len(like.full_shape) < 2:
            barrier_outside(f"{self.name} of a sharded tensor")
            for key, each in {id(each): each for each in self.slices}.items():
                operands[key] = each.placement.cut(each.read_full())
        replace = lambda each: operands.get(id(each), each)  # noqa: E731
        return self._write(target, replace_tensors(replace, self.args), replace_tensors(replace, self.kwargs))

    def _on_many(self) -> Any:
        """Apply a function of lists of tensors, such as `torch._foreach_add_`, to this rank's elements.

        The function acts on full tensors instead in three cases: it is not element-wise; autograd may record it, and it
        does not write in place; or the tensors at some position of the lists cannot be combined element by element on
        this rank (see `_operand`).
        """
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
                _count_writes(self.name, args)
                return self._many_results(lists, result)
        return self._on_full()

    def _aligned(self, members: Sequence[Any]) -> Sequence[Any] | None:
        """Return the tensors to pass instead of `members`, so that a function of lists acts on this rank's elements.

        An example of such a function is `torch._foreach_add_(parameters, gradients)`. Returns None if the function must
        act on full tensors instead, because a member cannot be combined with the sharded member element by element on
        this rank.

        members: the items at one position of all lists, such as (parameters[i], gradients[i]).
        """
        like: Any = next((each for each in members if isinstance(each, ShardBase)), None)
        if like is None:
            return members
        operands = [
            each if each is like or not isinstance(each, torch.Tensor) else _operand(each, like) for each in members
        ]
        if self.in_place and not isinstance(members[0], ShardBase):
            return self._onto_ordinary(members, like, operands)
        return None if any(each is None for each in operands) else operands

    def _onto_ordinary(self, members: Sequence[Any], like: Any, operands: list[Any]) -> Sequence[Any] | None:
        """Return the tensors to pass instead of `members` to a function such as `_foreach_add_(plain, sharded)`.

        `_aligned` calls this if the function writes to plain tensors. With the returned tensors, the function acts on
        this rank's elements. Returns None if the function must act on full tensors instead. Raises RuntimeError if the
        plain tensor has neither the shape (n,) of this rank's elements nor the full shape. Collective if the sharded
        tensors have fewer than two dimensions.

        members: the arguments at the same position of each list, for example (plain[i], sharded[i]). The function
            writes to the first, which is a plain tensor.
        like: the first sharded tensor of `members`.
        operands: for each of `members`, a tensor with this rank's elements, or None if there is none. Changed in place.
        """
        target = members[0]
        if target.shape not in (like.shape, like.full_shape):
            _refuse_plain_target(self.name, target, like)
        # `target` has as many elements as this rank stores, or the full shape. A rank that stores all elements of a
        # vector cannot distinguish the two cases, but other ranks can. Because all ranks must issue the same
        # collectives, vectors are gathered in both cases.
        if len(like.full_shape) < 2 and current_world().size > 1:
            barrier_outside(f"{self.name} of a sharded tensor")
            for number, each in enumerate(members):
                if isinstance(each, ShardBase):
                    full = each.read_full()
                    operands[number] = full if target.shape == like.full_shape else each.placement.cut(full)
                elif each is target:
                    operands[number] = target
        elif target.shape == like.full_shape:
            return None
        return None if any(each is None for each in operands) else operands

    def _many_results(self, lists: Sequence[Any], result: Any) -> Any:
        """Turn the result of a function of lists, such as `torch._foreach_add`, into sharded tensors, and return it.

        An item of the result becomes a sharded tensor if one of `lists` has a sharded tensor at the same position. If
        the function is in-place, its first list is returned instead. A result that is not a list is returned unchanged.

        lists: the lists that were passed to the function.
        result: what the function returned for this rank's elements.
        """
        if not isinstance(result, (list, tuple)):
            return result
        if self.in_place:
            return lists[0]
        likes = [next((each for each in members if isinstance(each, ShardBase)), None) for members in zip(*lists)]
        return [part if like is None else ShardTensor.of(part, like.placement) for part, like in zip(result, likes)]

    def _communicate(self) -> Any:
        """Gather the sharded tensors that were passed to a function of torch.distributed, and run it on full tensors.

        Collective: every rank must call it. Raises RuntimeError for subgroups and point-to-point operations: only some
        ranks call them, but all ranks must take part in the gather. Also raises RuntimeError for async_op=True: the
        results are copied back when the function returns, and an asynchronous operation may not have finished by then.
        """
        if current_world().size == 1:  # this rank's elements are the full tensor
            own = lambda each: each.part.view(each.full_shape) if isinstance(each, ShardBase) else each  # noqa: E731
            return self.func(*replace_tensors(own, self.args), **replace_tensors(own, self.kwargs))
        given = inspect.signature(self.func).bind(*self.args, **self.kwargs).arguments
        some = given.get("group") not in (None, torch.distributed.group.WORLD)
        if some or given.get("async_op") or self.name in ("send", "recv", "isend", "irecv"):
            raise RuntimeError(
                f"torch.distributed.{self.name} of sharded tensors gathers them first, so all ranks must call it and "
                "wait for it. Subgroups, async_op=True and point-to-point operations are not possible. Call "
                "parameter.gather() on all ranks, and communicate the full tensor that it returns."
            )
        self.full = False
        return self._on_full(counted=False)

    # -- functions of full tensors --------------------------------------------------------------------------------

    def _on_full(self, counted: bool = True) -> Any:
        """Run this call's torch function on full copies of the sharded tensors, and copy the modified ones back.

        Collective: every rank must call it.

        Args:
            counted: how to find out which copies the function has modified: by their version counters (True), or by
                comparing their values before and after (False, for torch.distributed's collectives). It has no effect
                for operators of torch.ops, whose schemas declare the arguments that they modify.
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
        if self.in_place and declared is None and self.args and id(self.args[0]) in unique:
            # Functions such as `apply_` do not increment the version counter. So take the first argument of an in-place
            # function as modified in any case.
            written[id(full_params[id(self.args[0])])] = self.args[0]
        for key, full in full_params.items():
            if id(full) in written:
                if self.name in _DRAWS:
                    _broadcast(full, unique[key])  # the ranks may have drawn different numbers
                self._write_back(unique[key], full)
        copies = [*full_params.values()]
        sources = [] if self.full else [CopySource(unique[key], full) for key, full in full_params.items()]
        return replace_tensors(lambda each: written.get(id(each), _read_only(each, copies, sources)), result)

    def _declared_writes(self) -> set[int] | None:
        """Return the ids of the tensors that the schema of an operator of torch.ops declares to be modified.

        Returns None for all other functions. For operators, version counters are not sufficient, because operators of
        other libraries may write by their own kernels or through `.data`, and neither increments a counter.
        """
        schema = schema_of(self.func)
        if schema is None:
            return None
        given = {argument.name: value for argument, value in zip(schema.arguments, self.args)} | self.kwargs
        written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        return {id(each) for each in find_tensors(written)}

    def _explain(self, error: RuntimeError) -> None:
        """Raise a clearer error than `error` if an argument of the wrong size is its likely cause. Otherwise, return.

        `error` was raised by the torch function that is being called on full tensors. A frequent cause is a plain 1-D
        tensor that was created with as many elements as this rank stores of a parameter, and so does not fit the full
        shape.
        """
        with WithoutTorchFunction():
            for piece in self.slices:
                for each in self.tensors:
                    if not isinstance(each, ShardBase) and each.dim() == 1 and each.shape == piece.shape:
                        raise RuntimeError(
                            f"{self.name} combines a tensor of {len(each)} elements, as many as this rank stores, "
                            f"with the full parameter of shape {tuple(piece.full_shape)}. Create that "
                            f"tensor with the full shape, `parameter.full_shape`, instead. ({error})"
                        ) from error

    def _write_back(self, target: Any, full: torch.Tensor) -> None:
        """Copy this rank's elements of `full` to the sharded tensor `target`.

        Raises RuntimeError if autograd records the call and `target` requires a gradient, or if the function has
        changed the shape or the dtype.

        full: the full copy of `target`, after the torch function has modified it.
        """
        with WithoutTorchFunction():
            if self.full and target.requires_grad:
                raise _recorded_write(self.name)
            if full.shape != target.full_shape or full.dtype != target.dtype:
                raise RuntimeError(
                    f"{self.name} would change a sharded tensor from shape {tuple(target.full_shape)} and "
                    f"{target.dtype} to shape {tuple(full.shape)} and {full.dtype}, which is not possible after "
                    "auto_wrap. Resize and cast before auto_wrap."
                )
            target.settle()
            with torch.no_grad():
                target.copy_(target.placement.cut(full))


def _recorded_write(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} writes in place to a sharded parameter that requires grad, while autograd records. Use "
        "torch.no_grad()."
    )


def _initializes(func: Callable) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


def _hosts_store_copies() -> bool:
    """Return whether every host stores all shards. If so, random numbers must be the same on all hosts."""
    world = current_world()
    return world.shard_group.size < world.size


def _broadcast(full: torch.Tensor, sharded: Any) -> None:
    """Overwrite `full`, a full copy of `sharded`, with the first rank's copy. Collective: every rank must call it."""
    with torch.no_grad():
        sent = full.to(sharded.device).contiguous()
        sharded.placement.communicator.broadcast(sent, 0).wait()
        if sent is not full:
            full.copy_(sent)


def barrier_outside(occasion: str) -> None:
    """Wait until every rank has called this function, unless a forward or backward is running.

    Called before a collective operation that user code may by mistake start on some ranks only, for example under
    `if rank == 0`. If a rank does not call this function before the timeout, the waiting ranks raise RuntimeError,
    which names that rank and `occasion`. Without this check, they would hang in the operation itself. RuntimeError is
    also raised if the ranks have issued different operations earlier.

    Collective: every rank must call it. Inside a forward or backward, or with only one rank, it does nothing.

    occasion: the operation that the ranks are about to start, for the error, for example "sort of a sharded tensor".
    """
    world = current_world()
    if world.size > 1 and not (world.schedule.in_forward or world.schedule.in_backward):
        world.barrier(occasion)


SET_GRAD: Callable[[Any, Any], None] = getattr(torch.Tensor, "grad").__set__  # noqa: B009, type checkers take `Tensor.grad` for a tensor, but it is a descriptor
"""Sets torch's own `.grad` of a tensor. For a sharded tensor, the caller must also set its `grad_now`."""


class Address:
    """The result of `data_ptr()` of a sharded tensor, if there are several ranks.

    Addresses can be compared and hashed, so that code can look for tied tensors. Two addresses are equal if the tensors
    begin at the same place of the same memory and are divided among the ranks by the same Placement object.

    An Address is not a number, and arithmetic with it raises RuntimeError: code that combines an address with
    `numel()`, the number of elements of the full tensor, would access memory beyond this rank's elements.

    Args:
        tensor: the sharded tensor. The caller must have disabled `__torch_function__` (see WithoutTorchFunction), so
            that the constructor reads the properties of this rank's elements.
    """

    __slots__ = ("_key", "_told")

    def __init__(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self._key = (id(tensor.placement), storage._cdata, tensor.storage_offset())
        self._told = f"{len(tensor)} of the elements of this sharded tensor of shape {tuple(tensor.full_shape)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<the address of a sharded tensor {self._key}>"

    def _refuse(self, *args: object) -> NoReturn:
        raise RuntimeError(
            f"data_ptr() cannot be used as a number here, because this rank stores only {self._told}. Pass "
            "`tensor.part`, a plain tensor of these elements, to element-wise kernels."
        )

    __index__ = __int__ = __float__ = __add__ = __radd__ = __sub__ = __rsub__ = __mod__ = __and__ = __lt__ = _refuse
    __gt__ = __le__ = __ge__ = __floordiv__ = __rshift__ = __format__ = _refuse


def _data_ptr(tensor: Any) -> int | Address:
    """Return the result of `data_ptr()` of a sharded tensor.

    With one rank, the result is the ordinary int. With several ranks, it is an `Address`, which can be compared and
    hashed, but raises RuntimeError in arithmetic, because this rank's memory contains only a part of the full tensor.
    """
    with WithoutTorchFunction():
        return tensor.data_ptr() if tensor.placement.communicator.size == 1 else Address(tensor)


def _on_alike(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an element-wise function of lists, such as `torch._foreach_mul_`, to this rank's elements.

    This is a fast path for optimizers. The sharded tensors at one position of all lists must have the same Placement
    object (which elements each rank stores), and plain tensors must have one element and fewer than two dimensions.
    Otherwise this function does nothing and returns NotImplemented, and the caller uses the slower `_Call`.

    func: the function.
    name: the result of `name_of(func)`. A trailing `_` means that the function writes to its first argument.
    args, kwargs: the arguments with which it was called.
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
            except AttributeError:  # the list contains a plain tensor, which has no placement
                return NotImplemented
            if {*map(type, value)} != {ShardTensor}:
                unsettled += value
    ordinary = [each for each in single if isinstance(each, torch.Tensor)]
    if not placements or not all(
        type(each) is torch.Tensor and each.numel() == 1 and each.dim() < 2 for each in ordinary
    ):
        return NotImplemented
    for each in unsettled:
        each.settle()
    with WithoutTorchFunction():
        written = args[0]
        if name.endswith("_") and not any(isinstance(value, (list, tuple)) for value in (*args[1:], *kwargs.values())):
            joined = join_neighbours(written)
            operands = [_same_dtype(value, joined) for value in args[1:]] if name in _WITH_TENSOR else args[1:]
            args = (joined, *operands)
        result = func(*args, **kwargs)
        _count_writes(name, args)
        if not isinstance(result, (list, tuple)):
            return result
        if name.endswith("_"):
            return written
        for each, placement in zip(result, placements):
            each.__class__ = ShardTensor  # faster than `ShardTensor.of`, which would create another tensor
            each.placement = placement
        return result


def _same_dtype(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Convert `value`, the second operand of a function such as `torch._foreach_mul_`, to the dtype of `tensors`.

    For example, gradient clipping multiplies bfloat16 gradients by a float32 factor. On a GPU, torch would round the
    factor to bfloat16 anyway. If the factor has the tensors' dtype, one kernel multiplies many tensors. Otherwise,
    torch launches one kernel per tensor, which is four times as slow.

    value: a number, or a tensor of one element. Anything but a floating-point tensor on a GPU is returned unchanged.
    tensors: the tensors that the function writes. If they differ in dtype, `value` is returned unchanged.
    """
    if not isinstance(value, torch.Tensor) or not value.is_cuda or not value.is_floating_point():
        return value
    dtype = tensors[0].dtype
    alike = dtype.is_floating_point and all(each.dtype == dtype for each in tensors)
    return value.to(dtype) if alike else value


def _count_writes(name: str, args: Sequence[Any]) -> None:
    """Increment the version counters of parameters that a fused optimizer function of torch has written.

    Torch does not increment them. Without this call, a block (a transformer layer) that is unsharded during the step
    would not be all-gathered again, and would compute with the old weights.

    name: the name of the function that was called. Unless it begins with `_fused_`, nothing is done.
    args: the function's arguments. The first is the list of parameters.
    """
    if name.startswith("_fused_"):
        torch.autograd.graph.increment_version(args[0])


_ON_LISTS = {f"_fused_{optimizer}_" for optimizer in ("adagrad", "adam", "adamw", "sgd")}
_ON_LISTS |= {f"_foreach_{name}{suffix}" for name in ELEMENT_WISE for suffix in ("", "_")}
"""Element-wise functions of torch that take lists of tensors."""
_WITH_TENSOR = {"add_", "mul_", "div_"}
"""In-place functions of lists (`torch._foreach_...`) that accept a tensor of one element as their second operand. All
others convert such a tensor to a Python number."""
_SAME_MEMORY = frozenset("detach alias conj real imag".split())
"""Functions that return their first argument, or a new tensor that shares its memory."""
_NUMBERS = (int, float, complex)
_PLACEMENT = operator.attrgetter("placement")


def _on_meta(value: Any) -> Any:
    """Return a meta tensor with the shape and dtype of `value`. If `value` is sharded, the shape is the full shape."""
    shape = getattr(value, "full_shape", value.shape)
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _alias(tensor: Any, part: torch.Tensor, placement: Placement) -> ShardTensor:
    """Return a new ShardTensor with the elements `part` and the given placement, registered as an alias of `tensor`.

    `part` is in the memory of the sharded tensor `tensor`. The class `Aliases` explains why aliases are registered.
    """
    made = ShardTensor.of(part, placement)
    Aliases.note(tensor, made)
    return made


def _operand(value: torch.Tensor, like: Any) -> torch.Tensor | None:
    """Return the elements of `value` that an element-wise function combines with this rank's elements of `like`.

    A plain tensor that can be broadcast to the full shape is treated as a full tensor. A plain vector with as many
    elements as this rank stores is treated as this rank's elements. Raises ValueError if `value` could be either.
    Returns None if the two tensors cannot be combined this way, so that the function must act on full tensors.

    value: an operand of the function.
    like: a sharded operand of the same function.
    """
    if isinstance(value, ShardBase):
        alike = value.placement is like.placement or value.placement.matches(like.placement)
        return value if alike else None
    shape = like.full_shape
    if value.numel() == 1:
        if value.dim() < 2:
            return value
        return value.reshape(1) if value.dim() <= len(shape) else None  # None if it has more than `shape`
    try:
        result = torch.broadcast_shapes(value.shape, shape)
    except RuntimeError:
        return value if value.shape == like.shape else None
    if value.shape == like.shape and value.shape != shape:
        raise ValueError(
            f"A tensor of shape {tuple(value.shape)} is ambiguous in an operation with a sharded parameter of shape "
            f"{tuple(shape)}. It may be this rank's {value.numel()} elements, or a full tensor to be broadcast. In "
            "the first case, create it with torch.zeros_like(parameter) or parameter.take(full). In the second case, "
            ".expand() it to the full shape."
        )
    # Sparse tensors, such as the product of PEFT's SHiRA adapters, can be neither expanded nor cut.
    if value.layout is not torch.strided:
        value = value.to_dense()
    return like.placement.cut(value.expand(shape)) if result == shape else None


def _refuse_plain_target(name: str, target: torch.Tensor, like: Any) -> None:
    """Raise RuntimeError, because a function of lists (`torch._foreach_...`) cannot write to the plain tensor `target`.

    `target` has neither the shape of this rank's elements of `like` nor the full shape, so the values do not fit.

    name: the name of the function of lists, for the message.
    target: the plain tensor to which it would write.
    like: the sharded tensor at the same position of another list.
    """
    raise RuntimeError(
        f"{name} would write this rank's {like.numel()} elements of a sharded tensor of shape "
        f"{tuple(like.full_shape)} to a plain tensor of shape {tuple(target.shape)}, where they do not fit. Use "
        "parameter.gather() to get the full values, or create the target as a sharded tensor with "
        "parameter.detach().clone()."
    )


if torch.__version__ < "2.12":  # in older versions, some functions of torch.distributed ignore `__torch_function__`
    override_collectives((ShardBase, WholeCopy))
