"""Names of models, new classifiers, and the dropout of several kinds of configuration."""

import pytest
import torch
from huggingface_hub import constants
from transformers import BartConfig, BertConfig, BertForSequenceClassification, DistilBertConfig, GPT2Config

from boolq.model import (
    LABELS,
    adapt,
    check_max_length,
    check_model_name,
    load_model,
    load_tokenizer,
    new_small_bert,
)
from boolq.small_bert import train_tokenizer
from cases import full


def test_every_dropout_of_a_configuration_is_replaced():
    for config, names in (
        (BertConfig(), ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")),
        (DistilBertConfig(), ("dropout", "attention_dropout", "seq_classif_dropout")),
        (GPT2Config(), ("attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_first_dropout")),
        (BartConfig(), ("dropout", "activation_dropout", "encoder_layerdrop", "classifier_dropout")),
    ):
        adapt(config, 0.25)
        assert [getattr(config, name) for name in names] == [0.25] * len(names)
        assert config.id2label == LABELS
        assert config.num_labels == 2


@full
def test_a_model_keeps_its_dropout_unless_told():
    config = BertConfig(hidden_dropout_prob=0.3, classifier_dropout=None)
    adapt(config, None)
    assert (config.hidden_dropout_prob, config.classifier_dropout) == (0.3, None)
    adapt(config, 0.0)
    assert (config.hidden_dropout_prob, config.classifier_dropout) == (0.0, 0.0)


@full
def test_dropout_reaches_the_modules():
    model = new_small_bert(30, seed=0, dropout=0.4)
    found = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
    assert found == {0.4}


@full
def test_a_name_that_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="has no config.json: give the folder of a saved model"):
        check_model_name(str(tmp_path))
    for name in ("/no/such/model", "./model", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="no such folder; give the folder of a saved model"):
            check_model_name(name)
    check_model_name("bert-base-uncased")
    check_model_name("owner/name")


@full
def test_a_broken_folder_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"^cannot load --model .*; check the name and the network, or give"):
        load_model(str(tmp_path), seed=0, dropout=None)


def test_a_seed_draws_the_new_classifier_and_a_saved_one_is_kept(tmp_path):
    config = BertConfig(num_labels=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    BertForSequenceClassification(config).to(torch.bfloat16).save_pretrained(tmp_path)
    drawn = [load_model(str(tmp_path), seed, dropout=None) for seed in (1, 1, 2)]
    weights = [model.classifier.weight for model in drawn]
    assert weights[0].shape == (2, 16)  # three labels became two
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert {p.dtype for p in drawn[0].parameters()} == {torch.float32}
    drawn[0].save_pretrained(tmp_path)
    assert torch.equal(load_model(str(tmp_path), 2, dropout=None).classifier.weight, weights[0])


@full
def test_tokens_that_the_model_cannot_place():
    tokenizer = train_tokenizer(["a few words"])
    model = new_small_bert(len(tokenizer), seed=0, dropout=None)
    check_max_length(512, model, tokenizer)
    with pytest.raises(ValueError, match="--max-length 513 is more than the 512 tokens"):
        check_max_length(513, model, tokenizer)


@full
def test_a_tokenizer_without_padding(tmp_path):
    tokenizer = train_tokenizer(["a few words"])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no padding token"):
        load_tokenizer(str(tmp_path))
