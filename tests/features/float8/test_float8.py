"""Float8 factors: their elements, scales and products, on the CPU."""

import pytest
import torch

import kernel_checks as checks
from cases import full, in_full
from hf_bmtrain.features.float8.arithmetic import (
    ALIGNMENT,
    MOST,
    check_device,
    product,
    quantize_both,
    quantize_full,
    quantize_rows,
    quantize_transposed,
)


def matrix(rows, columns, dtype=torch.float32, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(factor) -> torch.Tensor:
    return factor.values.double() * factor.scales.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32, torch.float16)])
def test_elements_are_rounded_to_four_significant_bits(dtype):
    x = matrix(33, 48, dtype) * torch.logspace(-3, 3, 33)[:, None].to(dtype)
    factor = quantize_rows(x)
    assert factor.values.shape == x.shape and factor.scales.shape == (33, 1)
    assert torch.equal(factor.scales, x.float().abs().amax(1, keepdim=True) / MOST)
    assert factor.values.float().abs().amax(1).eq(MOST).all()
    error = (wide(factor) - x.double()).abs()
    # half of the last of three binary places; below 2^-6 of a value, the spacing is constant
    assert (error <= x.double().abs() * 2**-4 * 1.001 + factor.scales.double() * 2**-10 * 1.001).all()


@full
def test_columns_are_rows_of_the_transpose_and_are_padded():
    x = matrix(21, 32)
    rows, columns = quantize_both(x)
    assert columns.values.shape == (32, 2 * ALIGNMENT) and not columns.values[:, 21:].float().any()
    again = quantize_rows(x.t().contiguous())
    assert torch.equal(columns.values[:, :21].float(), again.values.float())
    assert torch.equal(columns.scales, again.scales) and torch.equal(rows.scales, quantize_rows(x).scales)


@full
@pytest.mark.parametrize("shape", [(21, 32), *in_full((32, 16), (1, 48))])
def test_compilers_know_what_rounding_both_ways_returns(shape):
    torch.library.opcheck(torch.ops.hf_bmtrain.quantize_both.default, (matrix(*shape, torch.bfloat16),))


@full
@pytest.mark.parametrize("shape", [(21, 32), *in_full((32, 16), (0, 48), (1, 48))])
def test_compilers_know_what_transposing_returns(shape):
    values = torch.randint(0, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    checked = (
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_dynamic",
    )  # one knows no float8
    torch.library.opcheck(torch.ops.hf_bmtrain.transpose_codes.default, (values,), test_utils=checked)


@full
@pytest.mark.parametrize("shape", [(21, 32), *in_full((32, 16), (1, 48))])
def test_transposing(shape):
    checks.check_transpose(lambda x: x, shape)


@full
def test_a_weight_has_one_scale_in_both_directions():
    weight = matrix(24, 16)
    factor = quantize_full(weight)
    assert factor.scales.shape == (len(weight), 1) and (factor.scales == weight.abs().max() / MOST).all()
    both_ways = quantize_transposed(weight)
    assert torch.equal(wide(both_ways), wide(factor).t()) and both_ways.values.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32, torch.float16)])
@pytest.mark.parametrize("shape", [(7, 5), *in_full((1, 1), (33, 48))])
def test_pieces_are_rounded_as_the_whole(dtype, shape):
    checks.check_float8(lambda x: x, "pieces", dtype, shape, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_products_are_those_of_the_elements(dtype):
    a, b = quantize_rows(matrix(5, 64)), quantize_full(matrix(7, 64, seed=1))
    exact = wide(a) @ wide(b).t()
    found = product(a, b, dtype, fast=True)
    assert found.dtype == dtype and found.shape == (5, 7)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@full
def test_products_are_not_rounded_by_autocast():
    a, b = quantize_rows(matrix(5, 64)), quantize_full(matrix(7, 64, seed=1))
    plain = product(a, b, torch.float32, fast=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(a, b, torch.float32, fast=False), plain)


@pytest.mark.parametrize("bad", [float("inf"), *in_full(float("nan"))])
def test_what_is_not_finite_makes_its_row_nan(bad):
    x = matrix(4, 16)
    x[2, 3] = bad
    y = product(quantize_rows(x), quantize_full(matrix(3, 16, seed=1)), torch.float32, fast=False)
    assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()


def test_zeros_tiny_rows_and_no_rows():
    x = torch.tensor([[0.0] * 16, [1e-42] * 16, [1e-20] * 16])
    y = product(quantize_rows(x), quantize_full(torch.eye(16)), torch.float32, fast=False)
    assert torch.equal(y[0], torch.zeros(16)) and y[1].abs().max() < 1e-31
    torch.testing.assert_close(y[2], x[2], rtol=0.07, atol=0)
    rows, columns = quantize_both(torch.empty(0, 32))
    assert rows.values.shape == (0, 32) and columns.values.shape == (32, 0)
    assert product(rows, quantize_full(matrix(16, 32)), torch.float32, fast=False).shape == (0, 16)
    other = quantize_both(torch.empty(0, 16))[1]
    assert not product(other, columns, torch.float32, fast=False).any()


def test_gpus_without_float8_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(ValueError, match=r"an A100 cannot multiply float8 matrices.* 8\.0, and 8\.9 is needed\. Leave"):
        check_device(torch.device("cuda", 0))
    check_device(torch.device("cpu"))
