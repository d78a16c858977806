"""The contents of mutable containers: copy them, and put them back in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from ...engine.blocks.containers import ATOMS, containers_of, items_of


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
                    self._find(items_of(container))

    def __bool__(self) -> bool:
        return bool(self._copies)

    @property
    def containers(self) -> list[Any]:
        return [container for container, _ in self._copies.values()]

    def restore(self) -> Contents:
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
