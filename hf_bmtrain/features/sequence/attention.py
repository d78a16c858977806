"""The attention function of models whose rows (sequences) are shared by several ranks.

The function exchanges queries, keys and values, so that each rank has all tokens of some heads. For these heads it
calls the model's own attention function ("sdpa", "flash_attention_2", ...). The function of this file is registered
with transformers under a new name for each of these functions, such as "sequence_of_sdpa". For the new name,
transformers makes the same masks as for the model's own function. No existing name is redefined.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...engine.base.torch_internals import autocast_type, disable_compiler
from .exchange import heads_from_rows, rows_from_heads
from .parts import Heads, Parts

ROW = "_bmt_row"
"""The name of an attribute of attention modules. Its value is the `Row` (the division of the tokens among ranks) of the
last forward."""
_PREFIX = "sequence_of_"
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class Row:
    """Information about the rows (sequences) of a batch, which the attention of a block needs in one forward.

    The block processes only this rank's tokens, but its attention needs all tokens of a row. Before each forward of a
    block, a Row is stored in the block's attention modules, as the attribute that `ROW` names. The attention function
    that `register` has registered reads it.

    Attributes:
        parts: how the tokens of a row are divided: which of them each rank has. All rows are divided alike.
        positions: the block's argument `position_ids` for all tokens of the rows, as the model has passed it, or None
            if the block gets none. Flash attention uses it to distinguish packed documents.
    """

    parts: Parts
    positions: torch.Tensor | None


def is_attention(module: torch.nn.Module) -> bool:
    """Return whether the forward of `module` uses transformers' attention interface (ALL_ATTENTION_FUNCTIONS).

    Called to find the attention modules of a block. Sequence parallelism replaces the function that these modules call
    through this interface.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and _INTERFACE in code.co_names


def register(inner: str) -> str:
    """Register with transformers an attention function for shared rows, and return the name that selects it.

    A shared row is a sequence whose tokens are divided among several ranks. `auto_wrap` writes the returned name, such
    as "sequence_of_sdpa", into the configuration of attention modules, which makes them call the registered function.
    The registered function exchanges queries, keys and values, so that each rank has all tokens of some heads, and
    calls the model's own attention function for these heads. A second call with the same `inner` only returns the name.

    inner: the name of the model's own attention function, such as "sdpa". A name that `register` has returned is
        returned unchanged.
    """
    if inner.startswith(_PREFIX):
        return inner
    name = _PREFIX + inner.replace("/", "_")
    functions: Any = getattr(sys.modules["transformers.modeling_utils"], _INTERFACE)
    if name not in functions:
        masks: Any = sys.modules["transformers.masking_utils"].ALL_MASK_ATTENTION_FUNCTIONS  # pyright: ignore
        functions.register(name, functools.partial(_attend, inner))
        if inner in masks:
            masks.register(name, masks[inner])
    return name


@disable_compiler  # torch.compile must not trace the collectives in this function
def _attend(
    inner: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of `module` for this rank's tokens.

    The ranks that share each row exchange their tensors: every rank gets all tokens for some of the heads, and calls
    `inner` for these heads. In a second exchange, it gets back the outputs of its own tokens. If `module` belongs to a
    model that is not wrapped, this rank has all tokens, and `inner` is called without exchanges.

    Collective: every rank of the group that shares a row must call it. The signature is that of transformers' attention
    interface.

    Args:
        inner: the name of the attention function to call for this rank's heads, such as "sdpa".
        module: the attention module.
        query: (rows, query heads, this rank's tokens, d).
        key: (rows, key-value heads, this rank's tokens, d).
        value: (rows, key-value heads, this rank's tokens, d of the output).
        attention_mask: the mask for all tokens of the rows, in the form that `inner` requires.
        **options: further arguments of `inner`.

    Returns:
        The output (rows, this rank's tokens, query heads, d of the output), and None in place of attention weights.
    """
    function = _function(inner, module)
    row: Row | None = vars(module).get(ROW)
    if row is None:  # the model is not wrapped, but uses the same configuration object as a wrapped model
        return function(_Share(module, inner), query, key, value, attention_mask, **options)
    parts = row.parts
    _check(module, parts, query, key, options)
    if vars(module).get("attn_temperature_tuning") and not module.use_rope:
        query = _at_own_temperature(module, parts, query)
    if "position_ids" in options:
        options["position_ids"] = row.positions
    heads = Heads(query.shape[1], key.shape[1], parts.size)
    own = heads.of_queries[parts.rank]
    division = [heads.of_queries, heads.of_keys, heads.of_keys]
    dtype = _common_dtype(query, key, value)
    rows = (tensor.to(dtype).permute(2, 0, 1, 3) for tensor in (query, key, value))
    exchanged = heads_from_rows(parts, division, *rows)
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in exchanged)
    if not own:  # this rank has no head (there are fewer heads than ranks), but it must still call the collectives
        output = value.transpose(1, 2)
    else:
        places = heads.repeated(parts.rank)
        if places is not None:
            chosen = torch.tensor(places, device=key.device)
            key, value = key.index_select(1, chosen), value.index_select(1, chosen)
        share = _Share(module, inner, own, query.shape[1] // key.shape[1])
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] > 1:
            attention_mask = attention_mask[:, own.start : own.stop]
        if options.get("s_aux") is not None:
            options["s_aux"] = options["s_aux"][own.start : own.stop]
        output, _ = function(share, query, key, value, attention_mask, **options)
    output = rows_from_heads(parts, heads.of_queries, output.transpose(0, 1))
    return output.transpose(0, 1).contiguous(), None


def _at_own_temperature(module: Any, parts: Parts, query: torch.Tensor) -> torch.Tensor:
    """Correct the position-dependent scaling of the queries of a Llama 4 layer without RoPE. Return the new queries.

    Such a layer multiplies each query by a factor that depends on the query's position in the row. Its forward has
    already done so, but for wrong positions: as if this rank's first token were the first of the row. This function
    divides by the factor of the wrong position, and multiplies by the factor of the right position.

    Args:
        module: the Llama4TextAttention.
        parts: the division of the tokens among the ranks.
        query: (rows, query heads, this rank's tokens, d).
    """

    def factors(positions: range) -> torch.Tensor:
        numbers = torch.arange(positions.start + 1, positions.stop + 1, device=query.device, dtype=torch.float32)
        return torch.log1p(torch.floor(numbers / module.floor_scale)) * module.attn_scale + 1

    ratio = factors(parts.own) / factors(range(len(parts.own)))
    return (query * ratio[:, None]).to(query.dtype)


def _common_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the dtype to which tensors are converted before ranks exchange them.

    This is the autocast dtype if autocast is enabled, and otherwise the promoted dtype of the tensors.
    """
    device = autocast_type(tensors[0].device)
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _function(inner: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention function of transformers named `inner`.

    transformers does not register the function "eager". This function is looked up in the file that defines the class
    of `module`, then in the files of the base classes.
    """
    functions: Any = getattr(sys.modules["transformers.modeling_utils"], _INTERFACE)
    files = [sys.modules.get(each.__module__) for each in type(module).__mro__] if inner == "eager" else []
    eager = next((found for file in files if (found := getattr(file, "eager_attention_forward", None))), None)
    return functions.get_interface(inner, eager) if hasattr(functions, "get_interface") else eager or functions[inner]


def _check(
    module: torch.nn.Module, parts: Parts, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]
) -> None:
    """Raise NotImplementedError with the reason if sequence parallelism does not support this call of attention."""
    kind, own = type(module).__name__, len(parts.own)
    if query.shape[2] != own or key.shape[2] != own:
        raise NotImplementedError(
            f"sequence_parallel: {kind} computes attention from {query.shape[2]} to {key.shape[2]} tokens, but this "
            f"rank has {own} tokens of the sequence. Attention to other tokens (cross-attention, a key-value cache) is "
            "not supported. Wrap the model without sequence_parallel."
        )
    if query.shape[1] % key.shape[1]:
        raise NotImplementedError(
            f"sequence_parallel: {kind} has {query.shape[1]} query heads and {key.shape[1]} key-value heads, but the "
            "first number must be a multiple of the second. Wrap the model without sequence_parallel."
        )
    if options.get("position_bias") is not None or options.get("output_attentions"):
        what = "a position bias" if options.get("position_bias") is not None else "output_attentions=True"
        raise NotImplementedError(
            f"sequence_parallel: {kind} is called with {what}, which is not supported. Leave it out, or wrap the model "
            "without sequence_parallel."
        )


class _Share:
    """A proxy of an attention module, through which transformers' attention function computes only this rank's heads.

    The proxy replaces the module as the function's argument `module`. The proxy's `num_key_value_groups` and `sinks`
    are those of this rank's heads. Its `config._attn_implementation` is `inner`. (In the module's own config, this may
    be the name of a function of this file, such as "sequence_of_sdpa".) All other attributes are those of the module.

    Args:
        module: the attention module.
        inner: the name of the attention function that gets the proxy, such as "sdpa".
        heads: this rank's query heads. None means all.
        groups: the number of query heads for each key-value head. None means the module's `num_key_value_groups`.
    """

    def __init__(
        self, module: torch.nn.Module, inner: str, heads: range | None = None, groups: int | None = None
    ) -> None:
        self._module, self._inner, self._heads, self._groups = module, inner, heads, groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups" and self._groups is not None:
            return self._groups
        if name == "sinks" and self._heads is not None and value is not None:
            return value[self._heads.start : self._heads.stop]
        return _Configuration(value, self._inner) if name == "config" else value


class _Configuration:
    """Proxy of a model's configuration in which `_attn_implementation` is replaced. Other attributes are unchanged.

    config: the model's configuration.
    inner: the value of `_attn_implementation`: the name of the model's own attention function, such as "sdpa".
    """

    def __init__(self, config: Any, inner: str) -> None:
        self._config, self._attn_implementation = config, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
