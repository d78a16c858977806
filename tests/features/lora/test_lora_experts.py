"""Adapters on stacks of experts that are applied as products, against PEFT's own forward in float64."""

import contextlib
import copy
import logging
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

import hf_bmtrain as bmt
from beside_twin import loss_of, train_beside
from cases import by_default, full, in_full, rows_in_full
from expert_layers import LAYOUTS, Layer
from hf_bmtrain.features.experts import products
from hf_bmtrain.features.experts import sorted as sorted_experts
from hf_bmtrain.features.experts.sorted import SortedExperts
from hf_bmtrain.features.lora import experts as lora_experts
from hf_bmtrain.features.lora.experts import SplitWrapper, split_adapters
from log_lines import log_lines
from ranks import on_ranks

peft = pytest.importorskip("peft")
WIDTH, INNER = 12, 10
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
"""The ways of transformers that run on a CPU."""


def build(layout="mixtral", adapters=1, targets=2, dtype=torch.float64, **options):
    layer = Layer(layout, WIDTH, INNER, "eager").to(dtype)
    names = [name for name, parameter in layer.experts.named_parameters() if parameter.dim() == 3][:targets]
    options = {"r": 3, "lora_alpha": 5, "init_lora_weights": False, "target_modules": []} | options
    config = peft.LoraConfig(target_parameters=[f"experts.{name}" for name in names], **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(layer, config, autocast_adapter_dtype=False)
    for number in range(1, adapters):
        model.add_adapter(f"adapter {number}", config, autocast_adapter_dtype=False)
    return model


def use(model, implementation):
    for module in model.modules():
        if isinstance(module, SortedExperts):
            module.config._experts_implementation = implementation


def run(model, dtype=torch.float64, call=None):
    """The output, and the gradients of the input, of the router's weights and of what is trained.

    call: what to call instead of the model.
    """
    generator = torch.Generator().manual_seed(2)
    x, weights = (torch.randn(6, n, generator=generator).to(dtype).requires_grad_() for n in (WIDTH, 2))
    y = (call or model)(x, weights)
    y.square().sum().backward()
    return {"y": y, "x": x.grad, "weights": weights.grad} | {name: p.grad for name, p in model.named_parameters()}


def compare(prepare=None, split=1, rtol=1e-12, dtype=torch.float64, **options):
    plain, model = build(dtype=dtype, **options), build(dtype=dtype, **options)
    targets = options.get("targets", 2)
    assert split_adapters(model.modules()) == targets and split_adapters(model.modules()) == 0
    for each in (plain, model):
        if prepare is not None:
            prepare(each)
    with mock.patch.object(sorted_experts, "run_experts", wraps=sorted_experts.run_experts) as runs:
        found = run(model, dtype)
    assert runs.call_count == split
    expected = run(plain, dtype)
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        got = found[name]
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert got.dtype == wanted.dtype and got.shape == wanted.shape, name
            assert (got - wanted).norm() <= rtol * wanted.norm(), name
    return expected


@pytest.mark.parametrize("implementation", by_default(IMPLEMENTATIONS, "eager"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_pefts(layout, implementation):
    """PEFT's runs eagerly: transformers' other ways round differently, or know no float64."""
    if not hasattr(transformers.models, layout):
        pytest.skip(f"this transformers has no {layout}")
    expected = compare(lambda model: use(model, implementation), layout=layout)
    assert all(grad.any() for name, grad in expected.items() if "lora" in name)


def both(model):
    model.base_model.set_adapter(["default", "adapter 1"])


def disable(model):
    model.base_model.disable_adapter_layers()


def merge(model):
    model.merge_adapter()


def unmerge(model):
    model.merge_adapter()
    model.unmerge_adapter()


def second(model):
    model.set_adapter("adapter 1")


@pytest.mark.parametrize(
    ("prepare", "split", "options"),
    [
        (both, 1, {"adapters": 2, "layout": "gpt_oss"}),
        (merge, 0, {}),
        *rows_in_full([
            (both, 1, {"adapters": 2}), (second, 1, {"adapters": 2}), (disable, 0, {}), (unmerge, 1, {}),
            (None, 1, {"targets": 1}), (None, 1, {"use_rslora": True}), (None, 1, {"r": 1}), (None, 1, {"r": 8}),
        ]),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # not an address: xdist's processes must agree
)  # fmt: skip
def test_settings(prepare, split, options):
    compare(prepare, split, **options)


@full
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("layout", ["mixtral", "gpt_oss"])
def test_kernel(layout, dtype, rtol):
    """With widths that torch's kernel takes, and a rank that it does not."""
    with mock.patch.multiple(__name__, WIDTH=16, INNER=24):
        compare(rtol=rtol, dtype=dtype, layout=layout)


def test_trainable_stack():
    """The base may be trained beside the adapters."""
    compare(lambda model: model.base_model.model.experts.requires_grad_(True))


def test_one_of_two_is_pefts():
    """One stack's adapter is split, while PEFT's own forward adds the other one's to its stack."""

    def prepare(model):
        wrapper = next(module for module in model.modules() if isinstance(module, peft.tuners.lora.layer.ParamWrapper))
        wrapper.scaling = {name: torch.tensor(value) for name, value in wrapper.scaling.items()}

    compare(prepare)


@pytest.mark.parametrize("dtype", by_default([torch.float64, torch.float32, torch.bfloat16], torch.float64), ids=str)
def test_product_of_groups(dtype):
    """In all its forms: torch's kernel, the operator that compiled code calls, and a loop."""
    generator = torch.Generator().manual_seed(0)
    x, stack, dy = (torch.randn(*shape, generator=generator).to(dtype) for shape in [(9, 16), (4, 16, 8), (9, 8)])
    ends = torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    expected = torch.cat([rows @ matrix for rows, matrix in zip(x.tensor_split([3, 3, 8]), stack)])
    expected_stack = torch.stack([a.t() @ b for a, b in zip(x.tensor_split([3, 3, 8]), dy.tensor_split([3, 3, 8]))])
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for product in (products.grouped_product, products._product_of_groups):
        for kernel in (products._KERNEL, None):
            with mock.patch.object(products, "_KERNEL", kernel):
                leaves = x.clone().requires_grad_(), stack.clone().requires_grad_()
                y = product(*leaves, ends)
                y.backward(dy)
            torch.testing.assert_close(y, expected, rtol=rtol, atol=rtol)
            torch.testing.assert_close(leaves[1].grad, expected_stack, rtol=rtol, atol=rtol)
            assert not leaves[1].grad[1].any(), "no row, no gradient"
            rows = [part @ matrix.t() for part, matrix in zip(dy.tensor_split([3, 3, 8]), stack)]
            torch.testing.assert_close(leaves[0].grad, torch.cat(rows), rtol=rtol, atol=rtol)


def tiny(dtype=torch.float32, **options):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to(dtype)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"r": 4, "init_lora_weights": False, "target_parameters": targets} | options
    lora = peft.LoraConfig(**options)
    return peft.get_peft_model(model, lora).train()


def counts_of(model):
    return [sum(isinstance(module, kind) for module in model.modules()) for kind in (SplitWrapper, SortedExperts)]


@pytest.mark.parametrize(
    "wrap", [{"use_checkpoint": False, "zero_level": 2}, *in_full({}, {"compile": "aot_eager"})], ids=str
)
@on_ranks(2)
def test_trained(wrap):
    """In a model in two processes, with the memory of the stacks left alone: no gradient, no version."""
    model, twin = bmt.auto_wrap(tiny(target_modules=["q_proj"]), **wrap), tiny(target_modules=["q_proj"])
    assert counts_of(model) == [4, 2]
    train_beside(model, twin, 2)
    assert list(model.state_dict()) == list(tiny(target_modules=["q_proj"]).state_dict())


@full
@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)], ids=str)
def test_compiled(dtype):
    """As one graph, by an optimizing compiler, which chooses the strides of what it computes, in backward too."""
    torch._dynamo.reset()
    with mock.patch.multiple(__name__, WIDTH=16, INNER=24):
        models = build(dtype=dtype), build(dtype=dtype)
        for model in models:
            split_adapters(model.modules())
        compiled = torch.compile(partial(checkpoint, models[0].base_model.model, use_reentrant=False), fullgraph=True)
        found, expected = run(models[0], dtype, compiled), run(models[1], dtype)
    for name, wanted in expected.items():
        if wanted is not None:
            assert (found[name] - wanted).norm() <= (2e-6 if dtype == torch.float32 else 0.02) * wanted.norm(), name


@on_ranks(1)
def test_what_is_not_split():
    """A way that is not among those, and parameters that are no stacks, run PEFT's own forward; a line says why."""
    with log_lines(level=logging.INFO) as lines:
        lora_experts._logged.clear()
        model = bmt.auto_wrap(tiny(target_modules=["q_proj"]))
        use(model, "sonicmoe")
        with mock.patch.object(sorted_experts, "run_experts") as runs, contextlib.suppress(Exception):
            loss_of(model, 0)  # fails: sonicmoe needs a GPU
        assert not runs.called
    assert any("takes less memory, because experts_implementation is 'sonicmoe'" in line for line in lines), lines
    router = bmt.auto_wrap(tiny(target_parameters=["mlp.gate.weight"]))
    assert counts_of(router)[0] == 0
    loss_of(router, 0).backward()


@on_ranks(2)
def test_copied():
    """Deep copies, also of one layer's experts, have the classes and the bits of a model that was never wrapped, and
    can be pickled."""
    for options in ({"target_parameters": ["mlp.gate.weight"]}, {"target_modules": ["q_proj"]}):
        model, twin = bmt.auto_wrap(tiny(**options)), tiny(**options)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(loss_of(copied, 0), loss_of(twin, 0))
        for (name, mine), theirs in zip(copied.named_modules(), twin.modules()):
            if not isinstance(mine, bmt.TransformerBlockList):
                assert type(mine) is type(theirs), name
            assert {*vars(mine)} - {*vars(theirs)} <= {"gradient_checkpointing", "_gradient_checkpointing_func"}, name
    inputs = torch.randn(3, 32), torch.tensor([[0, 3], [4, 1], [0, 1]]), torch.rand(3, 2)
    mine, theirs = (each.base_model.model.model.layers[1].mlp.experts for each in (model, twin))
    assert torch.equal(copy.deepcopy(mine)(*inputs), theirs(*inputs))


@on_ranks(1)
def test_merged_and_unloaded():
    model, twin = bmt.auto_wrap(tiny()), tiny()
    merged, expected = model.merge_and_unload(), twin.merge_and_unload()
    torch.testing.assert_close(loss_of(merged, 0), loss_of(expected, 0))
    assert list(merged.state_dict()) == list(expected.state_dict())
