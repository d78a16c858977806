"""Compile the forward of a block together with its recomputation in backward.

If torch's checkpoint calls a compiled forward, backward recomputes the whole forward. Here, torch.compile traces the
checkpoint too, so that the compiled backward recomputes only what the gradients need. For example, it need not
recompute the last linear layer of a transformer layer, which has a third of the layer's weights in GPT-2 and a quarter
in Llama.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..base.torch_internals import compile_errors
from .recompute import Keeps, keep_nothing


class RecomputedGraphs:
    """Compiles the forward of one block together with its recomputation in backward.

    `run` calls torch.compile once for each value of `keeps`, the function that selects the outputs kept for backward.

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
        """Return the outputs of the compiled forward.

        Args:
            keeps: tells which operators' outputs backward does not recompute.
            args: the positional arguments of the forward.
            kwargs: its keyword arguments.

        Raises:
            CannotRecompute: torch.compile cannot trace the layer as one graph. No part of the forward has run.
        """
        if keeps not in self._compiled:
            source = (_checkpointed if self._layer is None else _of_class)(self._forward, keeps)
            self._compiled[keeps] = source, self._compile(source.function)
        source, compiled = self._compiled[keeps]
        if source.refused:
            raise CannotRecompute(source.refused)
        try:
            return compiled(*args, **kwargs) if self._layer is None else compiled(self._layer(), *args, **kwargs)
        except compile_errors() as error:
            source.refused = str(error).strip().split("\n")[0] or type(error).__name__
            raise CannotRecompute(source.refused) from error


class CannotRecompute(Exception):
    """torch.compile cannot trace a layer and its recomputation as one graph. The message is torch's reason."""


class _Source:
    """A function for torch.compile that runs a layer's forward inside torch's checkpoint.

    Attributes:
        function: the function.
        refused: why torch.compile could not trace the function; empty if no attempt has failed.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self.refused = function, ""


def _checkpointed(forward: Callable, keeps: Keeps) -> _Source:
    """Return a `_Source`, that is, a function for torch.compile, that runs `forward` inside torch's checkpoint.

    keeps: selects the operators whose outputs are kept. Backward recomputes the outputs of all others.
    """

    def policy(_, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {}
    if keeps is not keep_nothing:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

    # Copy the code object, because torch.compile caches graphs by code object and limits the number of graphs for each.
    return _Source(types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__))


_of_class = functools.cache(_checkpointed)  # cached, so that all layers of a class share one function and its graphs
