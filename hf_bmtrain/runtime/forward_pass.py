"""One outermost forward of a sharded model, and the beginning of its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Reader(Protocol):
    """A buffer outside blocks that forwards read: see `sharding.on_demand`."""

    unwatched: bool

    @property
    def version(self) -> int: ...
    def check_unwritten(self) -> None: ...
    def release(self) -> None: ...
    def prepare_backward(self, unwatched: bool) -> None: ...


class ForwardPass:
    """An outermost forward, which owns the boundary at the model's outputs where its backward begins.

    readers: the buffers outside blocks that it read. blocks: the blocks that autograd recorded in it.

    While its backward runs, a call of a recorded block is a recomputation by a checkpoint around it; a call of any
    other block is a forward of its own, recorded for a backward inside the backward.
    """

    def __init__(self, enter: Callable[[ForwardPass], None]) -> None:
        """enter: notes that the running backward goes through this pass."""
        self._enter = enter
        self.readers: dict[Reader, None] = {}
        self.blocks: set[Any] = set()
        self._unwatched: list[bool] = []

    # -- forward ------------------------------------------------------------------------------------------------

    def end(self) -> list[int]:
        """End the forward. Returns the versions of the buffers it read, for `before_backward`."""
        self._unwatched = [reader.unwatched for reader in self.readers]
        return [reader.version for reader in self.readers]

    def check_unwritten(self) -> None:
        """Raise RuntimeError if the forward modified a parameter that it read."""
        for reader in self.readers:
            reader.check_unwritten()

    def release(self) -> None:
        """Release what was read; no backward will follow."""
        for reader in self.readers:
            reader.release()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        """Start the gathers that backward needs. token: the result of `end`."""
        if token != [reader.version for reader in self.readers]:
            raise RuntimeError(
                "Weights outside the blocks changed between the forward and its backward (an optimizer step or a "
                "load came between them); the gradients would be wrong. Run forward again."
            )
        self._enter(self)
        for reader, unwatched in zip(self.readers, self._unwatched):
            reader.prepare_backward(unwatched)

    def after_backward(self) -> None:
        raise AssertionError("an outermost forward has no boundary at its inputs")
