"""The embedded base models: a small Llama and a small mixture of experts, made on the spot, that read stories."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

ROWS_A_STEP, PEAK_LR = 32, 4e-3


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-pair encoding of 400 tokens. It can encode any text."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    plain.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>")


def small_llama(tokenizer: Any) -> LlamaForCausalLM:
    """Return a new Llama with the tokenizer's vocabulary."""
    return LlamaForCausalLM(LlamaConfig(intermediate_size=256, num_hidden_layers=3, **_sizes(tokenizer)))


def small_mixture(tokenizer: Any) -> Qwen3MoeForCausalLM:
    """Return a new mixture of 8 experts, 2 of them for each token, with the tokenizer's vocabulary."""
    config = Qwen3MoeConfig(
        moe_intermediate_size=96, num_hidden_layers=2, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, output_router_logits=True, router_aux_loss_coef=0.01, **_sizes(tokenizer),
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def _sizes(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer), "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 512, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }  # fmt: skip


def make_base(model: Any, texts: Sequence[str], tokenizer: Any, steps: int, seed: int, quiet: bool) -> None:
    """Train `model` in plain torch on `texts` for `steps` steps. Every process gets the same weights."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps + 1, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    for _ in tqdm(range(steps), "the base model reads stories", disable=True if quiet else None):
        chosen = torch.randint(len(texts), (ROWS_A_STEP,), generator=order).tolist()
        batch = tokenizer([f"{texts[number]}<end>" for number in chosen], padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
