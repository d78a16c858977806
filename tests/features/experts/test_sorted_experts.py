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
from hf_bmtrain.features.experts import products, sort_experts
from hf_bmtrain.features.experts import sorted as sorted_experts
from hf_bmtrain.features.experts.sorted import SortedExperts
from ranks import on_ranks

WIDTH, INNER, COUNT = 16, 24, 5
LAYOUTS = {
    "mixtral": ("mixtral.modeling_mixtral.MixtralExperts", "MixtralConfig"),
    "gpt_oss": ("gpt_oss.modeling_gpt_oss.GptOssExperts", "GptOssConfig"),  # transposed, with biases, interleaved
    "nemotron_h": ("nemotron_h.modeling_nemotron_h.NemotronHExperts", "NemotronHConfig"),  # without gate
}
pytestmark = pytest.mark.skipif(products._KERNEL is None, reason="torch has no grouped_mm")


class Layer(nn.Module):
    """Routes to fixed experts, one of which gets no token."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        path, config = LAYOUTS[layout]
        folder, module, name = path.split(".")
        cls = getattr(getattr(getattr(transformers.models, folder), module), name)
        settings = {"hidden_size": WIDTH, "intermediate_size": INNER, "moe_intermediate_size": INNER}
        counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), COUNT)
        self.experts = cls(getattr(transformers, config)(**settings, **counts, experts_implementation="grouped_mm"))
        torch.manual_seed(0)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x, weights):
        index = torch.tensor([[0, 3], [3, 1], [0, 1], [4, 3], [1, 4], [3, 0]], device=x.device)
        return self.experts(x, index, weights)


def run(layer: nn.Module, dtype: torch.dtype) -> dict:
    """The output, and the gradients of the input, of the router's weights and of the stacks."""
    generator = torch.Generator().manual_seed(2)
    x, weights, dy = (torch.randn(6, n, generator=generator).to(dtype) for n in (WIDTH, 2, WIDTH))
    y = layer(x.requires_grad_(), weights.requires_grad_())
    y.backward(dy)
    return {"y": y, "x": x.grad, "weights": weights.grad} | {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
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
