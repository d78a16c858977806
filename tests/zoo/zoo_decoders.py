"""Decoders of text, among them state-space models and mixtures of experts."""

from __future__ import annotations

from typing import Any

from zoo_models import TEXT, Family, causal, unmasked, without

MLA: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "head_dim": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "output_router_logits": True,
}  # fmt: skip
GRANITE = EXPERTS | {"output_router_logits": False}  # its router loss fails in transformers 5.17, plain too
STATE_SPACE: dict[str, Any] = {"state_size": 4, "conv_kernel": 4, "expand": 2, "time_step_rank": 2}


def _family(name: str, model: str, note: str = "", batch=causal, **config) -> Family:
    return Family(name, f"{model}ForCausalLM", TEXT | config, batch, note)


DECODERS = [
    *(_family(name, model) for name, model in {
        "llama": "Llama", "qwen3": "Qwen3", "gemma": "Gemma", "phi": "Phi", "olmo": "Olmo", "olmo2": "Olmo2",
        "gpt_neox": "GPTNeoX", "biogpt": "BioGpt", "cohere": "Cohere", "granite": "Granite", "glm": "Glm",
        "glm4": "Glm4", "starcoder2": "Starcoder2", "nemotron": "Nemotron", "persimmon": "Persimmon",
        "helium": "Helium", "arcee": "Arcee", "ernie4_5": "Ernie4_5", "seed_oss": "SeedOss", "diffllama": "DiffLlama",
        "doge": "Doge", "nanochat": "NanoChat",
    }.items()),
    _family("llama tied", "Llama", tie_word_embeddings=True),
    _family("llama4", "Llama4", "fused experts", **EXPERTS, intermediate_size_mlp=40, attention_chunk_size=4),
    _family("mistral", "Mistral", sliding_window=4),
    _family("ministral", "Ministral", sliding_window=4),
    _family("mixtral", "Mixtral", "router loss", **EXPERTS),
    _family("qwen2", "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    _family("qwen2_moe", "Qwen2Moe", "router loss", **EXPERTS, shared_expert_intermediate_size=24),
    _family("qwen3_moe", "Qwen3Moe", "router loss", **EXPERTS),
    _family("qwen3_next", "Qwen3Next", "linear and full attention", **EXPERTS, shared_expert_intermediate_size=24,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"]),
    _family("gemma2", "Gemma2", sliding_window=4),
    _family("gemma3", "Gemma3", "two rotary tables", sliding_window=4,
        layer_types=["sliding_attention", "full_attention"]),
    _family("phimoe", "Phimoe", "router loss", **EXPERTS),
    _family("olmo3", "Olmo3", sliding_window=4),
    _family("olmoe", "Olmoe", "router loss", **EXPERTS),
    Family("gpt2", "GPT2LMHeadModel", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, causal),
    _family("gpt_bigcode", "GPTBigCode", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    _family("gptj", "GPTJ", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    _family("codegen", "CodeGen", n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
    _family("gpt_neo", "GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    _family("gpt_oss", "GptOss", "fused experts, sinks", **EXPERTS, sliding_window=4),
    Family("openai-gpt", "OpenAIGPTLMHeadModel", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        causal),
    Family("ctrl", "CTRLLMHeadModel", {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 40, "n_positions": 64},
        causal),
    _family("opt", "OPT", ffn_dim=40, word_embed_proj_dim=16),
    _family("xglm", "XGLM", d_model=32, ffn_dim=40, num_layers=2, attention_heads=4),
    _family("bloom", "Bloom", n_layer=2, n_head=4),
    Family("falcon", "FalconForCausalLM",
        without(TEXT, "head_dim") | {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2,
            "ffn_hidden_size": 40},
        causal, "alibi"),
    _family("mpt", "Mpt", d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _family("stablelm", "StableLm", use_qkv_bias=True),
    _family("cohere2", "Cohere2", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    _family("granitemoe", "GraniteMoe", "experts", **GRANITE),
    _family("granitemoeshared", "GraniteMoeShared", "experts", **GRANITE, shared_intermediate_size=24),
    _family("granitemoehybrid", "GraniteMoeHybrid", "state space and attention", **GRANITE, shared_intermediate_size=24,
        layer_types=["mamba", "attention"], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_n_groups=1,
        mamba_chunk_size=4),
    _family("deepseek_v2", "DeepseekV2", "latent attention, experts", **MLA, topk_method="greedy"),
    _family("deepseek_v3", "DeepseekV3", "latent attention, experts", **MLA),
    _family("glm4_moe", "Glm4Moe", "experts", **{**MLA, "head_dim": 8, "num_key_value_heads": 2}),
    _family("smollm3", "SmolLM3", no_rope_layers=[1, 0]),
    _family("exaone4", "Exaone4", sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    _family("dbrx", "Dbrx", "fused experts", d_model=32, n_heads=4, n_layers=2, max_seq_len=64,
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}),
    _family("jetmoe", "JetMoe", "experts in attention too", **EXPERTS, kv_channels=8, num_key_value_heads=2),
    _family("lfm2", "Lfm2", "convolution and attention", layer_types=["conv", "full_attention"], block_ff_dim=40,
        block_multiple_of=8, block_auto_adjust_ff_dim=False),
    _family("modernbert_decoder", "ModernBertDecoder", local_attention=4),
    _family("mamba", "Mamba", "state space", **STATE_SPACE),
    _family("mamba2", "Mamba2", "state space",
        **{**STATE_SPACE, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4}),
    _family("falcon_mamba", "FalconMamba", "state space", **STATE_SPACE),
    _family("rwkv", "Rwkv", "recurrent", batch=unmasked, attention_hidden_size=32, context_length=64, rescale_every=0),
    _family("recurrent_gemma", "RecurrentGemma", "recurrent", lru_width=32, conv1d_width=4, attention_window_size=8,
        block_types=["recurrent", "attention"]),
    _family("jamba", "Jamba", "state space, attention, experts", **EXPERTS, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=2, use_mamba_kernels=False),
    _family("bamba", "Bamba", "state space and attention", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=4, mamba_n_groups=1, mamba_chunk_size=4),
    _family("zamba2", "Zamba2", "an attention layer shared by position",
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_hidden_layers=4, mamba_d_state=4, mamba_ngroups=1,
        n_mamba_heads=4, mamba_headdim=16, chunk_size=4, num_mem_blocks=1, use_shared_attention_adapter=False,
        adapter_rank=4),
    Family("xlnet", "XLNetLMHeadModel",
        {**without(TEXT, "max_position_embeddings"), "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 40}, causal),
    _family("phi3", "Phi3", "Phi-3 and Phi-4"),
    _family("apertus", "Apertus", "trainable activation"),
]  # fmt: skip
