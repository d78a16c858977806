"""Boundaries around the forward of sharded layers for autograd, and autocast without its cache.

The boundaries call back when backward reaches the layers and when it has left them. They are identity functions, but
for the outputs of a model, which `watch_backward` leaves as they are: hooks on them call back at the first gradient.
`enter_backward` is applied to the outputs of a layer: its backward runs once all their gradients exist, before any node
of the layer. `leave_backward` is applied to the inputs: its backward runs once all their gradients exist, after the
nodes that made them. By then the gradients of the layers' weights are complete as well: autograd's engine runs, of the
nodes that are ready, those that accumulate gradients first and then the one that was made last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..base.torch_internals import functorch_transforms_active
from ..tensors.backward import double_backward
from .containers import ATOMS, exchange, tensors_in


class _EnterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, before: Callable[[Any], None], token: Any, *outputs: torch.Tensor):
        ctx.before, ctx.token = before, token
        ctx.set_materialize_grads(False)
        # detach() and not the tensor itself: an input returned as it is becomes a view that may not be modified.
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


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)` without its search for functorch's wrappers, which takes half of its time.

    Under a transform of functorch torch's own call raises; torch.compile supports only the usual call.
    """
    if torch.compiler.is_compiling() or functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]


class Containers:
    """The mutable containers (lists, dicts, objects) among the arguments of layers, which the layers may modify.

    During the forward their tensors are behind the boundary of `leave_backward`.
    """

    def __init__(self, values: Sequence[Any], inputs: Sequence[torch.Tensor], guarded: Sequence[torch.Tensor]) -> None:
        """guarded: the `inputs` behind the boundary."""
        self._values, self._inputs = values, {id(tensor) for tensor in inputs}
        self._originals = {id(tensor): original for tensor, original in zip(guarded, inputs)}
        self._guarded = guarded  # ids are those of living objects

    def restore(self) -> None:
        """Put the original tensors into the containers again, at the end of the forward."""
        seen: set[int] = set()
        for value in self._values:
            exchange(value, self._originals, seen)

    def added(self, seen: set[int], strange: list[Any]) -> list[torch.Tensor]:
        """Return the differentiable tensors that the layers put into the containers. For the rest see `tensors_in`."""
        return [t for t in tensors_in(self._values, seen, strange) if id(t) not in self._inputs]

    def exchange(self, table: dict[int, torch.Tensor], seen: set[int]) -> None:
        for value in self._values:
            exchange(value, table, seen)


def enter_backward(
    before: Callable[[Any], None], token: Any, outputs: Any, filled: Containers | None = None
) -> tuple[Any, bool]:
    """Return `outputs` with their differentiable tensors behind the boundary, and True if there are any.

    before: called with `token` before the layers' backward. filled: containers that the layers may have added tensors
    to, which count as outputs. Lists, dicts and objects are modified in place. Raises RuntimeError if an object that
    cannot be searched holds differentiable tensors.
    """
    found: list[torch.Tensor] = []
    opened: list[Any] = []
    _find((outputs,), found, opened)
    if opened or filled is not None:
        return _enter_containers(before, token, outputs, filled)
    if not found:
        return outputs, False
    return _replace(outputs, iter(_apply(_EnterBackward, before, token, *found))), True


def watch_backward(before: Callable[[Any], None], token: Any, outputs: Any) -> tuple[Any, bool]:
    """Call `before` from hooks on the differentiable tensors in `outputs`; otherwise like `enter_backward`.

    What a model returns is then what its layers passed on, and a hook or `retain_grad()` on a hidden state sees its
    whole gradient. Leaves, on which a hook would stay, and models being compiled get an identity function.
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


def _enter_containers(
    before: Callable[[Any], None], token: Any, outputs: Any, filled: Containers | None
) -> tuple[Any, bool]:
    """`enter_backward` for any outputs."""
    seen: set[int] = set()
    strange: list[Any] = []
    found = [] if filled is None else filled.added(seen, [])
    found += tensors_in((outputs,), seen, strange)
    for leaf in strange:
        names = [name for cls in type(leaf).__mro__ for name in getattr(cls, "__slots__", ())]
        if any(getattr(getattr(leaf, name, None), "requires_grad", False) for name in names):
            raise RuntimeError(
                f"The forward of a sharded layer or model returned a {type(leaf).__name__}, whose tensors cannot be "
                "found, because it has __slots__. Return tensors, tuples, dicts, dataclasses without slots, or a "
                "transformers ModelOutput."
            )
    if not found:
        return outputs, False
    unique = list(dict.fromkeys(found))
    entered = _apply(_EnterBackward, before, token, *unique)
    table, seen = {id(tensor): behind for tensor, behind in zip(unique, entered)}, set()
    if filled is not None:
        filled.exchange(table, seen)
    return exchange(outputs, table, seen), True


def leave_backward(
    after: Callable[[], None], args: tuple, kwargs: dict
) -> tuple[tuple, dict, Sequence[torch.Tensor], Containers | None]:
    """Return `args` and `kwargs` behind the boundary, the differentiable tensors in them, and the containers in them.

    after: called when the gradients of all these tensors exist; never, if there are none. Containers are not copied:
    their tensors are replaced in place, until `restore`. None if there are no containers.
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
    guarded = _apply(_LeaveBackward, after, *found)
    ahead = iter(guarded)
    if in_args:
        args = _replace(args, ahead)
    if len(found) > in_args:
        kwargs = {key: _replace(value, ahead) for key, value in kwargs.items()}
    return args, kwargs, guarded, None


def _leave_containers(
    after: Callable[[], None], args: tuple, kwargs: dict
) -> tuple[tuple, dict, Sequence[torch.Tensor], Containers]:
    """`leave_backward` for any arguments."""
    values = (*args, *kwargs.values())
    found = list(dict.fromkeys(tensors_in(values, set(), [])))
    guarded: Sequence[torch.Tensor] = _apply(_LeaveBackward, after, *found) if found else ()
    table, seen = {id(tensor): behind for tensor, behind in zip(found, guarded)}, set[int]()
    args = exchange(args, table, seen)
    kwargs = {key: exchange(value, table, seen) for key, value in kwargs.items()}
    return args, kwargs, guarded, Containers(values, found, guarded)


def _find(values: Iterable[Any], found: list[torch.Tensor], opened: list[Any]) -> None:
    """Add the differentiable tensors in `values` and in tuples there, in the order of `_replace`.

    opened: gets everything else that may hold tensors.
    """
    for value in values:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found.append(value)
        elif kind is tuple:
            _find(value, found, opened)
        elif kind not in ATOMS:
            opened.append(value)


def _replace(value: Any, guarded: Iterator[torch.Tensor]) -> Any:
    """Return a copy of `value` in which the tensors of `_find` are replaced by the next ones of `guarded`."""
    if isinstance(value, torch.Tensor):
        return next(guarded) if value.requires_grad else value
    if type(value) is tuple:
        return tuple([_replace(item, guarded) for item in value])
    return value


def uncached_autocast() -> AbstractContextManager | None:
    """Return the caller's autocast without its cache of casts, None if the caller has none.

    The cache is keyed by the whole parameter, which is the same object every step: a refilled block would compute
    with the casts of old weights, and the casts of all blocks would stay alive.
    """
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
    return None
