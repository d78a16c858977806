"""Snapshot: all that a forward changes, put back afterwards."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch

from ...engine.blocks.containers import ATOMS, containers_of, items_of
from .generators import Generators, generators_of

_STANDARD = frozenset(vars(torch.nn.Module())) | {"_bmt", "_schedule", "float8_state", "config", "forward"}
"""Attributes that are no state of a forward: those of every module, ours, and a configuration, which is read only."""
Buffers = Sequence[tuple[dict[str, Any], dict[str, torch.Tensor | None]]]
"""For each module its dict of buffers, and what was in it, by name."""


class Snapshot:
    """What a forward changes, as it was when this object was made.

    buffers: copies of the modules' buffers. attributes: those of the modules. arguments: the contents of the mutable
    containers (lists, dicts, caches) among the forward's arguments. generators: the states of random generators. The
    tensors in attributes and containers are not copied.
    """

    def __init__(self, buffers: Buffers, attributes: Attributes, arguments: Contents, generators: Generators) -> None:
        self.buffers, self.attributes = buffers, attributes
        self.arguments, self.generators = arguments, generators
        self._originals: Buffers = ()  # of which `buffers` are copies

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> Snapshot:
        """Return all of it: every buffer and attribute of `model`, and every random generator."""
        generators = [*generators_of(model), torch.default_generator]
        if device.type != "cpu":
            generators.append(torch.get_device_module(device).default_generators[device.index])
        modules = list(model.modules())
        originals = [(module._buffers, dict(module._buffers)) for module in modules]
        copies = [
            (buffers, {n: None if b is None else b.clone() for n, b in own.items()}) for buffers, own in originals
        ]
        snapshot = cls(copies, Attributes(modules), Contents(arguments), Generators(generators))
        snapshot._originals = originals
        return snapshot

    @torch.no_grad()
    def restore(self) -> None:
        """Put back all of it (`of`), so that another forward begins as the first one did. Buffers are the same ones."""
        for (buffers, originals), (_, copies) in zip(self._originals, self.buffers):
            for name in buffers.keys() - originals.keys():
                del buffers[name]
            buffers.update(originals)
            for name, copy in copies.items():
                # Autograd may have saved a buffer for a backward that is to come: what did not change is not written.
                if copy is not None and not torch.equal(buffers[name], copy):
                    buffers[name].copy_(copy)
        self._restore_others()

    def show(self) -> Callable[[], None]:
        """Put everything back, but for buffers, in whose places copies are shown. Returns a function that undoes it."""
        present = []
        for buffers, copies in self.buffers:
            present.append((buffers, {name: buffers.get(name) for name in copies}))
            buffers.update({name: None if copy is None else copy.clone() for name, copy in copies.items()})
        undo_others = self._restore_others()

        def undo() -> None:
            for buffers, shown in present:
                buffers.update(shown)
            undo_others()

        return undo

    def _restore_others(self) -> Callable[[], None]:
        """Put back what is no buffer. Returns a function that undoes it."""
        attributes = self.attributes
        undo_attributes = None if attributes.is_present() else attributes.restore()
        arguments, generators = self.arguments.restore(), self.generators.restore()

        def undo() -> None:
            arguments.restore()
            generators.restore()
            if undo_attributes is not None:
                undo_attributes()
            elif not attributes.is_present():
                attributes.restore()

        return undo


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


class Attributes:
    """The attributes of a layer's modules at one moment, and the contents of the containers in them.

    Modules of torch itself change none, and are left out unless they have hooks.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        """modules: the layer and those in it."""
        self._layer = weakref.ref(modules[0])  # the layer owns this object, and its dict of attributes
        # All attributes (None: of the layer), and copies of the modules' own.
        self._modules: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
        self._getters: list[tuple[dict[str, Any] | None, Callable[[dict], Iterable[Any]], int]] = []
        children = []
        for module in modules:
            if module._modules:
                children.append(module._modules)
            hooked = module._forward_hooks or module._forward_pre_hooks
            if hooked or not type(module).__module__.startswith("torch.nn."):
                own, attributes = _own(vars(module)), None if module is modules[0] else vars(module)
                names = [*own, "training", "_modules"]  # a getter of two names or more returns a tuple
                self._modules.append((attributes, own))
                self._getters.append((attributes, itemgetter(*names[: max(2, len(own))]), len(vars(module))))
        self._inside = Contents([*children, *(value for _, own in self._modules for value in own.values())])
        containers = self._inside.containers
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._rows = [each for each in containers if not isinstance(each, dict)]
        self._values = self._read()

    def _read(self) -> list[Any] | None:
        """Return all values, None if attributes have come or gone."""
        values: list[Any] = []
        try:
            for attributes, getter, count in self._getters:
                present = vars(self._layer()) if attributes is None else attributes
                if len(present) != count:
                    return None
                values += getter(present)
        except KeyError:
            return None
        if self._dicts:
            values += chain.from_iterable(self._dicts)
            values += chain.from_iterable(map(dict.values, self._dicts))
        if self._rows:
            values += chain.from_iterable(self._rows)
        return values

    def is_present(self) -> bool:
        """Return whether nothing has changed since."""
        known, values = self._values, self._read()
        assert known is not None
        return values is not None and len(values) == len(known) and not any(map(is_not, values, known))

    def restore(self) -> Callable[[], None]:
        """Make the attributes and containers as they were. Returns a function that undoes it."""
        present = []
        for attributes, own in self._modules:
            changed = vars(self._layer()) if attributes is None else attributes
            present.append((changed, _own(changed)))
            _replace(changed, own)
        inside = self._inside.restore()

        def undo() -> None:
            inside.restore()
            for attributes, own in present:
                _replace(attributes, own)

        return undo


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _STANDARD}


def _replace(attributes: dict[str, Any], own: dict[str, Any]) -> None:
    for name in _own(attributes).keys() - own.keys():
        del attributes[name]
    attributes.update(own)
