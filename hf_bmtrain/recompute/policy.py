"""The decision whether a block's forward is recomputed in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

UseCheckpoint = bool | Literal["auto"]


class PassRecorder(Protocol):
    """Records the memory that a block takes in a measured pass."""

    def count_saved(self, args: tuple, kwargs: dict[str, Any], pending: int) -> AbstractContextManager[None]:
        """Count the bytes that autograd saves in the block's first forward, which runs in this context."""
        ...

    def mark(self, recomputed: bool) -> None:
        """Mark the start of the block's backward or, with `recomputed`, the start of its recomputation."""


class Recomputation(Protocol):
    """The policy of one block.

    use_checkpoint: the argument that it was made from.
    recorder: records the current pass; None unless the pass is measured.
    """

    @property
    def use_checkpoint(self) -> UseCheckpoint: ...

    @property
    def recorder(self) -> PassRecorder | None: ...

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the training forward that is about to begin is recomputed in backward.

        Called before the block is gathered. pending: the number of the block's forwards whose backward is to come.
        """
        ...


class Fixed:
    """The same decision for every forward: use_checkpoint=True or False."""

    recorder: PassRecorder | None = None

    def __init__(self, use_checkpoint: bool) -> None:
        self.use_checkpoint: UseCheckpoint = use_checkpoint

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return self.use_checkpoint is True
