"""The benchmark's models and batches, the same for every engine."""

import zlib
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import PreTrainedConfig

from common.adapters import stacks_of

LLAMAS = {
    "llama-tiny": (2, 128, 256, 4, 2, 512, False),
    "llama-1b": (16, 2048, 8192, 32, 8, 128256, True),
    "llama-3b": (28, 3072, 8192, 24, 8, 128256, True),
    "llama-8b": (32, 4096, 14336, 32, 8, 128256, False),
}
"""Layers, width, width inside the MLP, heads, heads of keys and values, vocabulary, whether the head is tied."""
NAMED = ("tiny", "bert-base", "bert-classifier", "gpt2-small", "gpt-1.5b", "gpt-13b", *LLAMAS)
MASKED = ("bert", "roberta", "distilbert", "electra", "modernbert", "deberta-v2")
"""Model types that predict masked tokens; all others predict the next token."""
CLASSIFIER = "ForSequenceClassification"
"""The end of the name of an architecture with one label for each row."""
IGNORED = -100


def make_config(name: str, length: int, layers: int = 0) -> PreTrainedConfig:
    """Return the config of a name in NAMED, without dropout, or of a folder or Hub name.

    layers: how many the model has, instead of its own number; 0 leaves it.
    """
    config = _make_config(name, length)
    if layers:
        config.num_hidden_layers = layers
    return config


def _make_config(name: str, length: int) -> PreTrainedConfig:
    if name == "tiny":
        return gpt(layers=4, width=64, heads=4, length=length, vocabulary=512)
    if name in ("bert-base", "bert-classifier"):
        kind = "ForMaskedLM" if name == "bert-base" else CLASSIFIER
        return BertConfig(
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=max(512, length),
            architectures=[f"Bert{kind}"],
        )  # fmt: skip
    if name == "gpt2-small":
        return gpt(layers=12, width=768, heads=12, length=max(1024, length), vocabulary=50257, tied=True)
    if name == "gpt-1.5b":
        return gpt(layers=48, width=1600, heads=25, length=length, vocabulary=50257, tied=True)
    if name == "gpt-13b":  # the published table of BMTrain: 128 heads of 40
        return gpt(layers=40, width=5120, heads=128, length=length, vocabulary=50304)
    if name in LLAMAS:
        layers, width, inner, heads, key_heads, vocabulary, tied = LLAMAS[name]
        return LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=tied,
            max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
    return AutoConfig.from_pretrained(name)


def gpt(layers: int, width: int, heads: int, length: int, vocabulary: int, tied: bool = False) -> GPT2Config:
    return GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=vocabulary, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
    )  # fmt: skip


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether the model has one label for each row."""
    return any(name.endswith(CLASSIFIER) for name in config.architectures or ())


def make_model(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the model on `device`. Its weights depend on their names only, apart from rounding to `dtype`."""
    kind = AutoModelForMaskedLM if config.model_type in MASKED else AutoModelForCausalLM
    if is_classifier(config):
        kind = AutoModelForSequenceClassification
    with device:
        model = kind.from_config(config, dtype=dtype)  # with SDPA, except models that transformers runs without it
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    return model.train()


@torch.no_grad()
def fill(name: str, parameter: torch.Tensor) -> None:
    """Fill matrices from N(0, 0.02²), norms with 1, biases with 0.

    Numbers are drawn in float32, so that they are equal in every dtype.
    """
    if parameter.dim() > 1:
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        drawn = parameter if parameter.dtype == torch.float32 else torch.empty_like(parameter, dtype=torch.float32)
        parameter.copy_(drawn.normal_(0.0, 0.02, generator=generator))
    else:
        parameter.fill_(float(not name.endswith("bias")))


def make_batch(config: PreTrainedConfig, rows: int, length: int, seed: int, device: torch.device) -> dict:
    """Return random `input_ids` and `labels`, each (rows, length). For a masked model 15 % of the tokens are masked.

    The labels of a classifier are (rows,).
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (rows, length), generator=generator)
    if is_classifier(config):
        return {"input_ids": ids.to(device), "labels": (ids[:, 0] % 2).to(device)}
    if config.model_type not in MASKED:
        ids = ids.to(device)
        return {"input_ids": ids, "labels": ids}
    hidden = torch.rand(rows, length, generator=generator) < 0.15
    hidden[:, 0] = True  # or a short batch might have none, and no loss
    labels = ids.masked_fill(~hidden, IGNORED)
    return {"input_ids": ids.masked_fill(hidden, config.vocab_size - 1).to(device), "labels": labels.to(device)}


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model's layers: the items of its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))


def flops_a_token(model: PreTrainedModel, length: int) -> float:
    """Return the FLOPs per token of forward and backward, without recomputation (PaLM, appendix B).

    A multiply-add counts as two. Causal attention counts the lower half of its scores only. Of a stack, the experts of
    one token count. Frozen weights have no gradient of their own. Call it before the weights are sharded.
    """
    output = model.get_output_embeddings()
    weights = [p for layer in layers_of(model) for p in layer.parameters()]
    weights += [output.weight] if isinstance(output, torch.nn.Linear) else []
    text = model.config.get_text_config()
    used: dict[torch.Tensor, float] = {}
    for stack in stacks_of(model).values():
        used[stack] = text.num_experts_per_tok / len(stack)
    for module in list[Any](model.modules()):
        if hasattr(module, "parameter_name"):  # PEFT's adapters of a stack
            share = text.num_experts_per_tok / module.num_experts
            used |= dict.fromkeys([*module.lora_A.parameters(), *module.lora_B.parameters()], share)
    products = sum((6.0 if p.requires_grad else 4.0) * p.numel() * used.get(p, 1.0) for p in weights)
    attention = 12.0 if model.config.model_type in MASKED else 6.0
    return products + attention * text.num_hidden_layers * attention_width(text) * length


def attention_width(config: Any) -> float:
    """Return the width of all heads of a layer together, which is not the hidden size in every model.

    If values are narrower than queries and keys, it is the mean of both: each takes part in one of two products.
    """
    heads = getattr(config, "num_attention_heads", 1)
    if hasattr(config, "qk_head_dim"):
        return heads * (config.qk_head_dim + config.v_head_dim) / 2
    return heads * (getattr(config, "head_dim", None) or config.hidden_size / heads)
