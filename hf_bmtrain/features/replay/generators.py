"""Find random generators other than torch's default ones, and save and restore their states.

These are the global generators of Python and NumPy, and those in attributes of a layer's modules and in arguments.
"""

from __future__ import annotations

import ctypes
import random
from _random import Random as _PlainRandom
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator object of Python, NumPy or torch, whose state can be saved.

    False for random.SystemRandom, which has no state. Always False while torch.compile traces the caller, because it
    cannot trace code that handles generators.
    """
    if torch.compiler.is_compiling():
        return False
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return (function that gets the state of `generator`, function that sets it)."""
    if generator is random:
        return _read_python, generator.setstate
    if generator is np.random:
        return _read_numpy, generator.set_state
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


# The global generators' states are read before and after every forward that is recomputed. Python needs 10 us to build
# the state, and NumPy 50 us. Copying the memory in which they store their 624 words, and comparing it with the last
# copy, takes less than 1 us. So the state is built only if this memory has changed.


_python: Any = random.getstate.__self__  # pyright: ignore[reportFunctionMemberAccess]
_head = object.__basicsize__  # the reference count and the type, which come before the words
_python_words = (ctypes.c_char * (_PlainRandom.__basicsize__ - _head)).from_address(id(_python) + _head)
_NumpyWords = ctypes.c_char * (4 * (624 + 1))  # the words and the position
_known_python: tuple[bytes, float | None, Any] = (b"", None, None)  # words, kept normal number and state, as last read
_known_numpy: tuple[bytes, Any] = (b"", None)  # words and state, as last read


def _read_python() -> Any:
    global _known_python
    words, kept = _python_words.raw, _python.gauss_next
    if words != _known_python[0] or kept != _known_python[1]:
        _known_python = words, kept, random.getstate()
    return _known_python[2]


def _read_numpy() -> Any:
    global _known_numpy
    bits: Any = np.random.mtrand._rand._bit_generator  # pyright: ignore[reportAttributeAccessIssue]
    if type(bits) is not np.random.MT19937:  # np.random.set_bit_generator was called
        return np.random.get_state()
    words = _NumpyWords.from_address(bits.ctypes.state_address).raw
    if words != _known_numpy[0]:
        _known_numpy = words, np.random.get_state()
    # A normal number that is kept for the next call, the second of a pair, is not in this memory. Without one, there is
    # none until the memory changes, unless np.random.set_state sets one for the same words, which is not noticed.
    return np.random.get_state() if _known_numpy[1][3] else _known_numpy[1]


def read_state(generator: Any) -> Any:
    """Return the present state of a random generator, to be restored later by `write_state`.

    generator: a generator for which `is_generator` is True, or the module `random` or `numpy.random`, which stands for
        its global generator.

    Returns:
        The state in the generator's own format: a tensor for torch, nested dicts and tuples for Python and NumPy.
    """
    if generator is random:
        return _read_python()
    return _read_numpy() if generator is np.random else _access(generator)[0]()


def write_state(generator: Any, state: Any) -> None:
    """Set a random generator of Python, NumPy or torch to a state that `read_state` returned for this generator.

    Called before a forward is recomputed, so that the recomputation draws the same random numbers as the forward.
    Called again after the recomputation, so that the generator continues from the state that it had before.
    """
    _access(generator)[1](state)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether `a` and `b`, two states of one random generator as `read_state` returns them, are equal.

    If they are not, the generator was used between the two calls of `read_state`.
    """
    if a is b:
        return True
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(equal_states, a, b))
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())
