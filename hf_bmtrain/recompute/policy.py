"""Whether a block's forward is run again in backward instead of keeping its activations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from .random_state import RandomState

UseCheckpoint = bool | Literal["auto"]


class Recomputation(Protocol):
    """What a block asks. use_checkpoint: what the user said."""

    @property
    def use_checkpoint(self) -> UseCheckpoint: ...

    def enter(self) -> None:
        """A training forward of the block begins, before it is gathered."""

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Whether this forward is to be recomputed. pending: the block's forwards whose backward is to come."""
        ...

    def counting(self, args: tuple, kwargs: dict[str, Any], pending: int) -> AbstractContextManager[Any]:
        """Around the layer's own forward, the first time."""
        ...

    def remember_draws(self) -> RandomState | None:
        """Ahead of a forward that keeps its activations: where random numbers stand, None if it may not be repeated."""

    def take_back(self) -> None:
        """A forward that keeps its activations has run out of memory and is repeated, to be recomputed."""

    def before_backward(self) -> None:
        """Backward has come to the block."""

    def before_recomputation(self) -> None:
        """The block's forward is about to be run again."""


class Fixed:
    """use_checkpoint=True or False: all forwards alike."""

    def __init__(self, use_checkpoint: bool) -> None:
        self.use_checkpoint: UseCheckpoint = use_checkpoint

    def enter(self) -> None:
        pass

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return bool(self.use_checkpoint)

    def counting(self, args: tuple, kwargs: dict[str, Any], pending: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def remember_draws(self) -> RandomState | None:
        return None

    def take_back(self) -> None:
        raise AssertionError("nothing was remembered")

    def before_backward(self) -> None:
        pass

    def before_recomputation(self) -> None:
        pass
