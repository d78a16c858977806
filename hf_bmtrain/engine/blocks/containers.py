"""Find tensors in nested lists, dicts, tuples and objects, and replace or copy them."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import torch

from ..base.torch_internals import disable_compiler, pytree

ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
"""Types whose values contain no tensors."""
_CODE = (torch.nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType)
_STATELESS = sys.stdlib_module_names - {"types", "collections"} | {"torch", "numpy"}
"""Packages whose objects (such as loggers, locks and generators) are not searched for tensors.

`types` and `collections` are not included: types.SimpleNamespace and the containers of `collections` must be searched.
"""


@functools.cache
def _has_attributes(cls: type) -> bool:
    return not issubclass(cls, _CODE) and cls.__module__.partition(".")[0] not in _STATELESS


def containers_of(value: Any) -> list[Any]:
    """Return the mutable containers in which `value` stores its items and attributes, for the caller to search or copy.

    The result is a list of up to two containers:

    * `value` itself, if it is a list, dict, set or deque, or an instance of a subclass of them.
    * The `__dict__` of `value`, which stores its attributes, if it has one. It is left out for tensors, modules, enum
      members, functions and classes, and for instances of most classes of the standard library, torch and NumPy (see
      `_STATELESS`).

    For example, the result is `[value]` for a plain list, and empty for a number or a plain tuple.

    A tuple is not mutable, so it is never in the result. To search the items of a tuple, the caller must iterate over
    it. (For an instance of a subclass of tuple, the result may still contain its `__dict__`.)
    """
    own = [value] if isinstance(value, (list, dict, set, deque)) else []
    if not isinstance(value, torch.Tensor) and _has_attributes(type(value)):
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            own.append(attributes)
    return own


def items_of(container: Any) -> list[Any]:
    """Return the values of a dict, or the items of any other container, for the caller to search.

    container: a result of `containers_of`.
    """
    return list(container.values() if isinstance(container, dict) else container)


def _nodes(value: Any) -> list[Any] | None:
    """Return the leaves of `value` if torch's pytree can flatten it, or None if pytree treats it as a leaf itself."""
    leaves = pytree.tree_leaves(value)
    return None if len(leaves) == 1 and leaves[0] is value else leaves


def tensors_in(
    values: Iterable[Any],
    seen: set[int],
    strange: list[Any],
    constants: bool = False,
    sets: list[set[Any]] | None = None,
) -> Iterator[torch.Tensor]:
    """Yield the tensors in `values`, at any depth of containers and objects, that require a gradient.

    If `values` are the inputs or outputs of a layer, these are the tensors that connect the layer's autograd graph to
    the graphs before or after it.

    Args:
        values: the values to search.
        seen: ids of containers to skip. The ids of the containers that are searched are added to it.
        strange: a list to which this function appends the objects that it cannot search, such as modules, functions,
            and objects with `__slots__` instead of `__dict__`. (Tuples, objects in which `containers_of` finds a
            container, and objects that torch's pytree can flatten are searched.) The caller decides what to do about
            the objects in this list, for example to raise an error.
        constants: whether to also yield the tensors that do not require a gradient.
        sets: a list to which this function appends the sets that it searches, or None.
    """
    for value in values:
        if type(value) in ATOMS:
            continue
        if isinstance(value, torch.Tensor):
            if constants or value.requires_grad:
                yield value
            continue
        containers = containers_of(value)
        for container in containers:
            if id(container) not in seen:
                seen.add(id(container))
                if sets is not None and isinstance(container, set):
                    sets.append(container)
                yield from tensors_in(items_of(container), seen, strange, constants, sets)
        if isinstance(value, tuple):
            yield from tensors_in(value, seen, strange, constants, sets)
        elif not containers:
            leaves = _nodes(value)
            if leaves is None:
                strange.append(value)
            else:
                yield from tensors_in(leaves, seen, strange, constants, sets)


def exchange(value: Any, table: dict[int, torch.Tensor], seen: set[int]) -> Any:
    """Replace tensors in `value`, at any depth of containers and objects, by those in `table`, and return the result.

    Used to replace tensors in the arguments or outputs of a layer, for example views of parameters by copies.

    Args:
        value: the value to search. Lists, dicts, sets, deques and attributes of objects are modified in place.
        table: the replacements, as {id(old tensor): new tensor}.
        seen: ids of containers to skip. The ids of the containers that are searched are added to it.

    Returns:
        If `value` is a tensor in `table`, its replacement. If `value` is a tuple, or a structure that only torch's
        pytree can search, and a tensor in it was replaced, a new tuple or structure. Otherwise, `value` itself.
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return table.get(id(value), value)
    containers = containers_of(value)
    for container in containers:
        if id(container) in seen:
            continue
        seen.add(id(container))
        if isinstance(container, set):
            items = {item: exchange(item, table, seen) for item in container}
            if not all(map(is_, items, items.values())):
                set.clear(container)
                set.update(container, items.values())
            continue
        mapping = isinstance(container, dict)
        base: Any = dict if mapping else list if isinstance(container, list) else deque
        for key, item in list(container.items() if mapping else enumerate(container)):
            new = exchange(item, table, seen)
            if new is not item:
                base.__setitem__(container, key, new)
    if isinstance(value, tuple):
        items = [exchange(item, table, seen) for item in value]
        if all(map(is_, items, value)):
            return value
        make = getattr(value, "_make", type(value))  # named tuples have `_make`
        made = make(items)
        if hasattr(value, "__dict__"):
            made.__dict__ = value.__dict__  # shared: an attribute that a layer sets on `made` must appear on `value`
        return made
    if containers:
        return value
    if _nodes(value) is None:
        return value
    leaves, spec = pytree.tree_flatten(value)
    items = [exchange(leaf, table, seen) for leaf in leaves]
    return value if all(map(is_, items, leaves)) else pytree.tree_unflatten(items, spec)


# -- views of memory that will be freed -------------------------------------------------------------------------------


_LEAVES = ATOMS | {torch.Tensor}


def filled_in(inputs: Iterable[Any], skipped: set[int], objects: bool = False) -> list[Any]:
    """Return those arguments of a forward into which the forward may have put tensors, for the caller to search.

    These are the plain lists and dicts among the arguments, also those in tuples. If `objects` is True, other mutable
    arguments are returned too: sets, deques, instances of subclasses of list or dict, and objects with attributes, such
    as a key-value cache. Called after the forward.

    Args:
        inputs: the arguments of the forward.
        skipped: a set. If `objects` is False, this function adds the ids of the containers (see `containers_of`) of the
            arguments that it leaves out. If the caller passes this set to `tensors_in` as `seen`, these arguments are
            not searched, even if the outputs of the forward refer to them.
        objects: whether to return other mutable arguments than plain lists and dicts. Searching them takes longer: a
            key-value cache, for example, contains the tensors of all layers.
    """
    found: list[Any] = []
    values = list(inputs)
    for value in values:
        kind = type(value)
        if kind in _LEAVES or isinstance(value, torch.Tensor):
            continue
        if isinstance(value, tuple):
            values += value  # the loop goes on with the items of the tuple
            if kind is tuple:
                continue
        if kind is list or kind is dict:
            found.append(value)
        elif containers := containers_of(value):
            if objects:
                found.append(value)
            else:
                skipped.update(map(id, containers))
    return found


def copy_views(
    outputs: Any, inputs: Iterable[Any], is_view: Callable[[torch.Tensor], bool], objects: bool = False
) -> Any:
    """Return `outputs` with a copy in place of each tensor that is a view of memory that will be freed or overwritten.

    Called at the end of a forward. For example, a layer may return a view of a full parameter, which becomes invalid
    when the parameter is resharded. Lists, dicts, sets and objects in `outputs` are modified in place. Gradients flow
    through the copies.

    Args:
        outputs: the return value of a layer or model.
        inputs: the arguments of its forward. Views that the forward has put into plain lists or dicts among the
            arguments are replaced by copies too.
        is_view: a function that returns whether a tensor is a view of memory that will be freed or overwritten.
        objects: whether to also replace views in other arguments than plain lists and dicts, such as a key-value cache.
            If False, such arguments are not searched, even if `outputs` contains them, because the search takes long.
    """
    if torch.compiler.is_compiling():  # `is_view` compares memory addresses, which torch.compile cannot trace
        return _copy_views_untraced(outputs, inputs, is_view, objects)
    skipped: set[int] = set()
    filled = filled_in(inputs, skipped, objects)
    if not filled and type(outputs) is torch.Tensor:
        return outputs.clone() if is_view(outputs) else outputs
    found = tensors_in((outputs, *filled), skipped, [], constants=True)
    views = dict.fromkeys([tensor for tensor in found if is_view(tensor)])
    if not views:
        return outputs
    copies = {id(view): view.clone() for view in views}
    seen: set[int] = set()
    for value in filled:
        exchange(value, copies, seen)
    return exchange(outputs, copies, seen)


_copy_views_untraced = disable_compiler(copy_views)
