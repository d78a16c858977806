"""What the speedometer counts, over ranks that see different numbers of rows."""

import time

import pytest
import torch

import hf_bmtrain as bmt
from hf_bmtrain.hf.speed import Speedometer, count_parameters
from tiny_models import batch, build


def rates():
    model = bmt.auto_wrap(build("llama")).train()
    speed = Speedometer(model)
    rank = bmt.rank()
    model(**batch("llama", 0, rows=rank + 1)).loss.backward()
    with torch.no_grad():
        model(**batch("llama", 0))  # no training
    speed.pause()
    time.sleep(0.5)
    speed.resume()
    speed._since = time.perf_counter() - 10  # as if training had taken ten seconds
    first, second = speed.read(), speed.read()
    speed.close()
    model(**batch("llama", 0))
    assert not speed._counts.any() and second["samples_per_second"] == 0 and "tokens_per_second" not in second
    paused = Speedometer(model)
    start = paused._since
    paused.pause()
    time.sleep(0.2)
    paused.pause()  # a second one changes nothing
    paused.resume()
    assert 0.2 <= paused._since - start < 0.4
    return first


@pytest.mark.parametrize("size", [1, 2])
def test_rates_are_of_all_ranks(world, size):
    plain = build("llama")
    rows = sum(range(1, size + 1))
    for report in world(size)(rates):
        assert report["samples_per_second"] == pytest.approx(rows / 10, rel=0.02)
        assert report["tokens_per_second"] == pytest.approx(rows * 7 / 10, rel=0.02)
        weights = sum(p.numel() for name, p in plain.named_parameters() if "embed_tokens" not in name)
        flops = rows * 7 * (6 * weights + 12 * 3 * 24 * 7)
        assert report["model_tflops_per_device"] == pytest.approx(flops / 10 / size / 1e12, rel=0.02)


def counts(family, tied):
    model, plain = bmt.auto_wrap(build(family, tied)), build(family, tied)
    for exclude in (False, True):
        assert count_parameters(model, exclude_embeddings=exclude) == count_parameters(
            plain, exclude_embeddings=exclude
        )
    assert count_parameters(model) == sum(p.numel() for p in plain.parameters())
    return count_parameters(model) - count_parameters(model, exclude_embeddings=True)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_are_counted_whole(world, size):
    assert set(world(size)(counts, "llama", False)) == {61 * 24}
    assert set(world(size)(counts, "gpt2", True)) == {32 * 24}  # positions; the tied table multiplies as the head


class Regression(torch.nn.Linear):
    """Its input is not `input_ids`, and no token."""

    def forward(self, features, labels=None):
        return torch.nn.functional.mse_loss(super().forward(features), labels)


def rows_of_another_input():
    model = bmt.auto_wrap(Regression(2, 1)).train()
    speed = Speedometer(model)
    model(labels=torch.zeros(5, 1), features=torch.ones(5, 2)).backward()
    speed._since = time.perf_counter() - 10
    report = speed.read()
    speed.close()
    return report


@pytest.mark.parametrize("size", [1, 2])
def test_rows_are_counted_whatever_the_input_is_called(world, size):
    for report in world(size)(rows_of_another_input):
        assert report["samples_per_second"] == pytest.approx(5 * size / 10, rel=0.02)
        assert "tokens_per_second" not in report
