"""All patches on instances of models: their own recomputation, caching and casting give way to the blocks'."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from ..base.torch_internals import (
    differentiates_by_functorch,
    functorch_transforms_active,
    is_exporting,
    preserve_version,
    pytree,
)
from ..blocks.block import CheckpointBlock, weak_method
from ..blocks.block_state import BlockState
from ..blocks.sharded_module import RefuseDataParallel, moved
from ..runtime.launcher import check_accelerator, mixed_precision
from ..runtime.world import World
from ..sharding.parameter import DistributedParameter

_log = logging.getLogger("hf_bmtrain")
_log_once = functools.cache(_log.log)


@functools.cache
def _is_sharded(kind: type) -> bool:
    """Return whether what stands in a module's slot is a local parameter, or None."""
    return kind is type(None) or issubclass(kind, DistributedParameter)


_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def route_recomputation(model: torch.nn.Module, blocks: Iterable[Any]) -> None:
    """Turn off Hugging Face's gradient checkpointing.

    Later calls to `gradient_checkpointing_enable()` (Trainer makes one) and `_disable()` switch the blocks' instead.
    """
    states = weakref.WeakSet(block._bmt for block in blocks)  # weak: a patched module may be inside a block
    for module in model.modules():
        for word in ("activation", "gradient"):  # the second is the older name
            disable = getattr(module, f"{word}_checkpointing_disable", None)
            if callable(disable):
                if word == "activation" or not hasattr(module, "activation_checkpointing_disable"):
                    _turn_off(module, disable)
                setattr(module, f"{word}_checkpointing_enable", functools.partial(_set_recompute, states, True))
                setattr(module, f"{word}_checkpointing_disable", functools.partial(_set_recompute, states, False))


def _turn_off(module: torch.nn.Module, disable: Callable[[], object]) -> None:
    """Call `disable`. transformers raises where the class claims the support and none of its modules has the switch."""
    try:
        disable()
    except ValueError:
        if any(hasattr(inner, "gradient_checkpointing") for inner in module.modules()):
            raise


def _set_recompute(states: weakref.WeakSet[BlockState], on: bool, *args, **kwargs) -> None:
    """Switch the blocks' recomputation on or off. The options, which are torch.utils.checkpoint's, are ignored."""
    _log.info("recompute %s in %d sharded blocks (asked for through the model)", on, len(states))
    for state in states:
        state.policy = on


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


def let_parametrize(model: torch.nn.Module) -> None:
    """Let PEFT's adapters on parameters (`target_parameters`) replace a parameter while their module's forward runs.

    They register a torch parametrization, which sets the whole parameter to itself and puts back what it found.
    """
    for module in model.modules():
        activate = getattr(module, "_activate_lora", None)
        if inspect.ismethod(activate):  # not patched yet
            module._activate_lora = functools.partial(  # pyright: ignore[reportArgumentType]
                _activate_uncounted, weak_method(activate), weakref.ref(module)
            )


@contextmanager
def _activate_uncounted(activate: Callable, reference: weakref.ref[Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Run `activate`, a context, without a write to the parameter on its way in, and with its slot as it was after."""
    wrapper: Any = reference()
    holder, name = wrapper.get_base_layer(), wrapper.parameter_name
    held = holder._parameters.get(name)
    with ExitStack() as stack:
        if held is not None:  # else an enclosing adapter of the same parameter has replaced it
            stack.callback(holder._parameters.__setitem__, name, held)
        with preserve_version(wrapper.get_param()):
            stack.enter_context(activate(*args, **kwargs))
        yield


def keep_ranks_together(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
    """Make all ranks call the same blocks, because a collective runs in every block.

    Turns off layer-drop, which skips random layers, different ones on each rank: for modules marked as FSDP's
    transformers uses every layer where the rate is read from the configuration. Makes generation continue until every
    rank is done: transformers does that for marked modules too, and `generate` if `synced_gpus` is set.
    """
    dropping = [module for module in model.modules() if _drops_layers(module)]
    for module in dropping:
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0  # pyright: ignore
    if dropping:
        names = ", ".join(sorted({type(module).__name__ for module in dropping}))
        _log.warning("layer-drop is off in %s: each rank would skip other blocks, whose gathers then hang", names)
    inside = {module for block in blocks for module in block.modules()}  # torch.compile gives the mark a meaning
    for module in model.modules():
        if module not in inside:
            module._is_fsdp_managed_module = True  # pyright: ignore[reportArgumentType]
        generate: Any = getattr(module, "generate", None)
        if callable(generate):
            synced = inspect.signature(generate).parameters.get("synced_gpus")
            if synced is not None and synced.default is False:
                module.generate = functools.partial(weak_method(generate), synced_gpus=True)  # pyright: ignore


def _drops_layers(module: torch.nn.Module) -> bool:
    """Return whether the forward of `module` skips random layers, at a rate of its own or of its configuration."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    rates = [name for name in code.co_names if name.endswith("layerdrop")] if code is not None else []
    config = getattr(module, "config", None)
    return bool(getattr(module, "layerdrop", 0)) or any(getattr(config, name, 0) for name in rates)


def follow_accelerator(model: torch.nn.Module, device: torch.device) -> None:
    """Run `model`'s forward in the mixed precision of the process's Accelerator (Trainer makes one), if there is one.

    Accelerate does this for the models it prepares, but regards a sharded one as prepared. As in Accelerate,
    half-precision outputs are converted to float32, and fp16 on the CPU, where it has no loss scale, becomes float32,
    with a warning.
    """
    forward = weak_method(model.forward)
    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}

    @functools.wraps(forward)
    def forward_in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        precision = mixed_precision()
        if precision == "fp16" and device.type == "cpu":
            _log_once(
                logging.WARNING,
                "mixed_precision='fp16' is left out on the CPU, as Accelerate does: computing in float32. Use 'bf16'.",
            )
            precision = "no"
        if precision == "no":
            return forward(*args, **kwargs)
        if precision not in _HALF:
            raise RuntimeError(
                f"mixed_precision='{precision}' is not supported by a sharded model: use 'bf16', 'fp16' or 'no'."
            )
        if weights == {_HALF[precision]}:
            _log_once(
                logging.INFO,
                "mixed_precision='%s' around weights that are %s already: autocast computes norms and losses in "
                "float32, which takes time and memory. Leave it out (bf16=False in TrainingArguments) for what FSDP2 "
                "does; our optimizers keep float32 masters either way.", precision, precision,
            )  # fmt: skip
        with torch.autocast(device.type, dtype=_HALF[precision], cache_enabled=False):
            outputs = forward(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in _HALF.values() else t, outputs)

    model.forward = forward_in_mixed_precision


def install_guard(model: torch.nn.Module, world: World) -> None:
    """Check `model` before each training forward, and refuse to resize its embeddings."""
    if world.device.type != "meta":  # a simulation has another number of ranks than Accelerate
        model.register_forward_pre_hook(Guard(world.size))
    for module in model.modules():
        for name in ("resize_token_embeddings", "resize_position_embeddings"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(_refuse_resizing, name))


def _refuse_resizing(name: str, *args, **kwargs) -> NoReturn:
    raise RuntimeError(
        f"{name} changes the shape of sharded weights, whose slices would be lost: call it before auto_wrap."
    )


class Guard:
    """A forward pre-hook that checks one model before its training forwards.

    Raises RuntimeError if the model is exported or called in a transform of torch.func, if it was wrapped in
    DistributedDataParallel, if Accelerate shards it or sees another number of ranks, if it holds a parameter that is
    not sharded, or if one of a block was renamed. Parameters and modules can be replaced without any call (FSDP writes
    into the dicts of a module), so every training forward checks all of them: module by module in the first one and
    after the tree of modules or a name has changed, otherwise in the dicts that were found then.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._parameters: list[dict[str, Any]] = []  # of every module
        self._modules: list[dict[str, Any]] = []
        self._tree: list[torch.nn.Module | None] | None = None  # their values at the last walk
        self._names: list[str] = []  # of the parameters then

    def __call__(self, model: torch.nn.Module, args: tuple) -> None:
        if torch.jit.is_tracing() or is_exporting():
            raise RuntimeError(
                f"A sharded {type(model).__name__} cannot be traced or exported, because its weights come and go: load "
                "its state dict (bmt.save, model.state_dict()) into a model that is not wrapped, and export that."
            )
        if not torch.is_grad_enabled():
            return
        if functorch_transforms_active() and differentiates_by_functorch():
            raise RuntimeError(
                f"A transform of torch.func around a sharded {type(model).__name__}: its blocks are gathered and "
                "released by autograd's own backward. Use loss.backward(), torch.autograd.grad with respect to "
                "inputs, or a model that is not wrapped."
            )
        if DistributedDataParallel._active_ddp_module is not None:
            iter(RefuseDataParallel())
        check_accelerator(self._ranks)
        names = list(chain.from_iterable(self._parameters))
        if (
            _values(self._modules) != self._tree
            or names != self._names
            or not all(map(_is_sharded, set(map(type, _values(self._parameters)))))
        ):
            self._walk(model)

    def _walk(self, model: torch.nn.Module) -> None:
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                # A wrapped model that became a part of a block is shown with wholes in the block's forward.
                known = _is_sharded(type(parameter)) or hasattr(parameter, "is_whole")
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


def _check_places(block: CheckpointBlock) -> None:
    """Raise RuntimeError if a parameter of `block` has another name than when it was sharded."""
    known = {(id(slot.parameters), slot.name) for slot in block._slots()}
    for name, module in block.named_modules():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DistributedParameter) and (id(module._parameters), key) not in known:
                if any(parameter is slot.piece for slot in block._slots()):
                    raise moved(f"{name}.{key}".lstrip("."), block)


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))
