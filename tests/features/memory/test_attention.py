"""use_checkpoint="attention", and plans that choose it: attention is not repeated, and no number changes."""

import importlib.util
import logging
from unittest import mock

import pytest
import torch
import transformers
from test_planner import ENOUGH, kept, memory_of, policies
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from cases import by_default, full
from hf_bmtrain.features import memory as memory_feature
from hf_bmtrain.features.memory import activations, attention
from hf_bmtrain.features.memory.activations import AutoCheckpoint
from log_lines import log_lines
from operator_calls import OperatorCalls
from ranks import on_ranks
from tiny_models import VOCABULARY, batch
from twins import WIDTH, Tower, ids, tower_loss

WHOLE = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attention_calls():
    # In compiled code, an operator that is recomputed may be an argument of one that restores its random generator.
    return OperatorCalls(lambda function, args: any(each is WHOLE for each in (function, *args)))


class Attending(nn.Module):
    """Attention of two heads, and a mask that is drawn after it."""

    def __init__(self):
        super().__init__()
        self.project, self.linear = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = [part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in self.project(x).chunk(3, -1)]
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(-2, -3).flatten(-2)
        return x + nn.functional.dropout(self.linear(y), 0.3, self.training)


class Checkpointed(Tower):
    """Puts torch's checkpoint around each layer."""

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


def tower(frozen=False, kind=Tower):
    model = kind(0)
    torch.manual_seed(1)
    model.layers = nn.ModuleList([Attending() for _ in range(3)])
    if frozen:  # no gradient comes to the attention of the first layer
        model.requires_grad_(False)
        model.layers[0].linear.bias.requires_grad_(True)
        model.head.requires_grad_(True)
    return model.train()


def frozen_tower():
    return tower(frozen=True)


def checkpointed_tower():
    return tower(kind=Checkpointed)


def llama(adapters=False):
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCABULARY, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    if adapters:
        import peft

        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    return model


def adapted():
    return llama(adapters=True)


def llama_loss(model, step, rank):
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch("llama", 10 * step + rank)).loss


def train(make, loss, use_checkpoint, steps=2, **options):
    """Losses and gradients of some steps, and how often the last backward computed attention."""
    model = bmt.auto_wrap(make(), use_checkpoint=use_checkpoint, **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(bmt.rank())
    seen, calls = [], attention_calls()
    for step in range(steps):
        value = loss(model, step, bmt.rank())
        seen.append(value.detach())
        calls = attention_calls()
        with calls:
            value.backward()
        seen += [p.gather_gradient() for p in model.parameters() if p.requires_grad]
        seen.append(torch.rand(()))  # random numbers go on as without
        optimizer.step()
        optimizer.zero_grad()
    return seen, calls.count, model


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


CASES = {
    "dropout": (tower, tower_loss, {}, 3),
    "zero_level 2": (tower, tower_loss, {"zero_level": 2}, 3),
    "compiled": (tower, tower_loss, {"compile": "aot_eager"}, 3),
    "nothing differentiable before attention": (frozen_tower, tower_loss, {}, 3),
    "float8": (llama, llama_loss, {"float8": True}, 2),
}
"""Model, loss, options of auto_wrap, and how often a backward computes attention that recomputes all."""
if importlib.util.find_spec("peft") is not None:
    CASES["LoRA over 4 bits"] = (adapted, llama_loss, {"quantize_frozen": "nf4"}, 2)


@pytest.mark.parametrize("name", by_default(CASES, "dropout"))
@on_ranks(2)
def test_equal_to_plain_recomputation(name):
    make, loss, options, repeated = CASES[name]
    plain, count, _ = train(make, loss, True, **options)
    assert count == repeated
    found, count, _ = train(make, loss, "attention", **options)
    assert count == 0
    assert equal(plain, found)
    plain, _, _ = train(checkpointed_tower, tower_loss, True)
    assert equal(plain, train(checkpointed_tower, tower_loss, "attention")[0])
    plans()
    twice()


def plans():
    """A plan whose room is enough for what attention returns, and one that has no room."""
    plain, _, _ = train(tower, tower_loss, True, steps=3)
    with memory_of(ENOUGH):
        size = policies(train(tower, tower_loss, "auto", steps=1)[2])[0].attention_nbytes
    heads = 2
    assert size == 4 * 3 * (WIDTH + heads) * 4, "not attention's output and the sums of its exponentials"
    with mock.patch.object(AutoCheckpoint, "prefers_attention", return_value=True):
        for room, chosen, count in [(3 * size, "111", 0), (2 * size, "011", 1), (size - 1, "000", 3)]:
            with memory_of(room), log_lines(logging.INFO) as lines:
                found, repeated, model = train(tower, tower_loss, "auto", steps=3)
                assert "".join("01"[policy.attention] for policy in policies(model)) == chosen
            assert kept(model) == "000"
            assert repeated == count and equal(plain, found)
            told = [line for line in lines if "use_checkpoint='auto'" in line]
            assert len(told) == (bmt.rank() == 0)
            assert all(f"{chosen.count('1')} recompute all but attention" in line for line in told)


def twice():
    """What was kept is used once; a second backward computes attention again."""
    for use_checkpoint in (True, "attention"):
        model = bmt.auto_wrap(tower().eval(), use_checkpoint=use_checkpoint)
        loss, calls = model(ids(0, bmt.rank())), attention_calls()
        loss.backward(retain_graph=True)
        first = [p.gather_gradient() for p in model.parameters()]
        model.zero_grad()
        with calls:
            loss.backward()
        assert calls.count == 3
        assert equal(first, [p.gather_gradient() for p in model.parameters()])


class Gating(nn.Module):
    """Attention whose output is multiplied in place."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        parts = [part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in self.project(x).chunk(3, -1)]
        y = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + y.mul_(parts[0].sigmoid()).transpose(-2, -3).flatten(-2)


@on_ranks(1)
def test_an_output_that_was_written_in_place_is_refused():
    """As without recomputation, where autograd refuses it."""
    for use_checkpoint, message in ((False, "modified by an inplace operation"), ("attention", "written in place")):
        model = tower()
        model.layers = nn.ModuleList([Gating() for _ in range(2)])
        loss = bmt.auto_wrap(model, use_checkpoint=use_checkpoint)(ids(0, 0))
        with pytest.raises(RuntimeError, match=message):
            loss.backward()


@on_ranks(1)
def test_a_backward_that_calls_attention_more_often_is_refused():
    """Outside of the context of the forward, torch chooses another implementation."""
    model = bmt.auto_wrap(tower(), use_checkpoint="attention")
    with sdpa_kernel(SDPBackend.MATH):
        loss = model(ids(0, 0))
    with pytest.raises(RuntimeError, match=r"call 1 of attention.*_attention.*only 0 calls.*use_checkpoint=True"):
        loss.backward()
    with sdpa_kernel(SDPBackend.MATH):
        model(ids(0, 0)).backward()


def test_which_calls_are_kept():
    values = torch.randn(2, 2, 8, 16)
    aten = torch.ops.aten
    assert attention.is_kept(WHOLE, (values,) * 3, {})
    assert not attention.is_kept(WHOLE, (values,) * 3 + (0.1,), {})  # later numbers would be other ones
    assert not attention.is_kept(aten._scaled_dot_product_flash_attention.default, (values,) * 3, {"dropout_p": 0.1})
    assert not attention.is_kept(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (), {})
    assert not attention.is_kept(aten.mm.default, (values, values), {})
    with torch.library._scoped_library("hf_bmtrain_attn", "FRAGMENT") as library:
        library.define("fwd(Tensor q, float p_dropout, *, Tensor? mask=None) -> Tensor")
        other = torch.ops.hf_bmtrain_attn.fwd.default
        assert attention.is_kept(other, (values, 0.0), {}) and not attention.is_kept(other, (values, 0.1), {})


@full
@on_ranks(1)
def test_refused_where_compiled_code_would_not_run():
    with mock.patch.object(memory_feature, "modes_see_compiled", False):
        with pytest.raises(RuntimeError, match="Pass use_checkpoint=True, or install a newer torch"):
            bmt.auto_wrap(tower(), use_checkpoint="attention")


@pytest.mark.parametrize(("attends", "first"), [(1.0, False), (4.0, True), (float("nan"), False)])
def test_what_saves_more_time_a_byte_comes_first(attends, first):
    """Attention returns a fifth of what a forward of 10 ms keeps."""
    policy = AutoCheckpoint(mock.Mock(), mock.Mock())
    watch, meter = (mock.Mock(milliseconds=lambda taken=taken: taken) for taken in (10.0, attends))
    policy.learn(activations.Measurement((), 50, 1, 10, watch, meter))
    assert activations._attention_first([policy]) == first
