"""Callbacks before and after the backward of a sharded layer or model, and a context for autocast without its cache.

* `enter_backward` passes the outputs of a layer through an identity function. The backward of this function calls the
  callback. It runs when the gradients of all outputs exist, before any other autograd node of the layer.
* `leave_backward` passes the inputs of a layer through an identity function. The backward of this function calls the
  callback. It runs when the gradients of all inputs exist. By then, the gradients of the layer's weights are complete,
  too: of all nodes that are ready, autograd's engine first runs those that accumulate gradients, and then the node
  that was created last. The node of the identity function was created before the layer's nodes, so it runs after them.
* `watch_backward` is used for a whole model. It does not replace the outputs, but registers hooks on them. The hooks
  call the callback when backward computes the first gradient of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..base.torch_internals import functorch_transforms_active, pytree
from ..tensors.backward import double_backward
from .containers import ATOMS, exchange, tensors_in


class _EnterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, before: Callable[[Any], None], token: Any, *outputs: torch.Tensor):
        ctx.before, ctx.token = before, token
        ctx.set_materialize_grads(False)
        # Without detach(), this function would return its own arguments. Autograd would turn them into views that code
        # after the layer may not modify in place.
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            raise double_backward()
        ctx.before(ctx.token)
        return None, None, *gradients


class _LeaveBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, after: Callable[[], None], *inputs: torch.Tensor):
        ctx.after = after
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in inputs])

    @staticmethod
    def backward(ctx, *gradients):
        ctx.after()
        return None, *gradients


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return `function.apply(*args)`, but skip torch's checks for functorch, which take half the time of the call.

    Inside a functorch transform, the checks run, because they raise torch's error for functions that do not support
    transforms. They also run while torch.compile traces, because it supports only `function.apply`.
    """
    if torch.compiler.is_compiling() or functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


class Containers:
    """Restores the mutable containers (lists, dicts and objects) among a layer's arguments after the layer's forward.

    Before the forward, `leave_backward` replaces each tensor in the layer's arguments that requires a gradient by a new
    tensor, whose backward calls a function at the end of the layer's backward. A tensor in a mutable container is
    replaced in place, although the container belongs to the layer's caller. `leave_backward` then creates this object,
    whose methods are called after the forward, in this order:

    * `restore` puts the original tensors back into the containers.
    * `added` returns those tensors that the layer itself has put into the containers, for example into a key-value
      cache, and that require a gradient. Code after the layer may use them, so `enter_backward` treats them like
      outputs.
    * `exchange` replaces the tensors that `added` has returned by new tensors, whose backward calls a function at the
      beginning of the layer's backward.
    """

    def __init__(self, values: Sequence[Any], inputs: Sequence[torch.Tensor], guarded: Sequence[torch.Tensor]) -> None:
        """Create the object after `leave_backward` has replaced tensors in the layer's arguments.

        Args:
            values: the objects that the caller passed as the layer's arguments. In the containers among them, tensors
                have been replaced.
            inputs: the tensors in the arguments that require a gradient.
            guarded: the tensors that replace `inputs`, in the same order. Empty if none were replaced.
        """
        self._values, self._inputs = values, {id(tensor) for tensor in inputs}
        self._originals = {id(tensor): original for tensor, original in zip(guarded, inputs)}
        self._guarded = guarded  # keeps the tensors alive, so that their ids stay unique

    def restore(self) -> None:
        """Put the original tensors back into the lists, dicts and objects among the layer's arguments.

        Called at the end of the layer's forward. `leave_backward` replaced these tensors before the forward.
        """
        seen: set[int] = set()
        for value in self._values:
            exchange(value, self._originals, seen)

    def added(self, seen: set[int], strange: list[Any]) -> list[torch.Tensor]:
        """Return the tensors that the layer has put into its arguments (lists, dicts and objects) during the forward.

        Only tensors that require a gradient are returned. `enter_backward` calls this after `restore`, to treat these
        tensors like outputs of the layer.

        Args:
            seen: the ids of containers that are skipped. This call adds the ids of the containers that it searches, so
                that the caller does not search the same containers again among the layer's outputs.
            strange: a list to which this call appends the objects that it cannot search for tensors. The caller may
                ignore them.
        """
        return [t for t in tensors_in(self._values, seen, strange) if id(t) not in self._inputs]

    def exchange(self, table: dict[int, torch.Tensor], seen: set[int]) -> None:
        for value in self._values:
            exchange(value, table, seen)


def enter_backward(
    before: Callable[[Any], None], token: Any, outputs: Any, filled: Containers | None = None
) -> tuple[Any, bool]:
    """Make autograd call `before(token)` at the beginning of a layer's backward.

    A block uses this to all-gather its weights before its backward reads them. The tensors in `outputs` that require a
    gradient are passed through an identity function whose backward makes the call. In lists, dicts and objects, they
    are replaced in place.

    Args:
        before: the function to call.
        token: the argument of `before`.
        outputs: the return value of the layer.
        filled: the mutable containers among the layer's arguments; None if there are none. Tensors that the layer has
            added to them are treated as outputs.

    Returns:
        The outputs with the tensors replaced, and whether any tensor was replaced. If none was, `before` is never
        called.

    Raises:
        RuntimeError: a tensor that requires a gradient is in an object with `__slots__`, where it cannot be replaced.
    """
    found: list[torch.Tensor] = []
    opened: list[Any] = []
    _find((outputs,), found, opened)
    if opened or filled is not None:
        return _enter_containers(before, token, outputs, filled)
    if not found:
        return outputs, False
    return _replace(outputs, iter(apply_function(_EnterBackward, before, token, *found))), True


def watch_backward(before: Callable[[Any], None], token: Any, outputs: Any) -> tuple[Any, bool]:
    """Make autograd call `before(token)` at the beginning of a model's backward, by hooks on the model's outputs.

    In each backward, the hooks call `before` once, when the first gradient of an output has been computed.

    `enter_backward`, in contrast, replaces the outputs. For a model, this could hide a part of a gradient: a model may
    return a hidden state that its later layers use too. If the hidden state were replaced, the user and the later
    layers would have different tensors. A hook or `retain_grad()` on the user's tensor would then miss the part of the
    gradient that comes from the later layers. With hooks on the outputs, both have the same tensor.

    In three cases, such hooks are unsuitable, and this function calls `enter_backward` instead:

    * torch.compile is tracing the model.
    * An object in the outputs cannot be searched for tensors.
    * An output that requires a gradient is a leaf, such as a parameter. Hooks on it would stay after the backward.

    Args:
        before: the function to call.
        token: the argument of `before`.
        outputs: the return value of the model.

    Returns:
        The outputs, and whether any tensor in them requires a gradient. If none does, `before` is never called.
    """
    if torch.compiler.is_compiling():
        return enter_backward(before, token, outputs)
    strange: list[Any] = []
    found = list(dict.fromkeys(tensors_in((outputs,), set(), strange)))
    if not found or strange or any(tensor.is_leaf for tensor in found):
        return enter_backward(before, token, outputs)

    def reached(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise double_backward()
        before(token)

    torch.autograd.graph.register_multi_grad_hook(found, reached, mode="any")
    return outputs, True


def anchor_backward(before: Callable[[Any], None], token: Any, outputs: Any) -> Any:
    """Return `outputs` with their floating-point tensors replaced by tensors that require a gradient.

    The backward of the new tensors computes nothing, and only calls `before(token)`. Used if no output of this rank
    requires a gradient, but outputs of other ranks may. Backward is collective, so this rank must run it too. With the
    original outputs, torch would raise an error, because they do not require a gradient.

    Args:
        before: the function to call.
        token: the argument of `before`.
        outputs: the return value of the model. It is not modified.
    """
    found = [
        leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    if not found:
        return outputs
    anchor = torch.zeros((), dtype=torch.float32, device=found[0].device, requires_grad=True)
    _, *entered = apply_function(_EnterBackward, before, token, anchor, *found)
    table = {id(tensor): behind for tensor, behind in zip(found, entered)}
    return pytree.tree_map_only(torch.Tensor, lambda tensor: table.get(id(tensor), tensor), outputs)


def _enter_containers(
    before: Callable[[Any], None], token: Any, outputs: Any, filled: Containers | None
) -> tuple[Any, bool]:
    """Do the work of `enter_backward` if the layer's outputs or arguments include lists, dicts or objects.

    The tensors that require a gradient are replaced by tensors whose backward calls `before(token)`. In lists, dicts
    and objects, they are replaced in place. Return the outputs with the replacements, and whether there are any.

    before: the function to call at the beginning of the layer's backward.
    token: the argument of `before`.
    outputs: the return value of the layer.
    filled: the mutable containers among the layer's arguments, or None if there are none. Tensors that the layer has
        added to them are treated as outputs.
    """
    seen: set[int] = set()
    strange: list[Any] = []
    found = [] if filled is None else filled.added(seen, [])
    found += tensors_in((outputs,), seen, strange)
    for leaf in strange:
        names = [name for cls in type(leaf).__mro__ for name in getattr(cls, "__slots__", ())]
        if any(getattr(getattr(leaf, name, None), "requires_grad", False) for name in names):
            raise RuntimeError(
                f"The forward of a sharded layer or model returned a {type(leaf).__name__}, a class with __slots__. "
                "hf_bmtrain must replace the tensors in it, so that their backward all-gathers the weights, but cannot "
                "do so in such a class. Return tensors, tuples, dicts, dataclasses without slots, or a transformers "
                "ModelOutput."
            )
    if not found:
        return outputs, False
    unique = list(dict.fromkeys(found))
    entered = apply_function(_EnterBackward, before, token, *unique)
    table, seen = {id(tensor): behind for tensor, behind in zip(unique, entered)}, set()
    if filled is not None:
        filled.exchange(table, seen)
    return exchange(outputs, table, seen), True


def leave_backward(
    after: Callable[[], None], args: tuple, kwargs: dict
) -> tuple[tuple, dict, Sequence[torch.Tensor], Containers | None]:
    """Make autograd call `after()` at the end of a layer's backward, when the gradients of all its inputs exist.

    A block uses this to reduce its gradients and to reshard its weights. The tensors in the arguments that require a
    gradient are passed through an identity function whose backward makes the call. In lists, dicts and objects, they
    are replaced in place, until `Containers.restore` puts the originals back.

    Args:
        after: the function to call. It is never called if no tensor in the arguments requires a gradient, or if a
            tensor that requires a gradient is in a `set`.
        args: the layer's positional arguments.
        kwargs: the layer's keyword arguments.

    Returns:
        The new `args` and `kwargs`, the new tensors in them, and the mutable containers among the arguments (None if
        there are none).
    """
    found: list[torch.Tensor] = []
    opened: list[Any] = []
    _find(args, found, opened)
    in_args = len(found)
    _find(kwargs.values(), found, opened)
    if opened:
        return _leave_containers(after, args, kwargs)
    if not found:
        return args, kwargs, found, None
    guarded = apply_function(_LeaveBackward, after, *found)
    ahead = iter(guarded)
    if in_args:
        args = _replace(args, ahead)
    if len(found) > in_args:
        kwargs = {key: _replace(value, ahead) for key, value in kwargs.items()}
    return args, kwargs, guarded, None


def _leave_containers(
    after: Callable[[], None], args: tuple, kwargs: dict
) -> tuple[tuple, dict, Sequence[torch.Tensor], Containers]:
    """Do the work of `leave_backward` if the layer's arguments include lists, dicts or objects.

    The tensors that require a gradient are replaced by the outputs of one autograd node, whose backward calls `after()`
    once. In lists, dicts and objects, they are replaced in place, until `Containers.restore` puts the originals back.
    Return the new `args` and `kwargs`, the new tensors in them, and the mutable containers among the arguments.

    after: the function to call at the end of the layer's backward.
    args, kwargs: the layer's arguments.
    """
    values = (*args, *kwargs.values())
    sets: list[set[Any]] = []
    found = list(dict.fromkeys(tensors_in(values, set(), [], sets=sets)))
    # Do not replace tensors in a set. This would change the order of the set, but the caller may be iterating over it,
    # and a checkpoint around the layer must find the same order.
    guards = found and not any(True for _ in tensors_in(sets, set(), []))
    guarded: Sequence[torch.Tensor] = apply_function(_LeaveBackward, after, *found) if guards else ()
    table = {id(tensor): behind for tensor, behind in zip(found, guarded)}
    seen: set[int] = set()
    args = exchange(args, table, seen)
    kwargs = {key: exchange(value, table, seen) for key, value in kwargs.items()}
    return args, kwargs, guarded, Containers(values, found, guarded)


def _find(values: Iterable[Any], found: list[torch.Tensor], opened: list[Any]) -> None:
    """Find the tensors that require a gradient, in `values` and in plain tuples nested in them.

    values: the arguments or outputs of a layer.
    found: the tensors are appended to this list.
    opened: objects of other types that may contain tensors (such as lists, dicts and named tuples) are appended to this
        list, and not searched. If there are any, the caller searches again with `tensors_in`, which is slower.
    """
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or isinstance(value, torch.Tensor):  # `is` avoids the slower isinstance
            if value.requires_grad:
                found.append(value)
        elif kind is tuple:
            _find(value, found, opened)
        elif kind not in ATOMS:
            opened.append(value)


def _replace(value: Any, guarded: Iterator[torch.Tensor]) -> Any:
    """Return `value` with each tensor that requires a gradient replaced by the next tensor of `guarded`.

    value: an argument or output of a layer. Tensors in nested plain tuples are replaced too. Other containers are not
        searched.
    guarded: the new tensors, in the order in which `_find` finds the old tensors.
    """
    kind = type(value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):  # `is` avoids the slower isinstance
        return next(guarded) if value.requires_grad else value
    if kind is tuple:
        return tuple([_replace(item, guarded) for item in value])
    return value


def uncached_autocast() -> AbstractContextManager | None:
    """Return a context manager that turns off autocast's cache and keeps its other settings; None if autocast is off.

    The forwards of sharded blocks and of the outermost module run in this context. The reason: until the outermost
    autocast context ends, the cache keeps the low-precision copy of each Parameter object. A full parameter is the same
    object in every step. So if one autocast context enclosed several steps, blocks would compute with copies of old
    weights. The copies of all blocks would also stay in memory.
    """
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
    return None
