"""What the speedometer counts, over ranks that see different numbers of rows."""

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer

import hf_bmtrain as bmt
from cases import full, in_full
from hf_bmtrain.hf.speed import ParameterCount, Speedometer, _flops_a_token
from tiny_models import batch, build
from zoo_families import FAMILIES


class Clock:
    """Stands in for time.perf_counter, and goes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def rates():
    clock = Clock()
    with mock.patch.object(time, "perf_counter", clock):
        model = bmt.auto_wrap(build("llama")).train()
        speed = Speedometer(model)
        rank = bmt.rank()
        model(**batch("llama", 0, rows=rank + 1)).loss.backward()
        with torch.no_grad():
            model(**batch("llama", 0))  # no training
        clock.now += 4
        speed.pause()
        clock.now += 100
        speed.pause()  # a second one changes nothing
        clock.now += 100
        speed.resume()
        clock.now += 6
        first, second = speed.read(), speed.read()
        assert second["samples_per_second"] == 0 and "tokens_per_second" not in second
        speed.close()
        model(**batch("llama", 0))
        clock.now += 1
        assert speed.read()["samples_per_second"] == 0
    return first


@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_rates_are_of_all_ranks(world, size):
    plain = build("llama")
    rows = sum(range(1, size + 1))
    for report in world(size)(rates):
        assert report["samples_per_second"] == pytest.approx(rows / 10, rel=1e-4)
        assert report["tokens_per_second"] == pytest.approx(rows * 7 / 10, rel=1e-4)
        weights = sum(p.numel() for name, p in plain.named_parameters() if "embed_tokens" not in name)
        flops = rows * 7 * (6 * weights + 12 * 3 * 24 * 7)
        assert report["model_tflops_per_device"] == pytest.approx(flops / 10 / size / 1e12, rel=1e-4)


@pytest.mark.parametrize(
    ("more", "width"),
    [({}, 32), ({"head_dim": 16}, 64), ({"qk_head_dim": 12, "v_head_dim": 4}, 32), ({"head_dim": None}, 32)],
    ids=str,
)
def test_attention_is_as_wide_as_its_heads(more, width):
    """Qwen3 and Gemma, for instance, have heads that are wider together than a hidden state."""
    config = SimpleNamespace(num_hidden_layers=3, hidden_size=32, num_attention_heads=4, **more)
    model: Any = torch.nn.Linear(2, 2)
    model.config = config
    assert _flops_a_token(model)[1] == 12 * 3 * width


def test_layers_of_several_kinds_have_no_flops():
    """LXMERT's configuration has a dict with the number of layers of each kind."""
    model: Any = torch.nn.Linear(2, 2)
    layers = {"vision": 2, "language": 3}
    model.config = SimpleNamespace(num_hidden_layers=layers, hidden_size=8, num_attention_heads=2)
    assert _flops_a_token(model) == (0.0, 0.0)


@pytest.mark.parametrize("family", ["gemma4_unified", "dbrx", "aria text"])
def test_layers_or_experts_that_differ_have_no_flops(family):
    """Gemma 4's layers have heads of two sizes; the others are mixtures of experts with names of their own."""
    if FAMILIES[family].missing:
        pytest.skip("not in this version of transformers")
    assert _flops_a_token(FAMILIES[family].build()) == (0.0, 0.0)


def counts(family, tied):
    model, plain = bmt.auto_wrap(build(family, tied)), build(family, tied)
    count = ParameterCount(model)
    for exclude in (False, True):
        assert count(exclude_embeddings=exclude) == ParameterCount(plain)(exclude_embeddings=exclude)
    assert count() == sum(p.numel() for p in plain.parameters())
    return count() - count(exclude_embeddings=True)


def test_parameters_are_counted_whole(world):
    assert set(world(2)(counts, "llama", False)) == {61 * 24}
    assert set(world(2)(counts, "gpt2", True)) == {32 * 24}  # positions; the tied table multiplies as the head


class Regression(torch.nn.Linear):
    """Its input is not `input_ids`, and no token."""

    def forward(self, features, labels=None):
        return torch.nn.functional.mse_loss(super().forward(features), labels)


def rows_of_another_input():
    model = bmt.auto_wrap(Regression(2, 1)).train()
    clock = Clock()
    with mock.patch.object(time, "perf_counter", clock):
        speed = Speedometer(model)
        model(labels=torch.zeros(5, 1), features=torch.ones(5, 2)).backward()
        clock.now += 10
        report = speed.read()
    speed.close()
    return report


@full
@pytest.mark.parametrize("size", [2, *in_full(1)])
def test_rows_are_counted_whatever_the_input_is_called(world, size):
    for report in world(size)(rows_of_another_input):
        assert report["samples_per_second"] == pytest.approx(5 * size / 10, rel=1e-4)
        assert "tokens_per_second" not in report


@full
def test_parameters_are_counted_again_after_a_change():
    model = build("llama")
    count, total = ParameterCount(model), sum(p.numel() for p in model.parameters())
    assert count() == total
    layer = model.model.layers[0].mlp
    layer.extra = torch.nn.Linear(3, 5)
    assert count() == total + 20
    layer.extra.weight = torch.nn.Parameter(torch.zeros(7, 7))
    assert count() == total + 54
    layer.extra.weight.requires_grad_(False)
    assert count(only_trainable=True) == total + 5
    del layer.extra
    assert count() == total


def test_trainer_gets_the_last_count_again_and_others_a_new_one():
    model = build("llama")
    count = model.num_parameters = ParameterCount(model)
    inputs = {"input_ids": torch.zeros(1, 1)}
    trainer = mock.Mock(model=model)
    flops = [Trainer.floating_point_ops(trainer, inputs)]
    model.extra = torch.nn.Linear(3, 5)
    flops += [Trainer.floating_point_ops(trainer, inputs) for _ in range(count.KEPT)]
    assert flops == [*[flops[0]] * count.KEPT, flops[0] + 6 * 20]
    del model.extra
    assert 6 * count(exclude_embeddings=True) == flops[0]
    assert Trainer.floating_point_ops(trainer, inputs) == flops[0] + 6 * 20
    count.renew()
    assert Trainer.floating_point_ops(trainer, inputs) == flops[0]
