"""Rows that ranks share, with recomputation that is chosen, compiled blocks, and predictions of memory."""

import pytest
import torch
from torch._dynamo.utils import counters

import hf_bmtrain as bmt
from cases import by_default, rows_in_full, rows_in_slow, slow
from hf_bmtrain.engine.runtime.world import simulated
from hf_bmtrain.features.memory.meter import SavedBytes
from hf_bmtrain.features.prediction.live_bytes import LiveBytes
from hf_bmtrain.features.prediction.prediction import predict
from hf_bmtrain.features.prediction.quiet_world import META, quiet_world
from hf_bmtrain.features.prediction.simulation import on_meta
from inner import device_memory, state_of
from ranks import on_ranks
from sequence_models import MODELS, batch_of, causal, check, compare_gradients

FOUR_LAYERS = causal("Llama", num_hidden_layers=4)


class Given:
    """A memory of `room` bytes beside what is allocated and what a step takes."""

    def __init__(self, room):
        self.base, self.room, self.resets = 1000, room, 0

    def allocated(self):
        return self.base

    def peak(self):
        return self.base + 500

    def reset_peak(self):
        self.resets += 1

    def usable(self):
        return 1500 + self.room


def policies(model):
    return [state_of(module).recompute for module in model.modules() if isinstance(module, bmt.CheckpointBlock)]


def kept(model):
    return "".join("01"[policy.kept] for policy in policies(model))


@on_ranks(2, full=(4,))
def test_auto():
    """All ranks choose alike, by the rank that has least memory; what is measured is of a rank's own tokens.

    With an odd number of tokens, with rows of another length in each group, and with memory that one rank takes later.
    """
    with device_memory(Given(1 << 40)):
        model = check(FOUR_LAYERS, 2, tokens=21, steps=3, use_checkpoint="auto")
        sizes = bmt.current_world().gather_objects(policies(model)[0].nbytes)
        assert kept(model) == "1111" and sizes[0] > sizes[1], "the first rank of a group has 11 of 21 tokens"
    size, last = max(sizes), bmt.rank() == bmt.world_size() - 1
    memory, plans, resets = Given(3 * size), [], []
    groups, group = bmt.world_size() // 2, bmt.rank() // 2
    steps = [((21, 13), 0), ((21, 13), 0), ((13, 21), 0), ((13, 21), size * last), ((40, 21), 0), ((40, 21), 0)]
    with device_memory(memory):
        model, plain = bmt.auto_wrap(FOUR_LAYERS(), sequence_parallel=2, use_checkpoint="auto"), FOUR_LAYERS()
        for number, (lengths, taken) in enumerate(steps):
            memory.base += taken
            batches = [batch_of("plain", number * groups + each, lengths[each]) for each in range(groups)]
            model(**batches[group]).loss.backward()
            (torch.stack([plain(**batch).loss for batch in batches]).sum() / groups).backward()
            compare_gradients(model, plain)
            plans.append(kept(model))
            resets.append(memory.resets)
            for each in (model, plain):
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
    everyone = bmt.current_world().gather_objects((plans, resets))
    assert all(each == (plans, resets) for each in everyone)
    assert plans == ["0000", "0111", "0111", "0011", "0011", "0001"]


@pytest.mark.parametrize("name", by_default(["llama-9-heads", "mistral", "deepseek-v3", "gpt-oss"], "llama-9-heads"))
@on_ranks(2)
def test_attention_is_kept(name):
    check(name, 2, "packed", tokens=21, use_checkpoint="attention")


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("llama-3-layers", True),
        *rows_in_full([("llama-3-layers", False), ("gpt-oss", "attention"), ("modern-bert", True)]),
        *rows_in_slow([
            ("llama-3-layers", "attention"), ("gemma3", True), ("gemma3", False), ("gemma3", "attention"),
            ("gpt-oss", True), ("gpt-oss", False), ("modern-bert", False), ("modern-bert", "attention"),
        ]),
    ],
)  # fmt: skip
@on_ranks(2)
def test_compiled_blocks(name, recompute):
    """The exchanges break the graph; what is around them is compiled once for all layers."""
    torch._dynamo.reset()
    counters.clear()
    build = causal("Llama", num_hidden_layers=3) if name == "llama-3-layers" else MODELS[name]
    kind = "masked" if "bert" in name else "plain"
    check(build, 2, kind, tokens=21, steps=1, compile="eager", use_checkpoint=recompute)
    if name == "llama-3-layers":
        assert counters["stats"]["unique_graphs"] == 4


@slow
@on_ranks(2)
def test_the_user_compiles_the_model():
    """With rows of two lengths, for which its graphs are compiled again."""
    torch._dynamo.reset()
    compiled = {}

    def loss(model, batch):
        if hasattr(model, "_bmt_shared_rows"):
            model = compiled.setdefault(model, torch.compile(model, backend="eager"))
        return model(**batch).loss

    batches = [batch_of("plain", number, 21 - 2 * number) for number in range(2)]
    check(causal("Llama", num_hidden_layers=1), 2, loss=loss, batches=batches.__getitem__)


@on_ranks(2)
def test_saved_activations_are_those_that_are_predicted():
    for name, recompute in (("llama-9-heads", True), ("llama-eager", False), ("gemma2", False)):
        batch = batch_of("plain", 0, tokens=21)
        model = bmt.auto_wrap(MODELS[name](), sequence_parallel=2, use_checkpoint=recompute)
        real = SavedBytes(model.parameters())
        with real.counting():
            model(**batch)
        with simulated(quiet_world(2, None)), LiveBytes(str):
            meta = bmt.auto_wrap(on_meta(MODELS[name]()), sequence_parallel=2, use_checkpoint=recompute)
            saved = SavedBytes(meta.parameters())
            with saved.counting():
                meta(**{key: value.to(META) for key, value in batch.items()})
        assert bmt.rank() or saved.nbytes == real.nbytes > 0  # the prediction is of rank 0, which has most tokens


def test_predictions_of_shared_rows():
    def predicted(share, tokens=4096, **options):
        model = on_meta(causal("Llama", max_position_embeddings=8192, attn_implementation="sdpa")()).bfloat16().train()
        batch = batch_of("plain", 0, tokens, rows=1)
        options = {"total": 80 << 30, "sequence_parallel": share} | options
        return predict(model, batch, bmt.optim.AdamOptimizer, ranks=4, **options)

    saved = {share: predicted(share, use_checkpoint=False).table["block"] for share in (1, 2, 4)}
    assert saved[1] > 1.7 * saved[2] > 1.7 * 1.5 * saved[4]
    assert predicted(2, use_checkpoint="auto").kept == (True, True)
    with pytest.raises(ValueError, match="sequence_parallel=3 must divide the number of ranks, 4"):
        predicted(3)
