"""What a layer's recomputation must find as its first forward found it: buffers and key-value caches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

Buffers = dict[tuple[torch.nn.Module, str], torch.Tensor]


class Moment:
    """What one forward began from: values of the buffers that it changed, and the caches among its inputs."""

    def __init__(self, training: bool, buffers: Buffers, caches: dict[int, Any]) -> None:
        self.training, self.buffers, self.caches = training, buffers, caches


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
    def first(self, inputs: Any) -> Iterator[Moment]:
        """`with replay.first(inputs) as moment:` the first forward runs on `inputs` (any pytree)."""
        training = self._layer.training
        known = self._changing.get(training)
        before = {place: self._buffer(place) for place in self._places}
        before = {place: buffer for place, buffer in before.items() if buffer is not None}
        versions = {place: _version(buffer) for place, buffer in before.items()}
        copies = {place: buffer.clone() for place, buffer in before.items() if known is None or place in known}
        caches = {i: _copy_cache(leaf) for i, leaf in enumerate(pytree.tree_leaves(inputs)) if _is_cache(leaf)}
        moment = Moment(training, copies, caches)
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
    def again(self, moment: Moment, inputs: Any) -> Iterator[Any]:
        """`with replay.again(moment, inputs) as inputs:` the recomputation; what it changes is forgotten after it."""
        present = {place: self._buffer(place) for place in moment.buffers}
        if moment.caches:
            leaves, spec = pytree.tree_flatten(inputs)
            for index, cache in moment.caches.items():
                leaves[index] = _copy_cache(cache)
            inputs = pytree.tree_unflatten(leaves, spec)
        for (module, name), value in moment.buffers.items():
            module._buffers[name] = value.clone()
        try:
            yield inputs
        finally:
            for (module, name), buffer in present.items():
                module._buffers[name] = buffer

    def _buffer(self, place: tuple[torch.nn.Module, str]) -> torch.Tensor | None:
        module, name = place
        return module._buffers.get(name)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_cache(leaf: Any) -> bool:
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
