"""Families of the zoo with rows that two ranks share: equal to a plain process, or refused by name.

Some run always, all others with `pytest -m zoo`.
"""

import pytest
from sequence_zoo import outcome

from cases import full
from zoo_families import FAMILIES

EQUAL = (
    """
llama, qwen3, gemma, phi, olmo, olmo2, gpt_neox, biogpt, cohere, granite, glm, glm4, starcoder2, nemotron,
persimmon, helium, arcee, ernie4_5, seed_oss, diffllama, nanochat, llama tied, llama4, mistral, ministral, mixtral,
qwen2, qwen2_moe, qwen3_moe, gemma2, gemma3, phimoe, olmo3, olmoe, gpt2, gpt_bigcode, gptj, codegen, gpt_oss, ctrl,
opt, stablelm, cohere2, granitemoe, granitemoeshared, deepseek_v2, deepseek_v3, glm4_moe, smollm3, exaone4, dbrx,
jetmoe, modernbert_decoder, phi3, apertus, aria text, beam, bitnet, cwm, emu3 text, flint, gemma4_unified,
granite_swa, hunyuan_v1_dense, hyperclovax, jais2, ministral3, mllama text, moshi text, vaultgemma, axk1,
glm4_moe_lite, mistral4, cohere2_moe, flex_olmo, granitemoe_swa, hunyuan_v1_moe, ernie4_5_moe, exaone_moe, hy_v3,
kolibri1, laguna, mellum, minimax_m2, minimax_m3_vl text, solar_open, afmoe, mimo_v2_flash, dots1, fuyu, minicpm3,
youtu, bert, roberta, roberta_prelayernorm, xlm_roberta, xlm_roberta_xl, camembert, ernie, eurobert,
data2vec_text, nomic_bert, electra, albert, modernbert, mobilebert, esm, xmod, splinter, vipllava, paligemma,
aya_vision, gemma3 vision, mistral3, qwen2_vl, qwen2_5_vl, qwen3_vl,
idefics3, smolvlm, internvl, llava, blip_2, instructblip,
roc_bert, gte, jina_embeddings_v3, bert-generation, blt_patcher, cosmos3_edge_text, gradium_phonon_tts,
granite4_vision_text, granite_docling_text, molmo2_text, muse_glimmer_text, muse_spark_text, openai_privacy_filter,
pocket_tts, qwen3_omni_moe_text, qwen3_vl_moe_text, embedding_gemma2, csm, kosmos_2_5_text_model,
kosmos_2_text_model, kyutai_speech_to_text, nemotron3_diarization_audio, mllama, ultrabert, esmc, glm4v_moe_text,
glm4v_text, glm_image_text, glm_ocr_text, paddleocr_vl_text, qwen2_5_omni_text, step3p5,
qwen3_omni_moe_talker_code_predictor,
hunyuan_vl_text, cohere_compass_text, deepseek_ocr2_text, diffusion_gemma_text, layoutlmv3, neomme, gemma4_text,
dia_encoder, voxtral_realtime_text
""".replace("\n", " ")
    .strip()
    .split(", ")
)
"""The families whose rows can be shared. The others are refused."""


DEFAULT = ("gpt_oss", "qwen2_5_vl", "bart")
ALWAYS = (
    "llama", "gpt2", "opt", "gpt_neox", "bloom", "mistral", "gemma3", "mixtral", "deepseek_v3", "jetmoe", "bert",
    "albert", "modernbert", "t5", "mamba", "zamba2", "llava", "mllama", "csm", "whisper", "qwen3_vl",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT else full if name in ALWAYS else pytest.mark.zoo)
        for name in FAMILIES
    ],
)
def test_families(world, name):
    found = world(2)(outcome, name)[0]
    if found != "missing":
        assert (found == "equal") == (name in EQUAL), found


@full
def test_features_of_images_between_blocks(world):
    """Two of four ranks share the tokens of the images, and the others have none of them."""
    assert world(4)(outcome, "qwen3_vl", 4) == ["equal"] * 4


@full
def test_names_are_families():
    assert {*EQUAL, *DEFAULT, *ALWAYS} <= set(FAMILIES)
