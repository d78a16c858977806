"""Repetition of a forward that changes state: buffers, attributes, generators, and containers among its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import optimize_scripts
from .generators import Generators, generators_of
from .snapshot import Attributes, Buffers, Contents, Snapshot


class Replay:
    """Repeats, without side effects, forwards of a layer that change state (running means, counters, a cache).

    The first forward in training mode and the first in evaluation mode copy all buffers and compare their values
    afterwards, which waits for the device; later ones copy only the buffers that changed. The same holds for random
    generators other than torch's default ones, which its checkpoint puts back. Attributes and containers are put back
    in place; the tensors in them are not copied.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer: torch.nn.Module = weakref.proxy(layer)  # pyright: ignore[reportAttributeAccessIssue]  # it owns this
        self._places = [(module._buffers, name) for module in layer.modules() for name in module._buffers]
        self._changing: dict[bool, set[int]] = {}  # numbers of places
        self._drawn: dict[bool, list[Any]] = {}  # generators
        self._attributes: Attributes | None = None

    def _present_attributes(self) -> Attributes:
        if self._attributes is None or not self._attributes.is_present():
            self._attributes = Attributes(list(self._layer.modules()))
        return self._attributes

    @contextmanager
    def record(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Snapshot]:
        """Yield the snapshot of the first forward, which runs on these arguments inside the context.

        The snapshot is complete at the end of the context. Raises RuntimeError if the forward changed a buffer that
        the layer's first forward did not change.
        """
        keep_scripts()
        training = self._layer.training
        known = self._changing.get(training)
        before = {n: buffer for n, buffer in enumerate(self._present()) if buffer is not None}
        versions = {n: _version(buffer) for n, buffer in before.items()}
        copies = {n: buffer.clone() for n, buffer in before.items() if known is None or n in known}
        drawn = generators_of(self._layer) if known is None else self._drawn[training]
        generators, arguments = Generators(drawn), Contents((*args, *kwargs.values()))
        snapshot = Snapshot(self._by_module(copies), self._present_attributes(), arguments, generators)
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
            self._drawn[training] = generators.moved()
            snapshot.buffers = self._by_module({n: copies[n] for n in changed})

    @contextmanager
    def restore(self, snapshot: Snapshot) -> Iterator[None]:
        """Under `with`, all is as in the snapshot; at the end it is as before.

        The exception by which torch ends a recomputation inside a TorchScript function ends the context.
        """
        keep_scripts()
        undo = snapshot.show()
        try:
            yield
        except RuntimeError as error:
            if not ends_recomputation(error):
                raise
        finally:
            undo()

    def _by_module(self, copies: dict[int, torch.Tensor]) -> Buffers:
        return [(self._places[n][0], {self._places[n][1]: copy}) for n, copy in copies.items()]

    def _present(self) -> list[torch.Tensor | None]:
        return [buffers.get(name) for buffers, name in self._places]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# -- TorchScript ------------------------------------------------------------------------------------------------------
# TorchScript profiles the first call of a function and optimizes the second. Autograd then saves other tensors than in
# the first, in another order, and a recomputation would take one for another. So nothing is optimized from the first
# recomputed layer on: each function stays what it is, optimized or not.


def keep_scripts() -> None:
    """Optimize no further TorchScript function in this thread."""
    optimize_scripts(False)


def ends_recomputation(error: RuntimeError) -> bool:
    """Return whether this is the exception by which torch ends a recomputation once all tensors are there.

    TorchScript turns what passes through it into a RuntimeError of its own, with the place and the message, and that
    one has no message. Torch checks afterwards that no tensor is missing.
    """
    message = str(error)
    return "TorchScript interpreter" in message and message.rstrip().endswith("RuntimeError:")
