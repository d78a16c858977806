"""What cannot share rows is refused, with the reason, before anything is wrong."""

import copy

import pytest
import torch
import transformers
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import hf_bmtrain as bmt
from ranks import on_ranks
from sequence_models import MODELS, VOCABULARY, batch_of, causal


def tiny(name, **given):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **given)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def qwen3_next():
    return causal(
        "Qwen3Next", linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )()  # fmt: skip


def t5():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


REFUSED = {
    "mamba": (lambda: tiny("Mamba", state_size=4), "state"),
    "qwen3-next": (qwen3_next, "linear_attention"),
    "bloom": (lambda: tiny("Bloom", n_head=4), "attention interface"),
    "t5": (t5, "encoder-decoder"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_models(name):
    build, reason = REFUSED[name]
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s){type(model).__name__}.*{reason}"):
        bmt.auto_wrap(model, sequence_parallel=2)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@on_ranks(2)
def test_what_ranks_choose_alone():
    """A block that only one rank runs, or repeats, would exchange tokens with another block of the other rank."""
    model = tiny("OPT", num_attention_heads=4, ffn_dim=40, word_embed_proj_dim=32, layerdrop=0.1)
    with pytest.raises(ValueError, match="OPTDecoder drops layers at random"):
        bmt.auto_wrap(model, sequence_parallel=2)


@on_ranks(3)
def test_number_of_ranks():
    with pytest.raises(ValueError, match="sequence_parallel=2 must divide the number of ranks, 3"):
        bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)


@on_ranks(2)
def test_calls():
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    batch = batch_of("plain", 0)
    with pytest.raises(NotImplementedError, match="generate"):
        model.generate(batch["input_ids"])
    for given in ({"logits_to_keep": 1}, {"output_attentions": True}, {"past_key_values": transformers.DynamicCache()}):
        with pytest.raises(NotImplementedError, match=next(iter(given))):
            model(**batch, **given)
    with pytest.raises(NotImplementedError, match="LlamaModel was called with deepstack_features.*part of the tokens"):
        model(**batch, deepstack_features={0: torch.ones(2, 32)})
    with pytest.raises(ValueError, match="a row of 1 tokens"):
        model(**{name: value[:, :1] for name, value in batch.items()})
    with pytest.raises(NotImplementedError, match="one label for each token"):
        model(input_ids=batch["input_ids"], labels=torch.tensor([0, 1]))
    model(**batch).loss.backward()  # still usable


@on_ranks(2)
def test_a_loss_that_reads_the_mask():
    config = transformers.BioGptConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        layerdrop=0.0,
    )  # fmt: skip
    model = bmt.auto_wrap(transformers.BioGptForTokenClassification(config), sequence_parallel=2)
    tokens = torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotImplementedError, match="a mean over the tokens that attention_mask allows"):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens % 2)
    model(input_ids=tokens, labels=tokens % 2).loss.backward()


class NamelessBlock(GPT2Block):
    """Gets a mask by position, without a name."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs)


@on_ranks(2)
def test_tensors_without_a_name():
    model = MODELS["gpt2"]()
    for layer in model.transformer.h:
        layer.__class__ = NamelessBlock
    bmt.auto_wrap(model, sequence_parallel=2)
    with pytest.raises(NotImplementedError, match="the forward of NamelessBlock got 4 positional arguments"):
        model(**batch_of("right", 0))


@on_ranks(2)
def test_rows_that_differ_in_a_group():
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    with pytest.raises(RuntimeError, match="must get the same rows.*DistributedSampler"):
        model(**batch_of("plain", bmt.rank()))
    with pytest.raises(RuntimeError, match="must get the same rows"):
        model(**batch_of("plain", 0, tokens=20 + bmt.rank()))
    model(**batch_of("plain", 0))


@on_ranks(2)
def test_pooled_outputs():
    config = copy.deepcopy(MODELS["bert"]().config)
    with pytest.raises(ValueError, match="BertModel pools tokens.*add_pooling_layer=False"):
        bmt.auto_wrap(transformers.BertModel(config), sequence_parallel=2)
    model = bmt.auto_wrap(transformers.BertModel(config, add_pooling_layer=False), sequence_parallel=2)
    batch = {"input_ids": batch_of("plain", 0)["input_ids"]}
    assert model(**batch).last_hidden_state.shape[:2] == batch["input_ids"].shape


@on_ranks(2)
def test_outputs_that_are_not_one_for_each_token():
    config = copy.deepcopy(MODELS["llama"]().config)
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    towers = {"text_config": {**sizes, "vocab_size": 61}, "vision_config": {**sizes, "image_size": 8, "patch_size": 4}}
    for model in (
        transformers.LlamaForSequenceClassification(config),
        transformers.CLIPModel(transformers.CLIPConfig(**towers)),
    ):
        with pytest.raises(ValueError, match=f"{type(model).__name__}: it does not have one output for each token"):
            bmt.auto_wrap(model, sequence_parallel=2)
