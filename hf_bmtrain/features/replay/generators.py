"""Random generators other than torch's default ones: Python's, NumPy's, and those stored as attributes of modules."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def generators_of(layer: torch.nn.Module) -> list[Any]:
    """Return the global generators of Python and NumPy, and those that are attributes of the layer's modules.

    Returns an empty list while torch.compile traces the layer, because reading their states cannot be traced.
    """
    if torch.compiler.is_compiling():
        return []
    numpy = _numpy_random()
    own = (value for module in layer.modules() for value in vars(module).values())
    return [random, *([] if numpy is None else [numpy]), *(value for value in own if _access(value) is not None)]


class Generators:
    """The states of some random generators when this object is created."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(generator, _read(generator)) for generator in generators]

    def moved(self) -> list[Any]:
        """Return the generators whose state has changed since this object was created."""
        return [generator for generator, state in self._states if not _equal(state, _read(generator))]

    def restore(self) -> Generators:
        """Set the generators back to the saved states. Return the states that they had before this call."""
        present = Generators(generator for generator, _ in self._states)
        for generator, state in self._states:
            access = _access(generator)
            assert access is not None
            access[1](state)
        return present


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return functions that get and set the state of `generator`, or None if it is not a random generator."""
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
    """Return whether two states of one generator are equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_equal, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())
