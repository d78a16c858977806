"""Select the frozen weights that `auto_wrap(quantize_frozen=...)` packs, that is, quantizes."""

from __future__ import annotations

import torch
from torch.nn.utils.parametrize import ParametrizationList

from ...engine.base.launch import C_NAMES
from ...engine.sharding.slots import find_places
from ...engine.wrap.find import Chain, is_router
from .arithmetic import BLOCK, CELL, FORMATS
from .storage import PackedKind

_NO_MATRICES = (
    torch.nn.Embedding, torch.nn.EmbeddingBag, torch.nn.Conv1d, torch.nn.ConvTranspose1d, ParametrizationList,
)  # fmt: skip


def choose_quantized(model: torch.nn.Module, blocks: Chain, without: set[int], name: str | None) -> PackedKind | None:
    """Choose the parameters in `blocks` to pack (quantize). Return a PackedKind, which contains their ids and names.

    The chosen parameters are frozen, in a floating-point dtype of 16 or 32 bits, and have at least CELL (16,384)
    elements, because a smaller parameter would take as much packed memory as CELL elements. They are 2-D parameters
    named `weight`, and 3-D parameters that stack two or more matrices with at least BLOCK (64) rows and columns (fused
    experts). Stacks of narrower matrices are left out, because they are convolution kernels, tables, or decays of
    state-space layers. Embeddings, convolutions, parametrizations and routers are left out too: a router has few
    weights, and rounding them would send many tokens to different experts.

    Args:
        model: the model that is about to be sharded.
        blocks: its blocks (transformer layers).
        without: the ids of parameters to leave out: adapters, which may be trained later, and parameters that are also
            used by another block or outside blocks.
        name: the name of the packed format, "nf4" or "fp8". None packs nothing; the result is then None.

    Raises:
        ValueError: no parameter in `blocks` can be packed.
    """
    if name is None:
        return None
    found: dict[int, str] = {}
    trained = 0
    paths = {module: path for path, module in model.named_modules()}
    for module, key, parameter in find_places(module for block in blocks for module in block.modules()):
        if is_router(paths[module]):
            continue
        if _holds_matrices(module, key, parameter) and id(parameter) not in without:
            trained += parameter.requires_grad
            if not parameter.requires_grad:
                found.setdefault(id(parameter), f"{paths[module]}.{key}")
    if not found:
        reason = f"{trained} matrices are trainable. Freeze them first (model.requires_grad_(False) or PEFT adapters)"
        nothing = f"no block has a matrix of {CELL} elements or more that can be quantized. Leave out quantize_frozen"
        reason = reason if trained else nothing
        raise ValueError(f"auto_wrap: quantize_frozen={name!r} finds no frozen weight to quantize: {reason}.")
    return PackedKind(FORMATS[name], found)


def _holds_matrices(module: torch.nn.Module, key: str, parameter: torch.nn.Parameter) -> bool:
    """Return whether `parameter` is a matrix, or a 3-D stack of matrices, of a size and dtype that can be quantized.

    module: the module with the parameter. For embeddings, convolutions and parametrizations, the result is False.
    key: the parameter's name in the module. A matrix must be named "weight"; a stack may have any name.
    """
    if isinstance(module, _NO_MATRICES) or parameter.dtype not in C_NAMES or parameter.numel() < CELL:
        return False
    if parameter.dim() == 3:
        return len(parameter) > 1 and min(parameter.shape[1:]) >= BLOCK
    return parameter.dim() == 2 and key == "weight"
