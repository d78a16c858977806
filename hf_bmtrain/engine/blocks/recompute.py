"""Which forwards of a block are recomputed in backward, and how a repeated forward finds what the first one did."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .block_state import BlockState


class Recompute:
    """Recomputes every training forward of a block. Subclasses decide for each one.

    fills_cache: whether training forwards may fill a key-value cache, which a repeated forward would fill twice.
    keeps_activations: whether a forward like the last one is not recomputed.
    """

    fills_cache = False
    keeps_activations = False

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the training forward that is about to begin is recomputed. Called before the all-gather.

        pending: the number of the block's forwards whose backward has not run.
        """
        return True

    def first_forward(self, args: tuple, kwargs: dict, pending: int) -> AbstractContextManager[Any] | None:
        """Return a context for the first run of a forward that is recomputed, None for none."""

    def backward_begins(self, recomputed: bool) -> None:
        """Note that the block's backward begins, or a recomputation inside it."""


class _Never(Recompute):
    fills_cache = True
    keeps_activations = True

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return False


ALWAYS, NEVER = Recompute(), _Never()


class Replay(Protocol):
    """Repeats a layer's forward as it was the first time."""

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context of a first forward, which yields what `restore` needs."""
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return the context of a repeated forward. It may end it by swallowing an exception."""
        ...


class LayerFeatures(Protocol):
    """What a block is made with. The features stand to the right of this folder, so the world names them."""

    def check(self, use_checkpoint: object) -> None:
        """Raise ValueError if `use_checkpoint` is not a value that `recompute` knows."""

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        """Return what `use_checkpoint` means for `block`."""
        ...

    def replay(self, layer: torch.nn.Module) -> Replay:
        """Return what repeats the forwards of `layer`."""
        ...
