"""The element-wise parts of experts on a GPU: against float64, and in the experts of transformers, compiled or not."""

import pytest
import torch

import kernel_checks as checks
from expert_layers import Layer, run
from hf_bmtrain.features.experts import sort_experts

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("weights", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 64), (700, 8, 2048), (33, 3, 4104)], ids=str)
def test_sums_of_rows(dtype, weights, shape, launched) -> None:
    checks.check_sums_of_rows(lambda tensor: tensor.cuda(), dtype, weights, *shape)
    assert "sum_rows" in launched and (weights is None or "sum_rows_backward" in launched)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (5000, 1024), (33, 4104)], ids=str)
def test_silu_gate(dtype, shape, launched) -> None:
    checks.check_silu_gate(lambda tensor: tensor.cuda(), dtype, *shape)
    assert {"silu_gate", "silu_gate_backward"} <= set(launched)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", ["mixtral", "gpt_oss", "nemotron_h"])
def test_experts(layout: str, compiled: bool, launched) -> None:
    """Against float64 on the CPU."""
    torch._dynamo.reset()
    layer, exact = Layer(layout), Layer(layout)
    exact.experts.config._experts_implementation = "eager"  # grouped_mm has no float64
    truth = run(exact.bfloat16().double(), torch.bfloat16)
    layer = layer.bfloat16().cuda()
    assert sort_experts(layer.modules()) == 1
    if compiled:
        layer.compile(fullgraph=True)
    found = run(layer, torch.bfloat16)
    for name, true in truth.items():
        assert (found[name].cpu().double() - true).norm() <= 0.01 * true.norm(), name  # 2.5 roundings to bfloat16
    used = {"mixtral": {"sum_rows", "sum_rows_backward", "silu_gate_backward"}}.get(layout, {"sum_rows"})
    assert used <= set(launched)
