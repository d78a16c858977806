"""Replace methods and attributes of wrapped models that concern activation checkpointing, generation or resizing."""

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
from ..runtime.world import current_world

_log = logging.getLogger("hf_bmtrain")
_OPTIONS = {"every_n_layers": 1, "offload": False}
"""All but the first argument of transformers' `activation_checkpointing_enable`, in order, with their defaults."""


def route_recomputation(model: torch.nn.Module, blocks: Iterable[Any]) -> None:
    """Turn off the model's own gradient checkpointing: the blocks (sharded layers) recompute their forwards themselves.

    Later calls of the model's `gradient_checkpointing_enable()` and `gradient_checkpointing_disable()` switch the
    recomputation of the blocks on and off.

    Args:
        model: the model, whose methods are replaced.
        blocks: the model's CheckpointBlocks.
    """
    # Use weak references: if a patched module is part of a block, strong ones would form a reference cycle.
    states = [weakref.ref(block._bmt) for block in blocks]
    for module in model.modules():
        for word in ("activation", "gradient"):  # the new and the old prefix of these methods in transformers
            disable = getattr(module, f"{word}_checkpointing_disable", None)
            if callable(disable):
                if word == "activation" or not hasattr(module, "activation_checkpointing_disable"):
                    _turn_off(module, disable)
                setattr(module, f"{word}_checkpointing_enable", functools.partial(_set_recompute, states, True))
                setattr(module, f"{word}_checkpointing_disable", functools.partial(_set_recompute, states, False))


def _turn_off(module: torch.nn.Module, disable: Callable[[], object]) -> None:
    """Turn off the gradient checkpointing of `module` by calling its method `disable`.

    Ignores the ValueError that transformers raises if nothing in `module` can use checkpointing.
    """
    try:
        disable()
    except ValueError:
        if any(hasattr(inner, "gradient_checkpointing") for inner in module.modules()):
            raise


def _set_recompute(states: Sequence[weakref.ref[BlockState]], on: bool, *args, **kwargs) -> None:
    """Switch the recomputation of all blocks on or off.

    As a functools.partial with `states` and `on`, this replaces the model's methods `gradient_checkpointing_enable` and
    `gradient_checkpointing_disable`, and the same methods with "activation" instead of "gradient".

    states: weak references to the BlockStates of the blocks (sharded transformer layers).
    on: whether the blocks recompute their forwards in backward from now on.
    args, kwargs: the arguments of the replaced method. If `offload` is True, the inputs of recomputed blocks are kept
        in host memory. A value of `every_n_layers` other than 1 raises ValueError. Options of torch.utils.checkpoint
        are ignored.
    """
    given = {**dict(zip(("", *_OPTIONS), args)), **kwargs}
    for value in (*args, *kwargs.values()):
        given |= value if isinstance(value, dict) else {}
    every, offload = (_OPTIONS[name] if given.get(name) is None else given[name] for name in _OPTIONS)
    if every != 1:
        raise ValueError(
            f"gradient_checkpointing_enable: every_n_layers={every} is not supported for sharded models. Leave it out, "
            "and pass use_checkpoint='auto' to auto_wrap: it recomputes only as many blocks as memory requires."
        )
    blocks = [state for each in states if (state := each()) is not None]
    _log.info(
        "gradient checkpointing: enabled=%s for %d sharded blocks, because gradient_checkpointing_enable() or "
        "gradient_checkpointing_disable() of the model was called",
        on, len(blocks),
    )  # fmt: skip
    store = current_world().layer_features.inputs() if on and offload else None
    for state in blocks:
        state.recompute = ALWAYS if on else NEVER
        # If this call does not turn on offloading, `store` is None. The block then keeps the store that
        # auto_wrap(offload_activations=True) may have set.
        state.inputs = store or state.inputs


def keep_ranks_together(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> None:
    """Make every rank continue to generate until all ranks have finished, because all must take part in all-gathers.

    transformers synchronizes the ranks in this way if a module has the attribute `_is_fsdp_managed_module`, or if
    `generate` is called with synced_gpus=True. This function sets the attribute on modules outside blocks that are not
    compiled, and makes synced_gpus=True the default of `generate`. Modules that drop layers at random do not get the
    attribute, because with the attribute, transformers would call all of their layers. Continuous batching cannot keep
    the ranks together, so this function makes it raise an error if there are several ranks.

    Args:
        model: the model, whose modules are patched.
        blocks: the model's blocks. They and the modules inside them do not get the attribute.
    """
    # torch.compile would treat a module with this attribute as an FSDP module. So do not set it on compiled modules,
    # nor on modules in blocks, which may be compiled.
    compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
    unmarked = {module for each in (*blocks, *compiled) for module in each.modules()}
    for module in model.modules():
        if module not in unmarked and not drops_layers(module):
            module._is_fsdp_managed_module = True  # pyright: ignore[reportArgumentType]
        generate: Any = getattr(module, "generate", None)
        if callable(generate):
            synced = inspect.signature(generate).parameters.get("synced_gpus")
            if synced is not None and synced.default is False:
                module.generate = functools.partial(weak_method(generate), synced_gpus=True)  # pyright: ignore
        if hasattr(module, "init_continuous_batching") and current_world().size > 1:
            module.init_continuous_batching = _refuse_continuous_batching  # pyright: ignore[reportArgumentType]


def _refuse_continuous_batching(*args, **kwargs) -> NoReturn:
    raise RuntimeError(
        "Continuous batching (generate_batch, init_continuous_batching) does not work with a model that is sharded "
        "over several ranks. Each rank would run the layers as often as its own requests need, and wait for the others "
        "in between. Use generate(), which keeps the ranks together."
    )


def drops_layers(module: torch.nn.Module) -> bool:
    """Return whether `module` drops layers at random, so that ranks may run different layers in the same step.

    The result is True if the module's `layerdrop` is not 0. It is also True if the module's forward reads an attribute
    whose name ends in "layerdrop", such as `encoder_layerdrop`, and the module's `config` has a nonzero value for it.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    rates = [name for name in code.co_names if name.endswith("layerdrop")] if code is not None else []
    config = getattr(module, "config", None)
    return bool(getattr(module, "layerdrop", 0)) or any(getattr(config, name, 0) for name in rates)


def refuse_resizing(model: torch.nn.Module) -> None:
    """Make the methods of `model` that resize embeddings raise RuntimeError. Sharded weights cannot be resized."""
    for module in model.modules():
        for name in ("resize_token_embeddings", "resize_position_embeddings"):
            if hasattr(module, name):
                setattr(module, name, functools.partial(_refuse_resizing, name))


def _refuse_resizing(name: str, *args, **kwargs) -> NoReturn:
    raise RuntimeError(
        f"{name} was called after auto_wrap, but the shape of sharded weights cannot change. Call it before auto_wrap."
    )
