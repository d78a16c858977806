"""Repetition of a forward that changes state: the layer's buffers, and key-value caches among its arguments."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Snapshot:
    """The state at the beginning of one forward.

    buffers: values of the buffers that the forward changed, by number. caches: copies of its caches by position or
    keyword.
    """

    buffers: dict[int, torch.Tensor]
    caches: dict[int | str, Any]


class Replay:
    """Repeats, without side effects, forwards of a layer that change state (running means, a key-value cache).

    The first forward in training mode and the first in evaluation mode copy all buffers and compare their values
    afterwards, which waits for the device; later ones copy only the buffers that changed. A cache is an object with
    `update` and `get_seq_length`; its structure is copied, its tensors are not.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = weakref.proxy(layer)  # the layer owns this object
        self._places = [(module._buffers, name) for module in layer.modules() for name in module._buffers]
        self._changing: dict[bool, set[int]] = {}  # numbers of places

    @contextmanager
    def record(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Snapshot]:
        """Yield the snapshot of the first forward, which runs on these arguments inside the context.

        The snapshot is complete at the end of the context. Raises RuntimeError if the forward changed a buffer that
        the layer's first forward did not change.
        """
        training = self._layer.training
        known = self._changing.get(training)
        before = {n: buffer for n, buffer in enumerate(self._present()) if buffer is not None}
        versions = {n: _version(buffer) for n, buffer in before.items()}
        copies = {n: buffer.clone() for n, buffer in before.items() if known is None or n in known}
        named = [*enumerate(args), *kwargs.items()]
        snapshot = Snapshot(copies, {key: _copy_cache(value) for key, value in named if _is_cache(value)})
        yield snapshot
        after = self._present()
        changed = {n for n, b in before.items() if after[n] is not b or _version(b) != versions[n]}
        if known is None:  # batch norm writes without incrementing the version
            changed |= {n for n, b in before.items() if not torch.equal(b, copies[n])}
        if changed - copies.keys():
            names = sorted(self._places[n][1] for n in changed - copies.keys())
            raise RuntimeError(
                f"The layer changed its buffers {names} in this forward and not in its first one, so they cannot be "
                "put back for its recomputation. Wrap the model with use_checkpoint=False."
            )
        if known is None:
            self._changing[training] = changed
            snapshot.buffers = {n: copies[n] for n in changed}

    @contextmanager
    def restore(
        self, snapshot: Snapshot, args: tuple, kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple, dict[str, Any]]]:
        """Yield the arguments of the recomputation, with copies of the snapshot's caches in place of the present ones.

        Inside the context the layer's buffers are copies of the snapshot's; at its end the present ones are restored.
        """
        present = self._present()
        caches = {key: _copy_cache(cache) for key, cache in snapshot.caches.items()}
        args = tuple(caches.pop(position, value) for position, value in enumerate(args))
        for n, value in snapshot.buffers.items():
            buffers, name = self._places[n]
            buffers[name] = value.clone()
        try:
            yield args, kwargs | caches  # pyright: ignore[reportReturnType]
        finally:
            for n in snapshot.buffers:
                buffers, name = self._places[n]
                buffers[name] = present[n]

    def _present(self) -> list[torch.Tensor | None]:
        return [buffers.get(name) for buffers, name in self._places]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_cache(leaf: Any) -> bool:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return False
    return callable(getattr(leaf, "update", None)) and callable(getattr(leaf, "get_seq_length", None))


def _copy_cache(value: Any) -> Any:
    """Copy the containers in a cache and the objects that have `update`; share tensors and other objects."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_cache(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy_cache(item) for key, item in value.items()}
    has_update = callable(getattr(value, "update", None)) and hasattr(value, "__dict__")
    if isinstance(value, torch.Tensor) or not has_update:
        return value
    twin = copy.copy(value)
    twin.__dict__.update({key: _copy_cache(item) for key, item in vars(value).items()})
    return twin
