"""What a layer's recomputation must find as its first forward found it: buffers and key-value caches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Buffers = dict[tuple[torch.nn.Module, str], torch.Tensor]


class Moment:
    """What one forward began from: values of the buffers that it changed, and its caches by place or keyword."""

    def __init__(self, buffers: Buffers, caches: dict[int | str, Any]) -> None:
        self.buffers, self.caches = buffers, caches


class Replay:
    """Lets a forward that changes state (running means, activation ranges, a cache) be run again without effect.

    Which buffers a layer changes is learnt from its first forward (by comparing values, which waits for the device),
    once for training and once for evaluation; only those are copied later on. A cache is what has `update` and
    `get_seq_length`; its tensors are not copied.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._places = [(module, name) for module in layer.modules() for name in module._buffers]
        self._changing: dict[bool, set[tuple[torch.nn.Module, str]]] = {}

    @contextmanager
    def first(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Moment]:
        """`with replay.first(args, kwargs) as moment:` the first forward runs on these arguments."""
        training = self._layer.training
        known = self._changing.get(training)
        before = {place: self._buffer(place) for place in self._places}
        before = {place: buffer for place, buffer in before.items() if buffer is not None}
        versions = {place: _version(buffer) for place, buffer in before.items()}
        copies = {place: buffer.clone() for place, buffer in before.items() if known is None or place in known}
        named = [*enumerate(args), *kwargs.items()]
        moment = Moment(copies, {key: _copy_cache(value) for key, value in named if _is_cache(value)})
        yield moment
        changed = {p for p, b in before.items() if self._buffer(p) is not b or _version(b) != versions[p]}
        if known is None:  # batch norm writes without counting a version
            changed |= {p for p, b in before.items() if not torch.equal(b, copies[p])}
        if changed - copies.keys():
            raise RuntimeError(
                f"The layer changed its buffers {sorted(name for _, name in changed - copies.keys())} in this forward "
                "and not in its first one, so they cannot be put back for its recomputation. Wrap the model with "
                "use_checkpoint=False."
            )
        if known is None:
            self._changing[training] = changed
            moment.buffers = {place: copies[place] for place in changed}

    @contextmanager
    def again(self, moment: Moment, args: tuple, kwargs: dict[str, Any]) -> Iterator[tuple[tuple, dict[str, Any]]]:
        """`with replay.again(moment, args, kwargs) as (args, kwargs):` the recomputation, without effect."""
        present = {place: self._buffer(place) for place in moment.buffers}
        caches = {key: _copy_cache(cache) for key, cache in moment.caches.items()}
        args = tuple(caches.pop(position, value) for position, value in enumerate(args))
        for (module, name), value in moment.buffers.items():
            module._buffers[name] = value.clone()
        try:
            yield args, kwargs | caches  # pyright: ignore[reportReturnType]
        finally:
            for (module, name), buffer in present.items():
                module._buffers[name] = buffer

    def put_back(self, moment: Moment) -> None:
        """The buffers are what the forward began from."""
        for (module, name), value in moment.buffers.items():
            module._buffers[name] = value

    def _buffer(self, place: tuple[torch.nn.Module, str]) -> torch.Tensor | None:
        module, name = place
        return module._buffers.get(name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_cache(leaf: Any) -> bool:
    if leaf is None or isinstance(leaf, torch.Tensor):
        return False
    return callable(getattr(leaf, "update", None)) and callable(getattr(leaf, "get_seq_length", None))


def _copy_cache(value: Any) -> Any:
    """The structure of a cache over the same tensors; what holds an `update` is copied, other objects are shared."""
    if isinstance(value, (list, tuple)):
        return type(value)(_copy_cache(item) for item in value)
    if isinstance(value, dict):
        return {key: _copy_cache(item) for key, item in value.items()}
    if (
        isinstance(value, torch.Tensor)
        or not callable(getattr(value, "update", None))
        or not hasattr(value, "__dict__")
    ):
        return value
    twin = copy.copy(value)
    twin.__dict__.update({key: _copy_cache(item) for key, item in vars(value).items()})
    return twin
