"""Checks before every training forward that the model is still the one that was sharded."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..blocks.base import RefuseDataParallel
from ..runtime.launcher import check_accelerator
from ..sharding.parameter import DistributedParameter

_SHARDED = {DistributedParameter, type(None)}


class Guard:
    """A forward pre-hook that checks one model before its training forwards.

    Raises RuntimeError if the model was wrapped in DistributedDataParallel, if Accelerate shards it or sees another
    number of ranks, or if it holds a parameter that is not sharded. Parameters and modules can be exchanged without
    any call (FSDP writes into the dicts of a module), so every training forward looks at all of them: module by module
    in the first one and after the tree of modules has changed, otherwise in the dicts that were found then.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._walked = False
        self._parameters: list[dict[str, Any]] = []  # of the modules that have their own
        self._modules: list[dict[str, Any]] = []
        self._tree: list[torch.nn.Module | None] = []  # what those hold
        self._empty: list[dict[str, Any]] = []  # the modules' other dicts of both kinds

    def __call__(self, model: torch.nn.Module, args: tuple) -> None:
        if not torch.is_grad_enabled():
            return
        if DistributedDataParallel._active_ddp_module is not None:
            iter(RefuseDataParallel())
        check_accelerator(self._ranks)
        if not self._as_walked():
            self._walk(model)

    def _as_walked(self) -> bool:
        """Return whether the tree of modules is that of the last walk, and its parameters are slices."""
        if not self._walked or any(self._empty):
            return False
        tree = _values(self._modules)
        if len(tree) != len(self._tree) or not all(map(operator.is_, tree, self._tree)):
            return False
        return set(map(type, _values(self._parameters))) <= _SHARDED

    def _walk(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and type(parameter) not in _SHARDED:
                    raise RuntimeError(
                        f"'{name}.{key}' is a {type(parameter).__name__} of shape {tuple(parameter.shape)} that came "
                        "into the model after auto_wrap: it is not sharded, and nobody averages its gradient over the "
                        "ranks. Do what adds or replaces parameters (LoRA, resize_token_embeddings, a new head) before "
                        "auto_wrap, and leave out FSDP, which replaces them all."
                    )
        dicts = [[module._parameters for module in model.modules()], [module._modules for module in model.modules()]]
        self._parameters, self._modules = ([each for each in kind if each] for kind in dicts)
        self._empty = [each for kind in dicts for each in kind if not each]
        self._tree = _values(self._modules)
        self._walked = True


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))
