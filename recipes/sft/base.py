"""Small base models, a Llama and a mixture of experts, that are created and trained on stories by the recipe itself."""

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
    """Train a tokenizer on `texts`: a byte-pair encoding of 400 tokens, which can encode any text."""
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
    """Return a Llama with three layers and random weights, for the vocabulary of `tokenizer`."""
    return LlamaForCausalLM(LlamaConfig(intermediate_size=256, num_hidden_layers=3, **_sizes(tokenizer)))


def small_mixture(tokenizer: Any) -> Qwen3MoeForCausalLM:
    """Return a mixture of 8 experts (2 for each token) with two layers and random weights, for this vocabulary.

    tokenizer: the tokenizer whose vocabulary the model gets.
    """
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
    """Train `model` on `texts` in plain torch, without hf_bmtrain. Every process computes the same weights.

    Args:
        model: the model, trained in place.
        texts: the texts, from which random ones are chosen in each step.
        tokenizer: encodes the texts.
        steps: the number of steps.
        seed: the seed of the choice of texts, the same in every process.
        quiet: whether to hide the progress bar.
    """
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
