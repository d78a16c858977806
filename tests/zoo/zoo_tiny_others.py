"""Families with the default configuration made small, and inputs of their own."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo_decoders import EXPERTS, MLA
from zoo_later_decoders import LINEAR
from zoo_models import TEXT, Batch, Family, causal, images, masked, tokens
from zoo_other import DETR, points
from zoo_seq2seq import pairs
from zoo_tiny import MROPED, bands, frames, grids, hidden, paired, pictures, texts, tiny_family
from zoo_vision import SOUND, STAGES

FULL = {"rope_type": "default", "rope_theta": 1e4}
SPEECH = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "vocab_size": 61, "decoder_start_token_id": 2,
    "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def boxed(generator: torch.Generator, number: int) -> Batch:
    """Tokens with a box each."""
    boxes = torch.randint(1, 20, (2, 7 + 2 * (number % 2), 4), generator=generator)
    return texts(generator, number) | {"bbox": boxes}


def flattened(generator: torch.Generator, number: int) -> Batch:
    """Two images of 2 x 2 patches, each with its row and column."""
    places = torch.tensor([[1, 1], [1, 2], [2, 1], [2, 2]]).float().expand(2, 4, 2)
    return {"flattened_patches": torch.cat([places, _random(generator, 2, 4, 768)], 2)}


def patches(generator: torch.Generator, number: int) -> Batch:
    """Two images of 2 x 2 patches with a mask."""
    return {
        "pixel_values": _random(generator, 2, 4, 192), "spatial_shapes": torch.tensor([[2, 2]] * 2),
        "pixel_attention_mask": torch.ones(2, 4, dtype=torch.long),
    }  # fmt: skip


def clips(generator: torch.Generator, number: int) -> Batch:
    return {"pixel_values_videos": _random(generator, 2, 2, 3, 32, 32)}


def codes(generator: torch.Generator, number: int) -> Batch:
    return {"input_values": _random(generator, 2, 1, 640)}


def decisions(generator: torch.Generator, number: int) -> Batch:
    sizes = {"states": 17, "actions": 4, "rewards": 1, "returns_to_go": 1}
    batch = {key: _random(generator, 2, 5, size) for key, size in sizes.items()}
    return batch | {"timesteps": torch.arange(5).expand(2, 5), "attention_mask": torch.ones(2, 5)}


def forecast(generator: torch.Generator, number: int) -> Batch:
    past = [torch.rand(64, generator=generator) for _ in range(2)]
    return {"past_values": past, "future_values": torch.rand(2, 128, generator=generator)}


def spectrum(generator: torch.Generator, number: int) -> Batch:
    return {"spectrogram": _random(generator, 2, 20, 32)}


def large(generator: torch.Generator, number: int) -> Batch:
    """Images of which four stages leave more than one pixel."""
    return {"pixel_values": _random(generator, 2, 3, 64, 64)}


def huge(generator: torch.Generator, number: int) -> Batch:
    """Images whose batch statistics are of enough pixels in the last stage."""
    return {"pixel_values": _random(generator, 4, 3, 128, 128)}


def spoken(generator: torch.Generator, number: int) -> Batch:
    target = tokens(generator, number, length=5)
    return {"input_values": _random(generator, 2, 3200), "decoder_input_ids": target}


RESNET = {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "layer_type": "basic"}
LAST_STAGES = ["stage2", "stage3", "stage4"]
EFFICIENT = {
    "num_block_repeats": [1, 1], "in_channels": [32, 8], "out_channels": [8, 16], "kernel_sizes": [3, 3],
    "strides": [1, 2], "expand_ratios": [1, 2], "depthwise_padding": [], "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
}  # fmt: skip
VOCODER = {"upsample_initial_channel": 32, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8]}


def _resnet(*stages: str) -> Any:
    return transformers.ResNetConfig(**RESNET, out_features=list(stages))


def _rt_detr(name: str):
    def make():
        return getattr(transformers, f"{name}Config")(
            backbone_config=transformers.RTDetrResNetConfig(**RESNET, out_features=LAST_STAGES),
            encoder_in_channels=[8, 16, 16], encoder_hidden_dim=16, d_model=16, decoder_in_channels=[16, 16, 16],
            encoder_ffn_dim=20, decoder_ffn_dim=20, encoder_attention_heads=2, decoder_attention_heads=2,
            num_queries=5, num_denoising=0, decoder_layers=2, encoder_layers=1, num_labels=3,
        )  # fmt: skip

    return make


def _sam_hq():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 20}
    vision = {
        **size, "image_size": 32, "patch_size": 8, "output_channels": 16, "window_size": 2, "mlp_ratio": 2.0,
        "global_attn_indexes": [1], "num_pos_feats": 8,
    }  # fmt: skip
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    mask = {**size, "iou_head_hidden_dim": 16, "vit_dim": 16}
    return transformers.SamHQConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)


def _upernet():
    backbone = _resnet("stage1", *LAST_STAGES)
    return transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=16, pool_scales=[1, 2], use_auxiliary_head=False, num_labels=3
    )


def _maskformer():
    return transformers.MaskFormerConfig(
        backbone_config=_resnet("stage1", *LAST_STAGES), decoder_config=transformers.DetrConfig(**DETR),
        fpn_feature_size=32, mask_feature_size=32,
    )  # fmt: skip


def _mask2former():
    return transformers.Mask2FormerConfig(
        backbone_config=_resnet("stage1", *LAST_STAGES), feature_size=32, mask_feature_size=32, hidden_dim=32,
        encoder_feedforward_dim=20, encoder_layers=2, decoder_layers=3, num_attention_heads=2, dim_feedforward=20,
        num_queries=5,
    )  # fmt: skip


TINY_OTHERS = [
    tiny_family("bridgetower", "BridgeTowerModel", paired, vision_config={"hidden_size": 64}, hidden_size=64,
        text_config={"hidden_size": 64}),
    Family("donut-swin", "DonutSwinForImageClassification", STAGES, images(32)),
    Family("maskformer-swin", "MaskFormerSwinModel", STAGES, pictures),
    tiny_family("step3p5", "Step3p7TextModel", texts, sliding_window=4),
    tiny_family("siglip2_vision_model", "Siglip2VisionModel", patches, num_patches=16),
    tiny_family("pix2struct_vision_model", "Pix2StructVisionModel", flattened, patch_size=16,
        patch_embed_hidden_size=768),
    tiny_family("kosmos_2_5_vision_model", "kosmos2_5.Kosmos2_5VisionModel", flattened, patch_size=16,
        patch_embed_hidden_size=768),
    tiny_family("lxmert", "LxmertModel",
        lambda g, n: (texts(g, n) | {"visual_feats": _random(g, 2, 5, 16),
            "visual_pos": torch.rand(2, 5, 4, generator=g)}),
        visual_feat_dim=16, num_attention_heads=4),
    Family("lfm2_moe", "Lfm2MoeForCausalLM",
        TEXT | EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, causal),
    tiny_family("hgnet_v2", "HGNetV2ForImageClassification", images(32), stem_channels=[3, 8, 8],
        stage_in_channels=[8, 8, 16, 16], stage_mid_channels=[8, 8, 8, 8], stage_out_channels=[8, 16, 16, 16],
        stage_num_blocks=[1, 1, 1, 1], stage_numb_of_layers=[2, 2, 2, 2], embedding_size=8,
        hidden_sizes=[8, 16, 16, 16]),
    tiny_family("textnet", "TextNetForImageClassification", images(32), stem_out_channels=32),
    tiny_family("sam2_hiera_det_model", "Sam2HieraDetModel", pictures, num_attention_heads=1,
        embed_dim_per_stage=[32, 64, 128, 256], num_attention_heads_per_stage=[1, 2, 4, 8], hidden_size=32),
    tiny_family("seggpt", "SegGptModel",
        lambda g, n: {"pixel_values": _random(g, 2, 3, 32, 32), "prompt_pixel_values": _random(g, 2, 3, 32, 32),
            "prompt_masks": _random(g, 2, 3, 32, 32)},
        image_size=[64, 32]),
    tiny_family("llama4_vision_model", "Llama4VisionModel", pictures, intermediate_size=128, projector_input_dim=32,
        projector_output_dim=32, vision_output_dim=32),
    tiny_family("mllama_vision_model", "MllamaVisionModel",
        lambda g, n: {"pixel_values": _random(g, 2, 1, 4, 3, 32, 32),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 4, dtype=torch.long)},
        intermediate_layers_indices=[0, 1], supported_aspect_ratios=[[1, 1], [1, 2], [2, 1], [2, 2]], max_num_tiles=4),
    tiny_family("xclip_vision_model", "XCLIPVisionModel", lambda g, n: {"pixel_values": _random(g, 4, 3, 32, 32)},
        num_frames=2),
    tiny_family("xclip", "XCLIPModel",
        lambda g, n: {"input_ids": tokens(g, n), "pixel_values": _random(g, 2, 2, 3, 32, 32)},
        vision_config={"num_frames": 2}, prompt_alpha=1.0),  # with the default, the first gradient is 250
    tiny_family("videoprism_vision_model", "VideoPrismVisionModel", clips, image_size=32, num_frames=2,
        tubelet_size=[1, 8, 8]),
    tiny_family("groupvit_vision_model", "GroupViTVisionModel", pictures, num_group_tokens=[8, 4, 0],
        num_output_groups=[8, 4, 0], depths=[1, 1, 1]),
    Family("bros", "BrosModel", TEXT | {"hidden_size": 128}, boxed),
    tiny_family("gemma3n_text", "Gemma3nForCausalLM", causal, intermediate_size=40, activation_sparsity_pattern=None,
        num_kv_shared_layers=0),
    Family("hunyuan_vl_text", "HunYuanVLTextModel", TEXT | MROPED, texts),
    Family("cohere_compass_text", "CohereCompassForCausalLM",
        TEXT | {"rope_parameters": {"full_attention": FULL, "sliding_attention": FULL}}, causal),
    Family("deepseek_ocr2_text", "DeepseekOcr2TextModel", TEXT | MLA | {"mlp_layer_types": ["dense", "sparse"]}, texts),
    Family("bailing_hybrid", "BailingHybridForCausalLM",
        TEXT | MLA | {"layer_group_size": 2, "layer_types": ["linear_attention", "full_attention"]}, causal),
    Family("diffusion_gemma_text", "diffusion_gemma.DiffusionGemmaEncoderTextModel",
        TEXT | EXPERTS | {"top_k_experts": 2}, texts),
    tiny_family("clvp_encoder", "ClvpEncoder", texts, projection_dim=32, use_rotary_embedding=False),
    tiny_family("instructblipvideo_qformer", "instructblipvideo.InstructBlipVideoQFormerModel",
        lambda g, n: (texts(g, n) | {"query_embeds": _random(g, 2, 3, 32),
            "encoder_hidden_states": _random(g, 2, 4, 32), "attention_mask": None}),
        cross_attention_frequency=1, encoder_hidden_size=32),
    tiny_family("perceiver", "PerceiverForMaskedLM",
        lambda g, n: {"inputs": torch.randint(3, 60, (2, 16), generator=g)}, d_latents=32, num_latents=4,
        num_self_attends_per_block=2, num_self_attention_heads=4, num_cross_attention_heads=4,
        max_position_embeddings=16, d_model=32, qk_channels=32, v_channels=32),
    Family("layoutlmv3", "LayoutLMv3Model",
        TEXT | {"visual_embed": False, "coordinate_size": 4, "shape_size": 8, "has_relative_attention_bias": False,
            "has_spatial_attention_bias": False},
        boxed),
    Family("speecht5", "SpeechT5ForSpeechToText", TEXT | SOUND | SPEECH,
        lambda g, n: {"input_values": _random(g, 2, 400), "labels": tokens(g, n, length=5)}),
    Family("mistral_large4_text", "MistralLarge4TextModel", TEXT | MLA, texts, "an indexer without gradients"),
    tiny_family("qwen3_omni_moe_vision_encoder", "qwen3_omni_moe.Qwen3OmniMoeVisionEncoder",
        grids("hidden_states", 384), deepstack_visual_indexes=[0, 1]),
    tiny_family("qwen3_vl_moe_vision", "Qwen3VLMoeVisionModel", grids("hidden_states", 384),
        deepstack_visual_indexes=[0, 1]),
    tiny_family("cohere_compass_vision", "CohereCompassVisionModel", grids("hidden_states", 384),
        deepstack_visual_indexes=[0, 1]),
    tiny_family("vjepa2", "VJEPA2Model", clips, crop_size=32, frames_per_clip=2),
    tiny_family("encodec", "EncodecModel", codes, num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=8,
        num_lstm_layers=1, upsampling_ratios=[4, 2]),
    tiny_family("dac", "DacModel", codes, encoder_hidden_size=8, decoder_hidden_size=32, downsampling_ratios=[2, 4],
        upsampling_ratios=[4, 2], n_codebooks=2, codebook_size=8, codebook_dim=4, hidden_size=32),
    tiny_family("mimi", "MimiModel", codes, num_filters=4, upsampling_ratios=[4, 2], codebook_size=8, codebook_dim=16,
        vector_quantization_hidden_dimension=16, num_quantizers=4, num_semantic_quantizers=1, upsample_groups=2),
    Family("neomme", "NeoMMEForMaskedLM", TEXT | {"hidden_size": 64, "head_dim": 16}, masked, "texts only"),
    tiny_family("chameleon", "ChameleonForConditionalGeneration", causal, vocabulary_map={"<image>": 60},
        vq_config={"base_channels": 32, "num_res_blocks": 1, "channel_multiplier": [1, 1]}),
    tiny_family("pix2struct_text_model", "Pix2StructTextModel", causal, initializer_range=0.02),
    tiny_family("granite_speech5_ctc", "GraniteSpeech5ForCTC", frames(320), encoder_config={"context_size": 16}),
    tiny_family("granite_speech5_encoder", "GraniteSpeech5Encoder", frames(320), context_size=16),
    Family("glm5_next_text", "Glm5NextTextModel",
        TEXT | MLA | LINEAR | {"index_topk": 4, "index_kpool": 2, "index_head_dim": 8, "index_n_heads": 2,
            "qk_rope_head_dim": 0, "linear_num_heads": 2, "linear_head_dim": 8},
        texts),
    Family("sam_hq", "SamHQModel", _sam_hq, points),
    Family("rt_detr", "RTDetrModel", _rt_detr("RTDetr"), huge),
    Family("rt_detr_v2", "RTDetrV2Model", _rt_detr("RTDetrV2"), huge),
    Family("upernet", "UperNetForSemanticSegmentation", _upernet, large),
    Family("maskformer", "MaskFormerModel", _maskformer, large),
    Family("mask2former", "Mask2FormerModel", _mask2former, large),
    tiny_family("speecht5_hifigan", "SpeechT5HifiGan", spectrum, **VOCODER),
    tiny_family("fastspeech2_conformer_hifigan", "FastSpeech2ConformerHifiGan", spectrum, **VOCODER),
    tiny_family("florence_vision", "Florence2VisionBackbone", lambda g, n: {"hidden_states": _random(g, 2, 3, 32, 32)},
        embed_dim=[8, 16], num_heads=[2, 2], num_groups=[2, 2], depths=[1, 1], patch_size=[7, 3], patch_stride=[4, 2],
        patch_padding=[3, 1], patch_prenorm=[False, True], window_size=4),
    tiny_family("seamless_m4t", "SeamlessM4TForTextToText", pairs, note="from text to text"),
    tiny_family("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText", pairs, note="from text to text"),
    tiny_family("pop2piano", "Pop2PianoForConditionalGeneration",
        lambda g, n: {"input_features": _random(g, 2, 7, 32), "labels": tokens(g, n, length=5)},
        decoder_start_token_id=0),
    tiny_family("efficientnet", "EfficientNetForImageClassification", images(32), hidden_dim=1280, **EFFICIENT),
    tiny_family("align_vision_model", "AlignVisionModel", pictures, hidden_dim=16, **EFFICIENT),
    tiny_family("depth_anything", "DepthAnythingForDepthEstimation", pictures,
        backbone_config={"out_features": ["stage1", "stage2"]}, neck_hidden_sizes=[8, 8], reassemble_factors=[4, 2],
        fusion_hidden_size=8, depth_estimation_type="metric", max_depth=2),
    tiny_family("wav2vec2-bert", "Wav2Vec2BertForCTC",
        lambda g, n: frames(32)(g, n) | {"labels": tokens(g, n, length=4)}, vocab_size=61, pad_token_id=0,
        apply_spec_augment=False, layerdrop=0.0),
    tiny_family("muse_spark_audio", "MuseSparkAudioModel",
        lambda g, n: {"input_values": _random(g, 2, 2 * transformers.MuseSparkAudioConfig().samples_per_token)},
        num_hidden_layers=4),
    tiny_family("moonshine", "MoonshineForConditionalGeneration", spoken, encoder_num_key_value_heads=4,
        decoder_num_key_value_heads=4),
    tiny_family("rf_detr", "RfDetrForObjectDetection", pictures, "returns its queries' parameters"),
    tiny_family("gemma4_text", "Gemma4ForCausalLM", causal),
    tiny_family("gemma4_audio", "Gemma4AudioModel", frames(128)),
    tiny_family("gemma3n_audio", "Gemma3nAudioEncoder",
        lambda g, n: {"audio_mel": _random(g, 2, 64, 128), "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool)}),
    tiny_family("qwen2_audio_encoder", "Qwen2AudioEncoder", bands(128, length=128)),
    tiny_family("voxtral_encoder", "VoxtralEncoder", bands(128, length=128)),
    tiny_family("qwen2_5_omni_audio_encoder", "qwen2_5_omni.Qwen2_5OmniAudioEncoder",
        lambda g, n: {"input_features": _random(g, 128, 64), "feature_lens": torch.tensor([32, 32]),
            "aftercnn_lens": torch.tensor([16, 16])}),
    tiny_family("timesfm", "TimesFmModelForPrediction", forecast),
    tiny_family("timesfm2_5", "TimesFm2_5ModelForPrediction", forecast),
    tiny_family("video_llama_3_vision", "VideoLlama3VisionModel",
        lambda g, n: {"pixel_values": _random(g, 32, 192), "grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "merge_sizes": torch.tensor([2, 2])}),
    tiny_family("gemma4_vision", "Gemma4VisionModel",
        lambda g, n: {"pixel_values": _random(g, 2, 9, 192),
            "pixel_position_ids": torch.tensor([[[x, y] for y in range(3) for x in range(3)]] * 2)}),
    tiny_family("qwen3_omni_moe_audio_encoder", "qwen3_omni_moe.Qwen3OmniMoeAudioEncoder",
        lambda g, n: {"input_features": _random(g, 128, 200), "feature_lens": torch.tensor([100, 100])}),
    tiny_family("idefics2_perceiver", "idefics2.Idefics2PerceiverResampler",
        lambda g, n: {"context": _random(g, 2, 7, 32), "attention_mask": torch.ones(2, 7, dtype=torch.long)}),
    tiny_family("canary_decoder", "canary.CanaryDecoder",
        lambda g, n: texts(g, n) | {"encoder_hidden_states": _random(g, 2, 6, 32)}),
    tiny_family("pp_formulanet_text", "pp_formulanet.PPFormulaNetTextModel",
        lambda g, n: texts(g, n) | {"encoder_hidden_states": _random(g, 2, 6, 32)}),
    tiny_family("dia_decoder", "dia.DiaDecoder",
        lambda g, n: {"input_ids": torch.randint(3, 60, (2, 7, 9), generator=g),
            "encoder_hidden_states": _random(g, 2, 6, 32)}),
    tiny_family("sam3_detr_encoder", "sam3.Sam3DetrEncoder",
        lambda g, n: {"vision_features": [_random(g, 2, 32, 4, 4)], "text_features": _random(g, 2, 5, 32),
            "vision_pos_embeds": [_random(g, 2, 32, 4, 4)]}),
    tiny_family("decision_transformer", "DecisionTransformerModel", decisions),
    tiny_family("minicpmv4_6_vision", "minicpmv4_6.MiniCPMV4_6VisionModel",
        lambda g, n: {"pixel_values": _random(g, 1, 3, 8, 256), "target_sizes": torch.tensor([[4, 4]] * 2)}),
    tiny_family("minicpmv4_7_vision", "MiniCPMV4_7VisionModel",
        lambda g, n: {"pixel_values": _random(g, 1, 3, 8, 256), "target_sizes": torch.tensor([[4, 4]] * 2)}),
    tiny_family("minicpm_ocr_vision", "MiniCPMOcrVisionModel",
        lambda g, n: {"pixel_values": _random(g, 1, 3, 8, 256), "target_sizes": torch.tensor([[4, 4]] * 2)}),
    tiny_family("moss_transcribe_diarize_audio", "MossTranscribeDiarizeAudioModel", bands(80, length=128)),
    tiny_family("sam3_vision_model", "Sam3VisionModel", pictures),
    tiny_family("granite_docling_vision", "GraniteDoclingVisionModel", pictures),
    tiny_family("slanext_vision", "slanext.SLANeXtVisionEncoder", pictures),
    tiny_family("musicgen_decoder", "MusicgenForCausalLM",
        lambda g, n: {"input_ids": torch.randint(3, 60, (2 * 4, 7), generator=g)}),
    tiny_family("musicgen_melody_decoder", "MusicgenMelodyForCausalLM",
        lambda g, n: {"input_ids": torch.randint(3, 60, (2 * 4, 7), generator=g)}),
    tiny_family("dia_encoder", "dia.DiaEncoder", texts),
    tiny_family("voxtral_realtime_text", "voxtral_realtime.VoxtralRealtimeTextModel",
        lambda g, n: texts(g, n) | {"t_cond": _random(g, 1, 1, 32)}),
    tiny_family("muse_glimmer_vision", "MuseGlimmerVisionModel", grids("pixel_values", 384)),
    tiny_family("muse_spark_vision", "MuseSparkVisionModel", grids("pixel_values", 384)),
    tiny_family("rf_detr_dinov2", "rf_detr.RfDetrDinov2Encoder", hidden),
]  # fmt: skip
