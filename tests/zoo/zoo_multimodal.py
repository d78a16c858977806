"""Models of text and images together."""

from __future__ import annotations

from typing import Any

import torch

from zoo_models import IMAGE_TOKEN, TEXT, Batch, Family, causal, only, tokens

VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8, "projection_dim": 16, "num_channels": 3,
}  # fmt: skip
PATCHES = 4
"""16 × 16 pixels in patches of 8 × 8."""


def contrasted(generator: torch.Generator, number: int) -> Batch:
    """Two texts and two images; the model makes the contrastive loss."""
    ids = tokens(generator, number)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "return_loss": True}


def with_image(count: int = PATCHES, extra: dict[str, Any] | None = None, images: tuple[int, ...] = ()):
    """`count` image tokens in front of the text; pixels (2, *images, 3, 16, 16)."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        ids = tokens(generator, number)
        ids = torch.cat([torch.full((2, count), IMAGE_TOKEN), ids], 1)
        pixels = torch.randn(2, *images, 3, 16, 16, generator=generator)
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        more = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in (extra or {}).items()
        }
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values": pixels,
            "labels": labels,
        } | more

    return batch


def flat_patches(width: int, merge: int = 2, side: int = 4):
    """Qwen's images: (patches, pixels a patch) and their grid; a token for every `merge` × `merge` patches."""

    def batch(generator: torch.Generator, number: int) -> Batch:
        plain = with_image(side * side // merge**2)(generator, number)
        pixels = torch.randn(2 * side * side, width, generator=generator)
        types = (plain["input_ids"] == IMAGE_TOKEN).int()
        return plain | {
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, side, side]] * 2),
            "mm_token_type_ids": types,
        }

    return batch


def captions(generator: torch.Generator, number: int) -> Batch:
    return causal(generator, number) | {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}


def _two(name: str, model: str, note: str = "", **config) -> Family:
    towers = {"text_config": TEXT | {"projection_dim": 16}, "vision_config": VISION, "projection_dim": 16}
    return Family(name, model, towers | config, contrasted, note)


def _llava(
    name: str, model: str, note: str = "", batch=None, text="llama", vision="clip_vision_model", **config
) -> Family:
    towers = {
        "text_config": TEXT | {"model_type": text}, "vision_config": VISION | {"model_type": vision},
        "image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, "image_seq_length": PATCHES,
    }  # fmt: skip
    return Family(name, f"{model}ForConditionalGeneration", towers | config, batch or with_image(), note)


QWEN_VISION = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "intermediate_size": 40, "out_hidden_size": 32,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
QWEN_TEXT = TEXT | {"rope_scaling": ROPE, "rope_parameters": ROPE}


def _qwen(name: str, model: str, note: str = "", vision: dict[str, Any] | None = None) -> Family:
    config = {
        "text_config": QWEN_TEXT, "vision_config": QWEN_VISION | (vision or {}), "image_token_id": IMAGE_TOKEN,
        "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57, "tie_word_embeddings": False,
    }  # fmt: skip
    return Family(name, f"{model}ForConditionalGeneration", config, flat_patches(3 * 2 * 4 * 4), note)


MULTIMODAL = [
    *(_two(name, model, "two lists") for name, model in {
        "clip": "CLIPModel", "siglip": "SiglipModel", "chinese_clip": "ChineseCLIPModel", "altclip": "AltCLIPModel",
        "metaclip_2": "MetaClip2Model", "blip": "BlipModel",
    }.items()),
    _llava("vipllava", "VipLlava", "two lists", vision_feature_layers=[-1, -2]),
    _llava("paligemma", "PaliGemma", "two lists", text="gemma", vision="siglip_vision_model", projection_dim=32),
    _llava("aya_vision", "AyaVision", "two lists", text="cohere2", vision="siglip_vision_model", downsample_factor=2,
        batch=with_image(1)),
    _llava("gemma3 vision", "Gemma3", "two lists", text="gemma3_text", vision="siglip_vision_model",
        mm_tokens_per_image=PATCHES, batch=with_image(extra={"token_type_ids": None})),
    _llava("mistral3", "Mistral3", "two lists", text="mistral", vision="pixtral", spatial_merge_size=1,
        batch=with_image(extra={"image_sizes": torch.tensor([[16, 16]] * 2)})),
    _qwen("qwen2_vl", "Qwen2VL", "two lists", {"hidden_size": 32}),
    _qwen("qwen2_5_vl", "Qwen2_5_VL", "two lists", {"window_size": 8, "fullatt_block_indexes": [1]}),
    _qwen("qwen3_vl", "Qwen3VL", "two lists", {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}),
    Family("idefics", "IdeficsForVisionText2Text",
        TEXT | {"vision_config": {"embed_dim": 32, "image_size": 16, "patch_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 4, "intermediate_size": 40, "hidden_size": 32},
            "perceiver_config": {"use_resampler": False}, "additional_vocab_size": 0, "cross_layer_interval": 1,
            "use_resampler": False},
        lambda g, n: causal(g, n) | {"pixel_values": torch.randn(2, 1, 3, 16, 16, generator=g),
            "image_attention_mask": torch.ones(2, 7 + 2 * (n % 2), 1, dtype=torch.long)},
        "two lists"),
    _llava("idefics3", "Idefics3", "two lists", vision="idefics3_vision", scale_factor=2,
        batch=with_image(1, images=(1,))),
    _llava("smolvlm", "SmolVLM", "two lists", vision="smolvlm_vision", scale_factor=2,
        batch=with_image(1, images=(1,))),
    _llava("internvl", "InternVL", "two lists", text="qwen2", vision="internvl_vision", downsample_ratio=0.5,
        batch=with_image(1)),
    Family("git", "GitForCausalLM", TEXT | {"vision_config": VISION, "num_image_with_embedding": None}, captions,
        "two lists"),
    Family("vilt", "ViltModel", TEXT | VISION | {"max_image_length": -1}, only(captions, "labels")),
    Family("blip caption", "BlipForConditionalGeneration",
        {"text_config": TEXT | {"encoder_hidden_size": 32}, "vision_config": VISION, "image_text_hidden_size": 32},
        captions, "two lists"),
    _llava("llava", "Llava", "two lists"),
]  # fmt: skip
