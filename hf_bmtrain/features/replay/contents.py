"""The contents of mutable containers: find the tensors in them, copy them, and put them back in place."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch

from ...engine.base.torch_internals import pytree

ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
"""Types of values that hold no tensors."""
_CODE = (torch.nn.Module, type, enum.Enum, types.FunctionType, types.MethodType, types.ModuleType)
_STATELESS = sys.stdlib_module_names - {"types", "collections"} | {"torch", "numpy"}
"""Packages whose objects are no containers (loggers, locks, generators). `types` has SimpleNamespace."""


@functools.cache
def _has_attributes(cls: type) -> bool:
    return not issubclass(cls, _CODE) and cls.__module__.partition(".")[0] not in _STATELESS


def containers_of(value: Any) -> list[Any]:
    """Return what can be modified in `value` itself: a list, dict, set or deque, and the dict of its attributes.

    Empty for tensors, modules, code, and objects of the standard library.
    """
    own = [value] if isinstance(value, (list, dict, set, deque)) else []
    if not isinstance(value, torch.Tensor) and _has_attributes(type(value)):
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            own.append(attributes)
    return own


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _nodes(value: Any) -> list[Any] | None:
    """Return the leaves of an object without containers of which pytree knows how to open it, otherwise None."""
    leaves = pytree.tree_leaves(value)
    return None if len(leaves) == 1 and leaves[0] is value else leaves


def tensors_in(values: Iterable[Any], seen: set[int], strange: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the differentiable tensors in `values` at any depth.

    seen: ids of containers that are left out, to which all that are searched are added. strange: gets the objects that
    cannot be searched.
    """
    for value in values:
        if type(value) in ATOMS:
            continue
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                yield value
            continue
        containers = containers_of(value)
        for container in containers:
            if id(container) not in seen:
                seen.add(id(container))
                yield from tensors_in(_items(container), seen, strange)
        if not containers:
            leaves = value if isinstance(value, tuple) else _nodes(value)
            if leaves is None:
                strange.append(value)
            else:
                yield from tensors_in(leaves, seen, strange)


def exchange(value: Any, table: dict[int, torch.Tensor], seen: set[int]) -> Any:
    """Return `value` with the tensors whose ids are keys of `table` replaced, in place in mutable containers.

    Tuples that hold such tensors are copied. seen: as in `tensors_in`.
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return table.get(id(value), value)
    containers = containers_of(value)
    for container in containers:
        if id(container) in seen or isinstance(container, set):
            continue
        seen.add(id(container))
        mapping = isinstance(container, dict)
        base: Any = dict if mapping else list if isinstance(container, list) else deque
        for key, item in list(container.items() if mapping else enumerate(container)):
            new = exchange(item, table, seen)
            if new is not item:
                base.__setitem__(container, key, new)
    if containers:
        return value
    if isinstance(value, tuple):
        items = [exchange(item, table, seen) for item in value]
        if all(map(is_, items, value)):
            return value
        make = getattr(value, "_make", type(value))  # of a named tuple
        return make(items)
    if _nodes(value) is None:
        return value
    leaves, spec = pytree.tree_flatten(value)
    items = [exchange(leaf, table, seen) for leaf in leaves]
    return value if all(map(is_, items, leaves)) else pytree.tree_unflatten(items, spec)


class Contents:
    """The contents of the mutable containers in `values`, at any depth, when this object was made.

    Tensors are shared, not copied.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # a container and its copy, by id
        self._find(values)

    def _find(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind in ATOMS or kind is torch.Tensor:
                continue
            if isinstance(value, tuple):
                self._find(value)
            for container in () if kind is tuple else containers_of(value):
                if id(container) not in self._copies:
                    self._copies[id(container)] = container, _copy(container)
                    self._find(_items(container))

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def containers(self) -> list[Any]:
        return [container for container, _ in self._copies.values()]

    def put_back(self) -> Contents:
        """Give the containers their contents again. Returns what they held before."""
        present = Contents(())
        for key, (container, copy) in self._copies.items():
            present._copies[key] = container, _copy(container)
            _fill(container, copy)
        return present


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container.items())
    return set(container) if isinstance(container, set) else list(container)


def _fill(container: Any, contents: Any) -> None:
    """Make `contents` the contents of `container`, without what its class adds to these operations."""
    if isinstance(container, dict):
        base: Any = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in contents.items():
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), contents)
    else:
        container.clear()
        container.update(contents) if isinstance(container, set) else container.extend(contents)
