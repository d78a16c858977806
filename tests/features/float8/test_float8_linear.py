"""Float8Linear: its three products against float64, what it keeps for backward, and what it shares."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cases import full, in_full
from hf_bmtrain.features.float8 import arithmetic as float8
from hf_bmtrain.features.float8.linear import Float8Inputs, extend_linear

K, N, M = 48, 32, 21


def make(transposed=False, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = Conv1D(N, K) if transposed else nn.Linear(K, N, bias=bias)
    nn.init.normal_(layer.weight)
    return layer.to(dtype)


def rounded(x, axis) -> torch.Tensor:
    """The elements that `x` has in e4m3, in float64, computed in another way: to 4 bits of the mantissa."""
    scale = (x.double().abs().amax() if axis is None else x.double().abs().amax(axis, keepdim=True)) / 448
    value = x.double() / scale
    exponent = torch.floor(torch.log2(value.abs().clamp(min=2.0**-6)))
    unit = 2 ** (exponent - 3)
    return torch.round(value / unit) * unit * scale


@pytest.mark.parametrize("transposed", [True, *in_full(False)])
def test_products_are_those_of_rounded_factors(transposed):
    layer = make(transposed)
    extend_linear(layer, transposed, Float8Inputs())
    x = torch.randn(3, 7, K, requires_grad=True)
    dy = torch.randn(3, 7, N)
    y = layer(x)
    y.backward(dy)
    weight = (layer.weight.t() if transposed else layer.weight).detach()
    flat, gradient = x.detach().view(M, K), dy.view(M, N)
    close = {"rtol": 1e-5, "atol": 1e-5}
    expected = rounded(flat, 1) @ rounded(weight, None).t() + layer.bias.double()
    torch.testing.assert_close(y.detach().view(M, N).double(), expected, **close)
    torch.testing.assert_close(x.grad.view(M, K).double(), rounded(gradient, 1) @ rounded(weight, None), **close)
    expected = rounded(gradient, 0).t() @ rounded(flat, 0)
    torch.testing.assert_close(layer.weight.grad.double(), expected.t() if transposed else expected, **close)
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))


def test_it_is_still_a_linear_layer():
    layer = make()
    plain = copy.deepcopy(layer)
    state = extend_linear(layer, False, Float8Inputs())
    assert isinstance(layer, nn.Linear) and type(layer).__name__ == "Linear" and repr(layer) == repr(plain)
    assert list(layer.state_dict()) == ["weight", "bias"] and type(layer) is type(make_extended())
    x = torch.randn(5, K)
    assert not torch.equal(layer(x), plain(x))
    state.active = False
    assert torch.equal(layer(x), plain(x))
    wide = layer.double()
    assert torch.equal(wide(x.double()), plain.double()(x.double()))  # float64 is not computed in float8


def make_extended(inputs=None):
    layer = make()
    extend_linear(layer, False, inputs or Float8Inputs())
    return layer


def test_autocast_decides_the_dtype():
    layer = make_extended()
    x = torch.randn(5, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32
    assert torch.equal(y.detach(), make_extended()(x.detach().bfloat16()).bfloat16())


def saved(run) -> list[torch.Tensor]:
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (found.append(tensor), tensor)[1], lambda kept: kept):
        run()
    return found


def test_inputs_are_kept_in_eight_bits_and_rounded_once_for_several_layers(monkeypatch):
    inputs = Float8Inputs()
    layers = [make_extended(inputs) for _ in range(3)]
    calls = []
    monkeypatch.setattr(float8, "quantize_rows", lambda x, own=float8.quantize_rows: (calls.append(1), own(x))[1])
    monkeypatch.setattr(
        "hf_bmtrain.features.float8.linear.quantize_both", lambda x: (calls.append(1), float8.quantize_both(x))[1]
    )
    x = torch.randn(M, K)
    kept = saved(lambda: [layer(x) for layer in layers])
    columns = {tensor.data_ptr() for tensor in kept if tensor.dtype == torch.float8_e4m3fn}
    assert len(columns) == 1 and not any(tensor.shape == x.shape for tensor in kept)
    assert len(calls) == 3  # once, by rows and by columns
    x.add_(1)
    assert not torch.equal(layers[0](x), layers[0](x - 1))  # what has changed is rounded anew


@full
def test_frozen_weights_need_no_columns():
    layer = make_extended().requires_grad_(False)
    x = torch.randn(M, K, requires_grad=True)
    kept = saved(lambda: layer(x))
    assert [tensor.shape for tensor in kept] == [layer.weight.shape]
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None and x.grad is not None


def test_factors_are_freed_with_the_activation(monkeypatch):
    made = []

    def quantize_rows(x):
        factor = float8.quantize_rows(x)
        made.append(weakref.ref(factor.values))
        return factor

    monkeypatch.setattr("hf_bmtrain.features.float8.linear.quantize_rows", quantize_rows)
    layer = make_extended().requires_grad_(False)
    x = torch.randn(M, K)
    layer(x)
    assert made[0]() is not None
    del x
    gc.collect()
    assert made[0]() is None


@full
def test_parameters_are_rounded_at_each_use():
    """A whole parameter is gathered into the same memory at each step, and its version stays."""
    layer, prompt = make_extended(), nn.Parameter(torch.randn(M, K))
    for x in (prompt, prompt.view(M, K)):
        before = layer(x)
        with torch.no_grad():
            prompt.data.add_(1)  # is not counted
        assert not torch.equal(layer(x), before)


def test_a_backward_of_a_backward_is_refused():
    layer = make_extended()
    x = torch.randn(M, K, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


@full
def test_no_rows():
    layer = make_extended()
    x = torch.randn(0, K, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, K) and not layer.weight.grad.any()
