"""Detection, segmentation, time series, and models of several parts."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo_models import TEXT, Batch, Family, causal, images, masked, only, tokens, without
from zoo_multimodal import VISION, captions, contrasted
from zoo_seq2seq import T5, pairs
from zoo_vision import SOUND, STAGES, VIT, waves

DETR: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_queries": 5, "num_labels": 3,
    "dropout": 0.1,
}  # fmt: skip
SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 8, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20,
    "lags_sequence": [1, 2], "num_time_features": 1, "num_static_categorical_features": 1, "cardinality": [5],
    "embedding_dimension": [3],
}  # fmt: skip
QFORMER = without(TEXT, "head_dim") | {"encoder_hidden_size": 32, "cross_attention_frequency": 1}


def _detr(**config):
    """A configuration of a detector whose backbone is a small ResNet."""

    def make(cls: str):
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        )  # fmt: skip
        sizes = DETR | {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone}
        return getattr(transformers, f"{cls}Config")(**{**sizes, **config})

    return make


def scenes(generator: torch.Generator, number: int) -> Batch:
    """Images without labels, for which the matching of boxes would need scipy."""
    return {"pixel_values": torch.randn(2, 3, 64, 64 + 32 * (number % 2), generator=generator)}


def points(generator: torch.Generator, number: int) -> Batch:
    """Images with a point, a box or both for each of the masks."""
    batch = {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "input_points": 30 * torch.rand(2, 1, 2, 2, generator=generator),
        "input_labels": torch.tensor([[[1, 0]], [[1, -1]]]),
    }
    if number % 2:
        batch["input_boxes"] = 30 * torch.rand(2, 1, 4, generator=generator)
    return batch


def series(generator: torch.Generator, number: int) -> Batch:
    past, future = torch.rand(2, 10, generator=generator), torch.rand(2, 4, generator=generator)
    return {
        "past_values": past, "future_values": future, "past_observed_mask": torch.ones(2, 10),
        "past_time_features": torch.rand(2, 10, 1, generator=generator),
        "future_time_features": torch.rand(2, 4, 1, generator=generator),
        "static_categorical_features": torch.randint(5, (2, 1), generator=generator),
    }  # fmt: skip


def patches(generator: torch.Generator, number: int) -> Batch:
    return {
        "past_values": torch.rand(2, 16, 2, generator=generator),
        "future_values": torch.rand(2, 4, 2, generator=generator),
    }


def described(generator: torch.Generator, number: int) -> Batch:
    """An image in front of a caption, with the tokens that its queries replace."""
    ids = torch.cat([torch.full((2, 3), 60), tokens(generator, number)], 1)
    return {
        "input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": ids.masked_fill(ids == 60, -100),
    }  # fmt: skip


def instructed(generator: torch.Generator, number: int) -> Batch:
    return described(generator, number) | {"qformer_input_ids": tokens(generator, number)}


def _blip2(cls: str):
    return lambda: getattr(transformers, f"{cls}Config")(
        vision_config=VISION, qformer_config=QFORMER, num_query_tokens=3, image_token_index=60,
        text_config=TEXT | {"model_type": "opt", "ffn_dim": 40, "word_embed_proj_dim": 32},
    )  # fmt: skip


def _sam():
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 20}
    vision = {
        **size, "image_size": 32, "patch_size": 8, "output_channels": 16, "window_size": 2, "mlp_ratio": 2.0,
        "global_attn_indexes": [1], "num_pos_feats": 8,
    }  # fmt: skip
    prompt = {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
    mask = {**size, "iou_head_hidden_dim": 16}
    return transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)


def _flava():
    part = {**without(VIT, "num_labels"), "vocab_size": 61, "max_position_embeddings": 64, "pad_token_id": 0}
    return transformers.FlavaConfig(
        image_config=part, text_config=part, multimodal_config=part, projection_dim=16, hidden_size=32,
        image_codebook_config={"hidden_size": 8, "num_groups": 2, "num_blocks_per_group": 1, "vocab_size": 20},
    )  # fmt: skip


def _named(name: str, cls: str, config, batch, note: str = "") -> Family:
    return Family(name, cls, config, batch, note)


OTHER = [
    _named("detr", "DetrForObjectDetection", lambda: _detr()("Detr"), scenes, "a backbone of images"),
    _named("conditional_detr", "ConditionalDetrForObjectDetection", lambda: _detr()("ConditionalDetr"), scenes,
           "a backbone of images"),
    _named("deformable_detr", "DeformableDetrForObjectDetection",
           lambda: _detr(num_feature_levels=3, d_model=32)("DeformableDetr"), scenes, "a backbone of images"),
    _named("table_transformer", "TableTransformerForObjectDetection", lambda: _detr()("TableTransformer"), scenes),
    _named("dab_detr", "DabDetrForObjectDetection", lambda: _detr()("DabDetr"), scenes, "a backbone of images"),
    _named("sam", "SamModel", _sam, points, "reads embeddings that are not called"),
    _named("flava", "FlavaModel", _flava, only(contrasted, "return_loss"), "three encoders"),
    _named("blip_2", "Blip2ForConditionalGeneration", _blip2("Blip2"), described, "three lists"),
    _named("instructblip", "InstructBlipForConditionalGeneration", _blip2("InstructBlip"), instructed, "three lists"),
    _named("informer", "InformerForPrediction", SERIES, series, "a list that holds None"),
    _named("time_series_transformer", "TimeSeriesTransformerForPrediction", SERIES, series),
    _named("autoformer", "AutoformerForPrediction", SERIES | {"label_length": 4, "moving_average": 3}, series),
    _named("patchtst", "PatchTSTForPrediction", {
        "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
        "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 20}, patches),
    _named("patchtsmixer", "PatchTSMixerForPrediction", {
        "num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
        "d_model": 16, "num_layers": 2}, patches),
    _named("owlvit", "OwlViTModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}, contrasted),
    _named("clipseg", "CLIPSegModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}, contrasted),
    _named("siglip vision", "SiglipVisionModel", VISION, only(images(), "labels")),
    _named("hiera", "HieraForImageClassification", STAGES | {
        "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "depths": [1, 1],
        "num_heads": [1, 2], "embed_dim": 8, "query_stride": [2, 2], "num_query_pool": 1, "masked_unit_size": [4, 4],
        "masked_unit_attention": [True, False]}, images(32)),
    _named("cvt", "CvtForImageClassification", {
        "patch_sizes": [7, 3], "patch_stride": [4, 2], "patch_padding": [2, 1], "embed_dim": [8, 16],
        "num_heads": [1, 2], "depth": [1, 2], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0],
        "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
        "qkv_projection_method": ["dw_bn", "dw_bn"], "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
        "padding_q": [1, 1], "stride_q": [1, 1], "num_labels": 2}, images(32), "batch norm"),
    _named("dpt", "DPTForSemanticSegmentation", VIT | {
        "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5], "is_hybrid": False}, only(images(), "labels")),
    _named("unispeech", "UniSpeechForCTC", SOUND | {"num_ctc_classes": 32}, waves, "weight norm"),
    _named("sew_d", "SEWDForCTC", SOUND | {"squeeze_factor": 1, "position_buckets": 4, "max_position_embeddings": 64},
           waves, "relative positions"),
    _named("roc_bert", "RoCBertForMaskedLM", TEXT | {"pronunciation_vocab_size": 61, "shape_vocab_size": 61,
           "pronunciation_embed_dim": 8, "shape_embed_dim": 8}, masked),
    _named("gte", "GteForMaskedLM", TEXT, masked),
    _named("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM", TEXT, masked),
    _named("yoso", "YosoForMaskedLM", TEXT | {"num_hash": 2, "use_expectation": True}, masked),
    _named("mra", "MraForMaskedLM", TEXT | {"block_per_row": 1}, masked),
    _named("lilt", "LiltModel", TEXT | {"channel_shrink_ratio": 2, "hidden_size": 24, "num_attention_heads": 2},
           lambda g, n: without(causal(g, n), "labels")),
    _named("visual_bert", "VisualBertModel", TEXT | {"visual_embedding_dim": 32},
           lambda g, n: without(causal(g, n), "labels")),
    _named("t5gemma", "T5GemmaForConditionalGeneration",
           {"encoder": TEXT, "decoder": TEXT, "vocab_size": 61, "dropout_rate": 0.0}, pairs),
    _named("udop", "UdopForConditionalGeneration", TEXT | T5 | {"image_size": 16, "patch_size": 8},
           lambda g, n: pairs(g, n) | {"bbox": torch.rand(2, 7 + 2 * (n % 2), 4, generator=g)}),
    _named("bark", "BarkSemanticModel", {"input_vocab_size": 61, "output_vocab_size": 61, "hidden_size": 32,
           "num_layers": 2, "num_heads": 4, "block_size": 64},
           lambda g, n: without(causal(g, n), "labels"), "a decoder of sound"),
    _named("imagegpt", "ImageGPTForCausalImageModeling", {"vocab_size": 62, "n_embd": 32, "n_layer": 2, "n_head": 4,
           "n_positions": 64}, lambda g, n: without(causal(g, n), "attention_mask")),
    _named("vision_encoder_decoder", "VisionEncoderDecoderModel", lambda: (
        transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**VIT), transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61,
            n_positions=64, pad_token_id=0, decoder_start_token_id=1), pad_token_id=0, decoder_start_token_id=1)),
        only(captions, "input_ids", "attention_mask"), "two models in one"),
    _named("encoder_decoder", "EncoderDecoderModel", lambda: (
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.BertConfig(**TEXT), transformers.BertConfig(**TEXT), pad_token_id=0,
            decoder_start_token_id=1)), pairs, "two models in one"),
]  # fmt: skip
