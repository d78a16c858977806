"""Tiny configurations of five architectures, and batches for them."""

from __future__ import annotations

import torch
import transformers

VOCABULARY = 61
FAMILIES = ("llama", "gpt2", "bert", "t5", "mixtral")


def build(family: str, tied: bool = False, dropout: float = 0.0, seed: int = 0, blocks: int = 3) -> torch.nn.Module:
    """A randomly initialised model of `blocks` blocks (two and two for T5)."""
    shared = {"vocab_size": VOCABULARY, "tie_word_embeddings": tied, "attn_implementation": "eager"}
    llama = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": blocks, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "attention_dropout": dropout,
    }  # fmt: skip
    torch.manual_seed(seed)
    if family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama, **shared))
    if family == "mixtral":
        config = transformers.MixtralConfig(
            **llama, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **shared
        )
        return transformers.MixtralForCausalLM(config)
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=24, n_layer=blocks, n_head=3, n_positions=32,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **shared,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if family == "bert":
        config = transformers.BertConfig(
            hidden_size=24, num_hidden_layers=blocks, num_attention_heads=3, intermediate_size=40,
            max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **shared,
        )  # fmt: skip
        return transformers.BertForMaskedLM(config)
    assert family == "t5"
    config = transformers.T5Config(
        d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=3, dropout_rate=dropout, decoder_start_token_id=0, **shared
    )
    return transformers.T5ForConditionalGeneration(config)


def batch(family: str, seed: int, rows: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Random token ids with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    if family in ("bert", "t5"):
        return {"input_ids": ids, "labels": torch.randint(1, VOCABULARY, (rows, length), generator=generator)}
    return {"input_ids": ids, "labels": ids}


def embeddings(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(model.get_input_embeddings().parameters())
