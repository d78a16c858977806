"""Encoders of text."""

from __future__ import annotations

from zoo_models import TEXT, Family, classified, masked, only, without


def _family(name: str, model: str, note: str = "", batch=masked, **config) -> Family:
    return Family(name, model, TEXT | config, batch, note)


ENCODERS = [
    *(_family(name, model) for name, model in {
        "bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM",
        "roberta_prelayernorm": "RobertaPreLayerNormForMaskedLM", "xlm_roberta": "XLMRobertaForMaskedLM",
        "xlm_roberta_xl": "XLMRobertaXLForMaskedLM", "camembert": "CamembertForMaskedLM", "mpnet": "MPNetForMaskedLM",
        "ernie": "ErnieForMaskedLM", "eurobert": "EuroBertForMaskedLM", "layoutlm": "LayoutLMForMaskedLM",
        "megatron_bert": "MegatronBertForMaskedLM", "data2vec_text": "Data2VecTextForMaskedLM",
        "ibert": "IBertForMaskedLM", "nomic_bert": "NomicBertForMaskedLM",
    }.items()),
    _family("bert classifier", "BertForSequenceClassification", batch=classified),
    _family("electra", "ElectraForMaskedLM", embedding_size=16),
    _family("deberta", "DebertaForMaskedLM", "relative positions", relative_attention=True, pos_att_type="c2p|p2c",
        max_relative_positions=8, position_biased_input=False),
    _family("deberta_v2", "DebertaV2ForMaskedLM", "relative positions", relative_attention=True, pos_att_type="c2p|p2c",
        position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"),
    _family("distilbert", "DistilBertForMaskedLM", dim=32, n_layers=2, n_heads=4, hidden_dim=40),
    _family("albert", "AlbertForMaskedLM", "one layer, called three times", num_hidden_layers=3, embedding_size=16),
    _family("albert in groups", "AlbertForMaskedLM", "layers shared by position", num_hidden_layers=4,
        num_hidden_groups=2, inner_group_num=2, embedding_size=16),
    _family("modernbert", "ModernBertForMaskedLM", local_attention=4, global_attn_every_n_layers=2),
    _family("longformer", "LongformerForMaskedLM", attention_window=4),
    _family("big_bird", "BigBirdForMaskedLM", attention_type="original_full"),
    Family("funnel", "FunnelForMaskedLM",
        without(TEXT, "num_hidden_layers") | {"d_model": 32, "d_inner": 40, "n_head": 4, "d_head": 8,
            "block_sizes": [1, 1], "num_decoder_layers": 1},
        masked, "lists in a list"),
    _family("squeezebert", "SqueezeBertForMaskedLM", embedding_size=32),
    _family("mobilebert", "MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=16),
    _family("nystromformer", "NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=4),
    _family("roformer", "RoFormerForMaskedLM", embedding_size=32),
    _family("rembert", "RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=24),
    _family("convbert", "ConvBertForMaskedLM", embedding_size=16, head_ratio=2),
    _family("canine", "CanineForSequenceClassification", batch=classified, local_transformer_stride=4,
        num_hash_buckets=16),
    _family("esm", "EsmForMaskedLM", position_embedding_type="rotary"),
    _family("fnet", "FNetForMaskedLM", batch=only(masked, "attention_mask")),
    _family("flaubert", "FlaubertWithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4, n_langs=1),
    _family("xlm", "XLMWithLMHeadModel", emb_dim=32, n_layers=2, n_heads=4, n_langs=1),
    _family("xmod", "XmodForMaskedLM", default_language="en_XX", languages=["en_XX", "de_DE"]),
    _family("luke", "LukeForMaskedLM", entity_vocab_size=8, entity_emb_size=16),
    _family("tapas", "TapasForMaskedLM", type_vocab_sizes=[3, 8, 8, 2, 8, 8, 2]),
    _family("splinter", "SplinterModel", batch=only(masked, "labels")),
]  # fmt: skip
