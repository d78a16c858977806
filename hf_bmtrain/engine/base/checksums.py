"""Checksums of tensors and of states.

A state, for example of an optimizer, is a dict whose values are tensors, plain values, or nested dicts and lists.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from .threads import in_threads
from .torch_internals import WithoutTorchFunction

SHOWN = 5
"""The maximum number of differing values that an error names."""


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of the elements of an integer or bool tensor, for example to check that ranks have equal tensors.

    The hash is an int64 tensor of shape (1,) on the same device. The host does not wait for the device.
    """
    flat = tensor.reshape(-1).long()
    return ((flat + 1) * (torch.arange(flat.numel(), device=flat.device) * 2654435761 + 97)).sum().reshape(1)


def checksums(state: Mapping[Any, Any]) -> dict[str, int]:
    """Return the CRC-32 of each value of a state, for example of an optimizer's state dict.

    Args:
        state: {name: value}. A value may be a tensor on any device, a number, a string or another plain value, or a
            mapping or a sequence of values.

    Returns:
        {str(name): CRC-32 of the value}. The CRC-32 of a tensor depends on its dtype, shape and elements.
    """
    names = [str(name) for name in state]
    return dict(zip(names, in_threads([functools.partial(_crc, value) for value in state.values()])))


def find_differences(saved: Any, state: Mapping[Any, Any]) -> str | None:
    """Describe how a state that was read from a file differs from the state that was saved, by their checksums.

    Args:
        saved: the checksums in the file: the result of `checksums` for the state that was saved.
        state: the state that was read.

    Returns:
        None if all checksums are equal. Otherwise a part of an error message, which names up to SHOWN (5) values that
        differ. If `saved` is not a mapping, the text says instead that the checksums cannot be read.
    """
    if not isinstance(saved, Mapping):
        return "its checksums cannot be read"
    found = checksums(state)
    names = sorted(str(name) for name in {*saved, *found} if saved.get(name) != found.get(name))
    if not names:
        return None
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"the values of {', '.join(names[:SHOWN])}{more} do not match the checksums that were saved with them"


def _crc(value: Any) -> int:
    crc = _Crc()
    with WithoutTorchFunction():  # in this context, a sharded tensor acts as a plain tensor of this rank's elements
        crc.add(value)
    return crc.value


class _Crc:
    """Computes one CRC-32 of all values passed to `add`, in the order of the calls.

    The CRC-32 is the same in every process: it does not depend on memory addresses or on the iteration order of sets.
    """

    def __init__(self) -> None:
        self.value = 0
        self._open: set[int] = set()  # ids of objects whose attributes are being added, to stop at reference cycles

    def add(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif isinstance(value, np.ndarray):
            self._add_text(f"{value.dtype} {value.shape}")
            self.add(value.tolist()) if value.dtype.hasobject else self._add_bytes(np.ascontiguousarray(value))
        elif isinstance(value, (str, bytes, range)) or isinstance(value, type):
            self._add_text(repr(value))
        elif isinstance(value, Mapping):
            self._add_text(f"{len(value)} entries")
            for name, held in value.items():
                self._add_text(repr(name))
                self.add(held)
        elif isinstance(value, Set):
            self._add_text(repr(sorted(map(repr, value))))
        elif isinstance(value, Sequence):
            self._add_text(f"{type(value).__name__} of {len(value)}")
            for held in value:
                self.add(held)
        elif hasattr(value, "__dict__"):  # for example, an object in the state of an LR scheduler
            self._add_object(value)
        else:
            has_address = type(value).__repr__ is object.__repr__
            self._add_text(type(value).__qualname__ if has_address else repr(value))

    def _add_object(self, value: Any) -> None:
        self._add_text(type(value).__qualname__)
        if id(value) not in self._open:
            self._open.add(id(value))
            self.add(vars(value))
            self._open.discard(id(value))

    def _add_text(self, text: str) -> None:
        self._add_bytes(text.encode(errors="replace"))

    def _add_bytes(self, data: Any) -> None:
        self.value = zlib.crc32(data, self.value)

    def _add_tensor(self, value: torch.Tensor) -> None:
        self._add_text(f"{value.dtype} {tuple(value.shape)}")
        if value.layout is torch.sparse_coo:
            coalesced = value.coalesce()
            self.add([coalesced.indices(), coalesced.values()])
        elif value.layout is torch.strided and not value.is_meta and value.numel():
            flat = value.detach().resolve_conj().resolve_neg().reshape(-1).cpu().contiguous()
            self._add_bytes(flat.view(torch.uint8).numpy())
