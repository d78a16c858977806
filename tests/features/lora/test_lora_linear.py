"""LoRA layers whose adapter is added in the product of the frozen layer, against PEFT's own forward."""

import contextlib
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import float8_models
import hf_bmtrain as bmt
from beside_twin import train_beside
from cases import full, in_full, pairwise, rows_by_default, rows_in_full
from hf_bmtrain.features.float8.linear import Float8Linear
from hf_bmtrain.features.lora import linear as lora_linear
from hf_bmtrain.features.lora.linear import FusedLoraLinear, fuse_lora
from ranks import on_ranks

peft = pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self, kind, bias):
        super().__init__()
        self.clips = False
        torch.manual_seed(0)
        self.first = Conv1D(24, 16) if kind == "conv1d" else nn.Linear(16, 24, bias=bias)
        self.second = nn.Linear(24, 12)

    def forward(self, x):
        y = self.first(x)
        if self.clips:
            y.clamp_(-1, 1)
        return self.second(torch.tanh(y))


def build(kind="linear", bias=True, dtype=torch.float64, **options):
    options = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "fan_in_fan_out": kind == "conv1d"} | options
    model = Model(kind, bias).to(dtype)
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["first", "second"], **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


@contextlib.contextmanager
def counted():
    """The number of fused products that run under `with`, as a list's length."""
    calls, apply = [], lora_linear.apply_function

    def counting(function, *arguments):
        if not torch.compiler.is_compiling():  # traced code would be compiled again for each length of the list
            calls.append(arguments)
        return apply(function, *arguments)

    with mock.patch.object(lora_linear, "apply_function", counting):
        yield calls


def run(model, x):
    """Output and gradients of all that is trained, and of the input."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)  # of dropout
    y = model(x)
    y.float().square().sum().backward()
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())]


def compare(
    prepare, fused, rtol=1e-12, shape=(3, 5, 16), dtype=torch.float64, around=contextlib.nullcontext, **options
):
    plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
    assert fuse_lora(model.modules()) == 2 and fuse_lora(model.modules()) == 0
    for each in (plain, model):
        prepare(each)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    with counted() as calls, around():
        found = run(model, x)
    assert len(calls) == fused
    with around():
        expected = run(plain, x)
    assert any(each is not None for each in expected[2:])
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def nothing(model):
    pass


@pytest.mark.parametrize(
    ("kind", "shape"),
    pairwise(
        [("linear", (3, 5, 16)), ("no bias", (0, 16)), ("conv1d", (16,))],
        ["linear", "no bias", "conv1d"],
        [(3, 5, 16), (7, 16), (16,), (0, 16)],
    ),
    ids=str,
)
def test_is_pefts(kind, shape):
    compare(nothing, 2, shape=shape, kind=kind, bias=kind != "no bias")


@full
@pytest.mark.parametrize(
    ("dtype", "fused"), [(torch.bfloat16, 2), *rows_in_full([(torch.float32, 0), (torch.float16, 2)])], ids=str
)
def test_other_dtypes(dtype, fused):
    compare(nothing, fused, rtol=0.05 if fused else 0, dtype=dtype)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.5}, *in_full({"use_rslora": True})], ids=str)
def test_evaluation(options):
    compare(lambda model: model.eval(), 2, **options)


def clip(model):
    model.base_model.model.clips = True


@full
@pytest.mark.parametrize("shape", [(3, 5, 16), *in_full((7, 16), (16,))], ids=str)
def test_outputs_may_be_modified_in_place(shape):
    compare(clip, 2, shape=shape)


def test_float16_does_not_overflow_before_it_is_scaled():
    """24 · 600 · 8 is beyond float16, and a quarter of it is not."""
    found = []
    for fused in (True, False):
        model = build(dtype=torch.float16, lora_alpha=1)
        fuse_lora(model.modules() if fused else [])
        layer = model.base_model.model.first
        layer.lora_B["default"].weight.data.fill_(8)
        layer(torch.full((2, 16), 1e-3, dtype=torch.float16)).backward(torch.full((2, 24), 600).half())
        found.append([layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad])
    assert all(each.isfinite().all() for each in found[1])
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


def two_adapters(model):
    torch.manual_seed(4)
    model.add_adapter("other", peft.LoraConfig(target_modules=["first"], r=2, init_lora_weights=False))
    model.double()
    model.base_model.set_adapter(["default", "other"])


@pytest.mark.parametrize("kind", ["linear", *in_full("conv1d")])
@pytest.mark.parametrize("dropout", [0.5, *in_full(0.0)])
def test_several_adapters_and_dropout(kind, dropout):
    """Dropout draws as PEFT's does on a CPU."""
    compare(two_adapters, 2, kind=kind, lora_dropout=dropout)


def freeze_a(model):
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)


def freeze_b(model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.requires_grad_(False)


@full
@pytest.mark.parametrize("prepare", [freeze_a, *in_full(freeze_b)])
def test_one_factor_is_frozen(prepare):
    compare(prepare, 2)


def other_adapter(model):
    two_adapters(model)
    model.set_adapter("other")


def hooked(model):
    model.base_model.model.first.base_layer.register_forward_hook(lambda module, args, output: output * 2)


def patched(model):
    base = model.base_model.model.first.base_layer
    base.forward = lambda x: 10 * type(base).forward(base, x)


def learned_scaling(model):
    model.base_model.model.first.scaling["default"] = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))


def train_the_base(model):
    model.base_model.model.first.base_layer.requires_grad_(True)


def merge(model):
    model.merge_adapter()
    model.base_model.model.first.base_layer.requires_grad_(True)


def disable(model):
    model.base_model.disable_adapter_layers()
    model.base_model.model.first.base_layer.requires_grad_(True)


PEFTS = [
    (other_adapter, 1, {}), (hooked, 1, {}), (patched, 1, {}),
    (patched, 1, {"kind": "conv1d"}), (learned_scaling, 1, {}), (train_the_base, 1, {}), (merge, 0, {}),
    (disable, 0, {}), (nothing, 0, {"lora_dropout": 1.0}), (nothing, 0, {"use_dora": True}),
    (nothing, 0, {"lora_bias": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("prepare", "fused", "options"),
    rows_by_default(PEFTS, (hooked, 1, {})),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_not_plain_adapters_runs_pefts_forward(prepare, fused, options):
    compare(prepare, fused, **options)


@full
def test_hooks_of_all_modules_are_called():
    model, seen = build(), []
    fuse_lora(model.modules())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        model(torch.ones(2, 16, dtype=torch.float64))
    finally:
        handle.remove()
    assert model.base_model.model.first.base_layer in seen


def gradients(model, x):
    """Gradients of all that is trained, by torch.func."""

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    return torch.func.grad(loss)({name: each for name, each in model.named_parameters() if each.requires_grad})


@full
def test_transforms_of_torch_func():
    found, x = [], torch.randn(2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for fused in (True, False):
        model = build()
        fuse_lora(model.modules() if fused else [])
        found.append([torch.vmap(model)(x), *gradients(model, x).values()])
    torch.testing.assert_close(*found)


@full
def test_sequences_of_different_lengths():
    found, rows = [], torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for fused in (True, False):
        model = build()
        fuse_lora(model.modules() if fused else [])
        x = torch.nested.nested_tensor([rows[:2], rows[2:]], layout=torch.jagged)
        found.append(model.base_model.model.first(x).values())
    torch.testing.assert_close(*found)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "dtype", "adapters"),
    pairwise(
        [("linear", torch.bfloat16, torch.float32), ("conv1d", torch.float32, torch.float32)],
        ["linear", "conv1d"],
        [torch.float32, torch.bfloat16],
        [torch.float32, torch.bfloat16],
    ),
    ids=str,
)
def test_autocast(dtype, adapters, kind):
    """PEFT keeps adapters in float32 beside a model in bfloat16."""

    def convert(model):
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.to(adapters)

    compare(convert, 2, rtol=0.05, dtype=dtype, around=autocast, kind=kind)


def float_adapters(model):
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()


@full
def test_autocast_leaves_float64_alone():
    compare(nothing, 2, around=autocast)


@full
def test_float32_adapters_beside_float16_run_pefts_forward():
    """The range of float16 is too small for the low parts."""
    compare(float_adapters, 0, rtol=0.05, dtype=torch.float16)


def saved_bytes(model, around):
    """What autograd keeps of a forward, parameters aside."""
    x, storages = torch.randn(64, 16, dtype=torch.bfloat16), {}
    known = {each.untyped_storage().data_ptr() for each in model.parameters()}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with around(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    found = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)
    assert y.requires_grad
    return found


@pytest.mark.parametrize("prepare", [freeze_b, *in_full(nothing, freeze_a)])
@pytest.mark.parametrize("around", [autocast, *in_full(contextlib.nullcontext)])
def test_no_more_is_kept_than_by_peft(around, prepare):
    plain, model = build(dtype=torch.bfloat16), build(dtype=torch.bfloat16)
    for each in (plain, model):
        prepare(each)
    if around is autocast:
        float_adapters(plain)
        float_adapters(model)
    fuse_lora(model.modules())
    mine, theirs = saved_bytes(model, around), saved_bytes(plain, around)
    assert mine < theirs if around is autocast and prepare is not freeze_a else mine <= theirs


def sharded(options, wrap):
    """In float64 a sharded model's losses and gradients are plain PEFT's, although their products differ."""

    def model():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager",
        )  # fmt: skip
        base = transformers.LlamaForCausalLM(config).double()
        config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False, **options)
        return peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()

    twin = model()
    with counted() as calls:
        train_beside(bmt.auto_wrap(model(), **wrap), twin)
    assert len(calls) >= 3 * 3 * 7


@pytest.mark.parametrize(
    "wrap",
    [{}, {"keep_frozen": True}, *in_full({"zero_level": 2, "use_checkpoint": False}, {"use_checkpoint": False})],
    ids=str,
)
def test_sharded(world, wrap):
    world(2)(sharded, {"use_rslora": "zero_level" in wrap}, wrap)


@pytest.mark.parametrize("family", ["gpt2", *in_full("llama")])
@on_ranks(1)
def test_layers_in_float8_are_not_fused(family):
    """A layer that computes in float8 is not fused, under its old class name."""
    config = peft.LoraConfig(
        r=16, target_modules=["c_attn"] if family == "gpt2" else ["q_proj"], fan_in_fan_out=family == "gpt2"
    )
    model = peft.get_peft_model(float8_models.build(family).bfloat16(), config, autocast_adapter_dtype=False)
    model = bmt.auto_wrap(model, float8=True)
    bases = [each.base_layer for each in model.modules() if isinstance(each, peft.tuners.lora.Linear)]
    assert bases and all(isinstance(each, Float8Linear) for each in bases)
    with counted() as calls:
        model(**float8_models.rows(0, 0)).loss.backward()
    assert not calls and all(each.float8_state.powers is not None for each in bases)


def test_a_second_derivative_is_refused():
    model = build()
    fuse_lora(model.modules())
    x = torch.randn(2, 16, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


@full
def test_the_class_is_still_pefts():
    model = build()
    fuse_lora(model.modules())
    layer = model.base_model.model.first
    assert isinstance(layer, FusedLoraLinear) and isinstance(layer, peft.tuners.lora.Linear)
    assert type(layer).__name__ == "Linear" and repr(layer).startswith("lora.Linear")
    merged = model.merge_and_unload()
    assert type(merged.first) is nn.Linear
