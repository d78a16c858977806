"""Predictions of memory: the engine's own bytes against really allocated ones, activations against a real forward."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import float8_models
import hf_bmtrain as bmt
from cases import by_default, full, in_full
from hf_bmtrain.features.memory.meter import SavedBytes
from hf_bmtrain.features.prediction.device_choices import cuda_choices
from hf_bmtrain.features.prediction.live_bytes import LiveBytes
from hf_bmtrain.features.prediction.predict import Comparison
from hf_bmtrain.features.prediction.prediction import ROWS, predict
from hf_bmtrain.features.prediction.simulation import on_meta, simulate
from log_lines import log_lines
from ranks import on_ranks
from tiny_models import FAMILIES, batch, build

OPTIMIZERS = {
    "adam": bmt.optim.AdamOptimizer,
    "adam8": lambda parameters: bmt.optim.AdamOptimizer(parameters, state_bits=8),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def engine_bytes(model, optimizer) -> dict[str, int]:
    """Bytes of what the engine keeps between steps, and of the buffers that it gathers."""
    buffers = list(dict.fromkeys(p.buffer for p in model.parameters()))
    state = [getattr(v, "part", v) for values in optimizer.state.values() for k, v in values.items() if k != "step"]
    return {
        "shards": sum(b.shard.nbytes for b in buffers),
        "full_params": sum(b.layout.numel * b.shard.itemsize for b in buffers),
        "gradients": sum(b.gradient.shard.nbytes for b in buffers if b.gradient.shard is not None),
        "state": sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state}.values()),
    }


def real_bytes(family: str, optimizer: str) -> dict[str, int]:
    model = bmt.auto_wrap(build(family))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(chosen)
    device = bmt.current_world().device
    for step in range(2):
        manager.zero_grad()
        manager.backward(model(**{k: v.to(device) for k, v in batch(family, step).items()}).loss)
        manager.step()
    return engine_bytes(model, chosen)


def simulated_bytes(family: str, optimizer: str, size: int) -> dict[str, int]:
    model, made = on_meta(build(family)).train(), []

    def make(parameters):
        made.append(OPTIMIZERS[optimizer](parameters))
        return made[-1]

    simulate(model, batch(family, 0), make, size, 1 << 40)
    return engine_bytes(model, made[0])


@full
@pytest.mark.parametrize("family", by_default([f for f in FAMILIES if f != "mixtral"], "t5"))
@pytest.mark.parametrize("size", [3, *in_full(1)])
def test_the_engines_bytes_are_those_of_real_ranks(world, family, size):
    for optimizer in OPTIMIZERS:
        expected = simulated_bytes(family, optimizer, size)
        assert expected["gradients"] == expected["shards"] > 0
        assert expected["state"] > 0
        first, *others = world(size)(real_bytes, family, optimizer)
        assert first == expected
        for found in others:  # other ranks' shards have more padding, or less, which has no state
            assert 0 < found["state"] <= 2 * found["shards"]
            assert found | {"state": 0} == expected | {"state": 0}


def float8_bytes(model, optimizer) -> dict[str, int]:
    buffers = list(dict.fromkeys(p.buffer for p in model.parameters()))
    return engine_bytes(model, optimizer) | {
        "rounded": sum(s.nbytes for b in buffers for s in b.storage.memory().stored[1:])
    }


def real_float8_bytes(family: str) -> dict[str, int]:
    model = bmt.auto_wrap(float8_models.build(family), float8=True)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    for step in range(3):  # gathers are in float8 from the second one on
        optimizer.zero_grad()
        model(**float8_models.rows(step, bmt.rank())).loss.backward()
        optimizer.step()
    return float8_bytes(model, optimizer)


@pytest.mark.parametrize("family", ["gpt2", *in_full("llama")])
@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_the_bytes_of_gathers_in_float8_are_those_of_real_ranks(world, family, size):
    model, made = on_meta(float8_models.build(family)).train(), []

    def make(parameters):
        made.append(bmt.optim.AdamOptimizer(parameters))
        return made[-1]

    simulate(model, float8_models.rows(0, 0), make, size, 1 << 40, float8=True)
    expected = float8_bytes(model, made[0])
    assert expected["rounded"] > 0 and world(size)(real_float8_bytes, family)[0] == expected


@pytest.mark.parametrize("family", by_default([f for f in FAMILIES if f != "mixtral"], "llama"))
def test_saved_activations_are_those_of_a_real_forward(family):
    inputs = batch(family, 0)
    model = build(family).train()
    real = SavedBytes(model.parameters())
    with real.counting():
        model(**inputs)
    meta = on_meta(model)
    saved = SavedBytes(meta.parameters())
    with LiveBytes(str), saved.counting():
        meta(**{key: value.to("meta") for key, value in inputs.items()})
    assert saved.nbytes == real.nbytes > 0


def predicted(family="llama", rows=2, length=7, **options):
    model = on_meta(build(family)).train()
    defaults = {"ranks": 1, "total": 1 << 40}
    return predict(model, batch(family, 0, rows, length), bmt.optim.AdamOptimizer, **(defaults | options))


def test_more_memory_is_taken_for_more_rows_and_less_for_recomputation():
    few, many = (predicted(rows=rows, length=32, use_checkpoint=False) for rows in (8, 64))
    assert few.table["shard"] == many.table["shard"]
    assert many.table["block"] == pytest.approx(8 * few.table["block"], rel=0.05)
    assert predicted(rows=64, length=32).peak < many.peak
    assert set(many.table) <= {key for key, _ in ROWS}


def test_auto_keeps_what_fits():
    enough = predicted(rows=64, length=32, use_checkpoint="auto")
    assert enough.kept == (True, True, True)
    scarce = predicted(rows=64, length=32, use_checkpoint="auto", total=1 << 31)  # less than the reserve
    assert scarce.kept == (False, False, False)


@full
def test_zero_2_keeps_all_blocks_whole_and_offload_takes_host_memory():
    three, two = (predicted(ranks=4, rows=64, length=32, zero_level=level) for level in (3, 2))
    assert two.peak > three.peak
    model = on_meta(build("llama")).train()
    inputs = batch("llama", 0)
    offloaded = predict(model, inputs, bmt.optim.AdamOffloadOptimizer, ranks=1, total=1 << 40)
    assert offloaded.host >= 8 * sum(p.numel() for p in build("llama").parameters())
    assert predicted().host == 0


@full
def test_live_bytes_follow_storages():
    live = LiveBytes(lambda: "here")
    with live:
        first = torch.empty(1000, device="meta")
        assert live.live == live.peak == 4096
        view = first[10:].view(torch.uint8)
        del first
        assert live.live == 4096
        view.untyped_storage().resize_(0)
        assert live.live == 0
        view.untyped_storage().resize_(100)
        assert live.live == 512
        pinned = torch.empty(300, dtype=torch.uint8, device="meta", pin_memory=True)
        assert (live.live, live.host) == (512, 300)
        del view, pinned
    assert (live.live, live.peak) == (0, 4096)
    assert [change.nbytes for change in live.changes] == [4096, -4096, 512, -512]
    torch.empty(5, device="meta").untyped_storage().resize_(0)
    assert len(live.changes) == 4


def test_attention_without_a_kernel_takes_what_it_takes_on_cuda():
    """In float32 with fewer keys than queries: scores in forward, and marks of them; in backward three times scores."""
    shape, keys = (1, 16, 512, 16), (1, 8, 512, 16)
    scores = 16 * 512 * 512 * 4
    with cuda_choices(), LiveBytes(lambda: "") as live, torch.device("meta"):
        query, key, value = (torch.empty(each, requires_grad=True) for each in (shape, keys, keys))
        before = live.live
        found = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        assert 2.25 * scores < live.peak - before < 2.5 * scores
        live.reset_peak()
        found.backward(torch.empty(shape))
        assert 4 * scores < live.peak - before < 4.25 * scores


def losses_of(model) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = model(**batch("llama", step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def predict_on_one_rank_and_train() -> list[float]:
    model = build("llama")
    if bmt.rank() == 0:
        bmt.predict_memory(model, batch("llama", 0))
    return losses_of(bmt.auto_wrap(model))


def train_without() -> list[float]:
    torch.manual_seed(0)
    return losses_of(bmt.auto_wrap(build("llama")))


def test_one_rank_alone_may_predict_and_nothing_changes(world):
    assert world(2)(predict_on_one_rank_and_train) == world(2)(train_without)


@on_ranks(1)
def test_the_precision_of_an_accelerator_is_not_simulated():
    """torch has no autocast for the meta device."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState

    plain = predict_on_one_rank()
    accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    try:
        with log_lines() as lines:
            assert predict_on_one_rank().table == plain.table
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert any("ignores autocast" in line for line in lines)


def predict_on_one_rank():
    return bmt.predict_memory(build("llama").to("meta"), batch("llama", 0))


@on_ranks(1)
def test_a_wrapped_model_is_refused():
    model = bmt.auto_wrap(build("llama"))
    with pytest.raises(ValueError, match="already wrapped. Call predict_memory before auto_wrap"):
        bmt.predict_memory(model, batch("llama", 0))
    with pytest.raises(ValueError, match="micro_batches must be 1 or more, not 0"):
        bmt.predict_memory(build("llama"), batch("llama", 0), micro_batches=0)
    with pytest.raises(ValueError, match="predict_memory: the model's output has no loss. Add `labels` to `batch`"):
        bmt.predict_memory(build("llama"), {"input_ids": batch("llama", 0)["input_ids"]})


@full
def test_a_large_difference_is_a_warning(caplog):
    prediction, model = predicted(), torch.nn.Linear(1, 1)
    with caplog.at_level(logging.INFO, "hf_bmtrain"):
        Comparison(prediction, 1, model).report(int(prediction.peak * 1.02))
        Comparison(prediction, 1, model).report(int(prediction.peak * 1.2))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING"]
    assert "measured (-2.0 %)" in caplog.text
    assert "optimizer state" in caplog.text.split("WARNING")[1]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("no memory in backward")


class Layer(nn.Module):
    def __init__(self, fails: str) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), fails

    def forward(self, x):
        if self.fails == "forward":
            raise torch.OutOfMemoryError("no memory in forward")
        return Failing.apply(self.linear(x)) if self.fails == "backward" else self.linear(x)


class Model(nn.Module):
    def __init__(self, fails: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(fails)])

    def forward(self, x):
        return self.layers[0](x).sum()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes, so it is logged")
@pytest.mark.parametrize("fails", ["forward", "backward"])
@on_ranks(1)
def test_an_out_of_memory_error_says_what_takes_less(fails):
    model = bmt.auto_wrap(Model(fails), use_checkpoint=False)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(torch.OutOfMemoryError, match=f"in {fails}") as caught:
        manager.backward(model(torch.ones(2, 4)))
    (note,) = caught.value.__notes__
    assert "shards of the parameters" in note
    assert "1. auto_wrap(model, use_checkpoint=True)" in note
    assert "AdamOffloadOptimizer" in note
