"""fuse_causal_loss against the model's own loss: tiny architectures, whole and sharded."""

import collections
import copy

import numpy
import pytest
import torch
import transformers
from torch import nn

import hf_bmtrain as bmt
from cases import full, in_full, rows_in_full
from hf_bmtrain.features.loss.chunked_head import ChunkedHead, fuse_causal_loss
from language_model import buffers
from log_lines import log_lines
from ranks import on_ranks
from tiny_models import VOCABULARY, batch
from tiny_models import build as build_known
from twins import check_gradients

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "head_dim": 8,
    "attn_implementation": "eager", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES = ("llama", "gpt2 tied", "gemma2", "cohere", "granite", "mixtral", "bert")
WITHOUT_ITEMS = ("bert",)  # whose forward takes no num_items_in_batch


def build(family: str) -> nn.Module:
    """Gemma 2 caps its logits, Cohere and Granite scale them, Mixtral adds a loss, BERT's loss is written inline."""
    torch.manual_seed(0)
    if family == "gemma2":  # a cap that bends these logits
        return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, final_logit_softcapping=0.3))
    if family == "cohere":
        return transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.3))
    if family == "granite":
        return transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL, logits_scaling=3.0))
    return build_known(family.split()[0], tied=family.endswith("tied"))


def inputs(family: str, seed: int) -> dict[str, torch.Tensor]:
    found = batch("bert" if family == "bert" else "llama", seed)
    found["labels"] = found["labels"].clone()
    found["labels"][0, :3] = -100
    return found


def train(family: str, sharded: str, items: int | None) -> None:
    """Two steps of SGD; losses and gradients are those of a plain model on all ranks' rows."""
    size, rank = bmt.world_size(), bmt.rank()
    model, twin = build(family), build(family)
    extra = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    with log_lines() as messages:
        if sharded in ("first", "own"):
            with buffers(own=sharded == "own"):
                bmt.auto_wrap(model)
        assert fuse_causal_loss(model) and fuse_causal_loss(model)  # again changes nothing
        if sharded == "later":
            bmt.auto_wrap(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
        for step in range(2):
            output = model(**inputs(family, 10 * step + rank), **extra)
            assert output.logits is None and "logits" not in output
            output.loss.backward()
            expected = torch.stack([twin(**inputs(family, 10 * step + r), **extra).loss for r in range(size)])
            expected.mean().backward()
            torch.testing.assert_close(output.loss, expected[rank], rtol=3e-6, atol=0)
            if sharded:
                check_gradients(model, twin)
            else:
                for (name, mine), other in zip(model.named_parameters(), twin.parameters()):
                    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert messages == []  # no logits were made


@pytest.mark.parametrize(
    ("family", "sharded", "items"),
    [
        ("llama", "own", 5),
        ("gpt2 tied", "first", None),
        ("gemma2", "later", 5),
        *rows_in_full(
            (family, sharded, items)
            for family in FAMILIES
            for sharded, items in [("first", 5), ("own", None), ("later", None)]
            if items is None or family not in WITHOUT_ITEMS
        ),
    ],
)
def test_sharded_models(world, family, sharded, items):
    world(2)(train, family, sharded, items)


@pytest.mark.parametrize("family", ["gemma2", *in_full(*(family for family in FAMILIES if family != "gemma2"))])
def test_plain_models(world, family):
    world(1)(train, family, "", None)


def test_logits_are_there_in_evaluation_and_without_labels():
    model, twin = build("gemma2"), build("gemma2")
    fuse_causal_loss(model)
    data = inputs("gemma2", 0)
    expected = twin(**data)
    torch.testing.assert_close(model(data["input_ids"]).logits, expected.logits)
    output = model.eval()(**data)
    torch.testing.assert_close(output.logits, expected.logits)
    torch.testing.assert_close(output.loss, expected.loss)
    assert model.generate(data["input_ids"], max_new_tokens=2, do_sample=False).shape == (2, 9)


@full
def test_positional_labels_tuples_and_failed_forwards():
    model, twin = build("llama"), build("llama")
    fuse_causal_loss(model)
    data = inputs("llama", 0)
    expected = twin(**data).loss
    (loss, *_) = model(**data, return_dict=False, use_cache=False)
    torch.testing.assert_close(loss, expected)
    assert len(model(**data, return_dict=False, use_cache=False)) == 1
    torch.testing.assert_close(model(data["input_ids"], None, None, None, None, data["labels"]).loss, expected)
    with pytest.raises(ValueError, match="neither a class"):
        model(data["input_ids"], labels=torch.full_like(data["labels"], VOCABULARY))
    assert isinstance(model.lm_head(torch.zeros(1, 24)), torch.Tensor)  # not armed any more


@full
def test_a_copy_has_its_own_head():
    model = build("llama")
    fuse_causal_loss(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(model.lm_head.weight)
    data = inputs("llama", 0)
    assert twin(**data).logits is None
    torch.testing.assert_close(twin(**data).loss, build("llama")(**data).loss)
    assert type(twin.lm_head).__name__ == "Linear" and isinstance(twin.lm_head, nn.Linear)


@pytest.mark.parametrize("family", ["granite", *in_full("cohere", "gemma2")])
def test_scaled_logits_of_a_head_with_a_bias(family):
    """A head that the user has replaced. The factor multiplies its bias too. Gemma 2 only caps its logits."""
    model = build(family)
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(24, VOCABULARY)
    nn.init.normal_(model.lm_head.bias)
    twin = copy.deepcopy(model)
    assert fuse_causal_loss(model)
    with log_lines() as messages:
        loss, expected = (each(**inputs(family, 0)).loss for each in (model, twin))
    assert messages == []
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("fused", ["first", *in_full("later", "again")])
@on_ranks(2)
def test_copies_of_sharded_models(fused):
    """Copies compute the loss as the model that was copied, and so does a copy of a copy that is sharded again."""
    model = build("llama")
    if fused != "later":
        fuse_causal_loss(model)
    bmt.auto_wrap(model)
    if fused == "later":
        fuse_causal_loss(model)
    copied = copy.deepcopy(model)
    if fused == "again":
        assert fuse_causal_loss(copied)
    again, data, expected = copy.deepcopy(copied), inputs("llama", 0), build("llama")(**inputs("llama", 0)).loss
    with log_lines() as messages:
        for each in (copied, bmt.auto_wrap(again), bmt.auto_wrap(copy.deepcopy(again))):
            output = each(**data)
            assert output.logits is None
            torch.testing.assert_close(output.loss, expected)
            output.loss.backward()
    assert messages == []


def test_another_head():
    """A resized head is fused as the first one was; the log says once why another is not."""
    model = build("llama")
    fuse_causal_loss(model)
    model.resize_token_embeddings(VOCABULARY + 3)
    assert model.eval()(**inputs("llama", 0)).logits.shape[-1] == VOCABULARY + 3
    assert model.train()(**inputs("llama", 0)).logits is None
    model.lm_head = Scaled(24, VOCABULARY + 3)
    with log_lines() as messages:
        for _ in range(2):
            assert model(**inputs("llama", 0)).logits is not None
    assert len(messages) == 1 and "Scaled, not a plain" in messages[0]


class Odd(transformers.LlamaForCausalLM):
    """Does to its logits what nobody foresaw."""

    change = staticmethod(lambda logits: logits)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = type(self).change(self.lm_head(self.model(input_ids).last_hidden_state))
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


TIMES_A_VECTOR = ("a product", lambda x: x * torch.linspace(1, 2, VOCABULARY))
CHANGES = [
    ("__add__", lambda x: x + 1), ("__rsub__", lambda x: 1 - x), ("softmax", lambda x: torch.softmax(x, -1)),
    ("a product", lambda x: x * -2),
    ("tanh", lambda x: (x.tanh() * 2).tanh()), ("indexing", lambda x: x[..., [1, 0, *range(2, VOCABULARY)]]),
    ("log_softmax", lambda x: x.log_softmax(-1)), ("view", lambda x: x.view(2, -1).view(2, 7, VOCABULARY)),
    ("add", lambda x: torch.add(torch.ones(VOCABULARY), x)), ("clamp", lambda x: x.clamp(-0.1, 0.1)),
    ("__rtruediv__", lambda x: 1 / x * 0 + x), ("__abs__", abs), ("__eq__", lambda x: (x == 0).logical_not() * x),
    ("indexing", lambda x: x[numpy.arange(2)]), ("reshape", lambda x: x.reshape(shape=(2, 7, VOCABULARY))),
]  # fmt: skip


def scaled(logits):
    other = logits
    logits *= 3
    logits /= 2
    assert other is logits and other.ndim == 3
    return other


HARMLESS = [
    lambda x: x[:, :, :][..., :] * 3 / 2, lambda x: (2 * (x / 2)).tanh() * 0.7, lambda x: torch.tanh(x).contiguous(),
    scaled, lambda x: x.to(torch.float32).float()[:2], lambda x: x.view((-1, VOCABULARY)).reshape(2, 7, VOCABULARY),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "change"),
    [TIMES_A_VECTOR, *rows_in_full([*CHANGES, *(("", change) for change in HARMLESS)])],
)
def test_what_happens_to_logits_on_their_way(monkeypatch, asked, change):
    """Known: no logits. Unknown: one log line that names it, the logits, and the right loss."""
    monkeypatch.setattr(Odd, "change", staticmethod(change))
    torch.manual_seed(0)
    model = Odd(build("llama").config)
    twin = copy.deepcopy(model)
    assert fuse_causal_loss(model)
    with log_lines() as messages:
        for _ in range(2):
            loss = model(**inputs("llama", 0)).loss
    assert [asked in message for message in messages] == [True] * bool(asked)
    expected = twin(**inputs("llama", 0)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, other in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def masked(logits):
    logits[..., 3] = -1e4
    return logits


def multiplied(logits):
    logits *= torch.linspace(1, 2, VOCABULARY)
    return logits


IN_PLACE = [
    ("__imul__", multiplied),
    ("__setitem__", masked), ("mul_", lambda x: x.mul_(2)), ("relu_", lambda x: nn.functional.relu(x, inplace=True)),
    ("data", lambda x: x.data.mul_(2) * 0 + x),
]  # fmt: skip


class Named(Odd):
    """Its output is a named tuple."""

    Output = collections.namedtuple("Output", ["loss", "logits"])

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
        return self.Output(loss, logits)


def test_named_tuples_keep_their_length():
    model = Named(build("llama").config)
    assert fuse_causal_loss(model)
    data = inputs("llama", 0)
    assert model(**data).logits is None and model(**data).loss > 0
    assert model(data["input_ids"]).logits.shape == (2, 7, VOCABULARY) and model(data["input_ids"]).loss is None


@pytest.mark.parametrize(("asked", "change"), IN_PLACE[:1] + rows_in_full(IN_PLACE[1:]))
def test_in_place_changes_of_logits(monkeypatch, asked, change):
    test_what_happens_to_logits_on_their_way(monkeypatch, asked, change)
    monkeypatch.setattr(Odd, "change", staticmethod(lambda x: (x[:, 1:], change(x))[1]))
    model = Odd(build("llama").config)
    assert fuse_causal_loss(model)
    if asked != "data":
        with pytest.raises(NotImplementedError, match=rf"in place \({asked}\) after it has reshaped or sliced"):
            model(**inputs("llama", 0))


def test_float32_logits_of_half_precision(monkeypatch):
    monkeypatch.setattr(Odd, "change", staticmethod(lambda x: x.float() + 0.001))
    model = Odd(build("llama").config).bfloat16()
    twin = copy.deepcopy(model)
    assert fuse_causal_loss(model)
    assert model(**inputs("llama", 0)).loss.item() == twin(**inputs("llama", 0)).loss.item()


def test_a_loss_of_the_users_own_keeps_its_arguments():
    weight = torch.linspace(0.5, 2, VOCABULARY)

    def own(logits, labels, vocab_size, **_):
        how = {"weight": weight, "ignore_index": 5, "reduction": "sum", "label_smoothing": 0.1}
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), **how)

    model = build("llama")
    model.loss_function = own
    twin = copy.deepcopy(model)
    fuse_causal_loss(model)
    data = {"input_ids": torch.arange(8).view(1, 8), "labels": torch.arange(8).view(1, 8)}
    with log_lines() as messages:
        torch.testing.assert_close(model(**data).loss, twin(**data).loss)
    assert messages == []


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@full
def test_other_heads_keep_their_loss():
    def with_hook(model):
        model.lm_head.register_forward_hook(lambda *_: None)

    def patched(model):
        model.lm_head.forward = model.lm_head.forward

    def other_class(model):
        model.lm_head.__class__ = Scaled

    for change, reason in ((with_hook, "hooks"), (patched, "not a plain"), (other_class, "Scaled, not a plain")):
        model = build("llama")
        change(model)
        with log_lines() as messages:
            assert not fuse_causal_loss(model)
        assert len(messages) == 1 and reason in messages[0] and "leaves LlamaForCausalLM unchanged" in messages[0]
        assert not isinstance(model.lm_head, ChunkedHead) and model(**inputs("llama", 0)).logits is not None


@full
@pytest.mark.parametrize(
    ("make", "reason"),
    [(lambda: build("llama").model, "no output embeddings"), (lambda: nn.Linear(2, 2), "takes no labels")],
)
def test_models_without_a_loss(make, reason):
    with log_lines() as messages:
        assert not fuse_causal_loss(make())
    assert len(messages) == 1 and reason in messages[0]
