"""Decoders of text that transformers added later, and the text parts of larger models."""

from __future__ import annotations

from typing import Any

from zoo_decoders import GRANITE, MLA
from zoo_models import TEXT, Family, causal

SPARSE: dict[str, Any] = {**GRANITE, "moe_num_experts": 4, "moe_k": 2, "shared_expert_intermediate_size": 16}
LATENT: dict[str, Any] = {**SPARSE, **MLA}


LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def _family(name: str, model: str, note: str = "", batch=causal, **config) -> Family:
    return Family(name, f"{model}ForCausalLM", TEXT | config, batch, note)


def _sparse(name: str, model: str, note: str = "experts", **config) -> Family:
    return _family(name, model, note, **{**SPARSE, **config})


def _latent(name: str, model: str, note: str = "latent attention, experts", **config) -> Family:
    return _family(name, model, note, **{**LATENT, **config})


LATER_DECODERS = [
    *(_family(name, model) for name, model in {
        "aria text": "AriaText", "beam": "Beam", "bitnet": "BitNet", "clvp": "Clvp", "cwm": "Cwm", "emu3 text": "Emu3",
        "flint": "Flint", "gemma4_unified": "Gemma4Unified", "gpt_neox_japanese": "GPTNeoXJapanese",
        "granite_swa": "GraniteSWA", "hunyuan_v1_dense": "HunYuanDenseV1", "hyperclovax": "HyperCLOVAX",
        "jais2": "Jais2", "ministral3": "Ministral3", "mllama text": "Mllama", "moshi text": "Moshi",
        "vaultgemma": "VaultGemma", "trocr": "TrOCR", "cpmant": "CpmAnt",
    }.items()),
    *(_latent(name, model) for name, model in {
        "axk1": "AXK1", "axk2": "AXK2", "deepseek_v32": "DeepseekV32", "dots3_note": "Dots3Note",
        "glm4_moe_lite": "Glm4MoeLite", "glm_moe_dsa": "GlmMoeDsa", "hy_v4": "HYV4", "longcat_flash": "LongcatFlash",
        "mistral4": "Mistral4",
    }.items()),
    *(_family(name, model, "experts") for name, model in {
        "cohere2_moe": "Cohere2Moe", "flex_olmo": "FlexOlmo", "granitemoe_swa": "GraniteMoeSWA",
        "hunyuan_v1_moe": "HunYuanMoEV1",
    }.items()),
    *(_sparse(name, model) for name, model in {
        "ernie4_5_moe": "Ernie4_5_Moe", "exaone_moe": "ExaoneMoe", "hy_v3": "HYV3",
        "kolibri1": "Kolibri1", "laguna": "Laguna", "mellum": "Mellum", "minimax_m2": "MiniMaxM2",
        "minimax_m3_vl text": "MiniMaxM3VL", "solar_open": "SolarOpen",
    }.items()),
    _sparse("afmoe", "Afmoe", num_dense_layers=1),
    _sparse("inkling2", "Inkling2", unpadded_vocab_size=61),
    _latent("deepseek_v4", "DeepseekV4", o_groups=1, o_lora_rank=8),
    _family("falcon_h1", "FalconH1", "state space and attention", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=4, mamba_chunk_size=4),
    _latent("mimo_v2_flash", "MiMoV2Flash", "experts", num_key_value_heads=2),
    _sparse("nemotron_h", "NemotronH", "state space, attention, experts", mamba_num_heads=4, mamba_head_dim=16,
        ssm_state_size=4, n_groups=1, chunk_size=4, moe_shared_expert_intermediate_size=16, intermediate_size=40),
    _family("qwen3_5", "Qwen3_5", "linear and full attention", **LINEAR),
    _sparse("qwen3_5_moe", "Qwen3_5Moe", "linear and full attention, experts", **LINEAR),
    _family("zamba", "Zamba", "state space and attention", layers_block_type=["mamba", "hybrid"] * 2,
        num_hidden_layers=4, mamba_d_state=4, mamba_dt_rank=2, n_mamba_heads=2, attention_head_dim=16,
        attention_hidden_size=64, use_mamba_kernels=False),
    _sparse("zaya", "Zaya", num_experts_per_tok=1),
    _latent("dots1", "Dots1", "experts"),
    _family("fuyu", "Fuyu", "a model in the model"),
    _family("hrm_text", "HrmText", "layers called again"),
    _latent("minicpm3", "MiniCPM3", "latent attention"),
    _latent("youtu", "Youtu", "latent attention"),
    _family("minimax", "MiniMax", "experts, linear attention"),
    _family("olmo_hybrid", "OlmoHybrid", "linear and full attention"),
]  # fmt: skip
