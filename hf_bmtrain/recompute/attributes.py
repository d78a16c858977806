"""The attributes of a layer's modules (counters, schedules, memories), which a forward may change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch

from .contents import Contents

_STANDARD = frozenset(vars(torch.nn.Module())) | {"_bmt", "_schedule", "config", "forward"}
"""Attributes that are no state of a forward: those of every module, ours, and a configuration, which is read only."""


class Attributes:
    """The attributes of a layer's modules at one moment, and the contents of the containers in them.

    Modules of torch itself change none, and are left out unless they have hooks.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._modules: list[tuple[weakref.ref[torch.nn.Module], Callable[[dict], tuple], int, dict[str, Any]]] = []
        children = []
        for module in layer.modules():
            if module._modules:
                children.append(module._modules)
            hooked = module._forward_hooks or module._forward_pre_hooks
            if hooked or not type(module).__module__.startswith("torch.nn."):
                own = _own(module)
                getter = itemgetter("training", "_modules", *own)  # a tuple, since there are two at least
                # Weak: the layer owns this object.
                self._modules.append((weakref.ref(module), getter, len(vars(module)), own))
        self._inside = Contents([*children, *(value for *_, own in self._modules for value in own.values())])
        containers = self._inside.containers
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._rows = [each for each in containers if not isinstance(each, dict)]
        self._values = self._read()

    def _read(self) -> list[Any]:
        """Return all values. Raises KeyError if an attribute is gone."""
        values: list[Any] = []
        for reference, getter, _, _ in self._modules:
            values += getter(vars(reference()))
        if self._dicts:
            values += chain.from_iterable(self._dicts)
            values += chain.from_iterable(map(dict.values, self._dicts))
        if self._rows:
            values += chain.from_iterable(self._rows)
        return values

    def is_present(self) -> bool:
        """Return whether nothing has changed since."""
        for reference, _, count, _ in self._modules:
            if len(vars(reference())) != count:
                return False
        try:
            values = self._read()
        except KeyError:
            return False
        return len(values) == len(self._values) and not any(map(is_not, values, self._values))

    def put_back(self) -> Callable[[], None]:
        """Make the attributes and containers as they were. Returns a function that undoes it."""
        present = [(reference, _own(reference())) for reference, *_ in self._modules]
        for reference, _, _, own in self._modules:
            _replace(reference(), own)
        inside = self._inside.put_back()

        def undo() -> None:
            inside.put_back()
            for reference, own in present:
                _replace(reference(), own)

        return undo


def _own(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _STANDARD}


def _replace(module: Any, own: dict[str, Any]) -> None:
    attributes = vars(module)
    for name in _own(module).keys() - own.keys():
        del attributes[name]
    attributes.update(own)
