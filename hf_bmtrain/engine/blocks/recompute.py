"""Interfaces that decide which forwards are recomputed in backward, with which state, and where inputs are kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .block_state import BlockState


Keeps = Callable[[Any, tuple, dict[str, Any]], bool]
"""A function that takes an operator of torch, and the arguments (a tuple and a dict) of one call of the operator. It
returns whether the output of this call is kept until backward, instead of being recomputed."""


def keep_nothing(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return False: backward recomputes the output of every operator."""
    return False


class Recompute:
    """Decides which training forwards of a block are recomputed in backward. The base class recomputes all of them.

    Attributes:
        fills_cache: whether training forwards may fill a key-value cache. It must be False if any forward may be
            recomputed, because the recomputation would fill the cache a second time.
        keeps_activations: whether the last training forward kept its activations, so that backward does not recompute
            it. The prediction of a step's memory reads this attribute.
    """

    fills_cache = False
    keeps_activations = False

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        """Return whether backward will recompute the training forward that is about to start.

        Called before the block's all-gather. If layers issue collectives in their own forwards, which a recomputation
        repeats, the result must be the same on all ranks.

        If torch's checkpoint encloses the block, the result must be the same for all calls of the block inside the
        checkpoint. When the checkpoint recomputes these calls, each uses the last result.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """
        return True

    def contexts(
        self, args: tuple, kwargs: dict[str, Any], pending: int
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
        """Return two contexts: one for a forward that backward will recompute, and one for the recomputation.

        Returns None if neither of them needs a context.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """

    def kept_in_graph(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Keeps | None:
        """Return a function that selects the operators whose outputs a compiled graph keeps, and does not recompute.

        Called before a forward of a compiled block that is to be recomputed in backward. Returns None if torch's
        checkpoint must recompute this forward, in the contexts that `contexts` returns, and not the compiled graph.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """
        return keep_nothing

    def backward_begins(self, recomputed: bool) -> None:
        """Called when the block's backward starts, and again when the recomputation of its forward starts, if any.

        A subclass can measure the device's memory at these moments. The base class does nothing.

        Args:
            recomputed: True if a recomputation starts, False if the block's backward starts.
        """


class _Never(Recompute):
    fills_cache = True
    keeps_activations = True

    def recomputes(self, args: tuple, kwargs: dict[str, Any], pending: int) -> bool:
        return False


ALWAYS, NEVER = Recompute(), _Never()


class Replay(Protocol):
    """Makes a recomputation of a layer's forward compute the same values as the first forward."""

    def changes_buffers(self) -> bool | None:
        """Return whether forwards change the layer's buffers (such as running means), or None if this is not known.

        It is not known if the layer has buffers, but no forward has run in the context that `record` returns.
        """
        ...

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return the context for the first forward. It yields a snapshot of the layer's state, to pass to `restore`.

        args, kwargs: the arguments of the forward.
        """
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return the context for the recomputation. Inside it, the layer has the state that `snapshot` contains.

        The context may suppress an exception that torch's checkpoint raises to end the recomputation early.

        snapshot: the object that the context returned by `record` yielded.
        """
        ...


class InputStore(Protocol):
    """Keeps the inputs of recomputed blocks outside the device's memory, for example on the host, until backward."""

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context in which torch's checkpoint saves the inputs of one forward of a block to this store.

        Returns None if saved-tensor hooks are active already, such as those of a checkpoint around the block, because
        those hooks then decide where tensors are saved.
        """
        ...


class LayerFeatures(Protocol):
    """Creates, for each new block, the objects that decide when and how its forward is recomputed in backward.

    The code in `engine` takes this object from `World.layer_features`, so that it need not import the code of features
    such as the offloading of activations, which define the classes of these objects.
    """

    def check(self, use_checkpoint: object) -> None:
        """Raise ValueError unless `use_checkpoint` is a valid value of this argument of `auto_wrap`."""

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        """Return the object that decides, for the user's `use_checkpoint`, which forwards of `block` are recomputed."""
        ...

    def replay(self, layer: torch.nn.Module) -> Replay:
        """Return the object that makes recomputations of `layer` compute the same values as its first forward."""
        ...

    def inputs(self) -> InputStore | None:
        """Return a store in host memory for the inputs of a model's blocks, or None if the model is on the CPU."""
        ...
