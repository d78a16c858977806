"""What a Hugging Face model does by itself and a sharded one leaves to its blocks."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..recompute.policy import Fixed

_log = logging.getLogger("hf_bmtrain")


def route_recomputation(model: torch.nn.Module, blocks: list[Any]) -> None:
    """Turn off Hugging Face's gradient checkpointing.

    Later calls to `gradient_checkpointing_enable()` (Trainer makes one) and `_disable()` switch the blocks' instead.
    """
    for module in model.modules():
        for word in ("activation", "gradient"):  # the second is the older name
            disable = getattr(module, f"{word}_checkpointing_disable", None)
            if callable(disable):
                if word == "activation" or not hasattr(module, "activation_checkpointing_disable"):
                    disable()
                setattr(module, f"{word}_checkpointing_enable", functools.partial(_set_recompute, blocks, True))
                setattr(module, f"{word}_checkpointing_disable", functools.partial(_set_recompute, blocks, False))


def _set_recompute(blocks: list[Any], on: bool, *args, **kwargs) -> None:
    """Replace gradient_checkpointing_enable and _disable. Their options, those of torch's checkpoint, are ignored."""
    _log.info("recompute %s in %d sharded blocks (asked for through the model)", on, len(blocks))
    for block in blocks:
        block._bmt.recomputation = Fixed(on)


def keep_cache_out(modules: Iterable[torch.nn.Module], blocks: Sequence[Any]) -> None:
    """No key-value cache in training: recomputed it would be appended to twice, compiled each layer has its own."""

    def without_cache(module, args, kwargs):
        if torch.is_grad_enabled() and any(block._bmt.keeps_no_cache for block in blocks):
            kwargs = {**kwargs, "use_cache": False}
        return args, kwargs

    for module in modules:
        if hasattr(getattr(module, "config", None), "use_cache"):
            if "use_cache" in inspect.signature(module.forward).parameters:
                module.register_forward_pre_hook(without_cache, with_kwargs=True)


def keep_ranks_together(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
    """A collective runs in every block, so all ranks must call the same ones.

    Layer-drop, which draws on each rank for itself what to skip, is switched off. Generation goes on until every
    rank is done: transformers does that for modules with this mark, and where `generate` says otherwise it is told.
    """
    dropping = [module for module in model.modules() if getattr(module, "layerdrop", 0)]
    for module in dropping:
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
                module.generate = functools.partial(generate, synced_gpus=True)  # pyright: ignore
