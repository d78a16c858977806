"""Decide which forwards of a block are recomputed in backward, and make a recomputation repeat the first forward."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .block_state import BlockState


class Recompute:
    """Decides which training forwards of a block are recomputed in backward. Here all are; subclasses may choose.

    Attributes:
        fills_cache: whether training forwards may fill a key-value cache. It must be False if any forward may be
            recomputed, because the recomputation would fill the cache a second time.
        keeps_activations: whether the last training forward kept its activations, and so is not recomputed. Predictions
            of memory read this attribute.
    """

    fills_cache = False
    keeps_activations = False

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether the training forward that is about to start will be recomputed in backward.

        Called before the block's all-gather. The results may differ between ranks, because they change no collective,
        unless `Schedule.collective_layers` is set.
        Inside saved-tensor hooks, such as those of a checkpoint around the block, the result must be the same in every
        call, because the checkpoint repeats the block as the last result says.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """
        return True

    def contexts(
        self, args: tuple, kwargs: dict[str, Any], pending: int
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
        """Return two contexts: for the first run of a forward that backward will recompute, and for the recomputation.

        Returns None for contexts that do nothing.

        args, kwargs, pending: as for `recomputes`.
        """

    def backward_begins(self, recomputed: bool) -> None:
        """Called with False when the block's backward starts, and with True when it starts a recomputation."""


class _Never(Recompute):
    fills_cache = True
    keeps_activations = True

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return False


ALWAYS, NEVER = Recompute(), _Never()


class Replay(Protocol):
    """Makes a recomputation of a layer's forward compute the same values as the first forward."""

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context of the first forward. It yields the snapshot that `restore` takes."""
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return the context of the recomputation.

        The context may suppress an exception of the layer, which ends the recomputation early.
        """
        ...


class InputStore(Protocol):
    """Keeps the inputs of recomputed blocks from forward to backward, outside the device's memory."""

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context for the call in which torch's checkpoint saves the inputs of one forward of a block.

        Returns None inside saved-tensor hooks, such as those of a checkpoint around the block, because these hooks
        decide what is saved.
        """
        ...


class LayerFeatures(Protocol):
    """Creates the parts of a block that features define, so that the engine imports no feature.

    See `World.layer_features`.
    """

    def check(self, use_checkpoint: object) -> None:
        """Raise ValueError if `use_checkpoint` is not a value that the method `recompute` accepts."""

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        """Return the recomputation policy of `block` that the user's value of `use_checkpoint` selects."""
        ...

    def replay(self, layer: torch.nn.Module) -> Replay:
        """Return the Replay for `layer`."""
        ...

    def inputs(self) -> InputStore | None:
        """Return a store in host memory for the inputs of the blocks of one model, or None on the CPU."""
        ...
