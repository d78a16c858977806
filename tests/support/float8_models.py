"""Models whose linear layers have sizes that float8 takes, and those layers in float8 in plain torch."""

from __future__ import annotations

import torch
import transformers
from torch import nn

from hf_bmtrain.features.float8.choose import is_conv1d
from hf_bmtrain.features.float8.linear import Float8Inputs, extend_linear
from tiny_models import VOCABULARY

FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral", "qwen3")
SHARED = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}


def build(family: str, blocks: int = 2, width: int = 32) -> nn.Module:
    """A randomly initialised model without dropout."""
    torch.manual_seed(0)
    if family == "gpt2":
        none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        config = transformers.GPT2Config(n_embd=width, n_layer=blocks, n_head=4, n_positions=64, **none, **SHARED)
        return transformers.GPT2LMHeadModel(config).train()
    if family == "t5":
        config = transformers.T5Config(
            d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=blocks, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, **SHARED,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).train()
    sizes = {
        "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": blocks, "num_attention_heads": 4,
    }  # fmt: skip
    if family == "bert":
        none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **none, **SHARED)).train()
    sizes |= {"num_key_value_heads": 2}
    if family == "mixtral":
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4, **SHARED))
        model.set_experts_implementation("eager")  # others take no float64
        return model.train()
    if family == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=width // 4, **SHARED)).train()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **SHARED)).train()


def extend_all(model: nn.Module) -> nn.Module:
    """Make those layers of a plain model compute in float8 that do so in a wrapped one."""
    inputs = Float8Inputs()
    for blocks in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in blocks.modules():
            if (type(layer) is nn.Linear or is_conv1d(layer)) and not any(size % 16 for size in layer.weight.shape):
                extend_linear(layer, is_conv1d(layer), inputs)
    return model


def rows(step: int, rank: int, number: int = 2, length: int = 9) -> dict[str, torch.Tensor]:
    """Random token ids, which are the labels too."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(1, VOCABULARY, (number, length), generator=generator)
    return {"input_ids": ids, "labels": ids}
