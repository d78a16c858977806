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
    _sparse("afmoe", "Afmoe", num_dense_layers=1),
    _family("aria text", "AriaText"),
    _latent("axk1", "AXK1"),
    _latent("axk2", "AXK2"),
    _family("beam", "Beam"),
    _family("bitnet", "BitNet"),
    _family("clvp", "Clvp"),
    _family("cohere2_moe", "Cohere2Moe", "experts"),
    _family("cwm", "Cwm"),
    _latent("deepseek_v32", "DeepseekV32"),
    _latent("deepseek_v4", "DeepseekV4", o_groups=1, o_lora_rank=8),
    _latent("dots1", "Dots1", "experts"),
    _latent("dots3_note", "Dots3Note"),
    _family("emu3 text", "Emu3"),
    _sparse("ernie4_5_moe", "Ernie4_5_Moe"),
    _sparse("exaone_moe", "ExaoneMoe"),
    _family(
        "falcon_h1",
        "FalconH1",
        "state space and attention",
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=4,
        mamba_chunk_size=4,
    ),
    _family("flex_olmo", "FlexOlmo", "experts"),
    _family("flint", "Flint"),
    _family("fuyu", "Fuyu", "a model in the model"),
    _family("gemma4_unified", "Gemma4Unified"),
    _latent("glm4_moe_lite", "Glm4MoeLite"),
    _latent("glm_moe_dsa", "GlmMoeDsa"),
    _family("gpt_neox_japanese", "GPTNeoXJapanese"),
    _family("granite_swa", "GraniteSWA"),
    _family("granitemoe_swa", "GraniteMoeSWA", "experts"),
    _family("hrm_text", "HrmText", "layers called again"),
    _family("hunyuan_v1_dense", "HunYuanDenseV1"),
    _family("hunyuan_v1_moe", "HunYuanMoEV1", "experts"),
    _sparse("hy_v3", "HYV3"),
    _latent("hy_v4", "HYV4"),
    _family("hyperclovax", "HyperCLOVAX"),
    _sparse("inkling2", "Inkling2"),
    _family("jais2", "Jais2"),
    _sparse("kolibri1", "Kolibri1"),
    _sparse("laguna", "Laguna"),
    _latent("longcat_flash", "LongcatFlash"),
    _sparse("mellum", "Mellum"),
    _latent("mimo_v2_flash", "MiMoV2Flash", "experts", num_key_value_heads=2),
    _latent("minicpm3", "MiniCPM3", "latent attention"),
    _family("minimax", "MiniMax", "experts, linear attention"),
    _sparse("minimax_m2", "MiniMaxM2"),
    _sparse("minimax_m3_vl text", "MiniMaxM3VL"),
    _family("ministral3", "Ministral3"),
    _latent("mistral4", "Mistral4"),
    _family("mllama text", "Mllama"),
    _family("moshi text", "Moshi"),
    _sparse(
        "nemotron_h",
        "NemotronH",
        "state space, attention, experts",
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=4,
        n_groups=1,
        chunk_size=4,
        moe_shared_expert_intermediate_size=16,
        intermediate_size=40,
    ),
    _family("olmo_hybrid", "OlmoHybrid", "linear and full attention"),
    _family("qwen3_5", "Qwen3_5", "linear and full attention", **LINEAR),
    _sparse("qwen3_5_moe", "Qwen3_5Moe", "linear and full attention, experts", **LINEAR),
    _sparse("solar_open", "SolarOpen"),
    _family("vaultgemma", "VaultGemma"),
    _latent("youtu", "Youtu", "latent attention"),
    _family(
        "zamba",
        "Zamba",
        "state space and attention",
        layers_block_type=["mamba", "hybrid"] * 2,
        num_hidden_layers=4,
        mamba_d_state=4,
        mamba_dt_rank=2,
        n_mamba_heads=2,
        attention_head_dim=16,
        attention_hidden_size=64,
        use_mamba_kernels=False,
    ),
    _sparse("zaya", "Zaya", num_experts_per_tok=1),
    _family("trocr", "TrOCR"),
    _family("cpmant", "CpmAnt"),
]
