"""A base in bitsandbytes' 4 bits, without files: each linear layer is quantized before the next one is made."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.models import layers_of


def four_bit(
    model: Any, values: Callable[[str, torch.nn.Parameter], torch.Tensor], dtype: torch.dtype, double: bool
) -> Any:
    """Fill a model on the meta device, the linear layers inside its layers as bitsandbytes' Linear4bit in nf4.

    values: returns a parameter's values on the device, by its name. dtype: that the layers compute in. double: whether
    the scales are quantized too.
    """
    layers: Any = importlib.import_module("bitsandbytes.nn")
    inside = {module for layer in layers_of(model) for module in layer.modules()}
    for path, module in [*model.named_modules()]:
        drawn = {
            name: values(f"{path}.{name}", parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None
        }
        if module in inside and isinstance(module, torch.nn.Linear):
            weight = drawn.pop("weight")
            with torch.device("meta"):
                packed = layers.Linear4bit(module.in_features, module.out_features, False, dtype, double, "nf4")
            packed.weight = layers.Params4bit(
                weight, requires_grad=False, compress_statistics=double, quant_type="nf4", module=packed
            ).to(weight.device)
            del weight
            model.set_submodule(path, packed)
        else:
            module._parameters.update({k: torch.nn.Parameter(v, requires_grad=False) for k, v in drawn.items()})
    with model.get_input_embeddings().weight.device:  # its buffers are computed, and no parameters
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.is_loaded_in_4bit = True  # tells PEFT to use its layers for bitsandbytes'
    return model
