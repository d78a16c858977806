"""Rows that several ranks share: loss and every gradient are those of a plain process.

What other implementations got wrong, and the test that would have found it: windows and chunks ignored (mistral,
gemma3, llama4), an attribute for them that models do not set (qwen2, qwen3), documents that attend to each other
(packed), position ids that the user has to pass (all), queries scaled by their position (llama4), lengths and heads
that the group does not divide, 3-D position ids (the zoo's qwen2_5_vl), ZeRO stages (test_levels), ranks that compute
whole rows after all (test_a_rank_computes_its_own_tokens_alone), other models of the process captured
(test_models_in_one_process), a loss that is counted several times (test_sequence_trainer). State-space models, linear
attention and encoder-decoders, whose losses or states were wrong, are refused (test_sequence_refusals).
"""

import copy
import importlib

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default, full, in_full
from ranks import on_ranks
from sequence_models import MODELS, TOKENS, VOCABULARY, WIDTH, batch_of, causal, check, compare_gradients, whole_loss

UNLIKE = (
    "llama-9-heads", "mistral", "gemma2", "gpt-oss", "llama4", "mixtral-router-loss", "modern-bert", "bert", "gpt2",
)  # fmt: skip


@pytest.mark.parametrize("name", by_default(MODELS, *UNLIKE))
@on_ranks(2, full=(3, 4))
def test_architectures(name):
    check(name, bmt.world_size(), "masked" if "bert" in name else "plain")


@pytest.mark.parametrize(
    "name", by_default(["llama", "llama-9-heads", "gemma3", "gpt-oss", "mixtral"], "llama-9-heads")
)
@on_ranks(4)
def test_groups_beside_each_other(name):
    check(name, 2)


@pytest.mark.parametrize("tokens", by_default([4, 7, 21, 23], 7))
@on_ranks(3)
def test_lengths_that_the_group_does_not_divide(tokens):
    check("mistral", 3, tokens=tokens)


@pytest.mark.parametrize("tokens", [WIDTH, *in_full(2 * WIDTH)])
@on_ranks(2)
def test_rows_as_long_as_the_model_is_wide(tokens):
    """Where the sizes of tensors do not tell which dimension has the tokens."""
    long = {"max_position_embeddings": 2 * WIDTH}
    check(causal("Llama", **long), 2, tokens=tokens, rows=1)


@on_ranks(4)
def test_more_ranks_than_heads():
    check("llama-1-key", 4)
    check("modern-bert", 4, "masked")


@pytest.mark.parametrize("kind", ["packed", "left", "right", "answers"])
@pytest.mark.parametrize("name", by_default(["llama", "qwen2", "llama-eager", "gemma3"], "qwen2"))
@on_ranks(2, full=(3,))
def test_documents_padding_and_few_labels(name, kind):
    check(name, bmt.world_size(), kind)


@on_ranks(2)
def test_padding_of_an_encoder():
    check("modern-bert", 2, "masked+left")
    check("bert", 2, "masked+right")


def counted(model, batch):
    return model(**batch, num_items_in_batch=torch.tensor(17)).loss


@pytest.mark.parametrize("name", ["llama", "bert"])
@on_ranks(2)
def test_number_of_items(name):
    check(name, 2, "masked", loss=counted if name == "llama" else whole_loss)


def two_batches(model, batch):
    """Two forwards of different lengths before one backward: a recomputation divides each as its forward did."""
    short = {name: value[:, :13] for name, value in batch.items()}
    return model(**batch).loss + model(**short).loss


@pytest.mark.parametrize("recompute", [True, False])
@on_ranks(2)
def test_forwards_of_two_lengths(recompute):
    check("mistral", 2, loss=two_batches, use_checkpoint=recompute)


def from_logits(model, batch):
    labels = batch.pop("labels")
    logits = model(**batch).logits
    assert logits.shape == (*labels.shape, VOCABULARY)
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))  # as most programs do


@on_ranks(2, full=(3,))
def test_loss_from_outputs():
    check("qwen3", bmt.world_size(), loss=from_logits)


def from_hidden_states(model, batch):
    states = model(**batch, output_hidden_states=True).hidden_states
    assert all(each.shape == (*batch["input_ids"].shape, WIDTH) for each in states)
    weights = torch.linspace(1, 2, states[0].shape[1]).view(-1, 1)
    return sum((each * weights).square().mean() for each in states)


@pytest.mark.parametrize("name", ["gpt2", *in_full("llama", "modern-bert")])
@on_ranks(2)
def test_loss_from_hidden_states(name):
    """The last hidden state of GPT-2 was that of this rank's tokens alone, with zeros for the others."""
    check(name, 2, loss=from_hidden_states)


@pytest.mark.parametrize("level", [2, 3])
@pytest.mark.parametrize("recompute", [True, False])
@on_ranks(2)
def test_levels(level, recompute):
    check("llama-9-heads", 2, zero_level=level, use_checkpoint=recompute)


def own_ignored(model, batch):
    """As if 7 meant that a label does not count."""
    labels = batch["labels"].clone()
    labels[:, ::3] = 7
    return model(input_ids=batch["input_ids"], labels=labels, ignore_index=7).loss


def reset_attention(model, batch):
    model.set_attn_implementation("sdpa")
    return model(**batch).loss


@pytest.mark.parametrize("loss", [own_ignored, reset_attention])
@on_ranks(2)
def test_what_a_program_may_set(loss):
    check("llama", 2, loss=loss)


@on_ranks(2)
def test_labels_of_the_caller_stay_as_they_are():
    model = bmt.auto_wrap(MODELS["bert"](), sequence_parallel=2)
    batch = batch_of("answers", 0, rows=1)
    before = batch["labels"].clone()
    model(**batch).loss.backward()
    assert torch.equal(batch["labels"], before)


@on_ranks(2)
def test_outputs_of_an_evaluation():
    model, plain = MODELS["mistral"](), MODELS["mistral"]()
    bmt.auto_wrap(model, sequence_parallel=2)
    batch = batch_of("plain", 0)
    with torch.no_grad():
        found, expected = model.eval()(**batch), plain.eval()(**batch)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)
    assert TOKENS % 2 == 0


@on_ranks(2)
def test_a_rank_computes_its_own_tokens_alone():
    model, tokens = MODELS["llama"](), []
    bmt.auto_wrap(model, sequence_parallel=2)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: tokens.append(output.shape[1]))
    model(**batch_of("plain", 0, tokens=21)).loss.backward()
    assert set(tokens) == {11 - bmt.rank()}


@on_ranks(2)
def test_models_in_one_process():
    """A wrapped one, one with other ranks, and a plain one of the same configuration object, in turn."""
    plain = MODELS["mistral"]()
    shared, alone, beside = (type(plain)(plain.config) for _ in range(3))
    for each in (shared, alone, beside):
        each.load_state_dict(plain.state_dict())
    bmt.auto_wrap(shared, sequence_parallel=2)
    bmt.auto_wrap(alone)
    truth = MODELS["mistral"]()
    batch = batch_of("plain", 1)
    expected = truth(**batch).loss.item()
    for _ in range(2):
        for each in (shared, alone, beside):
            assert each(**batch).loss.item() == pytest.approx(expected, rel=1e-5)


@on_ranks(2)
def test_copies():
    """A copy has nothing left of the shared rows: a rank computes it alone, and it can be wrapped either way."""
    plain, model = MODELS["mistral"](), bmt.auto_wrap(MODELS["mistral"](), sequence_parallel=2)
    batch = batch_of("masked", 0)
    model(**batch).loss.backward()
    copied, shared, alone = (copy.deepcopy(model) for _ in range(3))
    for (name, mine), theirs in zip(copied.named_modules(), plain.modules()):
        assert {*vars(mine)} - {*vars(theirs)} <= {"gradient_checkpointing", "_gradient_checkpointing_func"}, name
        assert not mine._forward_pre_hooks and not mine._forward_hooks, name
    expected = plain(**batch).loss
    if bmt.rank() == 0:
        torch.testing.assert_close(copied(**batch).loss, expected)
        assert copied.generate(batch["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, TOKENS + 2)
    expected.backward()
    bmt.auto_wrap(shared, sequence_parallel=2)
    bmt.auto_wrap(alone)
    for each in (shared, alone):
        each.zero_grad()
        each(**batch).loss.backward()
        compare_gradients(each, plain)
    with torch.no_grad():
        own = batch_of("masked", 1 + bmt.rank())
        torch.testing.assert_close(alone(**own).loss, plain(**own).loss)  # ranks with rows of their own


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@full
@needs_peft
@on_ranks(2)
def test_arguments_by_position():
    """A PeftModel of no task names no arguments, and passes all on."""
    peft = importlib.import_module("peft")

    def adapted(model):
        torch.manual_seed(7)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))

    def loss(model, batch):
        return model(batch.pop("input_ids"), **batch).loss

    check("llama", 2, loss=loss)
    check("llama", 2, loss=loss, prepare=adapted)


@full
@needs_peft
@on_ranks(2)
def test_adapters():
    peft = importlib.import_module("peft")

    def prepare(model):
        torch.manual_seed(7)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        return adapted

    check("llama", 2, "packed", prepare=prepare)


@full
@needs_peft
@on_ranks(2)
def test_adapters_that_are_added_after_wrapping():
    peft = importlib.import_module("peft")
    model = bmt.auto_wrap(MODELS["llama"](), sequence_parallel=2)
    plain = MODELS["llama"]()
    adapted = []
    for each in (model, plain):
        torch.manual_seed(7)
        adapted.append(peft.get_peft_model(each, peft.LoraConfig(r=4, target_modules=["q_proj"])))
    bmt.auto_wrap(adapted[0])
    batch = batch_of("plain", 0)
    losses = [each(**batch).loss for each in adapted]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    compare_gradients(*adapted)


@on_ranks(2)
def test_loss_without_logits():
    def prepare(model):
        assert bmt.hf.fuse_causal_loss(model)
        return model

    check("gemma2", 2, "packed", prepare=prepare)


@on_ranks(2)
def test_custom_mask():
    def masked(model, batch):
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(
            -3
        )
        return model(**batch, attention_mask=seen.expand(2, 1, -1, -1)).loss

    check("llama", 2, loss=masked)
