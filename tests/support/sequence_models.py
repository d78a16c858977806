"""Tiny models whose rows several ranks share, beside the same model in one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

import hf_bmtrain as bmt

VOCABULARY = 61
TOKENS = 22
WIDTH = 72
Batch = dict[str, Any]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def causal(name: str, **given: Any) -> Callable[[], Any]:
    """What builds the `ForCausalLM` model of that name in transformers."""

    def build() -> Any:
        kind = getattr(transformers, f"{name}ForCausalLM")
        torch.manual_seed(5)
        return kind(kind.config_class(**(_SIZES | given)))

    return build


def gpt2() -> Any:
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 6, "n_positions": 64, "n_inner": 40}
    sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes))


def modern_bert() -> Any:
    torch.manual_seed(5)
    sizes = {key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    sizes |= {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2, "num_attention_heads": 3, **_TYPES}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))


def bert() -> Any:
    torch.manual_seed(5)
    sizes = {key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "head_dim")}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_attention_heads": 3}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def llama_tokens() -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**_SIZES, num_labels=VOCABULARY, classifier_dropout=0.0)
    return transformers.LlamaForTokenClassification(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": causal("Llama"),
    "llama-tokens": llama_tokens,
    "llama-9-heads": causal("Llama", num_attention_heads=9, num_key_value_heads=3),
    "llama-1-key": causal("Llama", num_key_value_heads=1),
    "llama-eager": causal("Llama", attn_implementation="eager"),
    "mistral": causal("Mistral", sliding_window=5),
    "qwen2": causal("Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": causal("Qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "gemma": causal("Gemma"),
    "gemma2": causal("Gemma2", sliding_window=5, attn_implementation="eager", query_pre_attn_scalar=8, **_TYPES),
    "gemma3": causal("Gemma3", sliding_window=5, query_pre_attn_scalar=8, **_TYPES),
    "gpt-oss": causal("GptOss", sliding_window=5, attn_implementation="eager", **_TYPES, **_EXPERTS),
    "llama4": causal(
        "Llama4", floor_scale=4, attn_scale=1.0, no_rope_layers=[1, 0], attention_chunk_size=5,
        intermediate_size_mlp=40, **_EXPERTS,
    ),
    "mixtral": causal("Mixtral", **_EXPERTS),
    "mixtral-router-loss": causal("Mixtral", output_router_logits=True, router_aux_loss_coef=0.5, **_EXPERTS),
    "qwen3-moe": causal("Qwen3Moe", **_EXPERTS),
    "phi3": causal("Phi3"),
    "olmo2": causal("Olmo2"),
    "cohere": causal("Cohere"),
    "granite": causal("Granite"),
    "smollm3": causal("SmolLM3"),
    "deepseek-v3": causal(
        "DeepseekV3", num_key_value_heads=6, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=6, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=4,
        num_experts_per_tok=2, moe_intermediate_size=16,
    ),
    "gpt2": gpt2,
    "modern-bert": modern_bert,
    "bert": bert,
}  # fmt: skip


def batch_of(kind: str, number: int, tokens: int = TOKENS, rows: int = 2) -> Batch:
    """Batch `number`. kind: "plain", or what is special about it; two of them may be joined by "+"."""
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    batch: Batch = {"input_ids": ids, "labels": ids.clone()}
    if "answers" in kind:  # only few tokens have labels, those of the first ranks
        batch["labels"][:, tokens // 2 :] = -100
    if "masked" in kind:
        drawn = torch.rand(rows, tokens, generator=generator) < 0.7
        batch["labels"] = batch["labels"].masked_fill(drawn, -100)
    if "left" in kind or "right" in kind:
        mask = torch.ones(rows, tokens, dtype=torch.long)
        padded = slice(0, 5) if "left" in kind else slice(tokens - 5, tokens)
        mask[0, padded] = 0
        batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    if "packed" in kind:  # three documents in each row
        lengths = [7, 9, tokens - 16]
        batch["position_ids"] = torch.cat([torch.arange(each) for each in lengths]).repeat(rows, 1)
    return batch


def whole_loss(model: Any, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def check(
    name: str | Callable[[], Any],
    share: int,
    kind: str = "plain",
    tokens: int = TOKENS,
    loss: Callable[[Any, Batch], torch.Tensor] = whole_loss,
    steps: int = 2,
    rows: int = 2,
    prepare: Callable[[Any], Any] = lambda model: model,
    batches: Callable[[int], Batch] | None = None,
    **wrap: Any,
) -> Any:
    """Train with SGD, `share` ranks a row, and compare losses and gradients with a plain process. Collective.

    kind, tokens, rows: as for `batch_of`. loss: of a model and a batch. prepare: changes both models first. batches:
    returns the batch of a number, in place of `batch_of`. wrap: for `auto_wrap`. Returns the sharded model.
    """
    build = MODELS[name] if isinstance(name, str) else name
    plain = prepare(build())
    plain.config.use_cache = False  # as in Trainer; transformers tells packed documents apart without a cache only
    model = bmt.auto_wrap(prepare(build()), sequence_parallel=share, **wrap)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    groups, group = bmt.world_size() // share, bmt.rank() // share
    for step in range(steps):
        numbers = range(step * groups, (step + 1) * groups)
        drawn = [batches(each) if batches else batch_of(kind, each, tokens, rows) for each in numbers]
        mine = loss(model, copy.deepcopy(drawn[group]))
        mine.backward()
        expected = [loss(plain, copy.deepcopy(batch)) for batch in drawn]
        (sum(expected) / groups).backward()  # pyright: ignore[reportAttributeAccessIssue]
        torch.testing.assert_close(mine.detach(), expected[group].detach(), rtol=1e-5, atol=1e-6)
        compare_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model


def compare_gradients(model: Any, plain: Any) -> None:
    """An element may differ by 1e-5 of its tensor's largest plus 2e-6 of the model's. Collective."""
    found = {name: parameter.gather_gradient() for name, parameter in model.named_parameters()}
    truth = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert found.keys() == truth.keys()
    assert any(each is not None for each in truth.values())
    largest = max(float(each.abs().max()) for each in truth.values() if each is not None)
    for name, expected in truth.items():
        got = found[name]
        if bmt.rank() != 0:
            continue
        if expected is None or got is None:
            assert expected is None or not expected.any(), (name, "has no gradient")
            assert got is None or not got.any(), (name, "has a gradient")
            continue
        allowed = 1e-5 * float(expected.abs().max()) + 2e-6 * largest
        error = float((got - expected).abs().max())
        assert error <= allowed, (name, error, allowed)
