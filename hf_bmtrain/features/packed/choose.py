"""The frozen weights that `auto_wrap(quantize_frozen=...)` stores packed."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ...engine.sharding.slots import find_places
from ...engine.wrap.find import Chain
from .arithmetic import BLOCK, CELL, FORMATS
from .storage import PackedKind

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NO_MATRICES = (
    torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.Conv1d, torch.nn.ConvTranspose1d, ParametrizationList,
)  # fmt: skip


def choose_quantized(model: torch.nn.Module, blocks: Chain, without: set[int], name: str | None) -> PackedKind | None:
    """Return which parameters in `blocks` are packed in format `name`; None if that is None.

    They are the frozen matrices of CELL elements or more (a smaller one would fill a cell) in a dtype of 16 or 32 bits:
    each `weight` of two dimensions, and each parameter of three, under any name, that stacks two or more matrices of
    BLOCK rows and columns or more (fused experts), except in embeddings, convolutions and parametrizations. A stack of
    narrower ones is no weight to multiply by, but a kernel, a table or the decay of a state space.

    without: ids of those that are left out: of adapters, which may be trained later, and those that are stored outside
    blocks. Raises ValueError if there are none.
    """
    if name is None:
        return None
    found: dict[int, str] = {}
    trained = 0
    paths = {module: path for path, module in model.named_modules()}
    for module, key, parameter in find_places(module for block in blocks for module in block.modules()):
        if _holds_matrices(module, key, parameter) and id(parameter) not in without:
            trained += parameter.requires_grad
            if not parameter.requires_grad:
                found.setdefault(id(parameter), f"{paths[module]}.{key}")
    if not found:
        reason = f"{trained} are trained: freeze them first (model.requires_grad_(False), or PEFT's adapters)"
        nothing = f"no block has a matrix of {CELL} elements or more, named weight or in a stack (fused experts)"
        reason = reason if trained else nothing
        raise ValueError(f"auto_wrap: quantize_frozen={name!r} finds no frozen weight to quantize: {reason}.")
    return PackedKind(FORMATS[name], found)


def _holds_matrices(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether parameter `key` of `module` is a matrix or a stack of matrices that can be packed."""
    if isinstance(module, _NO_MATRICES) or parameter.dtype not in _DTYPES or parameter.numel() < CELL:
        return False
    if parameter.dim() == 3:
        return len(parameter) > 1 and min(parameter.shape[1:]) >= BLOCK
    return parameter.dim() == 2 and key == "weight"
