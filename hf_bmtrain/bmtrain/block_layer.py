"""CheckpointBlockContext, BMTrain's context manager that gathers the parameters of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..engine.base.arguments import expect_kind
from ..engine.blocks.block import CheckpointBlock
from ..engine.sharding.gathered import gathered

__all__ = ["CheckpointBlockContext"]


class CheckpointBlockContext:
    """Context manager that all-gathers the parameters of a block, so that their full values can be read.

    Collective: every rank must enter and leave it. Inside the context, the block's parameters are temporary copies that
    have the full shape and values, and the block cannot be called. The copies are only for reading: if their values
    were changed, leaving the context raises RuntimeError.

    This class is for scripts written for BMTrain. In new code, prefer `gathered`, which does the same for any module
    and, with `modify=True`, also writes changes back.

    Args:
        block: the CheckpointBlock, for example a transformer layer of a model that `auto_wrap` has sharded.
        ctx_dict: for compatibility with BMTrain; ignored.
        flag: for compatibility with BMTrain; ignored.
        pipe: for compatibility with BMTrain; ignored.

    Example::

        with bmt.CheckpointBlockContext(block):
            print(block.linear.weight.shape)
    """

    def __init__(
        self, block: CheckpointBlock, ctx_dict: dict[str, Any] | None = None, flag: int = 0, pipe: bool = False
    ) -> None:
        expect_kind("block", block, CheckpointBlock, "a CheckpointBlock")
        self._block = block
        self._inside: AbstractContextManager[Any] | None = None

    def enter(self) -> None:
        """All-gather the parameters of the block. Collective: every rank must call it.

        A `with` statement calls `enter` and `exit` by itself. Call both only where `with` cannot be used. A second
        `enter` before `exit` does nothing.
        """
        if self._inside is None:
            self._inside = gathered(self._block)
            self._inside.__enter__()

    def exit(self) -> None:
        """Free the full parameters that `enter` gathered. Collective: every rank must call it.

        Does nothing if `enter` was not called.

        Raises:
            RuntimeError: values of the full parameters were changed since `enter`.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> CheckpointBlockContext:
        self.enter()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(kind, error, trace)
