"""Checks and settings for each forward of a wrapped model.

ModelHook checks the model before each forward. `follow_accelerator` makes the forward run in an Accelerator's mixed
precision. `keep_cache_out` makes training forwards run without a key-value cache, if blocks recompute their forwards or
are compiled.
"""

from __future__ import annotations

import functools
import inspect
import sys
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
from ..blocks.block import CheckpointBlock, weak_method
from ..blocks.sharded_module import RefuseDataParallel, moved
from ..runtime.world import World, current_world
from ..sharding.parameter import DistributedParameter
from ..sharding.slots import Slot
from .accelerator import check_accelerator, check_trainer, in_mixed_precision


def install_hook(model: torch.nn.Module) -> None:
    """Register a ModelHook on `model`, unless it has one. The hook checks the model before each forward."""
    if not any(isinstance(hook, ModelHook) for hook in model._forward_pre_hooks.values()):
        model.register_forward_pre_hook(ModelHook(), with_kwargs=True)


def after_later_hooks(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Run the forward pre-hooks of `model` that follow its ModelHook, and return the resulting arguments.

    ModelHook is the pre-hook that calls the observers' `before_forward`. An observer that runs the forward once as a
    trial in this method calls this function first, because the pre-hooks that follow ModelHook have not run yet, and
    may change the arguments. These pre-hooks run again before the forward itself.

    Args:
        model: a wrapped model.
        args: the positional arguments of the forward, as `Observer.before_forward` got them.
        kwargs: the keyword arguments of the forward, as `Observer.before_forward` got them.

    Returns:
        The positional and the keyword arguments with which to call the model's forward.
    """
    hooks = list(model._forward_pre_hooks.items())
    checks = [isinstance(hook, ModelHook) for _, hook in hooks]
    for key, hook in hooks[checks.index(True) + 1 :]:
        if key in model._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(model, args, kwargs) or (args, kwargs)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            changed = hook(model, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


@disable_compiler  # observers must not be compiled, even if the user compiles the whole model
def _tell_observers(world: World, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    world.schedule.before_forward(model, args, kwargs)


class ModelHook:
    """The forward pre-hook of a wrapped model. It checks the model, and then calls the observers' `before_forward`.

    Observers are objects whose methods are called at events of a training step. They may communicate with other ranks,
    so the checks come first. Hooks that were registered before the model was wrapped run before this one, and may
    change the arguments.

    The hook raises RuntimeError if the model is traced or exported. In a training forward (with gradients enabled), it
    also raises RuntimeError in these cases:

    * The model is called inside a torch.func transform or DistributedDataParallel.
    * Accelerate shards models itself, or has a different number of ranks than this package.
    * A Trainer on several ranks lacks BMTrainCallback.
    * A parameter is not sharded, or a block's parameter was renamed.

    If parameters were deleted from a block, the block no longer all-gathers flat buffers of which no parameter is left.

    Parameters and modules can be replaced at any time. So every training forward compares the modules, and the names
    and classes of the parameters, with those at the last check of all parameters. If any of them differ, all parameters
    are checked again.
    """

    def __init__(self) -> None:
        # These attributes store what the last `_walk` over all modules found. Before each training forward, `_check`
        # compares them with the present state. It calls `_walk` again, which takes longer, only if modules, or names or
        # classes of parameters, have changed.
        self._parameters: list[dict[str, Any]] = []  # the dict `_parameters` of every module
        self._modules: list[dict[str, Any]] = []  # the dict `_modules` of every module
        self._tree: list[torch.nn.Module | None] | None = None  # the children of all modules
        self._names: list[str] = []  # the names of all parameters
        self._kinds: set[type] = set()  # the classes of all sharded parameters, and NoneType if an entry is None

    def __call__(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        world = current_world()
        # To predict memory, forwards run on the meta device, with a simulated number of ranks. Skip the checks there,
        # because one of them fails if Accelerate reports a different number of ranks.
        if world.device.type != "meta":
            self._check(model, world)
        if world.schedule.observers.before_forward:
            _tell_observers(world, model, args, kwargs)

    def _check(self, model: torch.nn.Module, world: World) -> None:
        if torch.jit.is_tracing() or is_exporting():
            raise RuntimeError(
                f"A sharded {type(model).__name__} cannot be traced or exported, because its full parameters exist "
                "only while they are used. Load its state dict (bmt.save, model.state_dict()) into a model that is not "
                "wrapped, and export that."
            )
        if not torch.is_grad_enabled():
            return
        if functorch_transforms_active():
            raise RuntimeError(
                f"A sharded {type(model).__name__} cannot be called inside a torch.func transform, because its blocks "
                "are all-gathered and resharded during autograd's own backward. Use loss.backward(), "
                "torch.autograd.grad with respect to inputs, or a model that is not wrapped. vmap works under "
                "torch.no_grad()."
            )
        if DistributedDataParallel._active_ddp_module is not None:
            iter(RefuseDataParallel())
        if world.accelerator is not None:
            check_accelerator(world.accelerator, world.size)
        if world.size > 1 and "transformers.trainer" in sys.modules:
            check_trainer(model, world.size)
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
                # `model` may itself be inside a block of a larger wrapped model. While that block's forward runs, the
                # parameters of `model` are full ones, marked by the attribute `is_unsharded`.
                known = _is_sharded(type(parameter)) or hasattr(parameter, "is_unsharded")
                if parameter is not None and not known:
                    full_name = f"{name}.{key}" if name else key
                    raise RuntimeError(
                        f"'{full_name}' is a {type(parameter).__name__} of shape {tuple(parameter.shape)} that was "
                        "added to the model after auto_wrap. It is not sharded, and its gradient is not averaged over "
                        "the ranks. Add or replace parameters (adapters, resized embeddings, a new head) before "
                        "auto_wrap, and do not apply FSDP, which replaces all parameters."
                    )
        for module in model.modules():
            if isinstance(module, CheckpointBlock):
                module._bmt.forget_deleted(leave=True)
                _check_places(module)
        self._parameters = [module._parameters for module in model.modules()]
        self._names = list(chain.from_iterable(self._parameters))
        self._modules = [module._modules for module in model.modules()]
        self._tree = _values(self._modules)
        self._kinds = {kind for kind in map(type, _values(self._parameters)) if _is_sharded(kind)}


def _is_sharded(kind: type) -> bool:
    """Return whether an entry of the class `kind` in a module's `_parameters` is a sharded parameter or None.

    A parameter of any other class either was added after the model was sharded, or is a full parameter. Full parameters
    are in `_parameters` only while the forward of their block runs.
    """
    return issubclass(kind, (DistributedParameter, type(None)))


def _check_places(block: CheckpointBlock) -> None:
    """Raise RuntimeError if a parameter of `block` was registered under another name after `block` was sharded.

    Under the new name, the block's forward would read only this rank's elements, because the full parameter is set
    under the old name. If a parameter was deleted before an earlier check, and has been registered again since, this
    function makes it a parameter of the block again.
    """
    slots, state = block._slots(), block._bmt
    known = {(id(slot.parameters), slot.name) for slot in slots}
    for name, module in block.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DistributedParameter) and (id(module._parameters), key) not in known:
                if any(parameter is slot.sharded for slot in slots):
                    raise moved(f"{name}.{key}".lstrip("."), block)
                if parameter.buffer in state.left or parameter.buffer in state.buffers:
                    state.put_back(Slot(module._parameters, key, parameter.full, parameter))


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def follow_accelerator(model: torch.nn.Module, device: torch.device) -> None:
    """Replace `model.forward` by a function that runs it in the mixed precision of the program's Accelerator, if any.

    Each call of the forward looks for the Accelerator, which may be created after the model was wrapped. Accelerate
    itself enables mixed precision only for models that it prepares, and it does not prepare sharded models.

    Args:
        model: the model, whose attribute `forward` is replaced.
        device: the device on which the model computes.
    """
    forward = weak_method(model.forward)
    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}

    @functools.wraps(forward)
    def forward_in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        accelerator = current_world().accelerator
        if accelerator is None:
            return forward(*args, **kwargs)
        return in_mixed_precision(accelerator, functools.partial(forward, *args, **kwargs), device, weights)

    model.forward = forward_in_mixed_precision


def keep_cache_out(modules: Iterable[torch.nn.Module], blocks: Iterable[Any]) -> None:
    """Register hooks on `modules` that pass use_cache=False to their forwards in training (with gradients enabled).

    The hooks do this if any of `blocks` is compiled or may recompute its forward. A recomputed forward would append to
    the key-value cache twice, and torch.compile would have to compile a layer a second time for forwards with a cache.

    Args:
        modules: the modules that get a hook. Those whose forward has no argument `use_cache`, or whose `config` has no
            attribute `use_cache`, are skipped.
        blocks: the model's CheckpointBlocks.
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
