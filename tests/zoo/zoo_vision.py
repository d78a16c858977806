"""Encoders of images, videos and sound."""

from __future__ import annotations

import torch

from zoo_models import Batch, Family, images, only

VIT = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "num_labels": 2,
}  # fmt: skip
STAGES = {
    "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
    "hidden_sizes": [8, 16], "num_stages": 2, "num_labels": 2,
}  # fmt: skip
SOUND = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "num_adapter_layers": 1, "pad_token_id": 0, "ctc_zero_infinity": True,
}  # fmt: skip


def videos(generator: torch.Generator, number: int) -> Batch:
    pixels = torch.randn(2, 2, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(2, (2,), generator=generator)}


def waves(generator: torch.Generator, number: int) -> Batch:
    values = torch.randn(2, 400 + 80 * (number % 2), generator=generator)
    return {"input_values": values, "labels": torch.randint(1, 30, (2, 4), generator=generator)}


def spectrograms(generator: torch.Generator, number: int) -> Batch:
    values = torch.randn(2, 16, 16, generator=generator)
    return {"input_values": values, "labels": torch.randint(2, (2,), generator=generator)}


def _vit(name: str, model: str, note: str = "", batch=None, **config) -> Family:
    return Family(name, model, VIT | config, batch or images(), note)


def _stages(name: str, model: str, note: str = "", batch=None, **config) -> Family:
    return Family(name, f"{model}ForImageClassification", STAGES | config, batch or images(32), note)


def _sound(name: str, model: str, note: str = "", **config) -> Family:
    return Family(name, f"{model}ForCTC", SOUND | config, waves, note)


VISION = [
    *(_vit(name, model) for name, model in {
        "vit": "ViTForImageClassification", "deit": "DeiTForImageClassification",
        "dinov2": "Dinov2ForImageClassification", "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
        "ijepa": "IJepaForImageClassification", "vit_msn": "ViTMSNForImageClassification",
    }.items()),
    _vit("beit", "BeitForImageClassification", "relative positions", use_relative_position_bias=True,
        use_mask_token=False),
    _vit("dinov3_vit", "DINOv3ViTModel", batch=only(images(), "labels")),
    _vit("vit_mae", "ViTMAEForPreTraining", "two lists, random masks", batch=only(images(), "labels"),
        decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
        decoder_intermediate_size=40),
    _vit("yolos", "YolosModel", batch=only(images(), "labels"), image_size=[16, 16], num_detection_tokens=3),
    _vit("videomae", "VideoMAEForVideoClassification", batch=videos, num_frames=2, tubelet_size=2),
    _vit("vivit", "VivitForVideoClassification", batch=videos, num_frames=2, tubelet_size=[2, 8, 8]),
    _vit("timesformer", "TimesformerForVideoClassification", batch=videos, num_frames=2),
    _stages("focalnet", "FocalNet", focal_levels=[1, 1], focal_windows=[3, 3]),
    _stages("segformer", "Segformer", num_encoder_blocks=2, sr_ratios=[2, 1], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16),
    _stages("pvt", "Pvt", num_encoder_blocks=2, sequence_reduction_ratios=[2, 1], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2]),
    _stages("poolformer", "PoolFormer", num_encoder_blocks=2, patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
    _stages("resnet", "ResNet", "batch norm", embedding_size=8, layer_type="basic"),
    _stages("regnet", "RegNet", "batch norm", embedding_size=8, groups_width=8),
    _stages("mobilenet_v2", "MobileNetV2", "batch norm", depth_multiplier=0.25, min_depth=4, finegrained_output=False),
    _sound("wavlm", "WavLM", "weight norm", num_buckets=8, max_bucket_distance=16),
    _sound("data2vec_audio", "Data2VecAudio", conv_pos_kernel_size=3, num_conv_pos_embeddings=2),
    _sound("sew", "SEW", "weight norm", squeeze_factor=1),
    Family("audio_spectrogram_transformer", "ASTForAudioClassification",
        VIT | {"max_length": 16, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}, spectrograms),
    _stages("swin", "Swin"),
    _stages("swinv2", "Swinv2"),
    _stages("convnext", "ConvNext", "a stage a block"),
    _stages("convnextv2", "ConvNextV2", "a stage a block"),
    _sound("wav2vec2", "Wav2Vec2", "weight norm"),
    _sound("hubert", "Hubert", "weight norm"),
    _sound("unispeech_sat", "UniSpeechSat", "weight norm"),
    _sound("wav2vec2_conformer", "Wav2Vec2Conformer"),
]  # fmt: skip
