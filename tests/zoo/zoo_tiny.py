"""Families whose configuration is the default one, every size in it made small by its name."""

from __future__ import annotations

import re
from typing import Any

import torch

from zoo_models import VOCABULARY, Batch, Family, causal, images, only, tokens
from zoo_multimodal import contrasted
from zoo_other import scenes
from zoo_vision import waves

LAYERS = 2
SIZES: list[tuple[str, int]] = [
    (r"vocab_size", VOCABULARY),
    (r"(key_value|kv)_heads$|_groups$|n_group$", 2),
    (r"heads$|^n_head$|num_head$", 4),
    (r"experts_per_tok(en)?$|moe_top_?k$|^top_k$|topk$", 2),
    (r"topk_group", 1),
    (r"experts$", 4),
    (r"(?<!start_)layers$|^n_layer$|^depth$|_depth$|num_blocks$|_blocks$", LAYERS),
    (r"head_dim$|head_size$|d_head$|^d_kv$|rope_dim$", 8),
    (r"lora_rank$", 8),
    (r"intermediate_size|ffn_dim|ff_dim$|mlp_dim|^d_ff$|d_inner$|ffn_size|ffn_hidden|inner_dim$|feed_forward", 40),
    (r"hidden_size|d_model|n_embd|^dim$|_dim$|embed_dim|hidden_dim|embedding_size|embed_size|hidden_channels", 32),
    (r"width$", 32),
    (r"max_position|n_positions|max_seq|seq_length$|n_ctx$|max_(source|target)_", 64),
    (r"^patch_size$", 8),
    (r"image_size|input_size$", 32),
    (r"num_queries$", 5),
    (r"sliding_window$", 4),
    (r"chunk_size$", 4),
]  # fmt: skip
"""The first pattern that is found in a key gives the most that its value may be."""
DERIVED = {"transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "id2label"}
DERIVED |= {"label2id", "attribute_map", "base_model_tp_plan", "return_dict", "problem_type", "is_encoder_decoder"}


def tiny(config_class: Any, **given: Any) -> Any:
    """The default configuration with sizes as in SIZES; given: other values, dictionaries for nested ones."""
    small = _shrink(config_class().to_dict())
    return config_class(**_merge(small, given))


def _merge(small: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    merged = dict(small)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _shrink(values: dict[str, Any]) -> dict[str, Any]:
    small = {}
    for key, value in values.items():
        if key in DERIVED or key in ("out_features", "out_indices", "stage_names"):
            continue
        if key == "per_layer_config" and isinstance(value, dict):
            value = {layer: given for layer, given in value.items() if int(layer) < LAYERS}
        small[key] = _shrink(value) if isinstance(value, dict) else _shrink_one(key, value)
    lists = {key: value for key, value in values.items() if key.endswith("layer_types") and isinstance(value, list)}
    count = max([LAYERS, *(len({*value}) for value in lists.values())])
    for key, value in lists.items():
        small[key] = (list(dict.fromkeys(value)) * count)[:count]
        small["num_hidden_layers"] = count
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def _shrink_one(key: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if re.search(r"token_(id|index)$", key) and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(map(ord, key)) % 8
    if key == "mrope_section":
        return [1, 1, 2]
    limit = next((limit for pattern, limit in SIZES if re.search(pattern, key)), None)
    if limit is None:
        return value
    if isinstance(value, int):
        return min(value, limit)
    if isinstance(value, list | tuple) and value and all(isinstance(each, int) and each > 0 for each in value):
        return [min(each, limit) for each in value]
    return value


def texts(generator: torch.Generator, number: int) -> Batch:
    return only(causal, "labels")(generator, number)


def embedded(generator: torch.Generator, number: int) -> Batch:
    return {"inputs_embeds": torch.randn(2, 7 + 2 * (number % 2), 32, generator=generator)}


def hidden(generator: torch.Generator, number: int) -> Batch:
    return {"hidden_states": torch.randn(2, 7 + 2 * (number % 2), 32, generator=generator)}


def pictures(generator: torch.Generator, number: int) -> Batch:
    return only(images(32), "labels")(generator, number)


def paired(generator: torch.Generator, number: int) -> Batch:
    """Texts and images, for models without a loss of their own."""
    text = only(contrasted, "return_loss")(generator, number)
    return text | {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def sound(generator: torch.Generator, number: int) -> Batch:
    return only(waves, "labels")(generator, number)


def frames(width: int, mask: str = "attention_mask") -> Any:
    """Spectrograms (rows, frames, bands); the last of the first row are padded."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        length = 64 + 16 * (number % 2)
        seen = torch.ones(2, length, dtype=torch.long)
        seen[0, -8:] = 0
        return {"input_features": torch.randn(2, length, width, generator=generator), mask: seen}

    return batch


def bands(width: int, mask: str = "", length: int = 64) -> Any:
    """Spectrograms (rows, bands, frames)."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        features = {"input_features": torch.randn(2, width, length, generator=generator)}
        return features | ({mask: torch.ones(2, length, dtype=torch.long)} if mask else {})

    return batch


def heard(width: int) -> Any:
    """Spectrograms and the tokens that were said."""
    return lambda generator, number: (
        frames(width)(generator, number) | {"decoder_input_ids": tokens(generator, number, length=5)}
    )


def heard_waves(generator: torch.Generator, number: int) -> Batch:
    return {
        "input_values": torch.randn(2, 640, generator=generator),
        "decoder_input_ids": tokens(generator, number, length=5),
    }


def grids(key: str, *shape: int, rows: int = 0) -> Any:
    """Two images of 4 x 4 patches (in odd batches 4 x 8), one after another; shape: of a patch."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        wide = 4 + 4 * (number % 2)
        first = (rows,) if rows else ()
        patches = torch.randn(*first, 2 * 4 * wide, *shape, generator=generator)
        return {key: patches, "grid_thw": torch.tensor([[1, 4, wide]] * 2)}

    return batch


def tiny_family(name: str, model: str, batch: Any, note: str = "", **given: Any) -> Family:
    """A family of which only `given` is particular."""
    family = Family(name, model, {}, batch)
    return Family(name, model, lambda: tiny(family.model_class.config_class, **given), batch, note)


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
MROPED: dict[str, Any] = {"rope_parameters": MROPE}

TINY = [
    tiny_family("aimv2", "Aimv2Model", paired),
    tiny_family("owlv2", "Owlv2Model", paired),
    tiny_family("tipsv2", "Tipsv2Model", paired),
    *(tiny_family(name, model, texts) for name, model in {
        "aimv2_text_model": "Aimv2TextModel", "align_text_model": "AlignTextModel",
        "bert-generation": "BertGenerationEncoder", "blt_patcher": "BltPatcher",
        "bridgetower_text_model": "bridgetower.BridgeTowerTextModel", "clap_text_model": "ClapTextModel",
        "cosmos3_edge_text": "Cosmos3EdgeTextModel", "gradium_phonon_tts": "GradiumPhononTTSModel",
        "granite4_vision_text": "Granite4VisionTextModel", "granite_docling_text": "GraniteDoclingTextModel",
        "groupvit_text_model": "GroupViTTextModel", "markuplm": "MarkupLMModel", "molmo2_text": "Molmo2TextModel",
        "muse_glimmer_text": "MuseGlimmerTextModel", "muse_spark_text": "MuseSparkTextModel",
        "openai_privacy_filter": "OpenAIPrivacyFilterModel", "owlv2_text_model": "Owlv2TextModel",
        "pocket_tts": "PocketTTSModel", "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextModel",
        "qwen3_vl_moe_text": "Qwen3VLMoeTextModel", "sam3_lite_text_text_model": "Sam3LiteTextTextModel",
        "siglip2_text_model": "Siglip2TextModel", "tipsv2_text_model": "Tipsv2TextModel",
        "embedding_gemma2": "EmbeddingGemma2Model", "unlimited_ocr_text": "UnlimitedOcrTextModel",
        "videoprism_text_model": "VideoPrismTextModel", "xclip_text_model": "XCLIPTextModel",
    }.items()),
    *(tiny_family(name, model, pictures) for name, model in {
        "aimv2_vision_model": "Aimv2VisionModel", "dinov3_convnext": "DINOv3ConvNextModel", "glpn": "GLPNModel",
        "got_ocr2_vision": "got_ocr2.GotOcr2VisionEncoder", "idefics2_vision": "idefics2.Idefics2VisionTransformer",
        "instructblipvideo_vision_model": "InstructBlipVideoVisionModel", "janus_vision_model": "JanusVisionModel",
        "kosmos_2_vision_model": "kosmos2.Kosmos2VisionModel", "mlcd_vision_model": "MLCDVisionModel",
        "ovis2_vision": "ovis2.Ovis2VisionModel", "owlv2_vision_model": "Owlv2VisionModel",
        "phi4_multimodal_vision": "Phi4MultimodalVisionModel", "pp_lcnet": "PPLCNetForImageClassification",
        "qianfan_ocr_vision": "QianfanOCRVisionModel", "radio": "RadioModel", "sam3_vit_model": "Sam3ViTModel",
        "sam_hq_vision_model": "SamHQVisionModel", "step3p5_vision": "Step3p7VisionModel", "swin2sr": "Swin2SRModel",
        "pixio": "PixioModel", "tipsv2_vision_model": "Tipsv2VisionModel", "vitdet": "VitDetModel",
        "vitpose": "VitPoseForPoseEstimation",
    }.items()),
    *(tiny_family(name, model, images(32)) for name, model in {
        "bit": "BitForImageClassification", "data2vec-vision": "Data2VecVisionForImageClassification",
        "mobilenet_v1": "MobileNetV1ForImageClassification", "mobilevit": "MobileViTForImageClassification",
        "pvt_v2": "PvtV2ForImageClassification", "swiftformer": "SwiftFormerForImageClassification",
    }.items()),
    *(tiny_family(name, model, embedded) for name, model in {
        "csm": "CsmBackboneModel", "kosmos_2_5_text_model": "kosmos2_5.Kosmos2_5TextForCausalLM",
        "kosmos_2_text_model": "kosmos2.Kosmos2TextForCausalLM", "kyutai_speech_to_text": "KyutaiSpeechToTextModel",
        "lfm3": "Lfm3ForCausalLM", "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeTalkerCodePredictorModel",
        "nemotron3_5_transcribe_word_timestamp": "Nemotron3_5TranscribeWordTimestampModel",
        "nemotron3_diarization": "Nemotron3DiarizationModel",
        "nemotron3_diarization_audio": "Nemotron3DiarizationAudioModel",
    }.items()),
    *(tiny_family(name, model, causal) for name, model in {
        "csm_depth_decoder_model": "CsmDepthDecoderForCausalLM",
        "higgs_audio_v2": "HiggsAudioV2ForConditionalGeneration", "inkling_text": "InklingForCausalLM",
        "mllama": "MllamaForCausalLM", "ultrabert": "UltrabertForMaskedLM", "esmc": "EsmcForMaskedLM",
        "kimi_linear": "KimiLinearForCausalLM",
    }.items()),
    *(tiny_family(name, model, grids("pixel_values", 192)) for name, model in {
        "cosmos3_edge_vision": "Cosmos3EdgeVisionModel", "dots3_note_vision_encoder": "Dots3NoteVisionModel",
        "glm_image_vision": "GlmImageVisionModel", "hunyuan_vl_vision": "HunYuanVLVisionTransformer",
    }.items()),
    *(tiny_family(name, model, grids("hidden_states", 384)) for name, model in {
        "exaone4_5_vision": "Exaone4_5_VisionModel", "glm4v_moe_vision": "Glm4vMoeVisionModel",
        "glm4v_vision": "Glm4vVisionModel", "glm5_next_vision": "Glm5NextVisionModel",
        "glm_ocr_vision": "GlmOcrVisionModel", "qwen2_5_omni_vision_encoder": "qwen2_5_omni.Qwen2_5OmniVisionEncoder",
        "qwen3_5_moe_vision": "Qwen3_5MoeVisionModel", "qwen3_5_vision": "Qwen3_5VisionModel",
        "qwen4_exp_vision": "Qwen4ExpVisionModel",
    }.items()),
    tiny_family("glm4v_moe_text", "Glm4vMoeTextModel", texts, **MROPED),
    tiny_family("glm4v_text", "Glm4vTextModel", texts, **MROPED),
    tiny_family("glm_image_text", "GlmImageTextModel", texts, **MROPED),
    tiny_family("glm_ocr_text", "GlmOcrTextModel", texts, **MROPED),
    tiny_family("paddleocr_vl_text", "PaddleOCRTextModel", texts, **MROPED),
    tiny_family("qwen2_5_omni_text", "Qwen2_5OmniThinkerTextModel", texts, **MROPED),
    tiny_family("qwen2_5_omni_talker", "Qwen2_5OmniTalkerForConditionalGeneration", embedded, **MROPED),
    tiny_family("moonshine_streaming_encoder", "moonshine_streaming.MoonshineStreamingEncoder", sound),
    tiny_family("moonshine_streaming", "MoonshineStreamingForConditionalGeneration", heard_waves, num_attention_heads=2,
        num_key_value_heads=2),
    tiny_family("glmasr_encoder", "GlmAsrEncoder", bands(128)),
    tiny_family("voxtral_realtime_encoder", "VoxtralRealtimeEncoder", bands(128)),
    tiny_family("granite_speech_encoder", "GraniteSpeechCTCEncoder", hidden),
    tiny_family("granite_speech_plus_encoder", "GraniteSpeechPlusCTCEncoder", hidden),
    tiny_family("levit", "LevitForImageClassification", images(64)),
    tiny_family("mobilevitv2", "MobileViTV2ForImageClassification", scenes),
    tiny_family("pp_ocrv6_small_rec", "PPOCRV6SmallRecModel", scenes),
    tiny_family("pp_ocrv6_tiny_rec", "PPOCRV6TinyRecModel", scenes),
    tiny_family("parakeet_ctc", "ParakeetForCTC", frames(80)),
    tiny_family("parakeet_encoder", "ParakeetEncoder", frames(80)),
    tiny_family("audioflamingo3_encoder", "AudioFlamingo3Encoder", bands(128, "input_features_mask", 128)),
    tiny_family("canary", "CanaryForConditionalGeneration", heard(128)),
    tiny_family("cohere_asr", "CohereAsrForConditionalGeneration", heard(128)),
    tiny_family("ernie4_5_vl_moe_vision", "Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        grids("hidden_states", 192)),
    tiny_family("lasr_ctc", "LasrForCTC", frames(128)),
    tiny_family("lasr_encoder", "LasrEncoder", frames(128)),
    tiny_family("lfm3_vl_vision", "Lfm3VlVisionModel", grids("pixel_values", 384)),
    tiny_family("minimax_m3_vl_vision", "MiniMaxM3VLVisionModel", grids("pixel_values", 384)),
    tiny_family("paddleocr_vl_vision", "PaddleOCRVisionModel", grids("pixel_values", 3, 8, 8, rows=1)),
    tiny_family("parakeet_rnnt", "ParakeetForRNNT", heard(80)),
    tiny_family("qwen3_asr_encoder", "Qwen3ASREncoder", bands(128, "input_features_mask", 3000)),
]  # fmt: skip
