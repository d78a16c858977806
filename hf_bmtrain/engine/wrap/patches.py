"""All patches on instances of models: their own recomputation, caching and casting give way to the blocks'."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..base.torch_internals import pytree
from ..blocks.block import weak_method
from ..blocks.block_state import BlockState
from ..blocks.recompute import ALWAYS, NEVER
from ..runtime.launcher import mixed_precision

_log = logging.getLogger("hf_bmtrain")
_log_once = functools.cache(_log.log)
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
        state.recompute = ALWAYS if on else NEVER


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


def refuse_resizing(model: torch.nn.Module) -> None:
    """Refuse to resize the embeddings of `model`."""
    for module in model.modules():
        for name in ("resize_token_embeddings", "resize_position_embeddings"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(_refuse_resizing, name))


def _refuse_resizing(name: str, *args, **kwargs) -> NoReturn:
    raise RuntimeError(
        f"{name} changes the shape of sharded weights, whose slices would be lost: call it before auto_wrap."
    )
