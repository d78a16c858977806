"""Copy the state that a forward may change, to restore it later.

The state has four parts: buffers, attributes, containers in the arguments, and random generators.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_not, itemgetter
from typing import Any

import torch

from ...engine.blocks.containers import ATOMS, containers_of, items_of

_STANDARD = frozenset(vars(torch.nn.Module())) | {"_bmt", "_schedule", "float8_state", "config", "forward"}
"""Names of attributes that are not saved, because a forward does not change them: those of every torch.nn.Module, those
of this library, and `config`."""
Buffers = Sequence[tuple[dict[str, Any], dict[str, torch.Tensor | None]]]
"""Pairs (module._buffers, {name: saved copy of the buffer}). A module may occur in several pairs."""


class Snapshot:
    """A saved copy of the state that a forward of a layer or model may change.

    Args:
        buffers: copies of modules' buffers.
        attributes: the attributes of modules. Tensors among them are not copied.
        arguments: the items of the mutable containers (lists, dicts, caches) in the forward's arguments. Tensors among
            them are not copied.
        generators: the states of random generators.
    """

    def __init__(self, buffers: Buffers, attributes: Attributes, arguments: Contents, generators: Generators) -> None:
        self.buffers, self.attributes = buffers, attributes
        self.arguments, self.generators = arguments, generators
        self._originals: Buffers = ()  # the buffers of which `buffers` contains copies; set only by `of`

    @classmethod
    def of(cls, model: torch.nn.Module, device: torch.device, arguments: Iterable[Any] = ()) -> Snapshot:
        """Return a snapshot of a whole model, for `restore`: every buffer, attribute and random generator.

        Args:
            model: the model.
            device: the device whose default generator is saved, in addition to the CPU's.
            arguments: values whose mutable containers are saved too.
        """
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
        """Restore the state of a snapshot made by `of`. The old values are written to the original buffer tensors."""
        for (buffers, originals), (_, copies) in zip(self._originals, self.buffers):
            for name in buffers.keys() - originals.keys():
                del buffers[name]
            buffers.update(originals)
            for name, copy in copies.items():
                # Write only buffers that have changed. autograd may have saved a buffer for a later backward, which
                # would raise an error if it found a new version.
                if copy is not None and not torch.equal(buffers[name], copy):
                    buffers[name].copy_(copy)
        self._restore_others()

    def show(self) -> Callable[[], None]:
        """Set the modules to the saved state, for a recomputation.

        Their buffers are not written, but replaced by copies of the saved ones.

        Returns a function that undoes this: it restores the state before the call, and puts the replaced buffers back
        into the modules.
        """
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
        """Restore attributes, containers and generators, but not buffers.

        Returns a function that undoes this. If no attribute has changed since the snapshot, which is cheap to check,
        the present attributes are not copied, because the saved ones are equal.
        """
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
    """A saved copy of the items of all mutable containers (such as lists and dicts) in `values`, including nested ones.

    Each container is copied shallowly: tensors and other items in the copy are the same objects.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}  # {id: (container, its copy)}
        self._find(values)

    def _find(self, values: Iterable[Any]) -> None:
        """Add the mutable containers in `values`, and in their items, to `_copies`: {id: (container, its copy)}."""
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
        """The mutable containers whose items were copied: the containers themselves, not their copies."""
        return [container for container, _ in self._copies.values()]

    def restore(self) -> Contents:
        """Put the saved items back into the containers. Return their previous items, whose `restore` undoes this."""
        present = Contents(())
        for key, (container, copy) in self._copies.items():
            present._copies[key] = container, _copy(container)
            _fill(container, copy)
        return present


def _copy(container: Any) -> Any:
    """Return the items of a container as a plain dict, set or list."""
    if isinstance(container, dict):
        return dict(container.items())
    return set(container) if isinstance(container, set) else list(container)


def _fill(container: Any, contents: Any) -> None:
    """Replace all items of `container`, which may be a dict, list, set or deque, by `contents`.

    For a subclass of dict or list, this calls the methods of dict (or OrderedDict) or list, not those that the subclass
    overrides.
    """
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
    """A saved copy of the attributes of a layer's modules, and of the items of containers in these attributes.

    Modules of torch.nn without hooks are left out, because their forwards change no attributes.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        """Copy the attributes of `modules`, which are the layer, followed by all modules inside it."""
        # The layer refers to this object, so a strong reference to the layer or its `__dict__` would make a cycle.
        self._layer = weakref.ref(modules[0])
        # For each module: its `__dict__` (None for that of the layer), and the attributes that a forward may change.
        self._modules: list[tuple[dict[str, Any] | None, dict[str, Any]]] = []
        self._getters: list[tuple[dict[str, Any] | None, Callable[[dict], Iterable[Any]], int]] = []
        children = []
        for module in modules:
            if module._modules:
                children.append(module._modules)
            hooked = module._forward_hooks or module._forward_pre_hooks
            if hooked or not type(module).__module__.startswith("torch.nn."):
                own, attributes = _own(vars(module)), None if module is modules[0] else vars(module)
                names = [*own, "training", "_modules"]  # itemgetter returns a tuple only for two or more names
                self._modules.append((attributes, own))
                self._getters.append((attributes, itemgetter(*names[: max(2, len(own))]), len(vars(module))))
        self._inside = Contents([*children, *(value for _, own in self._modules for value in own.values())])
        containers = self._inside.containers
        self._dicts = [each for each in containers if isinstance(each, dict)]
        self._rows = [each for each in containers if not isinstance(each, dict)]
        self._values = self._read()

    def _read(self) -> list[Any] | None:
        """Return all present attributes, and all items of containers in them, in one list, to compare them by identity.

        Returns None if a module got or lost an attribute.
        """
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
        """Return whether the modules' attributes, and all items of containers in them, are still the saved objects."""
        known, values = self._values, self._read()
        assert known is not None
        return values is not None and len(values) == len(known) and not any(map(is_not, values, known))

    def restore(self) -> Callable[[], None]:
        """Restore the saved attributes, and the items of containers in them. Return a function that undoes this."""
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
    """Return the items of `attributes`, the `__dict__` of a module, that a forward may change."""
    return {name: value for name, value in attributes.items() if name not in _STANDARD}


def _replace(attributes: dict[str, Any], own: dict[str, Any]) -> None:
    """Replace the attributes that a forward may change, in `attributes` (a module's `__dict__`), by `own`."""
    for name in _own(attributes).keys() - own.keys():
        del attributes[name]
    attributes.update(own)


# -- random generators other than torch's default ones: Python's, NumPy's, and attributes of modules ------------------


def generators_of(layer: torch.nn.Module) -> list[Any]:
    """Return the global generators of Python and NumPy, and those that are attributes of the layer's modules.

    Returns an empty list while torch.compile traces the layer, because it cannot trace reads of their states.
    """
    if torch.compiler.is_compiling():
        return []
    numpy = _numpy_random()
    own = (value for module in layer.modules() for value in vars(module).values())
    return [random, *([] if numpy is None else [numpy]), *(value for value in own if _access(value) is not None)]


class Generators:
    """The states of random generators (of Python, NumPy or torch), saved when this object is created.

    `restore` sets the generators back to these states, and `moved` tells which generators have been used since.

    Args:
        generators: the generators. The modules `random` and `numpy.random` stand for their global generators.
    """

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(generator, _read(generator)) for generator in generators]

    def moved(self) -> list[Any]:
        """Return the generators whose state has changed since it was saved."""
        return [generator for generator, state in self._states if not _equal(state, _read(generator))]

    def restore(self) -> Generators:
        """Set the generators back to the saved states. Return their previous states, whose `restore` undoes this."""
        present = Generators(generator for generator, _ in self._states)
        for generator, state in self._states:
            access = _access(generator)
            assert access is not None
            access[1](state)
        return present


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return (function that gets the state of `generator`, function that sets it); None if it is not a generator."""
    if isinstance(generator, random.Random) or generator is random:
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state
    numpy = _numpy_random()
    if numpy is None:
        return None
    if isinstance(generator, numpy.RandomState) or generator is numpy:
        return generator.get_state, generator.set_state
    if isinstance(generator, numpy.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _numpy_random() -> Any:
    """Return numpy.random (which NumPy imports on first use), or None if NumPy has not been imported."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _read(generator: Any) -> Any:
    """Return the state of a generator: a tensor, or nested dicts and tuples."""
    access = _access(generator)
    assert access is not None
    return access[0]()


def _equal(a: Any, b: Any) -> bool:
    """Return whether `a` and `b`, two states of one random generator as `_read` returns them, are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_equal, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())
