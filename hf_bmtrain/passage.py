"""One outermost forward of a sharded model, which its backward goes back through."""

from __future__ import annotations

from typing import Any


class Passage:
    """readers: the buffers outside blocks that it read. blocks: those that autograd has recorded in it.

    A member of its backward (see `Step.enlist`), so that it is known which blocks are being gone back through: where
    one of them is called again meanwhile, somebody's checkpoint recomputes what autograd has recorded; where another is
    called, its forward went unrecorded, and is recorded now for a backward inside the backward.
    """

    def __init__(self) -> None:
        self.readers: dict[Any, None] = {}
        self.blocks: set[Any] = set()

    def flush_backward(self) -> None:
        pass

    def abandon_backward(self) -> None:
        pass
