"""Let transformers make attention masks without reading tensors on the GPU.

In each forward, models of transformers read their `attention_mask`, or without one their position ids, to find out what
kind of mask attention needs. The host then waits until the GPU has done all earlier work, such as the last optimizer
step. Until the host has launched the first layers, the GPU has nothing to do. This folder removes the two reads where
their result is known:

* Without a mask, position ids are read to find sequences that are packed into a row. Positions that the forward of a
  model of transformers counts itself belong to one sequence.
* If `attention_mask` has no zeros, attention needs no mask. Masks for which `note_full` was called, when they were
  still in host memory, are not read.

In all other cases transformers reads the tensors as before. Results are the same.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import re
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...engine.wrap.extension import Extension, WrapPlan

_log = logging.getLogger("hf_bmtrain")
MASK, _POSITIONS = "attention_mask", "position_ids"
_FULL = "_bmt_full"
"""Attribute of a mask without zeros: its `_version`, torch's counter of writes, when it was checked."""
_FUNCTION = "_preprocess_mask_arguments"
"""The function that transformers calls before it makes any mask."""
_KNOWN_PARAMETERS = [["config", "inputs_embeds", MASK, cache, _POSITIONS] for cache in ("cache", "past_key_values")]
"""The first parameters of `_FUNCTION` in the releases that are known."""
_COUNTED = re.compile(rf"torch\.arange\([\w.,=\[\]() ]*\)(\[None, :\]| \+ \w+)?|{_POSITIONS}\.unsqueeze\(0\)")
"""Matches positions that count from 0, or from the number of tokens in a cache."""


class Masks(Extension):
    """Spares models of transformers the two reads when they make attention masks. Needs no option.

    It adds hooks to the forwards of the model, and of the models of transformers in it.
    """

    def connect(self, plan: WrapPlan) -> None:
        transformers: Any = sys.modules.get("transformers.modeling_utils")
        if transformers is None:
            return
        models = [each for each in plan.model.modules() if isinstance(each, transformers.PreTrainedModel)]
        # A second call of `auto_wrap` finds the hooks of the first.
        models = [each for each in models if not any(isinstance(h, _Forward) for h in each._forward_pre_hooks.values())]
        if not models:
            return
        original = getattr(_masking(), _FUNCTION, None)  # old releases have none
        if original is None or [*inspect.signature(original).parameters][:5] not in _KNOWN_PARAMETERS:
            if plan.world.rank == 0:
                _log.info("each forward waits for the GPU: how this release of transformers makes masks is not known")
            return
        for model in models:
            hook = _Forward(original)
            model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            model.register_forward_hook(hook.end, always_call=True)


class _Forward:
    """The hooks of one model of transformers. They replace `_FUNCTION` while the model's forward runs.

    original: `_FUNCTION` of transformers.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._replaced: list[Callable[..., Any]] = []  # for each running forward of the module

    def __call__(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a forward."""
        if torch.compiler.is_compiling():
            return  # compiled code cannot read tensors while it is traced
        # Hooks that run after this one could add positions. Those of the engine do not.
        own = (hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, _Forward))
        alone = all(defining_module(hook).startswith("hf_bmtrain.engine.") for hook in own)
        without = alone and len(args) < 2 and kwargs.get(_POSITIONS) is None
        counted = without and "forward" not in vars(module) and counts_positions(type(module).forward)
        masking = _masking()
        self._replaced.append(getattr(masking, _FUNCTION))
        config = module.config if counted else None
        setattr(masking, _FUNCTION, functools.partial(_preprocess, self._original, config, threading.get_ident()))

    def end(self, module: Any, args: tuple, output: Any) -> None:
        """End a forward, also one that has raised an error."""
        if self._replaced:  # empty if the forward was traced, or an earlier hook has raised
            setattr(_masking(), _FUNCTION, self._replaced.pop())


def defining_module(value: Any) -> str:
    """Return the name of the module that contains the code of a function, or the class of another object.

    It is not the attribute `__module__`, which functools.wraps copies.

    value: a function or method, also in functools.partial, or any other object.
    """
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__globals__", {}).get("__name__", type(value).__module__)


def _masking() -> Any:
    """Return the module in which transformers makes masks; None if no model has imported it."""
    return sys.modules.get("transformers.masking_utils")


def _preprocess(original: Callable[..., Any], counting: Any, thread: int, *args: Any, **kwargs: Any) -> Any:
    """Call `original`, and spare the reads that would follow.

    Args:
        original: `_FUNCTION` of transformers. It returns whether the mask is ready, the mask, the numbers of packed
            sequences (None if there are none), and sizes. It reads positions if the mask is None. Its caller reads the
            mask that it returns if this is not None.
        counting: the config of the model whose forward runs, if this counts positions itself; otherwise None.
        thread: the thread in which the forward runs. Forwards of other threads read as before.
        *args: the arguments of `original`.
        **kwargs: the keyword arguments of `original`.
    """
    if len(args) < len(_KNOWN_PARAMETERS[0]) or torch.compiler.is_compiling() or threading.get_ident() != thread:
        return original(*args, **kwargs)
    config, embeddings, mask, cache, positions, *others = args
    if counting is config:
        positions = None
    ready, result, *sizes = original(config, embeddings, mask, cache, positions, *others, **kwargs)
    if not ready and cache is None and _is_full(mask) and _has_stock_masks(config):
        result = None
    return ready, result, *sizes


def note_full(mask: torch.Tensor) -> None:
    """Note that `mask` has no zeros, so that models need not read it. Later writes are recognized.

    mask: of any shape and dtype, on any device.
    """
    if not mask.is_inference():  # torch does not count writes to inference tensors
        setattr(mask, _FULL, mask._version)


def _is_full(mask: Any) -> bool:
    return hasattr(mask, _FULL) and getattr(mask, _FULL) == mask._version


def _has_stock_masks(config: Any) -> bool:
    """Return whether transformers makes masks for this attention, which are equal for None and for ones.

    A program can register a function of its own, which may require a tensor.
    """
    function = _masking().ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]
    return getattr(function, "__module__", "") == "transformers.masking_utils"


@functools.cache
def counts_positions(forward: Callable[..., Any]) -> bool:
    """Return whether a forward of transformers that gets no `position_ids` counts them: 0, 1 and so on in each row.

    forward: the forward of a class. All values that it assigns to `position_ids` must be known to count.
    """
    while True:
        if not defining_module(forward).startswith("transformers."):
            return False  # also if it decorates a forward of transformers
        if not hasattr(forward, "__wrapped__"):
            break
        forward = forward.__wrapped__
    try:
        source = inspect.getsource(forward)
    except OSError:  # installed without sources
        return False
    stored = counted = 0
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        stored += isinstance(node, ast.Name) and node.id == _POSITIONS and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_POSITIONS]:
            counted += _COUNTED.fullmatch(ast.unparse(node.value)) is not None
    return 0 < stored == counted
