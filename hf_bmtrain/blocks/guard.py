"""Guards against what would train a sharded model wrongly without a word."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from ..runtime import launcher as accelerator
from ..runtime.world import current_world
from ..sharding.buffer import DistributedParameter

_SHARDED = {DistributedParameter, type(None)}


class _Refusal:
    """An empty collection that raises when it is read, so that merely looking at the attribute does no harm."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise RuntimeError(
            "DistributedDataParallel around a model that hf_bmtrain has sharded: it would overwrite every rank's "
            "shards with rank 0's. Leave it out, the model averages its gradients itself. Where Trainer or "
            "Accelerator put it there, the installed accelerate is too old: pip install 'accelerate>=1.14'."
        )


class SelfReducing:
    """What a module with sharded parameters answers to those who wrap modules: it reduces its own gradients.

    `_is_accelerate_prepared` keeps Accelerate (and so Trainer) from adding DistributedDataParallel, which reads
    `_ddp_params_and_buffers_to_ignore` where it is added all the same. `_is_fsdp_managed_module` on the modules
    outside blocks makes transformers run as many forwards on every rank in `generate` and under layer-drop.
    """

    _is_accelerate_prepared = True
    _ddp_params_and_buffers_to_ignore = _Refusal()

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise RuntimeError(
            "torch.nn.DataParallel around a model that hf_bmtrain has sharded: it copies modules, and slices cannot "
            "be copied. Start one process a GPU (torchrun --nproc-per-node N script.py), or show the process one GPU "
            "(CUDA_VISIBLE_DEVICES=0)."
        )


def watch(model: torch.nn.Module) -> None:
    """Before each training forward of `model`, check that nobody wrapped it or put other parameters into it."""
    model.register_forward_pre_hook(Guard())
    for module in model.modules():
        for name in ("resize_token_embeddings", "resize_position_embeddings"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(_refuse_resizing, name))


def _refuse_resizing(name: str, *args, **kwargs) -> NoReturn:
    raise RuntimeError(
        f"{name} changes the shape of sharded weights, whose slices would be lost: call it before auto_wrap."
    )


class Guard:
    """The check of one model before its training forwards.

    Parameters and modules can be exchanged without a word (FSDP writes into the dicts of a module), so every training
    forward looks at all of them: module by module in the first one and where the tree of modules has changed,
    otherwise straight into the dicts that were found then.
    """

    def __init__(self) -> None:
        self._walked = False
        self._parameters: list[dict[str, Any]] = []  # of the modules that have their own
        self._modules: list[dict[str, Any]] = []
        self._tree: list[torch.nn.Module | None] = []  # what those hold
        self._empty: list[dict[str, Any]] = []  # the modules' other dicts of both kinds

    def __call__(self, model: torch.nn.Module, args: tuple) -> None:
        if not torch.is_grad_enabled():
            return
        if DistributedDataParallel._active_ddp_module is not None:
            iter(_Refusal())
        accelerator.check(current_world().size)
        if not self._as_walked():
            self._walk(model)

    def _as_walked(self) -> bool:
        """Whether the tree of modules is that of the last walk, and its parameters are slices."""
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
