"""The kernel that unpacks quantized weights, on a GPU against the reference, and packing there against the CPU's."""

import pytest
import torch

import kernel_checks as checks
from hf_bmtrain.features.packed import arithmetic as quantize

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", list(quantize.FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 20011, 5_000_003])
def test_unpack(dtype: torch.dtype, name: str, numel: int, launched) -> None:
    checks.check_unpack(lambda tensor: tensor.cuda(), dtype, name, numel)
    assert "unpack_cells" in launched


@pytest.mark.parametrize("name", list(quantize.FORMATS))
def test_pack(name: str) -> None:
    """The mean of the scales is added up in another order on a GPU, and that alone may differ."""
    values, form = torch.randn(1_000_003).bfloat16(), quantize.FORMATS[name]
    here, there = form.pack(values).view(-1, form.cell_bytes), form.pack(values.cuda()).cpu().view(-1, form.cell_bytes)
    codes = quantize.CELL * form.bits // 8
    assert torch.equal(here[:, :codes], there[:, :codes])
    results = [torch.empty(here.shape[0] * quantize.CELL) for _ in range(2)]
    for packed, out in zip((here, there), results):
        form.unpack(packed.contiguous().view(-1), out)
    torch.testing.assert_close(*results, rtol=0, atol=0.05 if quantize.FORMATS[name].scale_bits == 8 else 0)
