"""Experts whose rows move by permutations, against transformers' own grouped_mm."""

import pickle
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import hf_bmtrain as bmt
from beside_twin import loss_of, train_beside
from cases import full, in_full
from expert_layers import INNER, WIDTH, Layer, run
from hf_bmtrain.features.experts import arithmetic, products, sort_experts
from hf_bmtrain.features.experts import sorted as sorted_experts
from hf_bmtrain.features.experts.sorted import SortedExperts
from ranks import on_ranks

pytestmark = pytest.mark.skipif(products._KERNEL is None, reason="torch has no grouped_mm")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["mixtral", "gpt_oss", "nemotron_h"])
def test_is_grouped_mm(layout: str, dtype: torch.dtype) -> None:
    """The forward has the same bits."""
    plain, layer = Layer(layout).to(dtype), Layer(layout).to(dtype)
    assert sort_experts(layer.modules()) == 1 and sort_experts(layer.modules()) == 0
    with mock.patch.object(sorted_experts, "run_experts", wraps=sorted_experts.run_experts) as runs:
        found = run(layer, dtype)
    assert runs.call_count == 1
    expected = run(plain, dtype)
    assert torch.equal(found["y"], expected["y"])
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= (1e-6 if dtype == torch.float32 else 0.01) * wanted.norm(), name


def test_others_are_transformers() -> None:
    """Evaluation, other implementations, and expert parallelism."""
    layer = Layer("mixtral")
    sort_experts(layer.modules())
    x, weights = torch.randn(6, WIDTH), torch.rand(6, 2)
    with mock.patch.object(sorted_experts, "run_experts") as runs:
        with torch.no_grad():
            layer(x, weights)
        for implementation in ("eager", "batched_mm"):
            layer.experts.config._experts_implementation = implementation
            layer(x, weights)
        layer.experts.config._experts_implementation = "grouped_mm"
        layer.experts._is_expert_parallel = True
        layer(x, weights)
    assert not runs.called
    assert type(pickle.loads(pickle.dumps(layer.experts))) is type(Layer("mixtral").experts)


def test_a_forward_of_the_user_stays() -> None:
    """Of a subclass, put in place of that of the class, or registered as grouped_mm."""
    plain, layer = Layer("mixtral"), Layer("mixtral")
    cls = type(layer.experts)
    layer.experts.__class__ = type("Doubled", (cls,), {"forward": lambda self, *args: 2 * cls.forward(self, *args)})
    assert sort_experts(layer.modules()) == 0
    x, weights = torch.randn(6, WIDTH), torch.rand(6, 2)
    assert torch.equal(layer(x, weights), 2 * plain(x, weights))
    with mock.patch.object(cls, "forward", lambda self, x, *args: x):
        assert sort_experts(plain.modules()) == 0
    with mock.patch.dict(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, {"grouped_mm": lambda self, x, *args: x}):
        assert sort_experts(plain.modules()) == 0
    assert sort_experts(plain.modules()) == 1


def test_no_tokens() -> None:
    layer = Layer("mixtral")
    sort_experts(layer.modules())
    x, weights = torch.randn(0, WIDTH, requires_grad=True), torch.rand(0, 2)
    y = layer.experts(x, torch.zeros(0, 2, dtype=torch.long), weights)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, WIDTH) and not layer.experts.down_proj.grad.any()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_has_the_layout_of_its_stack(transposed: bool) -> None:
    """Else autograd and the reduction would copy it."""
    shape = (4, 8, 16) if transposed else (4, 16, 8)
    stack, seen = torch.randn(shape, requires_grad=True), []
    stack.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
    matrices = stack.transpose(1, 2) if transposed else stack
    x, ends = torch.randn(9, 16, requires_grad=True), torch.tensor([3, 3, 8, 9], dtype=torch.int32)
    for product in (products.grouped_product, products._product_of_groups):
        product(x, matrices, ends).square().sum().backward()
    assert seen == [True, True]


def tiny() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).train()


@pytest.mark.parametrize(
    "wrap", [{"use_checkpoint": True}, *in_full({"use_checkpoint": False, "compile": "aot_eager"})], ids=str
)
@on_ranks(2)
def test_trained(wrap: dict) -> None:
    model, twin = bmt.auto_wrap(tiny(), **wrap), tiny()
    assert sum(isinstance(module, SortedExperts) for module in model.modules()) == 2
    with mock.patch.object(sorted_experts, "run_experts", wraps=sorted_experts.run_experts) as runs:
        train_beside(model, twin, 2)
        assert runs.called or wrap.get("compile")
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model.eval(), 0), loss_of(twin.eval(), 0))


OPERATORS = {"sum_rows", "sum_rows_backward", "silu_gate_backward"}


@pytest.mark.parametrize("backend", [None, *in_full("aot_eager", "inductor")])
def test_operators(backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with torch's operators for the kernels."""
    torch._dynamo.reset()
    monkeypatch.setattr(sorted_experts, "serves", lambda rows, parts=1: rows.dtype in arithmetic.C_NAMES)
    plain, layer = Layer("mixtral"), Layer("mixtral")
    sort_experts(layer.modules())
    if backend:
        layer.compile(fullgraph=True, backend=backend)
        with torch.profiler.profile() as profile:
            found = run(layer, torch.float32)
        assert {f"hf_bmtrain::{name}" for name in OPERATORS} <= {event.name for event in profile.events()}
    else:
        calls = {name: mock.Mock(wraps=getattr(arithmetic, name)) for name in OPERATORS}
        with mock.patch.multiple(sorted_experts, **calls):
            found = run(layer, torch.float32)
        assert [calls[name].call_count for name in sorted(OPERATORS)] == [1, 2, 1]
    for name, wanted in run(plain, torch.float32).items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-5, atol=1e-5)


def test_predicted_memory() -> None:
    """On meta tensors, of which memory is predicted, a gate saves what it saves on a GPU: its argument alone."""
    layer = Layer("mixtral").bfloat16().to("meta")
    sort_experts(layer.modules())
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        x, weights = (torch.randn(6, n, device="meta", dtype=torch.bfloat16, requires_grad=True) for n in (WIDTH, 2))
        y = layer.experts(x, torch.zeros(6, 2, dtype=torch.long, device="meta"), weights)
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape
    assert saved.count((12, 2 * INNER)) == 1 and saved.count((12, INNER)) == 1  # the other one is of the product


@pytest.mark.parametrize(
    "change", ["hook", "forward", "gate", "activation", "gate of the class", "forward of the class", "class"]
)
def test_other_gates_are_called(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_experts, "serves", lambda rows, parts=1: rows.dtype in arithmetic.C_NAMES)
    results = []
    for sort in (False, True):
        layer = Layer("gpt_oss" if change == "class" else "mixtral")
        experts = layer.experts
        if change == "hook":
            experts.act_fn.register_forward_hook(lambda module, inputs, y: 2 * y)
        elif change == "forward":
            experts.act_fn.forward = torch.tanh
        elif change == "gate":
            experts._apply_gate = lambda x: x.chunk(2, -1)[1].tanh()
        elif change == "activation":
            experts.act_fn = nn.GELU()
        elif change == "gate of the class":
            monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: x.chunk(2, -1)[0].tanh())
        elif change == "forward of the class":
            monkeypatch.setattr(type(experts.act_fn), "forward", lambda self, x: x.tanh())
        if sort:
            sort_experts(layer.modules())
        results.append(run(layer, torch.float32))
    for name, wanted in results[0].items():
        torch.testing.assert_close(results[1][name], wanted, rtol=1e-5, atol=1e-5)


@full
def test_compiled() -> None:
    """As one graph, by an optimizing compiler, which chooses the strides of what it computes."""
    torch._dynamo.reset()
    layers = Layer("mixtral").bfloat16(), Layer("mixtral").bfloat16()
    sort_experts([*layers[0].modules(), *layers[1].modules()])
    layers[0].compile(fullgraph=True)
    found, expected = (run(layer, torch.bfloat16) for layer in layers)
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() <= 0.02 * wanted.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_products_on_the_meta_device(dtype) -> None:
    """A prediction of memory runs forward and backward there. torch's own kernel refuses all but bfloat16."""
    x, stack = (torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True) for shape in [(9, 16), (4, 16, 8)])
    y = products.grouped_product(x, stack, torch.empty(4, dtype=torch.int32, device="meta"))
    y.backward(torch.empty_like(y))
    assert y.shape == (9, 8) and x.grad.shape == x.shape and stack.grad.shape == stack.shape
