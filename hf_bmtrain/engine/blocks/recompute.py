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
    """Return False for every operator: the `Keeps` function with which backward recomputes all outputs."""
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

        A user may call torch's checkpoint with a function that calls the block, even several times. When this
        checkpoint recomputes the function, `recomputes` is not called again: the block uses its last result for all of
        these calls. So the result must be the same for them.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """
        return True

    def contexts(
        self, args: tuple, kwargs: dict[str, Any], pending: int
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
        """Return two context managers: one around a forward that backward will recompute, one around its recomputation.

        Called before a forward that torch's checkpoint will recompute, but not before one that a compiled graph will
        recompute (see `kept_in_graph`). Returns None if no context managers are needed. A subclass can use them to
        measure the forward, or to keep some of its tensors.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """

    def kept_in_graph(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Keeps | None:
        """Decide whether the compiled graph of a block recomputes a forward, or torch's checkpoint does.

        Called before a forward of a compiled block that backward will recompute.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.

        Returns:
            For the compiled graph, a function that selects the operators whose outputs the graph keeps until backward.
            The graph recomputes all others. For torch's checkpoint, None; `contexts` is then called.
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
    """Interface between a block and the object that restores its layer's state for recomputations of the forward.

    A forward may change the state that it reads, such as buffers, attributes and random generators. Its recomputation
    computes the same values only if it starts from the same state. The interface is implemented outside `engine`, by
    the class that `LayerFeatures.replay` creates.
    """

    def changes_buffers(self) -> bool | None:
        """Return whether forwards in the present mode (training or evaluation) change the layer's buffers.

        Buffers are, for example, running means. A layer without buffers returns False. A layer with buffers returns
        None until its first forward in the present mode has run under `record`, which observes what it changes.
        """
        ...

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context manager that saves the layer's state. The forward to be recomputed later runs under it.

        The context manager yields the saved state, a snapshot, which is passed to `restore`.

        args, kwargs: the arguments of the forward.
        """
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return a context manager that sets the layer to a saved state. The recomputation runs under it.

        At its end, the layer gets back the state that it had before. torch's checkpoint raises an exception to end a
        recomputation early. An implementation is allowed to suppress this exception.

        snapshot: what the context manager of `record` yielded for the forward that is recomputed.
        """
        ...


class InputStore(Protocol):
    """Keeps the inputs of recomputed blocks outside the device's memory, for example on the host, until backward."""

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context manager under which torch's checkpoint saves the inputs of a block's forward to this store.

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
        """Return the object that saves the state of `layer` before a forward, and restores it for its recomputation."""
        ...

    def inputs(self) -> InputStore | None:
        """Return a new store in host memory for the inputs of one model's blocks, or None if the model is on the CPU.

        Called when the user calls the model's `gradient_checkpointing_enable` with the option to offload these inputs.
        """
        ...
