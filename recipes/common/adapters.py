"""PEFT's adapters on the linear layers and the experts of a model."""

import importlib
from typing import Any

import torch

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
    """
    peft: Any = importlib.import_module("peft")
    output = model.get_output_embeddings()
    linear = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output
    }
    stacks = {".".join(name.split(".")[-2:]) for name in stacks_of(model)}
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, task_type="CAUSAL_LM",
        target_modules=sorted(linear - ROUTERS), target_parameters=sorted(stacks),
    )  # fmt: skip
    return peft.get_peft_model(model, config)
