"""PEFT's adapters on the linear layers and the experts of a model."""

import importlib
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

ROUTERS = {"gate", "router"}
"""What models call the linear layers that choose experts."""


def stacks_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that contain the weights of all experts of a layer, by name.

    In Transformers 5, all experts of a layer are one module. Its parameters have three dimensions, of which the first
    is the expert.
    """
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if hasattr(module, "num_experts")
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }


def add_adapters(model: Any, rank: int, alpha: int) -> Any:
    """Freeze a causal language model and return it with LoRA adapters, without dropout.

    They are at all linear layers except routers and the output layer, and at the stacks of experts. PEFT's "all-linear"
    would add the routers of models like Qwen3-MoE, also if they are excluded.

    Raises ValueError if the model is not a causal one, or has neither such layers nor stacks.
    """
    peft: Any = importlib.import_module("peft")
    if not model.can_generate():
        raise ValueError(
            f"the adapters are for causal language models, and {type(model).__name__} is none: give another --model, "
            "or leave out --lora"
        )
    output = model.get_output_embeddings()
    layers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not output
    }
    linear = {path.rpartition(".")[2] for path in layers} - ROUTERS
    stacks = {".".join(name.split(".")[-2:]) for name in stacks_of(model)}
    if not linear and not stacks:
        raise ValueError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear, Conv1D) besides its routers and its output "
            "layer, and no stacks of experts, so that adapters have no place: give another --model, or leave out --lora"
        )
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=sorted(linear), target_parameters=sorted(stacks),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in layers.values()),
    )  # fmt: skip
    return peft.get_peft_model(model, config)
