"""Interfaces for recomputation: which forwards of a block are recomputed, how, and where their inputs are kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .block_state import BlockState


class Recompute:
    """Decides which training forwards of a block are recomputed in backward. This base class recomputes all of them.

    Attributes:
        fills_cache: whether training forwards may fill a key-value cache. It must be False if any forward may be
            recomputed, because the recomputation would fill the cache a second time.
        keeps_activations: whether the last training forward kept its activations, so that backward does not recompute
            it. Predictions of memory read this attribute.
    """

    fills_cache = False
    keeps_activations = False

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether backward will recompute the training forward that is about to start.

        Called before the block's all-gather. The result may differ between ranks, because it does not change which
        collectives they issue. But if layers issue collectives themselves (see `Schedule.collective_layers`), all ranks
        must return the same result.
        Inside a checkpoint around the block, the result must be the same in every call, because this checkpoint repeats
        all calls of the block in the way that the last result determined.

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

        Returns None if neither run needs a context. The arguments are those that `recomputes` gets for this forward.
        """

    def backward_begins(self, recomputed: bool) -> None:
        """Called when the block's backward starts (`recomputed` is False) and when it starts a recomputation (True)."""


class _Never(Recompute):
    fills_cache = True
    keeps_activations = True

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return False


ALWAYS, NEVER = Recompute(), _Never()


class Replay(Protocol):
    """Makes a recomputation of a layer's forward compute the same values as the first forward."""

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context for the first forward. It yields a snapshot of the layer's state, for `restore`."""
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return the context for the recomputation, in which the layer has the state of `snapshot`.

        The context may suppress an exception that torch's checkpoint raises to end the recomputation early.
        """
        ...


class InputStore(Protocol):
    """Stores the inputs of recomputed blocks outside the device's memory, from forward to backward."""

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context in which torch's checkpoint saves the inputs of one forward of a block to this store.

        Returns None inside saved-tensor hooks, such as those of a checkpoint around the block, because these hooks
        decide where tensors are saved.
        """
        ...


class LayerFeatures(Protocol):
    """Creates the objects by which features control how blocks are recomputed.

    The engine takes this object from `World.layer_features`, so that it need not import features.
    """

    def check(self, use_checkpoint: object) -> None:
        """Raise ValueError if `use_checkpoint` is not a value that the method `recompute` accepts."""

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        """Return the recomputation policy of `block` for the user's argument `use_checkpoint`."""
        ...

    def replay(self, layer: torch.nn.Module) -> Replay:
        """Return the object that restores the state of `layer` for recomputations of its forward."""
        ...

    def inputs(self) -> InputStore | None:
        """Return a store that keeps the inputs of a model's blocks in host memory; None if the model is on the CPU."""
        ...
