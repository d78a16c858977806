"""Choose which linear layers of blocks compute in float8, for `auto_wrap(float8=...)`, and log why others do not.

Activations and gradients have one float8 scale per token or, in the product that computes a weight's gradient, one per
feature. Each weight has a single scale. On an H200, products with these scales and fast accumulation (in the forward)
are 1.7 to 1.9 times as fast as in bfloat16; without fast accumulation (in the backward), 1.6 to 1.8 times. With one
scale per 128 elements of activations and per 128 x 128 elements of weights, products would be only 1.4 to 1.7 times as
fast as in bfloat16.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...engine.base.launch import C_NAMES
from ...engine.wrap.find import Chain, adapter_parameters, is_router
from ..options import UseFloat8
from .arithmetic import ALIGNMENT, check_device
from .linear import Float8Inputs, Float8Linear, extend_linear

_log = logging.getLogger("hf_bmtrain")


def choose_float8(
    model: torch.nn.Module, blocks: Chain, device: torch.device, float8: UseFloat8, keep: Sequence[str]
) -> dict[str, torch.nn.Module]:
    """Return the linear layers in `blocks` that will compute in float8, by path, and log why the others will not.

    Args:
        model: the model that is about to be sharded.
        blocks: its blocks (transformer layers).
        device: the device on which the layers compute.
        float8: the argument of `auto_wrap`: True, "rows" (a synonym of True), or False, which selects no layers.
        keep: names of layers that must not compute in float8, or of modules that contain such layers.

    Raises:
        ValueError: `keep` is given without `float8`.
        ValueError: the device cannot multiply float8 matrices.
        ValueError: a name in `keep` matches no layer.
        ValueError: no layer can compute in float8.
    """
    if not float8:
        if keep:
            raise ValueError(
                f"auto_wrap: keep={[*keep]} has no effect without float8, because it names the layers that do not use "
                "float8. Pass float8=True as well, or leave out keep=."
            )
        return {}
    check_device(device)
    layers, left = _choose(model, blocks, keep)
    _log.info("%s", _table(layers, left))
    return layers


def check_late_float8(model: torch.nn.Module, float8: UseFloat8) -> None:
    """Raise ValueError if float8 is requested in a later call of `auto_wrap`, but not in the call that wrapped `model`.

    Args:
        model: the model, already wrapped.
        float8: the argument of the later call. If it is False, nothing is checked.
    """
    if float8 and not any(isinstance(module, Float8Linear) for module in model.modules()):
        raise ValueError(
            "auto_wrap: this model was wrapped without float8, which cannot be added later. Load the model again and "
            "wrap it with float8, or leave float8 out of this call."
        )


def apply_float8(layers: dict[str, torch.nn.Module]) -> None:
    """Make `layers`, {path: linear layer}, compute in float8. Call it before they are sharded."""
    inputs = Float8Inputs()
    for layer in layers.values():
        extend_linear(layer, is_conv1d(layer), inputs)


def is_conv1d(module: torch.nn.Module) -> bool:
    """Return whether `module` is transformers' Conv1D: a linear layer with a weight of shape (inputs, outputs).

    Such layers can compute in float8, like torch.nn.Linear, whose weight has the shape (outputs, inputs).
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def _choose(
    model: torch.nn.Module, blocks: Chain, keep: Sequence[str]
) -> tuple[dict[str, torch.nn.Module], dict[str, str]]:
    """Divide the linear layers of `blocks` into those that will use float8, {path: layer}, and others, {path: reason}.

    model: the model that is about to be sharded. Paths are relative to it.
    blocks: its blocks (transformer layers).
    keep: names of layers that must not use float8, or of modules that contain such layers.
    """
    names = {module: path for path, module in model.named_modules()}
    adapters, unused = adapter_parameters(model), {*keep}
    attentions = [module for block in blocks for module in block.modules() if _reads_weights(module)]
    inside = {child for module in attentions for child in module.modules()}
    layers: dict[str, torch.nn.Module] = {}
    left: dict[str, str] = {}
    for module in dict.fromkeys(module for block in blocks for module in block.modules()):
        if not isinstance(module, torch.nn.Linear) and not is_conv1d(module):
            continue
        path = names[module]
        asked = [name for name in keep if f".{name}." in f".{path}."]
        unused.difference_update(asked)
        reason = "named in keep" if asked else _reason(module, path, adapters)
        reason = "the torch module that contains it may read its weight" if module in inside and not reason else reason
        if reason:
            left[path] = reason
        else:
            layers[path] = module
    if unused:
        raise ValueError(
            "auto_wrap: names in keep= match no linear layer in a block, and no module that contains such a layer: "
            f"{sorted(unused)}. "
            f"The linear layers are named: {', '.join(sorted({path.rpartition('.')[2] for path in [*layers, *left]}))}."
        )
    if not layers:
        reasons = "; ".join(_grouped(left)) or "blocks have no linear layers"
        raise ValueError(
            f"auto_wrap: no linear layer of {type(model).__name__} can use float8: {reasons}. Leave out float8."
        )
    return layers, left


def _reason(module: torch.nn.Module, path: str, adapters: set[int]) -> str:
    """Return why the linear layer `module` cannot use float8, in words for the log, or "" if it can.

    path: the layer's path in the model.
    adapters: the ids of all parameters of adapters.
    """
    weight: Any = module.weight
    if not is_conv1d(module) and type(module).forward is not torch.nn.Linear.forward:
        return f"{type(module).__name__} does not use the forward of torch.nn.Linear"
    if "forward" in vars(module):
        return "its forward is replaced"
    if id(weight) in adapters:
        return "part of an adapter"
    if is_router(path):
        return "a router"
    if weight.dtype not in C_NAMES:
        return f"its weight is {weight.dtype}"
    if any(size % ALIGNMENT for size in weight.shape):
        return f"its sizes are not multiples of {ALIGNMENT}"
    return ""


def _reads_weights(module: torch.nn.Module) -> bool:
    """Return whether `module` is a module of torch that can read the weights of its linear layers without calling them.

    Float8 has no effect on a layer that is not called, and a weight that was all-gathered in float8 cannot be read.
    """
    return isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer))


def _table(layers: Iterable[str], left: dict[str, str]) -> str:
    """Return a log message: how many layers of each name use float8, and how many do not, with the reason.

    layers: the paths of the layers that use float8.
    left: {path of each other linear layer: why it does not use float8}.
    """
    lines = ["float8: matrix products of linear layers in blocks, with one scale per token and one per weight"]
    lines.append(f"  in float8: {', '.join(_counted(layers))}")
    lines += [f"  not: {text}" for text in _grouped(left)]
    lines.append("  not: embeddings, head, norms, attention and everything outside blocks")
    return "\n".join(lines)


def _grouped(left: dict[str, str]) -> list[str]:
    reasons = dict.fromkeys(left.values())
    return [f"{', '.join(_counted(p for p in left if left[p] == reason))} ({reason})" for reason in reasons]


def _counted(paths: Iterable[str]) -> list[str]:
    counts = Counter(path.rpartition(".")[2] for path in paths)
    return [f"{count} x {name}" for name, count in counts.items()]
