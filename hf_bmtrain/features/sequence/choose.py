"""Choose the blocks of a model for sequence parallelism, or raise an error that says why it is not supported.

In these blocks, the tokens of each row (sequence) are divided among several ranks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engine.wrap.patches import drops_layers
from .attention import is_attention

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_MIXERS = re.compile(r"Mamba|SSM|Mixer2|Rwkv|DeltaNet|LinearAttention|LightningAttention|ShortConv|Recurrent|RetNet")
_OTHERS = {
    "doge": "its attention computes a mask from its tokens, of which each rank has only a part",
    "hrm_text": "between its blocks it adds the embeddings of all tokens, but each rank has only a part of the tokens",
}
"""{model type: why it is not supported}, for models for which the checks of this file do not find the reason."""
_SHIFTED = {"ForCausalLMLoss"}
_PLAIN = {"ForMaskedLMLoss", "ForTokenClassification"}
_WAY_OUT = "Wrap this model without sequence_parallel."


def choose_blocks(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the blocks among `layers` in which each rank will process only its part of the tokens.

    These are the blocks that process text. Blocks of a vision or audio tower are left out.

    Args:
        model: a model from transformers.
        layers: the model's blocks.

    Raises:
        ValueError: sequence parallelism does not support the model. The message contains the reason.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(
            f"auto_wrap: sequence_parallel needs a model from the transformers library, but {kind} has no `config` "
            f"from that library. {_WAY_OUT}"
        )
    text: Any = config.get_text_config()  # pyright: ignore[reportOptionalMemberAccess]
    reason = _why_not(model, config, text)
    if reason:
        raise ValueError(f"auto_wrap: sequence_parallel cannot be used with {kind}: {reason}. {_WAY_OUT}")
    names = {module: name for name, module in model.named_modules()}
    found = {layer: attentions_of(layer) for layer in layers}
    others = [layer for layer, attentions in found.items()
              if attentions and not any(type(each.config) is type(text) for each in attentions)]  # fmt: skip
    towers = {trunk_of(model, layer) for layer in others}
    towers -= {trunk_of(model, layer) for layer, attentions in found.items() if attentions and layer not in others}
    chosen = []
    for layer, attentions in found.items():
        # Leave out the blocks of a vision or audio tower, which every rank computes in full. Some of them have no
        # attention, such as those that merge the outputs of other blocks (the deepstack mergers of Qwen3-VL).
        if layer in others or not attentions and trunk_of(model, layer) in towers:
            continue
        reason = _why_not_layer(layer, attentions)
        if reason:
            raise ValueError(
                f"auto_wrap: sequence_parallel cannot be used with {kind}, because '{names[layer]}' "
                f"({type(layer).__name__}) {reason}. {_WAY_OUT}"
            )
        chosen.append(layer)
    around = [module for module in model.modules() if any(block in chosen for block in module.modules())]
    pooling = next((module for module in around if module not in chosen and _pools(module)), None)
    if pooling is not None:
        raise ValueError(
            f"auto_wrap: sequence_parallel cannot be used with {kind}: {type(pooling).__name__} pools tokens after the "
            f"blocks, where each rank has only a part of the tokens. Create the model without a pooling layer "
            f"(add_pooling_layer=False), or wrap this model without sequence_parallel."
        )
    if not chosen:
        raise ValueError(
            f"auto_wrap: sequence_parallel cannot be used with {kind}: none of its {len(layers)} blocks processes "
            f"text. {_WAY_OUT}"
        )
    return chosen


def attentions_of(layer: torch.nn.Module) -> list[Any]:
    """Return the modules in `layer` that call transformers' attention interface.

    In these modules, each rank needs the tokens of other ranks, so sequence parallelism replaces the attention function
    that they call.
    """
    return [module for module in layer.modules() if is_attention(module)]


def trunk_of(model: torch.nn.Module, layer: torch.nn.Module) -> torch.nn.Module:
    """Return the module whose forward calls the block `layer`.

    Sequence parallelism registers a hook on this module, to process its output after the last block. The result is the
    module with the ModuleList that contains the block, or `model` if there is no such list.

    Args:
        model: the model.
        layer: one of its blocks.
    """
    for module in model.modules():
        for child in module.children():
            if isinstance(child, torch.nn.ModuleList) and any(item is layer for item in child):
                return module
    return model


def sets_shape(trunk: torch.nn.Module) -> bool:
    """Return whether the forward of `trunk` reshapes the last block's output to the shape of the trunk's own input.

    GPT-2's forward does this, for example. With sequence parallelism, the trunk's input has all tokens of a sequence,
    but the output of the last block has only this rank's tokens, so the reshape would fail. Therefore, if this function
    returns True, `SharedRows.watch` registers a hook that pads the block's output to the length of the sequence.

    The result is a guess: it is True if the forward has a local variable named `output_shape`.

    trunk: the module whose forward calls the blocks.
    """
    code = getattr(inspect.unwrap(type(trunk).forward), "__code__", None)
    return code is not None and "output_shape" in code.co_varnames


def loss_kind(model: Any) -> str | None:
    """Return which kind of loss the forward of `model` computes from labels.

    The kind determines how the labels are divided among the ranks, and how the ranks' losses are combined. Below,
    `num_items_in_batch` is an argument of the forward. If it is given, transformers' losses divide the sum of the
    labels' losses by it, instead of by the number of labels.

    Returns:
        "shifted": transformers' causal loss, which shifts `labels` by one, or uses the shifted labels `shift_labels`.
        "plain": another loss of transformers, which does not shift the labels and takes `num_items_in_batch`.
        "mean": the mean over labels that are not shifted. `num_items_in_batch` has no effect, because the loss is
            torch's CrossEntropyLoss, or the forward does not pass its `**kwargs` to the loss of transformers.
        None: any other loss, which is not supported.
    """
    forward = inspect.unwrap(type(model).forward)
    code: Any = getattr(forward, "__code__", None)
    if code is None:
        return None
    names = {*code.co_names, *code.co_varnames}
    if "loss_function" in names:
        function = getattr(getattr(model, "loss_function", None), "__name__", "")
        if not _passes_keywords(forward):
            return "mean" if function in _PLAIN else None
        return "shifted" if function in _SHIFTED else "plain" if function in _PLAIN else None
    unshifted = any(each in type(model).__name__ for each in ("MaskedLM", "TokenClassification"))
    return "mean" if "CrossEntropyLoss" in names and unshifted else None


def reads_mask_in_loss(model: Any) -> bool:
    """Return whether the loss of `model` is a mean over the tokens that `attention_mask` allows, whatever their labels.

    The result is a guess from names: forwards of transformers that compute such a loss call these tokens `active_loss`.
    """
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    return code is not None and "active_loss" in code.co_varnames


@functools.cache
def _passes_keywords(forward: Callable[..., Any]) -> bool:
    """Return whether `forward` passes its additional keyword arguments (`**kwargs`) to `self.loss_function`.

    Also returns False if the source of `forward` is not available.
    """
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError):
        return False
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    losses = [call for call in calls if getattr(call.func, "attr", "") == "loss_function"]
    return bool(losses) and all(any(each.arg is None for each in call.keywords) for call in losses)


def _why_not(model: Any, config: Any, text: Any) -> str | None:
    """Return why `model` as a whole does not support sequence parallelism, or None if no reason is found.

    text: the configuration of its text layers.
    """
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose cross-attention joins two sequences"
    dropping = next((type(module).__name__ for module in model.modules() if drops_layers(module)), None)
    if dropping is not None:
        return f"{dropping} drops layers at random, different ones on each rank; set its layerdrop to 0"
    others = {*(getattr(text, "layer_types", None) or ())} - _KNOWN_LAYERS
    if others:
        return f"it has layers of the unsupported types {sorted(others)}, which may carry a state from token to token"
    if getattr(text, "model_type", None) in _OTHERS:
        return _OTHERS[text.model_type]
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if _scores(base):
        return "it does not have one output for each token"
    if getattr(model, "_is_stateful", False):
        return "it is a state-space or recurrent model, which carries a state from token to token"
    return None


def _scores(model: Any) -> bool:
    """Return whether `model` may have one output (such as a score) per row (sequence) instead of one per token.

    Sequence parallelism does not support such models.
    """
    name = type(model).__name__
    # A model without a head usually has one output for each token. Models like CLIP, which have one output for a whole
    # row, can be recognized by one of the two attributes below.
    if "For" not in name and "LMHead" not in name:
        return any(hasattr(model, each) for each in ("logit_scale", "text_projection"))
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return head is None and "TokenClassification" not in name


def _pools(module: Any) -> bool:
    """Return whether the forward of `module` seems to compute one vector for a whole row (to pool its tokens).

    Sequence parallelism does not support this outside blocks, where each rank has only a part of the tokens of a row.
    The result is a guess: it is True if the forward has a local variable or argument with "pool" in its name, unless
    `module.pooler` is None.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    pools = code is not None and any("pool" in name for name in code.co_varnames)
    return pools and getattr(module, "pooler", module) is not None


def _why_not_layer(layer: torch.nn.Module, attentions: Sequence[Any]) -> str | None:
    """Return why the block `layer` does not support sequence parallelism, or None if it does.

    attentions: the modules in `layer` that call transformers' attention interface.
    """
    mixers = [type(each).__name__ for each in layer.modules() if _mixes(each)]
    if mixers:
        return f"contains a {mixers[0]}, which mixes neighbouring tokens or carries a state from token to token"
    if not attentions:
        return "does not call transformers' attention interface"
    if len(attentions) > 1:
        kinds = ", ".join(type(each).__name__ for each in attentions)
        return f"contains several attention modules ({kinds}), but only one, with self-attention, is supported"
    return None


def _mixes(module: torch.nn.Module) -> bool:
    """Return whether `module` may combine tokens in a way other than attention, as a convolution or recurrence does.

    Sequence parallelism does not support blocks with such modules.
    """
    return isinstance(module, torch.nn.modules.conv._ConvNd) or _MIXERS.search(type(module).__name__) is not None
