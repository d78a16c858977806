"""Compiled blocks: equal to those that are not, and compiled once for all layers."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full
from compile_checks import check, compiled_once, train
from ranks import on_ranks
from tiny_models import build


@pytest.mark.parametrize("size", [2, *in_full(1)])
@full
@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_once_for_all_layers(world, size, family, use_checkpoint):
    check(*world(size)(compiled_once, family, use_checkpoint)[0], use_checkpoint)


@full
@on_ranks(1)
def test_a_recompilation_is_seen():
    """What the other cases rely on: a longer batch in step 3 compiles again."""
    torch._dynamo.reset()
    model = bmt.auto_wrap(build("llama").train(), compile="aot_eager")
    with pytest.raises(torch._dynamo.exc.RecompileError):
        train(model, "llama", length=lambda step: 7 if step < 2 else 9)


@full
@on_ranks(2, full=(1,))
def test_modules_compiled_before_wrapping():
    """Beside blocks and inside them."""
    torch._dynamo.reset()
    compiled, plain = (build("llama").train() for _ in range(2))
    inner = compiled.model
    for module in (compiled.lm_head, inner.embed_tokens, inner.norm, inner.rotary_emb, inner.layers[1].mlp):
        module.compile(backend="aot_eager")
    losses = train(bmt.auto_wrap(compiled), "llama")
    torch.testing.assert_close(losses, train(bmt.auto_wrap(plain), "llama"), rtol=2e-6, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 5


@full
@on_ranks(2)
def test_the_whole_model():
    """Nobody is told to compile it; where it is done, its blocks break the graph and stay right."""
    torch._dynamo.reset()
    model, plain = (bmt.auto_wrap(build("llama").train()) for _ in range(2))
    losses = train(torch.compile(model, backend="eager"), "llama")
    torch.testing.assert_close(losses, train(plain, "llama"), rtol=2e-6, atol=0)
