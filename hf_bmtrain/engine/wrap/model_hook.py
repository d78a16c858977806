"""ModelHook: what runs before each forward of a wrapped model."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..base.torch_internals import (
    disable_compiler,
    functorch_transforms_active,
    is_exporting,
)
from ..blocks.block import CheckpointBlock
from ..blocks.sharded_module import RefuseDataParallel, moved
from ..runtime.world import World, current_world
from ..sharding.parameter import DistributedParameter
from .accelerator import check_accelerator


def install_hook(model: torch.nn.Module) -> None:
    """Register a ModelHook on `model`, unless it has one."""
    if not any(isinstance(hook, ModelHook) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(ModelHook(), with_kwargs=True)


@disable_compiler  # the model around the blocks may be compiled
def _tell_observers(world: World, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    world.schedule.before_forward(model, args, kwargs)


class ModelHook:
    """The forward pre-hook of a wrapped model: checks it, and then tells the observers that its forward begins.

    It runs behind hooks that were registered before the model was wrapped, which may change the arguments, and refuses
    a model before an observer exchanges anything with other ranks.

    The check of a training forward raises RuntimeError if the model is exported or called in a transform of torch.func,
    if it was wrapped in DistributedDataParallel, if Accelerate shards it or sees another number of ranks, if it holds a
    parameter that is not sharded, or if one of a block was renamed. Parameters and modules can be replaced without any
    call (FSDP writes into the dicts of a module), so every training forward checks all of them: module by module in the
    first one and after the tree of modules or a name has changed, otherwise in the dicts that were found then.
    """

    def __init__(self) -> None:
        self._parameters: list[dict[str, Any]] = []  # of every module
        self._modules: list[dict[str, Any]] = []
        self._tree: list[torch.nn.Module | None] | None = None  # their values at the last walk
        self._names: list[str] = []  # of the parameters then
        self._kinds: set[type] = set()  # their classes, of sharded ones

    def __call__(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        world = current_world()
        if world.device.type != "meta":  # a simulation has another number of ranks than Accelerate
            self._check(model, world.size)
        if world.schedule.observers.before_forward:
            _tell_observers(world, model, args, kwargs)

    def _check(self, model: torch.nn.Module, ranks: int) -> None:
        if torch.jit.is_tracing() or is_exporting():
            raise RuntimeError(
                f"A sharded {type(model).__name__} cannot be traced or exported, because its weights come and go: load "
                "its state dict (bmt.save, model.state_dict()) into a model that is not wrapped, and export that."
            )
        if not torch.is_grad_enabled():
            return
        if functorch_transforms_active():
            raise RuntimeError(
                f"A transform of torch.func around a sharded {type(model).__name__}: its blocks are gathered and "
                "released by autograd's own backward. Use loss.backward(), torch.autograd.grad with respect to "
                "inputs, or a model that is not wrapped; vmap without gradients under torch.no_grad()."
            )
        if DistributedDataParallel._active_ddp_module is not None:
            iter(RefuseDataParallel())
        check_accelerator(ranks)
        names = list(chain.from_iterable(self._parameters))
        if (
            _values(self._modules) != self._tree
            or names != self._names
            or not set(map(type, _values(self._parameters))) <= self._kinds
        ):
            self._walk(model)

    def _walk(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                # A wrapped model that became a part of a block is shown with wholes in the block's forward.
                known = _is_sharded(type(parameter)) or hasattr(parameter, "is_unsharded")
                if parameter is not None and not known:
                    raise RuntimeError(
                        f"'{name}.{key}' is a {type(parameter).__name__} of shape {tuple(parameter.shape)} that came "
                        "into the model after auto_wrap: it is not sharded, and nobody averages its gradient over the "
                        "ranks. Do what adds or replaces parameters (LoRA, resize_token_embeddings, a new head) before "
                        "auto_wrap, and leave out FSDP, which replaces them all."
                    )
        for module in model.modules():
            if isinstance(module, CheckpointBlock):
                _check_places(module)
        self._parameters = [module._parameters for module in model.modules()]
        self._names = list(chain.from_iterable(self._parameters))
        self._modules = [module._modules for module in model.modules()]
        self._tree = _values(self._modules)
        self._kinds = {kind for kind in map(type, _values(self._parameters)) if _is_sharded(kind)}


def _is_sharded(kind: type) -> bool:
    """Whether values of class `kind` may be among the parameters of a module: sharded ones and None."""
    return issubclass(kind, (DistributedParameter, type(None)))


def _check_places(block: CheckpointBlock) -> None:
    """Raise RuntimeError if a parameter of `block` has another name than when it was sharded."""
    known = {(id(slot.parameters), slot.name) for slot in block._slots()}
    for name, module in block.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DistributedParameter) and (id(module._parameters), key) not in known:
                if any(parameter is slot.sharded for slot in block._slots()):
                    raise moved(f"{name}.{key}".lstrip("."), block)


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def keep_cache_out(modules: Iterable[torch.nn.Module], blocks: Iterable[Any]) -> None:
    """Turn `use_cache` off in training forwards.

    A recomputed forward would append to the key-value cache twice, and a compiled layer would have its own graph.
    """
    states = weakref.WeakSet(block._bmt for block in blocks)

    def without_cache(position, module, args, kwargs):
        if torch.is_grad_enabled() and any(state.keeps_no_cache for state in states):
            if position < len(args):
                return (*args[:position], False, *args[position + 1 :]), kwargs
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    for module in modules:
        if hasattr(getattr(module, "config", None), "use_cache"):
            names = list(inspect.signature(module.forward).parameters)
            if "use_cache" in names:
                hook = functools.partial(without_cache, names.index("use_cache"))
                module.register_forward_pre_hook(hook, with_kwargs=True)
