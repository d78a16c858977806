"""CheckpointBlockContext, a name of BMTrain's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..engine.base.arguments import expect_kind
from ..engine.blocks.block import CheckpointBlock
from ..engine.sharding.gathered import gathered

__all__ = ["CheckpointBlockContext"]


class CheckpointBlockContext:
    """Context in which the parameters of a block are full, for reading, as in `gathered(block)`.

    Collective: every rank must call it. Prefer `gathered`, which takes any module and can also write.

    Args:
        block: the block.
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
        """Gather the parameters, unless they are already gathered. Collective: every rank must call it."""
        if self._inside is None:
            self._inside = gathered(self._block)
            self._inside.__enter__()

    def exit(self) -> None:
        """Free the full parameters. Collective: every rank must call it."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)

    def __enter__(self) -> CheckpointBlockContext:
        self.enter()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(kind, error, trace)
