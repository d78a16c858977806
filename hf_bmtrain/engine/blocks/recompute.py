"""Interfaces for recomputation in backward: which forwards are recomputed, their saved state, and their inputs."""

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
    """Return False for every call of an operator, so that backward recomputes all outputs.

    `Recompute.kept_in_graph` returns this function if the compiled graph of a block keeps no outputs until backward.

    Args:
        operator: the operator of torch. Neither it nor its arguments are used.
        args: the positional arguments of the call.
        kwargs: its keyword arguments.
    """
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

        Called before the block's all-gather. If layers issue collectives in their own forwards, a recomputation issues
        these collectives again. In this case, the result must be the same on all ranks.

        A user may put a torch.utils.checkpoint with use_reentrant=False around several calls of the block. The result
        must then be the same for all of these calls. When backward repeats them, this method is not called again, and
        all of them use one result: the last that this method returned while saved-tensor hooks, such as those of the
        checkpoint, were active.

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """
        return True

    def contexts(
        self, args: tuple, kwargs: dict[str, Any], pending: int
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
        """Return the context managers for a forward that backward will recompute, and for its recomputation.

        The forward runs inside the first context manager, and its recomputation inside the second. A subclass can use
        them to measure the forward, or to keep some of its tensors so that they are not computed again. Returns None
        if no context managers are needed.

        Called before a forward that torch's checkpoint will recompute. Not called if the compiled graph of the block
        recomputes the forward instead (see `kept_in_graph`).

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.
        """

    def kept_in_graph(self, args: tuple, kwargs: dict[str, Any], pending: int) -> Keeps | None:
        """Choose what will recompute a forward of a compiled block: its compiled graph, or torch's checkpoint.

        The graph recomputes only what the gradients need, while torch's checkpoint repeats the whole forward. So a
        subclass chooses the checkpoint only if the forward must run inside the context managers that `contexts`
        returns, for example to be measured.

        Called before a forward that backward will recompute, unless the block must use torch's checkpoint anyway (for
        example because the forward changes buffers).

        Args:
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.
            pending: the number of the block's forwards whose backward has not run.

        Returns:
            To choose the graph, a function that returns True for each call of an operator whose output the graph is to
            keep until backward. The graph recomputes all other outputs. To choose torch's checkpoint, None.
        """
        return keep_nothing

    def backward_begins(self, recomputed: bool) -> None:
        """Called when the block's backward starts, and when torch's checkpoint starts to recompute its forward.

        A subclass can measure the device's memory at these moments. The base class does nothing.

        Args:
            recomputed: False if the block's backward starts, True if a recomputation starts.
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
    computes the same values only if it starts from the same state. A class outside `engine` implements this interface.
    `LayerFeatures.replay` creates its instances.
    """

    def changes_buffers(self) -> bool | None:
        """Return whether the layer's forward changes the layer's buffers, such as running means.

        Called before a forward of a compiled block. If the forward changes buffers, torch's checkpoint must recompute
        it, because a compiled graph would recompute with the changed values.

        Returns:
            Whether forwards in the present mode (`training` of all modules) change buffers. False if the layer has no
            buffers. None if this is not known yet, because no forward in this mode has run inside the context manager
            of `record`. (This context manager observes what a forward changes.)
        """
        ...

    def record(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Return a context manager that saves the layer's state. A forward that will be recomputed runs inside it.

        The context manager yields the saved state, a snapshot, which the caller passes to `restore` in backward.

        args, kwargs: the arguments of the forward.
        """
        ...

    def restore(self, snapshot: Any) -> AbstractContextManager[Any]:
        """Return a context manager that sets the layer to a saved state. The recomputation runs inside it.

        When the context ends, the layer gets back the state that it had before the context.

        As soon as a recomputation has computed all tensors that backward needs, torch's checkpoint ends it by raising
        an exception inside the context. The context manager may suppress this exception or let it pass.

        snapshot: what the context manager of `record` yielded for the forward that is recomputed.
        """
        ...


class InputStore(Protocol):
    """Interface of an object that keeps the inputs of recomputed blocks outside the device's memory until backward.

    All blocks of a model share one store. A class outside `engine` implements it with host memory, and
    `LayerFeatures.inputs` creates it.
    """

    def saving(self) -> AbstractContextManager[Any] | None:
        """Return a context manager under which torch's checkpoint saves the inputs of a block's forward to this store.

        Called before each forward of a block that torch's checkpoint will recompute. Returns None if saved-tensor hooks
        are active already, for example those of a user's checkpoint around the block. These hooks then decide where the
        inputs are saved.
        """
        ...


class LayerFeatures(Protocol):
    """Creates, for each new block, the objects that decide when and how its forward is recomputed in backward.

    The classes of these objects are defined by features outside `engine`, such as the offloading of activations. The
    code in `engine` takes the LayerFeatures from `World.layer_features`, so that it need not import these features.
    """

    def check(self, use_checkpoint: object) -> None:
        """Check the argument `use_checkpoint` of CheckpointBlock, before its layer is sharded.

        Raises:
            ValueError: the value is none of those that `auto_wrap` documents for its argument of the same name.
        """

    def recompute(self, use_checkpoint: Any, block: BlockState) -> Recompute:
        """Return the object that decides which forwards of a new block are recomputed in backward.

        Args:
            use_checkpoint: the user's argument of this name, which `check` has accepted, such as True or "auto".
            block: the state of the new block.
        """
        ...

    def replay(self, layer: torch.nn.Module) -> Replay:
        """Return the object that saves the state of a layer before a forward, and restores it for the recomputation.

        Called when the layer becomes a block, and again when parameters are added to the block.

        Args:
            layer: the transformer layer.
        """
        ...

    def compile(self, function: Callable, block: BlockState, options: dict[str, Any]) -> Callable:
        """Return `function` compiled by torch.compile. If `options` request CUDA graphs, prepare the block for them.

        Args:
            function: the forward of the block's layer, or a function that runs it together with its recomputation.
            block: the state of the block.
            options: the keyword arguments of torch.compile.

        Raises:
            ValueError: the options request CUDA graphs, but these do not work with this block.
            RuntimeError: the options request CUDA graphs, and torch is older than 2.7.
        """
        ...

    def inputs(self) -> InputStore | None:
        """Return a new store in host memory for the inputs of one model's blocks, or None if the model is on the CPU.

        Called when the user calls the model's `gradient_checkpointing_enable` with the option to offload these inputs.
        """
        ...
