"""Compiled forwards of blocks whose backward recomputes them inside the compiled graph.

If torch's checkpoint encloses a compiled forward, the recomputation runs all of it. If torch.compile traces the
checkpoint instead, its graph for the backward contains only what the gradients need. It leaves out, for example, the
last product of a transformer layer, which is a third of the layer's linear products in GPT-2 and a quarter in Llama.
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
    """The compiled forwards of one block that recompute themselves in backward.

    Args:
        forward: the forward to compile: the function of the layer's class, or a forward that was set on the instance.
        layer: a reference to the layer, which is the first argument of its class's function. None if `forward` was set
            on the instance.
        compile: torch.compile with the options of the block, as a function of the forward.
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
    """A forward inside torch's checkpoint, for torch.compile.

    Attributes:
        function: the function to compile.
        refused: why torch.compile cannot trace it; empty while it can.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self.refused = function, ""


def _checkpointed(forward: Callable, keeps: Keeps) -> _Source:
    """Return `forward` inside torch's checkpoint, which recomputes everything but the outputs that `keeps` selects."""

    def policy(_, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if keeps(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {}
    if keeps is not keep_nothing:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False, **options)

    # torch.compile caches graphs by code object, and limits how many graphs one code object may have.
    return _Source(types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__))


_of_class = functools.cache(_checkpointed)  # the layers of a class share the function, and so its graphs
