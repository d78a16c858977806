"""Shard models with weights that bitsandbytes has quantized to 4 bits (`load_in_4bit=True`).

Weights that only one block uses keep their 4-bit codes. All others are dequantized.

bitsandbytes is not imported. Its classes are recognized by name, as in transformers and PEFT.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch

from ...engine.base.launch import C_NAMES
from ...engine.sharding.slots import Place, find_places
from ...engine.wrap.find import Chain
from ...engine.wrap.root_params import shared_parameters
from .arithmetic import BLOCK, CELL, FORMATS, Format, dynamic_values
from .storage import PackedParameter

_log = logging.getLogger("hf_bmtrain")
_LOAD = (
    "Load the model with BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', "
    "bnb_4bit_compute_dtype=torch.bfloat16). Or load it in an ordinary dtype, and pass quantize_frozen='nf4' or 'fp8' "
    "to auto_wrap."
)


class Linear4bit(torch.nn.Linear):
    """The class that replaces bitsandbytes' Linear4bit in a sharded model. It computes with the dequantized weight.

    `adopt_quantized` changes the class of existing layers to this one. The layers keep their attributes, and no
    constructor is called.

    Attributes:
        compute_dtype: the dtype of the computation, set by bitsandbytes; None uses the dtype of the input.
    """

    compute_dtype: torch.dtype | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dtype = self.compute_dtype or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return torch.nn.functional.linear(input.to(dtype), self.weight.to(dtype), bias).to(input.dtype)


def is_quantized(parameter: torch.Tensor) -> bool:
    """Return whether `parameter` has bitsandbytes' class for weights in 4 or 8 bits."""
    return type(parameter).__name__ in ("Params4bit", "Int8Params")


def admit_quantized(model: torch.nn.Module) -> None:
    """Raise ValueError if bitsandbytes has quantized a weight of `model` in a way that `auto_wrap` does not support."""
    for name, place in _find(model).items():
        reason = _refusal(*place)
        if reason is not None:
            raise ValueError(f"auto_wrap: '{name}', a bitsandbytes weight, {reason}")


def refuse_quantized(model: torch.nn.Module, why: str) -> None:
    """Raise ValueError if bitsandbytes has quantized a weight of `model`.

    `auto_wrap` calls this in the two cases in which it cannot shard such weights: if `quantize_frozen` is given, and if
    the model is already wrapped, so that the call only shards parameters that were added since.

    why: a sentence that ends the error message and says what to do, such as "Leave out quantize_frozen='nf4'."
    """
    for name in _find(model):
        raise ValueError(f"auto_wrap: '{name}' has been quantized by bitsandbytes. {why}")


def quantized_facts(model: torch.nn.Module) -> dict[str, str]:
    """Return the format and the unpacked dtype of each weight of `model` that bitsandbytes has quantized, as text.

    `auto_wrap` checks that the result is the same on every rank, because all ranks must pass the same model. Call
    `admit_quantized` first, which refuses unsupported weights.

    Returns:
        A dict with one entry for each weight, for example
        {"quantized 'model.layers.0.mlp.up_proj.weight'": "nf4 torch.bfloat16"}.
    """
    return {
        f"quantized '{name}'": f"{_form(_state(module, parameter)).name} {_dtype(module, parameter)}"
        for name, (module, _, parameter) in _find(model).items()
    }


def adopt_quantized(model: torch.nn.Module, blocks: Chain, outside: Chain, device: torch.device) -> None:
    """Turn the weights that bitsandbytes has quantized into packed or ordinary parameters.

    A weight that only one block uses becomes a PackedParameter, which is later sharded without being unpacked. A weight
    that is used outside the blocks, or by several blocks, is unpacked into an ordinary parameter. The layers of all
    these weights become the Linear4bit of this file, which computes with unpacked weights. The attributes by which
    transformers recognizes a quantized model are removed, so that Trainer and saved configurations treat the model as
    an ordinary one.

    Call `admit_quantized` first, which refuses unsupported weights.

    Args:
        model: the model that is about to be sharded.
        blocks: its blocks (transformer layers), in execution order.
        outside: the modules that are neither blocks nor inside one.
        device: the device on which the weights that become ordinary parameters are unpacked.
    """
    found = _find(model)
    root = shared_parameters(blocks, outside) | {id(parameter) for _, _, parameter in find_places(outside)}
    made: dict[int, torch.nn.Parameter] = {}  # {id of the old parameter: the new one}, so that tied weights stay tied
    unpacked: list[str] = []
    for name, (module, key, parameter) in found.items():
        if id(parameter) not in made:
            made[id(parameter)] = packed = _packed(module, parameter)
            if id(parameter) in root:
                made[id(parameter)] = _unpack(packed, device)
                unpacked.append(name)
        module._parameters[key] = made[id(parameter)]
        vars(module).pop("quant_state", None)
        module.__class__ = Linear4bit
    if unpacked:
        _log.warning(
            "%d weights that bitsandbytes has quantized, such as '%s', are outside the model's blocks (transformer "
            "layers) or shared by several of them, so they are dequantized. To load them unquantized, list their "
            "modules in llm_int8_skip_modules of BitsAndBytesConfig. To keep those outside blocks in 4 bits, list "
            "their modules, in addition to the model's blocks, in auto_wrap(model, blocks=[...]).",
            len(unpacked), unpacked[0],
        )  # fmt: skip
    if found:
        _forget(model)


def _find(model: torch.nn.Module) -> dict[str, Place]:
    """Return {name: (module, key, parameter)} of the weights of `model` that bitsandbytes has quantized.

    `module` is the layer that contains the weight, `key` is the weight's name in this layer, and `parameter` is the
    weight.
    """
    return {
        f"{path}.{key}".lstrip("."): (module, key, parameter)
        for path, module in model.named_modules()
        for _, key, parameter in find_places([module])
        if is_quantized(parameter)
    }


def _refusal(module: Any, key: str, parameter: Any) -> str | None:
    """Return why the quantized weight `parameter`, stored as `key` in `module`, cannot be sharded, or None if it can.

    The returned reason also says what the user can do instead.
    """
    computes = next(cls.__name__ for cls in type(module).__mro__ if "forward" in vars(cls))
    if type(parameter).__name__ == "Int8Params":
        return f"is quantized to 8 bits (load_in_8bit=True), which cannot be sharded. {_LOAD}"
    if computes != "Linear4bit" or key != "weight" or "forward" in vars(module):
        return (
            f"is the {key} of a {type(module).__name__}, whose forward is that of {computes} or has been replaced. "
            "Only the weight of a layer with the original forward of bitsandbytes' Linear4bit can be sharded. "
            f"Dispatching a model to several devices replaces the forwards of its modules. {_LOAD}"
        )
    state, wanted = _state(module, parameter), (module.out_features, module.in_features)
    if state is None:
        return "is not quantized yet. Call model.to(device), which makes bitsandbytes quantize it, before auto_wrap."
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        return (
            f"is quantized to {state.quant_type} in blocks of {state.blocksize}, but must be nf4 in blocks of 64. "
            f"{_LOAD}"
        )
    if getattr(state, "packing_format_for_cpu", False):
        return (
            "was converted to a CPU format that auto_wrap does not support, when the model was evaluated on the CPU. "
            "Load the model again, and call auto_wrap before any evaluation."
        )
    if parameter.requires_grad:
        return "requires a gradient, but quantized weights cannot be trained. Call requires_grad_(False) on it."
    nbytes = parameter.numel() * parameter.element_size()
    if tuple(state.shape) != wanted or nbytes != -(-math.prod(state.shape) // 2):
        return (
            f"does not match its layer: it has {nbytes} bytes for shape {tuple(state.shape)}, but the layer needs a "
            f"4-bit weight of shape {wanted}. {_LOAD}"
        )
    tables = [(state.code, FORMATS["nf4"].code_values)]
    if state.nested:
        if state.state2.blocksize != 256:
            return f"has scales that are quantized in blocks of {state.state2.blocksize}, not 256. {_LOAD}"
        tables.append((state.state2.code, dynamic_values))
    if any(not torch.equal(table.float().cpu(), values(torch.device("cpu"))) for table, values in tables):
        return f"has codes or scales whose table of values is not the one that bitsandbytes uses for nf4. {_LOAD}"
    if _dtype(module, parameter) not in C_NAMES:
        return (
            f"is dequantized to {_dtype(module, parameter)}, but only float32, float16 and bfloat16 are supported. "
            f"{_LOAD}"
        )
    return None


def _state(module: Any, parameter: Any) -> Any:
    """Return bitsandbytes' `quant_state` of the weight `parameter` of the layer `module`, or None if it has none.

    `quant_state` contains the scales. It is an attribute of the parameter or, after code has re-created the Parameter,
    only of the layer.
    """
    return getattr(parameter, "quant_state", None) or getattr(module, "quant_state", None)


def _form(state: Any) -> Format:
    return FORMATS["nf4" if state.nested else "nf4_float32"]


def _dtype(module: Any, parameter: Any) -> torch.dtype:
    """Return the dtype of the unpacked weight: the layer's `compute_dtype` or, if that is None, the original dtype.

    module: bitsandbytes' layer.
    parameter: its quantized weight.
    """
    return module.compute_dtype or _state(module, parameter).dtype


def _packed(module: Any, parameter: Any) -> PackedParameter:
    """Return a PackedParameter (a parameter whose values are already packed) for a weight that bitsandbytes quantized.

    The result only refers to bitsandbytes' tensors of codes and scales. `PackedParameter.pack` copies them later.

    module: bitsandbytes' layer.
    parameter: its quantized weight.
    """
    state = _state(module, parameter)
    codes = parameter.data.contiguous().view(-1).view(torch.uint8)
    scales = (state.absmax.view(-1),)
    if state.nested:
        scales = (*scales, state.state2.absmax, state.offset)
    form = _form(state)
    pack = functools.partial(form.assemble, math.prod(state.shape), codes, *scales)
    return PackedParameter.of(state.shape, _dtype(module, parameter), form, pack)


def _unpack(packed: PackedParameter, device: torch.device) -> torch.nn.Parameter:
    """Return a frozen parameter on `device` with the unpacked values of `packed`."""
    cells = packed.pack().to(device)
    values = torch.empty(len(cells) // packed.form.cell_bytes * CELL, dtype=packed.dtype, device=device)
    packed.form.unpack(cells, values)
    return torch.nn.Parameter(values[: packed.numel()].view(packed.shape), requires_grad=False)


def _forget(model: torch.nn.Module) -> None:
    """Clear, in the modules and their configurations, the attributes that mark `model` as quantized."""
    for module in model.modules():
        noted = vars(module)
        if noted.pop("hf_quantizer", None) is not None:
            noted["is_quantized"] = noted["is_loaded_in_4bit"] = False
            noted.pop("quantization_method", None)
            if hasattr(noted.get("config"), "quantization_config"):
                del noted["config"].quantization_config
