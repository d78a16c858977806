"""Compile the forward of a block together with its recomputation in backward.

If torch's checkpoint calls a compiled forward, backward recomputes the whole forward. Here, torch.compile traces the
checkpoint too, so that the compiled backward recomputes only what the gradients need. For example, no gradient needs
the output of the last linear layer of a transformer layer, so it is not recomputed. This linear layer has a third of
the transformer layer's weights in GPT-2, and about a quarter in Llama.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..base.torch_internals import compile_errors, compile_reason
from .recompute import Keeps, keep_nothing


class RecomputedGraphs:
    """Compiles the forward of one block together with its recomputation in backward.

    Backward then recomputes only what the gradients need, whereas torch's checkpoint would repeat the whole compiled
    forward. Call `run` in place of the forward. The argument `keeps` of `run` is a function that chooses the outputs of
    operators that are kept instead of recomputed. The forward is compiled once for each such function.

    Args:
        forward: the function to compile: the `forward` of the layer's class, or one that was set on the instance.
        layer: a reference to the layer, which is passed as `self` to the class's `forward`. None if `forward` was set
            on the instance.
        compile: a function that takes a function and returns it compiled, with the block's options of torch.compile.
    """

    def __init__(
        self,
        forward: Callable,
        layer: weakref.ref[torch.nn.Module] | None,
        compile: Callable[[Callable], Callable],
    ) -> None:
        self._forward, self._layer, self._compile = forward, layer, compile
        self._compiled: dict[Keeps, tuple[_Source, Callable]] = {}

    def run(self, keeps: Keeps, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the compiled forward, and return its outputs.

        The first call with each function `keeps` compiles the forward for this function. If `run` raises one of the
        exceptions below, no part of the forward has run.

        Args:
            keeps: a function that takes an operator of torch, and the positional and keyword arguments of one call of
                it. It returns whether the output of this call is kept until backward, instead of being recomputed.
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.

        Raises:
            NotCompiled: torch.compile has no effect at this moment, for example because it is disabled.
            CannotRecompute: torch.compile cannot trace the layer's forward and its recomputation as one graph.
        """
        if keeps not in self._compiled:
            source = (_checkpointed if self._layer is None else _of_class)(self._forward, keeps)
            self._compiled[keeps] = source, self._compile(source.function)
        source, compiled = self._compiled[keeps]
        if source.refused:
            raise CannotRecompute(source.refused)
        try:
            return self._call(compiled, args, kwargs)
        except compile_errors() as error:
            source.refused = (
                f"torch.compile cannot trace the forward and its recomputation as one graph: {compile_reason(error)}"
            )
            raise CannotRecompute(source.refused) from error

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward without torch.compile, and return its outputs.

        If `run` raises NotCompiled, the caller runs the forward with this method instead, and also its recomputation.

        Args:
            *args: the positional arguments of the forward.
            **kwargs: its keyword arguments.
        """
        return self._call(self._forward, args, kwargs)

    def _call(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs) if self._layer is None else function(self._layer(), *args, **kwargs)


class CannotRecompute(Exception):
    """Raised by `RecomputedGraphs.run` if a layer's forward and its recomputation cannot be compiled as one graph.

    The caller (the block) logs the message, which states the reason. It then runs the forward inside torch's
    checkpoint, so that backward repeats the whole forward, instead of only the part that the gradients need.
    """


class NotCompiled(CannotRecompute):
    """Raised by `RecomputedGraphs.run` if torch.compile has no effect now, so that it would run the forward eagerly.

    This happens if torch.compile is disabled, and inside some contexts, such as a TorchDispatchMode. The exception is
    raised before the forward begins.

    The caller then runs the forward with `RecomputedGraphs.eager`, inside torch's checkpoint. The recomputation also
    uses `eager`, because torch.compile may have an effect again in backward, which would make the two differ.
    """


class _Source:
    """A function for torch.compile that runs a layer's forward inside torch's checkpoint.

    Attributes:
        function: the function.
        refused: why torch.compile could not trace the function; empty if no attempt has failed.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self.refused = function, ""


def _checkpointed(forward: Callable, keeps: Keeps) -> _Source:
    """Return a `_Source` with a new function that runs `forward` inside torch's checkpoint. The caller compiles it.

    forward: the forward of a layer.
    keeps: a function that returns whether the output of a call of an operator is kept until backward. Backward
        recomputes all other outputs.
    """

    def policy(_, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {}
    if keeps is not keep_nothing:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Do not run eagerly, because the checkpoint below does not restore the layer's state (such as its attributes)
        # for the recomputation. The caller, which handles NotCompiled, has a checkpoint that restores it.
        if not torch.compiler.is_dynamo_compiling():
            raise NotCompiled(
                "torch.compile is disabled, or runs the blocks eagerly in a context such as a TorchDispatchMode"
            )
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

    # Copy the code object, because torch.compile caches graphs by code object and limits the number of graphs of each.
    # Rename it, because torch.compile remembers by the function's name which sizes have varied, and makes these sizes
    # dynamic. Under one name, sizes that differ between two classes of layers would become dynamic in both.
    name = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"
    return _Source(types.FunctionType(run.__code__.replace(co_name=name), run.__globals__, name, None, run.__closure__))


_of_class = functools.cache(_checkpointed)  # cached, so that all layers of a class share one function and its graphs
