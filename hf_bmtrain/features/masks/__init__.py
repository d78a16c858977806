"""Let transformers make attention masks without reading tensors on the GPU.

In each forward, transformers' models read the values of `attention_mask` or, if there is none, of `position_ids`, to
find out what kind of mask attention needs. For this read, the host waits until the GPU has done all earlier work, such
as the last optimizer step. The GPU is then idle until the host has launched the first layers. This folder avoids the
read in two cases in which its result is known:

* Without a mask, transformers reads `position_ids` to find out whether a row contains several packed sequences. If the
  caller passes no `position_ids`, most models count them in their forward: 0, 1, 2 and so on. Each row is then one
  sequence, so the positions are not read.
* Transformers reads `attention_mask` to find out whether it has zeros. If not, attention needs no mask. A data loader
  can check this earlier, while the mask is in host memory, and then call `note_full` for the mask's copy on the GPU
  (`hf/run_ahead` does so). Such a copy is not read.

In all other cases transformers reads the tensors as before. The outputs of models are the same in all cases.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import re
import sys
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...engine.wrap.extension import Extension, WrapPlan

_log = logging.getLogger("hf_bmtrain")
MASK, _POSITIONS = "attention_mask", "position_ids"
_FULL = "_bmt_full"
"""The name of an attribute that `note_full` sets on a mask without zeros. Its value is the mask's `_version` (torch's
counter of writes) at that time; if the counter has changed since, the mask may have zeros."""
_FUNCTION = "_preprocess_mask_arguments"
"""The name of the function of transformers that reads `position_ids`. It is called before any mask is made, and it is
replaced while a forward runs."""
_KNOWN_PARAMETERS = [["config", "inputs_embeds", MASK, cache, _POSITIONS] for cache in ("cache", "past_key_values")]
"""The names of the first five parameters of `_FUNCTION`, in the releases of transformers that this file supports."""
_COUNTED = re.compile(rf"torch\.arange\([\w.,=\[\]() ]*\)(\[None, :\]| \+ \w+)?|{_POSITIONS}\.unsqueeze\(0\)")
"""Matches the source code of two kinds of expressions: those that count positions, from 0 or from the number of tokens
in a cache, and those that only add a dimension to `position_ids`."""


class Masks(Extension):
    """The part of `auto_wrap` that lets transformers' models make attention masks without reading tensors on the GPU.

    In each forward, transformers' models read `attention_mask` or `position_ids`, to find out what kind of mask
    attention needs. On a GPU, the host then waits until the GPU has done all earlier work. This class avoids the read
    if its result is known: if `note_full` has marked the mask, or if the model counts the positions itself. The outputs
    of models do not change.

    It has no option. It adds hooks to the wrapped model and to all models inside it, if they are transformers models.
    While such a model's forward runs, the hooks replace the function of transformers that prepares masks. On the CPU,
    where reading a tensor does not make the host wait, no hooks are added.
    """

    def connect(self, plan: WrapPlan) -> None:
        transformers: Any = sys.modules.get("transformers.modeling_utils")
        if transformers is None or not _reads_wait(plan.world.device):
            return
        models = [each for each in plan.model.modules() if isinstance(each, transformers.PreTrainedModel)]
        # Leave out models that already have the hooks, from an earlier call of `auto_wrap`.
        models = [model for model in models if not any(map(_is_own, model._forward_pre_hooks.values()))]
        masking = _masking()
        if not models or masking is None:
            return
        original = getattr(masking, _FUNCTION, None)  # None in old releases of transformers
        if original is None or [*inspect.signature(original).parameters][:5] not in _KNOWN_PARAMETERS:
            if plan.world.rank == 0:
                _log.info(
                    "this version of hf_bmtrain does not know how transformers %s makes attention masks. So in each "
                    "forward, transformers reads masks or position ids on the GPU, which makes the host wait. Results "
                    "are the same",
                    sys.modules["transformers"].__version__,
                )  # fmt: skip
            return
        for model in models:
            hook = _Forward(original)
            model.register_forward_pre_hook(hook.begin, prepend=True, with_kwargs=True)
            model.register_forward_hook(hook.end, always_call=True)


def _reads_wait(device: torch.device) -> bool:
    """Return whether the host waits for `device` when it reads a tensor there."""
    return device.type != "cpu"


class _Forward:
    """The hooks of one transformers model. During its forward, `_preprocess` replaces the function that prepares masks.

    original: transformers' own function that prepares masks, `_preprocess_mask_arguments`.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        # For each running forward of the model, the function to put back at its end. Forwards may be nested.
        self._replaced: list[Callable[..., Any]] = []

    def begin(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: replace transformers' `_preprocess_mask_arguments` by `_preprocess`.

        `end`, a forward hook, puts transformers' function back. While torch.compile traces the forward, nothing is
        replaced.
        """
        if torch.compiler.is_compiling():
            return  # nothing to do: tensor values cannot be read anyway while torch.compile traces the forward
        # `counts`: whether the model will make the position ids 0, 1, 2, ... itself. It does so only if none are
        # passed. Another hook, which runs after this one, could add some. So `counts` is False if there are other hooks
        # (`alone`), except for hooks of the engine, which add none.
        others = (hook for hook in module._forward_pre_hooks.values() if not _is_own(hook))
        alone = all(defining_module(hook).startswith("hf_bmtrain.engine.") for hook in others)
        without = alone and len(args) < 2 and kwargs.get(_POSITIONS) is None
        counts = without and "forward" not in vars(module) and counts_positions(type(module).forward)
        masking = _masking()
        self._replaced.append(self._valid(getattr(masking, _FUNCTION)))
        setattr(masking, _FUNCTION, functools.partial(_preprocess, self._original, weakref.ref(module), counts))

    def end(self, module: Any, args: tuple, output: Any) -> None:
        """Forward hook: undo the replacement that `begin` has made, also after a forward that raised an error."""
        if self._replaced:  # it is empty if torch.compile traced the forward, or a hook raised an error before `begin`
            setattr(_masking(), _FUNCTION, self._valid(self._replaced.pop()))

    def _valid(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, or transformers' own function if `function` is a replacement that was left over.

        A replacement is installed for one forward. It is left over if this forward is not running in this thread. This
        happens if KeyboardInterrupt ends a forward, because `end` is then not called. It also happens if the forwards
        of two threads overlap, and the forward that began first also ends first.
        """
        if isinstance(function, functools.partial) and function.func is _preprocess:
            return function if _is_running(function.args[1]()) else self._original
        return function


def _is_own(hook: Any) -> bool:
    """Return whether `hook`, a forward pre-hook, was registered by this file."""
    return isinstance(getattr(hook, "__self__", None), _Forward)


def defining_module(value: Any) -> str:
    """Return the name of the module in which a function, or the class of another object, is defined.

    Called to find out which package a function comes from. If another package has decorated the function, it may behave
    differently, so the result is then the module of the decorator. (The attribute `__module__` would still name the
    module of the original function, because functools.wraps copies this attribute.)

    value: a function or method, possibly wrapped in functools.partial, or any other object.
    """
    while isinstance(value, functools.partial):
        value = value.func
    return getattr(value, "__globals__", {}).get("__name__", type(value).__module__)


def _masking() -> Any:
    """Return the module in which transformers makes masks; None if no model has imported it."""
    return sys.modules.get("transformers.masking_utils")


def _is_running(model: Any) -> bool:
    """Return whether a forward of `model` is running in this thread. model: a model, or None if it was freed."""
    frame = None if model is None else sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _preprocess(original: Callable[..., Any], model: Callable[[], Any], counts: bool, *args: Any, **kwargs: Any) -> Any:
    """Call transformers' function that prepares attention masks, without reading GPU tensors on the host needlessly.

    This function replaces `original` in transformers while a forward runs. If the positions need not be read, it passes
    None instead of them. If the mask need not be read, it returns None instead of the mask.

    Args:
        original: transformers' own function, `_preprocess_mask_arguments`. It returns a tuple: whether the mask can be
            used as it is, the mask, the index of each token's packed sequence (None if sequences are not packed), and
            sizes. If the mask passed to it is None, it reads the positions. If it returns a mask that cannot be used
            as it is, transformers reads this mask afterwards.
        model: a weak reference to the model whose forward runs.
        counts: whether this forward makes the positions itself, as consecutive numbers (see `counts_positions`).
        *args: the arguments of `original`.
        **kwargs: the keyword arguments of `original`.
    """
    if len(args) < len(_KNOWN_PARAMETERS[0]) or torch.compiler.is_compiling():
        return original(*args, **kwargs)
    config, embeddings, mask, cache, positions, *others = args
    # `counts` is about one forward. `_is_running` checks that this forward is running in this thread. It may not be: a
    # different thread may have called this function, or the forward may have ended without a call of `_Forward.end`.
    if counts and (counting := model()) is not None and counting.config is config and _is_running(counting):
        positions = None
    ready, result, *sizes = original(config, embeddings, mask, cache, positions, *others, **kwargs)
    if not ready and cache is None and _is_full(mask) and _has_stock_masks(config):
        result = None
    return ready, result, *sizes


def note_full(mask: torch.Tensor) -> None:
    """Mark `mask` as a mask without zeros, so that models from transformers need not read it.

    The mark is ignored if the mask is written later.

    mask: a tensor of any shape and dtype, on any device.
    """
    if not mask.is_inference():  # an inference tensor has no `_version`, so later writes to it could not be noticed
        setattr(mask, _FULL, mask._version)


def _is_full(mask: Any) -> bool:
    return hasattr(mask, _FULL) and getattr(mask, _FULL) == mask._version


def _has_stock_masks(config: Any) -> bool:
    """Return whether a function of transformers itself makes the masks for the attention that `config` selects.

    Functions of transformers make the same mask from None as from a tensor of ones. A user may have registered a
    different function, which may require a tensor.
    """
    function = _masking().ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation]
    return getattr(function, "__module__", "") == "transformers.masking_utils"


@functools.lru_cache(maxsize=256)  # limited in size, because the cache keeps the classes of models alive
def counts_positions(forward: Callable[..., Any]) -> bool:
    """Return whether `forward`, if it gets no `position_ids`, sets them to consecutive numbers in each row.

    The first number is 0, or the number of tokens in the cache. Then no row contains several packed sequences, and
    transformers need not read the positions to find this out.

    The result is derived from the source code. It is True only if `forward` belongs to transformers, assigns to
    `position_ids` at least once, and assigns only expressions that match `_COUNTED`, such as `torch.arange(n)`.

    forward: the function `forward` of a class of models.
    """
    while True:
        if not defining_module(forward).startswith("transformers."):
            return False  # also for a forward of transformers that another package has decorated, and may have changed
        if not hasattr(forward, "__wrapped__"):
            break
        forward = forward.__wrapped__
    try:
        source = inspect.getsource(forward)
    except OSError:  # transformers is installed without source files
        return False
    stored = counted = 0
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        stored += isinstance(node, ast.Name) and node.id == _POSITIONS and isinstance(node.ctx, ast.Store)
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_POSITIONS]:
            counted += _COUNTED.fullmatch(ast.unparse(node.value)) is not None
    return 0 < stored == counted
