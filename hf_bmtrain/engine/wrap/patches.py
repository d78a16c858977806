"""Methods of wrapped models that are replaced: gradient checkpointing, layer-drop, generation and resizing."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..blocks.block import weak_method
from ..blocks.block_state import BlockState
from ..blocks.recompute import ALWAYS, NEVER

_log = logging.getLogger("hf_bmtrain")


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
