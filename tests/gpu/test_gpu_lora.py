"""Fused LoRA layers on a GPU: parts of float32 matrices, bit by bit; a layer no further from float64 than PEFT's."""

import contextlib

import pytest
import torch

import kernel_checks as checks
from hf_bmtrain.features.lora.linear import fuse_lora

pytestmark = pytest.mark.gpu
peft = pytest.importorskip("peft")
INPUTS, OUTPUTS, ROWS = 512, 384, 600


@pytest.mark.parametrize("sizes", [(1, 1, 1), (8, 40, 24), (16, 4096, 14336), (64, 4099, 1031)], ids=str)
def test_split(sizes: tuple[int, int, int], launched) -> None:
    checks.check_split(lambda tensor: tensor.cuda(), *sizes)
    assert {"split_factors", "split_sums"} <= set(launched)


def build(dtype: torch.dtype, adapters: torch.dtype):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(INPUTS, OUTPUTS)).bfloat16().to(dtype)
    config = peft.LoraConfig(target_modules=["0"], r=8, lora_alpha=12)
    model = peft.get_peft_model(layer, config, autocast_adapter_dtype=False).cuda()
    for name, parameter in model.named_parameters():
        if "lora" in name:
            torch.manual_seed(len(name))
            # Small, as in training: of a large product, cuBLAS rounds more than PEFT does (see lora/factors.py).
            parameter.data = (0.3 * torch.randn(parameter.shape) * parameter.shape[1] ** -0.5).to("cuda", adapters)
    return model


def run(model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, INPUTS).bfloat16().to("cuda", dtype).requires_grad_()
    y = model(x)
    y.backward(torch.randn(ROWS, OUTPUTS).bfloat16().to("cuda", dtype))
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | trained


@pytest.mark.parametrize("autocast", [False, True])
def test_layer(autocast: bool, request: pytest.FixtureRequest) -> None:
    """Float32 adapters of a bfloat16 layer. Under autocast, they are rounded to bfloat16, by PEFT too."""
    mine, theirs = build(torch.bfloat16, torch.float32), build(torch.bfloat16, torch.float32)
    assert fuse_lora(mine.modules(), torch.device("cuda", 0)) == 1
    launched = [] if autocast else request.getfixturevalue("launched")
    with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
        found, expected = run(mine, torch.bfloat16), run(theirs, torch.bfloat16)
    assert [name for name in launched if name.startswith("split")] == (
        [] if autocast else ["split_factors", "split_sums", "split_sums"]
    )
    truth = run(build(torch.float64, torch.float64), torch.float64)
    assert found.keys() == truth.keys() and len(truth) == 4
    for name, true in truth.items():
        error, theirs_of = ((each[name].double() - true).norm() / true.norm() for each in (found, expected))
        assert error <= (2**-17 if "lora" in name and not autocast else 1.1 * theirs_of), (name, error, theirs_of)
