"""auto_wrap(offload_activations=True): bit for bit the training without it, with copies that lag as they please."""

import importlib.util
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_bmtrain as bmt
from cases import by_default, in_full
from hf_bmtrain.features import activations
from hf_bmtrain.features.activations import host_inputs
from hf_bmtrain.features.prediction.prediction import predict
from ranks import on_ranks
from slow_streams import Clock
from tiny_models import batch, build

BLOCKS = 4


@contextmanager
def as_on_a_gpu(seed=0):
    """Copies between two places in host memory, on streams that lag."""
    clock = Clock(seed)
    with (
        mock.patch.object(activations, "has_own_memory", return_value=True),
        mock.patch.object(host_inputs, "work_stream", clock.stream),
    ):
        yield clock


def adapted(model):
    peft = importlib.import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def train(offload, prepare=lambda model: model, family="llama", use_checkpoint=True, **wrap):
    """Return the losses and gradients of three steps, of two micro-batches each, and the model."""
    model = prepare(build(family, dropout=0.1, blocks=BLOCKS)).train()
    bmt.auto_wrap(model, use_checkpoint=use_checkpoint, offload_activations=offload, **wrap)
    torch.manual_seed(3 + bmt.rank())
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        for micro in range(2):
            rows = 10 * step + micro + bmt.rank() // wrap.get("sequence_parallel", 1)
            loss = model(**batch(family, rows)).loss
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.part.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found, model


VARIANTS = {
    "plain": {},
    "level 2": {"zero_level": 2},
    "compiled": {"compile": "aot_eager"},
    "lora": {"prepare": adapted},
    "gpt2": {"family": "gpt2"},  # its blocks pass tuples on
    "rows shared": {"sequence_parallel": 2},
}


if importlib.util.find_spec("peft") is None:
    del VARIANTS["lora"]


@pytest.mark.parametrize("name", by_default(VARIANTS, "plain"))
@on_ranks(2)
def test_the_same_bits(name):
    with as_on_a_gpu() as clock:
        found, model = train(True, **VARIANTS[name])
    expected, _ = train(False, **VARIANTS[name])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert clock.lag > 0
    store = next(module._bmt.inputs for module in model.modules() if isinstance(module, bmt.CheckpointBlock))
    # Host memory: one input for each block, used in every step. That of a frozen model's first block has no gradient.
    assert len(store._free) == BLOCKS - (name == "lora")


@on_ranks(1)
def test_how_many_inputs_are_on_the_device():
    """Of the blocks before the one that runs: one in forward, one ahead in backward."""
    held = []

    def count(module, *args):
        store = module._bmt.inputs
        inputs = [each() for each in store._saved if each() is not None]
        held.append(sum(saved.tensor is not None for each in inputs for saved in each._saved))

    def leave(inputs, leave=host_inputs._Inputs.leave_device):
        leave(inputs)
        assert inputs._event.reached  # the memory is free from now on: the copy must be complete

    with as_on_a_gpu(), mock.patch.object(host_inputs._Inputs, "leave_device", leave):
        model = bmt.auto_wrap(build("llama", blocks=BLOCKS), offload_activations=True)
        for block in model.model.layers:
            block.mlp.register_forward_pre_hook(lambda module, args, block=block: count(block))
        loss = model(**batch("llama", 0)).loss
        assert held == [1] * BLOCKS
        loss.backward()
    assert held[BLOCKS:] == [1] * (BLOCKS - 1) + [0]


@on_ranks(1)
def test_graphs_that_are_dropped_kept_or_written_to():
    with as_on_a_gpu():
        model, plain = (bmt.auto_wrap(build("llama"), offload_activations=on) for on in (True, False))
        model(**batch("llama", 1))  # no backward
        losses = [each(**batch("llama", 2)).loss for each in (model, plain)]
        for _ in range(2):
            for loss in losses:
                loss.backward(retain_graph=True)
        assert all(torch.equal(a.grad.part, b.grad.part) for a, b in zip(model.parameters(), plain.parameters()))
        del losses, loss
        assert len(model.model.layers[0]._bmt.inputs._free) == 3

        for number in (2, 1):  # the input of the last block stays on the device, where backward looks at it
            model.model.layers[number].register_forward_hook(
                lambda module, args, output: torch.autograd.graph.increment_version(args[0])
            )
            with pytest.raises(RuntimeError, match="modified in place after the block's forward"):
                model(**batch("llama", 3)).loss.backward()


@on_ranks(1)
def test_host_memory_of_rows_of_any_length():
    """It is as large as the longest rows need."""
    with as_on_a_gpu():
        model = bmt.auto_wrap(build("llama", blocks=BLOCKS), offload_activations=True)
        sizes = []
        for length in (5, 3, 7, 4, 6, 7):
            ids = torch.arange(1, length + 1)[None]
            model(input_ids=ids, labels=ids).loss.backward()
            sizes.append(sum(memory.nbytes for memory in model.model.layers[0]._bmt.inputs._free))
    width = model.config.hidden_size * 4
    assert sizes == [BLOCKS * width * most for most in (5, 5, 7, 7, 7, 7)]


@on_ranks(1)
def test_a_checkpoint_around_a_block_saves_by_itself():
    from torch.utils.checkpoint import checkpoint

    found = []
    for on in (True, False):
        with as_on_a_gpu():
            model = bmt.auto_wrap(build("llama"), offload_activations=on)
            loss = checkpoint(lambda model: model(**batch("llama", 2)).loss, model, use_reentrant=False)
            loss.backward()
            found.append([parameter.grad.part.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("call", ["activation", *in_full("gradient")])
@on_ranks(1)
def test_option_of_transformers(call):
    """`activation_checkpointing_kwargs={"offload": True}`; `every_n_layers` is refused."""
    with as_on_a_gpu():
        model = bmt.auto_wrap(build("llama", blocks=BLOCKS), use_checkpoint=False)
        enable = getattr(model, f"{call}_checkpointing_enable")
        enable(None, offload=True)
        states = [block._bmt for block in model.model.layers]
        assert [state.recompute.recomputes((), {}, 0) for state in states] == [True] * BLOCKS
        loss = model(**batch("llama", 2)).loss
        assert len([each for each in states[0].inputs._saved if each() is not None]) == BLOCKS
        loss.backward()
        with pytest.raises(ValueError, match="every_n_layers=2 is not supported"):
            enable({"every_n_layers": 2})
    enable()
    assert all(state.recompute.recomputes((), {}, 0) for state in states)


def test_predicted_memory():
    """Host memory has the input of each block, which the device does not keep; MLPs in pieces take less."""
    sizes = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4}
    found, ids = [], torch.zeros(1, 4096, dtype=torch.long)
    for options in ({}, {"offload_activations": True}, {"mlp_chunks": 8}):
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **sizes))
        batch = {"input_ids": ids, "labels": ids}
        found.append(predict(model.train(), batch, bmt.optim.AdamOptimizer, ranks=2, total=80 << 30, **options))
    plain, offloaded, pieces = found
    one = 4096 * 64 * 4
    assert (plain.host, offloaded.host) == (0, 6 * one)
    assert offloaded.peak < plain.peak - 2 * one and pieces.peak < plain.peak - 4096 * 512 * 4


@on_ranks(1)
def test_on_the_cpu_and_with_nothing_recomputed():
    with mock.patch.object(activations, "_log_once") as log:
        model = bmt.auto_wrap(build("llama"), offload_activations=True)
    assert "changes nothing on the CPU" in log.call_args[0][0]
    assert all(block._bmt.inputs is None for block in model.model.layers)
    with pytest.raises(ValueError, match="use_checkpoint=False recomputes no block"):
        bmt.auto_wrap(build("llama"), use_checkpoint=False, offload_activations=True)
