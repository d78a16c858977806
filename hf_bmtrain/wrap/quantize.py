"""The frozen weights that `auto_wrap(quantize_frozen=...)` stores packed."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.quantize import CELL, FORMATS
from ..sharding.quantized import Quantization
from ..sharding.slots import find_places
from .find import Chain

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_quantize_frozen(name: Any) -> None:
    """Raise ValueError for what is not the name of a packed format, or None."""
    if name is not None and (not isinstance(name, str) or name not in FORMATS):
        raise ValueError(f"quantize_frozen must be None or one of {', '.join(map(repr, FORMATS))}, got {name!r}")


def choose_quantized(model: torch.nn.Module, blocks: Chain, without: set[int], name: str | None) -> Quantization | None:
    """Return which parameters in `blocks` are packed in format `name`; None if that is None.

    They are frozen matrices, the `weight` of a module that is no embedding, of CELL elements at least (a smaller one
    would fill a cell), in a dtype of 16 or 32 bits. without: ids of those that are left out: of adapters, which may be
    trained later, and those that are stored outside blocks. Raises ValueError if there are none.
    """
    if name is None:
        return None
    found: dict[int, str] = {}
    trained = 0
    paths = {module: path for path, module in model.named_modules()}
    for module, key, parameter in find_places(module for block in blocks for module in block.modules()):
        fits = key == "weight" and parameter.dim() == 2 and parameter.dtype in _DTYPES and parameter.numel() >= CELL
        if fits and not isinstance(module, torch.nn.Embedding) and id(parameter) not in without:
            trained += parameter.requires_grad
            if not parameter.requires_grad:
                found.setdefault(id(parameter), f"{paths[module]}.{key}")
    if not found:
        reason = f"{trained} are trained: freeze them first (model.requires_grad_(False), or PEFT's adapters)"
        reason = reason if trained else f"no block has a matrix of {CELL} elements or more, named weight"
        raise ValueError(f"auto_wrap: quantize_frozen={name!r} finds no frozen weight to quantize: {reason}.")
    return Quantization(FORMATS[name], found)
