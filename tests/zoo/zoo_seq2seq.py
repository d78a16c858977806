"""Encoder-decoders of text and of speech."""

from __future__ import annotations

import torch

from zoo_models import TEXT, Batch, Family, causal, tokens, without

BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
PROPHETNET = {
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "ngram": 2, "num_buckets": 8, "relative_max_distance": 16,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


def pairs(generator: torch.Generator, number: int) -> Batch:
    """Source and target of different lengths."""
    return causal(generator, number) | {"labels": tokens(generator, number, length=5)}


def equal_pairs(generator: torch.Generator, number: int) -> Batch:
    """Source and target of one length, the target's input given."""
    target = tokens(generator, number)
    return causal(generator, number) | {"decoder_input_ids": target, "labels": target}


def speech(generator: torch.Generator, number: int) -> Batch:
    """Spectrograms of 8 bands, 20 frames for 10 positions."""
    features = torch.randn(2, 8, 20, generator=generator)
    return {"input_features": features, "labels": tokens(generator, number, length=5)}


def speech_frames_first(generator: torch.Generator, number: int) -> Batch:
    batch = speech(generator, number)
    return batch | {"input_features": batch["input_features"].transpose(1, 2).contiguous()}


def _bart(name: str, model: str, note: str = "", batch=pairs, **config) -> Family:
    return Family(name, model, TEXT | BART | config, batch, note)


def _t5(name: str, model: str, note: str = "", **config) -> Family:
    return Family(name, f"{model}ForConditionalGeneration", TEXT | T5 | config, pairs, note)


SEQ2SEQ = [
    *(_bart(name, model) for name, model in {
        "bart": "BartForConditionalGeneration", "mbart": "MBartForConditionalGeneration",
        "pegasus": "PegasusForConditionalGeneration", "blenderbot": "BlenderbotForConditionalGeneration",
        "blenderbot_small": "BlenderbotSmallForConditionalGeneration", "m2m_100": "M2M100ForConditionalGeneration",
        "marian": "MarianMTModel", "plbart": "PLBartForConditionalGeneration", "mvp": "MvpForConditionalGeneration",
    }.items()),
    _t5("t5", "T5"),
    _t5("t5 v1.1", "T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _t5("longt5", "LongT5", local_radius=3, global_block_size=4),
    _t5("switch_transformers", "SwitchTransformers", "router loss", num_experts=4, num_decoder_layers=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8, router_z_loss_coef=0.001),
    _bart("pegasus_x", "PegasusXForConditionalGeneration", block_size=4, num_global_tokens=2),
    _bart("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", attention_type="original_full"),
    _bart("led", "LEDForConditionalGeneration", attention_window=4, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64),
    _bart("fsmt", "FSMTForConditionalGeneration", batch=equal_pairs, src_vocab_size=61, tgt_vocab_size=61,
        langs=["en", "de"]),
    _bart("nllb_moe", "NllbMoeForConditionalGeneration", "experts", num_experts=4, encoder_sparse_step=2,
        decoder_sparse_step=2, expert_capacity=8, moe_eval_capacity_token_fraction=-1.0),
    Family("prophetnet", "ProphetNetForConditionalGeneration",
        without(TEXT | BART, "num_hidden_layers", "encoder_layers", "decoder_layers") | PROPHETNET, pairs),
    _bart("whisper", "WhisperForConditionalGeneration", "speech", batch=speech, num_mel_bins=8, max_source_positions=10,
        max_target_positions=64),
    _bart("speech_to_text", "Speech2TextForConditionalGeneration", "speech", batch=speech_frames_first,
        input_feat_per_channel=8, input_channels=1, conv_channels=16, num_conv_layers=2, conv_kernel_sizes=[3, 3],
        max_source_positions=64, max_target_positions=64),
    _t5("mt5", "MT5"),
    _t5("umt5", "UMT5"),
]  # fmt: skip
