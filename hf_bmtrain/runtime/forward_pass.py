"""One outermost forward of a sharded model, which its backward goes back through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Passage:
    """readers: the buffers outside blocks that it read. blocks: those that autograd has recorded in it.

    It owns the boundary at the model's outputs, where its backward begins. It takes part in that backward, so that it
    is known which blocks are being gone back through: where one of them is called again meanwhile, somebody's
    checkpoint recomputes what autograd has recorded; where another is called, its forward went unrecorded, and is
    recorded now for a backward inside the backward.
    """

    def __init__(self, enlist: Callable[[Passage], None]) -> None:
        """enlist: makes it a member of the running backward."""
        self._enlist = enlist
        self.readers: dict[Any, None] = {}
        self.blocks: set[Any] = set()
        self._unwatched: list[bool] = []

    # -- forward ------------------------------------------------------------------------------------------------

    def end(self) -> list[int]:
        """The forward is over: the versions of what it read, for `before_backward`."""
        self._unwatched = [reads.unwatched for reads in self.readers]
        return [reads.version for reads in self.readers]

    def check_unwritten(self) -> None:
        for reads in self.readers:
            reads.check_unwritten()

    def release(self) -> None:
        """No backward will come."""
        for reads in self.readers:
            reads.release()

    # -- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, token: list[int]) -> None:
        if token != [reads.version for reads in self.readers]:
            raise RuntimeError(
                "Weights outside the blocks changed between the forward and its backward (an optimizer step or a "
                "load came between them); the gradients would be wrong. Run forward again."
            )
        self._enlist(self)
        for reads, unwatched in zip(self.readers, self._unwatched):
            reads.prepare_backward(unwatched)

    def after_backward(self) -> None:
        raise AssertionError("nothing stands in front of an outermost forward")

    def flush_backward(self) -> None:
        """What it read and recorded are members themselves."""

    def abandon_backward(self) -> None:
        """What it read and recorded are members themselves."""
