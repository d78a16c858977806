"""Recompute a layer's forward that changes buffers, attributes, random generators, or containers in its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.base.torch_internals import optimize_scripts
from .snapshot import Attributes, Buffers, Contents, Generators, Snapshot, generators_of


class Replay:
    """Makes recomputations of a layer's forward correct if it changes state (running means, counters, a cache).

    `record` saves the state before the first forward. `restore` sets the state back for a recomputation, and afterwards
    undoes the changes of the recomputation.

    The first forward in each mode (training, evaluation) copies all buffers and compares their values afterwards, for
    which the host waits for the device. Later forwards in this mode copy only the buffers that the first one changed.
    Random generators are handled in the same way, except torch's default ones, which torch's checkpoint restores.
    Attributes and containers are restored in place; tensors in them are not copied.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        # A weak reference, because the layer refers to this object.
        self._layer: torch.nn.Module = weakref.proxy(layer)  # pyright: ignore[reportAttributeAccessIssue]
        self._places = [(module._buffers, name) for module in layer.modules() for name in module._buffers]
        # For each mode (the key is `layer.training`): the indices in `_places` of the buffers that a forward changes,
        # and the random generators that it uses.
        self._changing: dict[bool, set[int]] = {}
        self._drawn: dict[bool, list[Any]] = {}
        self._attributes: Attributes | None = None

    def changes_buffers(self) -> bool | None:
        """Return whether forwards in the present mode (training or evaluation) change the layer's buffers.

        Returns None if the layer has buffers, but none of its forwards in this mode has run inside `record`.
        """
        changing = self._changing.get(self._layer.training)
        return bool(changing) if changing is not None or not self._places else None

    def _present_attributes(self) -> Attributes:
        """Return a copy of the layer's attributes. The last copy is reused if they have not changed since."""
        if self._attributes is None or not self._attributes.is_present():
            self._attributes = Attributes(list(self._layer.modules()))
        return self._attributes

    @contextmanager
    def record(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[Snapshot]:
        """Save the layer's state for a recomputation of the forward that runs inside this context.

        Args:
            args: the positional arguments of the forward. Containers among them are saved too.
            kwargs: the keyword arguments of the forward. Containers among them are saved too.

        Returns:
            A context manager that yields the snapshot for `restore`. It is complete when the context ends.

        Raises:
            RuntimeError: at the end of the context, if the forward changed a buffer that was not copied because the
                layer's first forward in the same mode did not change it.
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
        if known is None:  # batch norm writes its buffers without incrementing their versions, so compare values too
            changed |= {n for n, b in before.items() if not torch.equal(b, copies[n])}
        if changed - copies.keys():
            names = sorted(self._places[n][1] for n in changed - copies.keys())
            raise RuntimeError(
                f"{type(self._layer).__name__} changed its buffers {names} in this forward but not in its first "
                "forward. Therefore they were not copied, and this forward cannot be recomputed. Pass "
                "use_checkpoint=False to auto_wrap."
            )
        if known is None:
            self._changing[training] = changed
            self._drawn[training] = generators.moved()
            snapshot.buffers = self._by_module({n: copies[n] for n in changed})

    @contextmanager
    def restore(self, snapshot: Snapshot) -> Iterator[None]:
        """Set the layer's state to a snapshot inside the context, and back to the present state at its end.

        torch's checkpoint ends a recomputation early by raising an exception. If this happens inside a TorchScript
        function, torch no longer recognizes the exception, so this context suppresses it.

        Args:
            snapshot: the snapshot that `record` yielded for the forward that is recomputed.
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
        """Convert copies of the layer's buffers to the pairs (module._buffers, {name: copy}) that Snapshot takes.

        copies: {index in `_places`, the list of all buffers of the layer: copy of this buffer}.
        """
        return [(self._places[n][0], {self._places[n][1]: copy}) for n, copy in copies.items()]

    def _present(self) -> list[torch.Tensor | None]:
        """Return the present buffers of the layer. One that was removed is None.

        The order is that of `_places`, the list of the layer's buffers when this object was created.
        """
        return [buffers.get(name) for buffers, name in self._places]


def _version(tensor: torch.Tensor) -> int:
    """Return a tensor's version (torch's counter of writes), or 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


# -- TorchScript ------------------------------------------------------------------------------------------------------
# TorchScript profiles the first call of a function, and optimizes the function in the second. The optimized function
# makes autograd save other tensors, in another order. torch's checkpoint matches the saved tensors of the forward and
# the recomputation by their order, so it would mix them up. Therefore, from the first recomputed layer on, TorchScript
# must not optimize any more functions. Each function stays as it is, optimized or not.


def keep_scripts() -> None:
    """Stop TorchScript from optimizing more functions in this thread. Optimized functions stay optimized.

    If a function were optimized between a layer's forward and its recomputation, autograd would save other tensors in
    the recomputation than in the forward.
    """
    optimize_scripts(False)


def ends_recomputation(error: RuntimeError) -> bool:
    """Return whether `error` is the exception by which torch ends a recomputation early, converted by TorchScript.

    torch raises that exception, without a message, once all tensors are recomputed. TorchScript converts every
    exception into a RuntimeError that contains a stack trace and the original message, which is empty in this case. If
    an unrelated error looked the same, torch would report afterwards that recomputed tensors are missing.
    """
    message = str(error)
    return "TorchScript interpreter" in message and message.rstrip().endswith("RuntimeError:")
