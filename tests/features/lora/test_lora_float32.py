"""Adapters in float32 beside a model in bfloat16 without autocast, PEFT's default, against float64."""

import contextlib
import logging
from unittest import mock

import pytest
import torch
import transformers
from test_lora_linear import counted, nothing
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

import hf_bmtrain as bmt
from beside_twin import loss_of
from cases import full, in_full, rows_in_full
from hf_bmtrain.features.lora import arithmetic, factors
from hf_bmtrain.features.lora import linear as lora_linear
from hf_bmtrain.features.lora.linear import COMPILES, FusedLoraLinear, fuse_lora
from hf_bmtrain.features.packed.bitsandbytes import Linear4bit
from log_lines import log_lines
from ranks import on_ranks

peft = pytest.importorskip("peft")

INPUTS, OUTPUTS, ROWS = 256, 192, 300
LEAST = 2**-17
"""Of a norm: what is left of a gradient of A or B. Rounded to bfloat16, an error is 2**-9 of it."""


def build(size=1.0, dtype=torch.bfloat16, adapters=torch.float32, kind="linear", **options):
    """One layer. size: of the adapter's product, in that of the frozen layer."""
    torch.manual_seed(0)
    layer = Conv1D(OUTPUTS, INPUTS) if kind == "conv1d" else nn.Linear(INPUTS, OUTPUTS)
    layer.weight.data.normal_(std=INPUTS**-0.5)
    layer = nn.Sequential(layer.bfloat16().to(dtype))
    options = {"r": 8, "lora_alpha": 12, "fan_in_fan_out": kind == "conv1d"} | options
    model = peft.get_peft_model(layer, peft.LoraConfig(target_modules=["0"], **options), autocast_adapter_dtype=False)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            std = INPUTS**-0.5 if "lora_A" in name else size * 8**-0.5 / 1.5
            parameter.data = torch.randn(parameter.shape).mul_(std).to(adapters)
    return model


def run(model, dtype=torch.bfloat16):
    """The output, and the gradients of the input and of what is trained, by name."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ROWS, INPUTS, generator=generator).bfloat16().to(dtype).requires_grad_()
    dy = torch.randn(ROWS, OUTPUTS, generator=generator).bfloat16().to(dtype)
    torch.manual_seed(3)  # of dropout
    y = model(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    return found | {n: p.grad for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def errors(found, truth):
    """Of each, the share of its norm."""
    assert found.keys() == truth.keys() and len(found) >= 4
    return {n: float((each.double() - truth[n]).norm() / truth[n].norm()) for n, each in found.items()}


def check(size=1.0, prepare=lambda model: None, compile=None, most=1.02, **options):
    """No further from float64 than PEFT's forward, but for gradients of A and B, which need a bound of their own."""
    models = [
        build(size, **options),
        build(size, **options),
        build(size, dtype=torch.float64, adapters=torch.float64, **options),
    ]
    for each in models:
        prepare(each)
    assert fuse_lora(models[0].modules()) == 1
    mine = models[0] if compile is None else torch.compile(models[0], backend=compile)
    with counted() as calls:
        found = run(mine)
    assert compile or len(calls) == 1
    assert all(each.dtype == (torch.float32 if "lora" in name else torch.bfloat16) for name, each in found.items())
    truth = run(models[2], torch.float64)
    error, theirs = errors(found, truth), errors(run(models[1]), truth)
    for name in error:
        assert error[name] <= (LEAST if "lora" in name else most * theirs[name]), (name, error, theirs)


@pytest.mark.parametrize("size", [1.0, *in_full(0.01, 0.1, 10.0)])
def test_as_exact_as_pefts_in_float32(size):
    check(size)


def second_adapter(model):
    torch.manual_seed(4)
    model.add_adapter("other", peft.LoraConfig(target_modules=["0"], r=4, init_lora_weights=False))
    dtype = model.base_model.model[0].lora_A["default"].weight.dtype
    for name, parameter in model.named_parameters():
        if "other" in name:  # PEFT's values are of the model's dtype
            parameter.data = torch.randn(parameter.shape).mul_(0.1).to(dtype)
    model.base_model.set_adapter(["default", "other"])


@pytest.mark.parametrize("first", ["default", pytest.param("other", marks=full)])
def test_adapters_of_two_dtypes(first):
    """One is multiplied in bfloat16, the other as sums of bfloat16 matrices, which include its scaling."""

    def prepare(model):
        second_adapter(model)
        for name, parameter in model.named_parameters():
            if "lora" in name and first not in name and parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()

    models = [build(), build(), build(dtype=torch.float64, adapters=torch.float64)]
    for each in models:
        prepare(each)
    assert fuse_lora(models[0].modules()) == 1
    with counted() as calls:
        found = run(models[0])
    assert len(calls) == 1
    truth = run(models[2], torch.float64)
    error, theirs = errors(found, truth), errors(run(models[1]), truth)
    for name in error:
        assert error[name] <= 1.2 * theirs[name] + LEAST, (name, error, theirs)


@pytest.mark.parametrize(
    ("prepare", "options"),
    [
        (second_adapter, {"lora_dropout": 0.25, "most": 1.15}),  # one rounding more, of the gradient of the input
        *rows_in_full(
            [
                (second_adapter, {}),
                (nothing, {"kind": "conv1d"}),
                (nothing, {"use_rslora": True}),
                (nothing, {"lora_dropout": 0.25}),
            ]
        ),
    ],
)
def test_other_layers(prepare, options):
    check(prepare=prepare, **options)


def test_four_bits_of_bitsandbytes():
    """Its layer, once the weight is sharded, computes in the dtype of the whole weight."""

    def adopt(model):
        base = model.base_model.model[0].base_layer
        base.__class__, base.compute_dtype = Linear4bit, None

    check(prepare=adopt)


@full
@pytest.mark.skipif(not COMPILES, reason="compiled blocks keep PEFT's layers")
@pytest.mark.parametrize("backend", ["inductor", *in_full("aot_eager")])
def test_compiled(backend):
    """In one graph. Inductor leaves out conversions to bfloat16 and back, on which the parts must not rely."""
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def compile(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return lookup_backend(backend)(graph, inputs)

    check(compile=compile)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(graphs) == 1 and "autograd_function_apply" in graphs[0], "PEFT's forward was compiled"


class Kernels(TorchDispatchMode):
    """The operations that launch a kernel on a GPU, in order."""

    FREE = (
        "alias", "detach", "empty", "empty_like", "new_empty", "select", "slice", "split", "split_with_sizes", "t",
        "transpose", "unsqueeze", "view", "_unsafe_view",
    )  # fmt: skip

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name.split(".")[0] not in self.FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def wide(self, one, other, factor=1.0):
        """One kernel on a GPU, several on the CPU, as the next two."""
        self.names.append("wide")
        return one.new_zeros(one.shape[0], other.shape[1], dtype=torch.float32)

    def split_factors(self, a, b):
        self.names.append("split_factors")
        return arithmetic.split_factors(a, b)

    def split_sums(self, sums, scaling):
        self.names.append("split_sums")
        return arithmetic.split_sums(sums, scaling)


@pytest.mark.parametrize(
    ("adapters", "around", "most"),
    [
        (torch.float32, contextlib.nullcontext, (5, 8)),
        (torch.float32, lambda: torch.autocast("cpu", torch.bfloat16), (5, 5)),
        (torch.bfloat16, contextlib.nullcontext, (3, 5)),
    ],
    ids=["float32", "autocast", "bfloat16"],
)
def test_number_of_kernels(adapters, around, most):
    """In forward and in backward. PEFT's forward has 7 and 10, 9 and 11, 5 and 7."""
    model = build(adapters=adapters)
    fuse_lora(model.modules())
    x, dy, seen = torch.randn(8, INPUTS).bfloat16().requires_grad_(), torch.randn(8, OUTPUTS).bfloat16(), Kernels()
    kernels = {"_wide_product": seen.wide, "split_factors": seen.split_factors, "split_sums": seen.split_sums}
    with mock.patch.multiple(factors, **{name: hidden(one) for name, one in kernels.items()}), around():
        with seen:
            y = model(x)
        forward, seen.names = seen.names, []
        with seen:
            torch.autograd.backward(y, dy)
    assert 0 < len(forward) <= most[0], forward
    assert 0 < len(seen.names) <= most[1], seen.names


def hidden(function):
    """Return `function` with what it calls not counted."""

    def call(*args):
        with torch.utils._python_dispatch._disable_current_modes():
            return function(*args)

    return call


def language_model(dtype, adapters):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config).bfloat16().to(dtype)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.manual_seed(len(name))
            parameter.data = torch.randn(parameter.shape).mul_(0.02).to(adapters)  # larger ones make noise larger
    return model


def trained(model, steps=3):
    """How far SGD has moved what is trained; every rank has rows of its own."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: value.double().clone() for n, value in model.state_dict().items() if n in parameters}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    sharded = hasattr(next(iter(parameters.values())), "buffer")
    for step in range(steps):
        numbers = [step * bmt.world_size() + rank for rank in range(bmt.world_size())]
        if sharded:
            loss_of(model, numbers[bmt.rank()]).backward()
        else:
            torch.stack([loss_of(model, number) for number in numbers]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: value.double() - before[n] for n, value in model.state_dict().items() if n in parameters}


def sharded(wrap):
    """Three steps of SGD: no further from those of float64 than plain PEFT, whose activations are in bfloat16 too."""
    with counted() as calls:
        mine = trained(bmt.auto_wrap(language_model(torch.bfloat16, torch.float32), **wrap))
    assert "compile" in wrap or len(calls) >= 3 * 3 * 7
    theirs = trained(language_model(torch.bfloat16, torch.float32))
    truth = trained(language_model(torch.float64, torch.float64))
    assert mine.keys() == truth.keys() and len(truth) == 3 * 7 * 2
    total = [
        torch.stack([(each[n] - truth[n]).norm() / truth[n].norm() for n in truth]).mean() for each in (mine, theirs)
    ]
    assert total[0] <= 1.15 * total[1] < 0.1, total


@pytest.mark.parametrize("wrap", [{}, *in_full({"use_checkpoint": False}, {"compile": "aot_eager"})], ids=str)
def test_sharded(world, wrap):
    world(2)(sharded, wrap)


@full
@pytest.mark.skipif(not COMPILES, reason="compiled blocks keep PEFT's layers")
@on_ranks(1)
def test_compiled_blocks():
    """One graph for all layers, and no break in it; the fused product is in it."""
    torch._dynamo.reset()
    counters.clear()
    model = bmt.auto_wrap(
        language_model(torch.bfloat16, torch.float32), compile="aot_eager", use_checkpoint=False, keep_frozen=True
    )
    loss_of(model, 0).backward()
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2, "one, and one of the first layer, whose input needs no gradient"


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "Dora adapters are not simply added"), *rows_in_full([({"lora_bias": True}, "has a bias")])],
)
@on_ranks(1)
def test_what_runs_pefts_forward_is_logged_once(options, reason):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    config = peft.get_peft_model(
        transformers.LlamaForCausalLM(config).bfloat16(),
        peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **options),
    )
    with mock.patch.object(lora_linear, "_logged", set()), log_lines(logging.INFO) as lines:
        model = bmt.auto_wrap(config)
        for _ in range(2):
            loss_of(model, 0).backward()
    said = [line for line in lines if "PEFT's own forward" in line]
    assert len(said) == 1 and reason in said[0] and "layers.0.self_attn.q_proj" in said[0], said
    assert any(isinstance(each, FusedLoraLinear) for each in model.modules())
