"""Find random generators other than torch's default ones, and save and restore their states.

These are the global generators of Python and NumPy, and those that are attributes of a layer's modules.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def generators_of(layer: torch.nn.Module) -> list[Any]:
    """Return the random generators from which the layer's forward may draw, other than torch's default generators.

    Their states are saved before a forward and restored when it is recomputed, so that both draw the same numbers.
    (torch's checkpoint itself does this for torch's default generators.)

    Returns:
        The global generators of Python and, if NumPy was imported, of NumPy (as the modules `random` and
        `numpy.random`), and all generators of Python, NumPy and torch that are attributes of the layer's modules. The
        list is empty while torch.compile traces the layer, because torch.compile cannot trace code that reads the state
        of a generator.
    """
    if torch.compiler.is_compiling():
        return []
    numpy = _numpy_random()
    own = (value for module in layer.modules() for value in vars(module).values())
    return [random, *([] if numpy is None else [numpy]), *(value for value in own if _access(value) is not None)]


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


def read_state(generator: Any) -> Any:
    """Return the present state of a random generator, to be restored later by `write_state`.

    generator: a random generator of Python, NumPy or torch, as `generators_of` returns them.

    Returns:
        The state in the generator's own format: a tensor for torch, nested dicts and tuples for Python and NumPy.
    """
    access = _access(generator)
    assert access is not None
    return access[0]()


def write_state(generator: Any, state: Any) -> None:
    """Set a random generator of Python, NumPy or torch to a state that `read_state` returned for this generator.

    Called before a forward is recomputed, so that the recomputation draws the same random numbers as the forward; and
    after it, so that the generator goes on from where it was before.
    """
    access = _access(generator)
    assert access is not None
    access[1](state)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether `a` and `b`, two states of one random generator as `read_state` returns them, are equal.

    If they are not, the generator was used between the two calls of `read_state`.
    """
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(equal_states, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())
