"""The kernel that adds up the ranks' rows, on a GPU against float64: odd sizes, misalignment, poisoned surroundings."""

import pytest
import torch

import kernel_checks as checks
from hf_bmtrain.ops import peer_sum

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def reaches_the_kernel(launched):
    yield
    assert "peer_mean" in launched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "offset"), [(1, 0), (7, 1), (1000, 3), (1003, 0), (1 << 20, 0), (3_000_017, 5)])
def test_peer_mean(dtype: torch.dtype, n: int, size: int, offset: int) -> None:
    checks.check_peer_mean(lambda tensor: tensor.cuda(), dtype, n, size, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("odd", [0, 3])
def test_the_bits_are_those_of_the_reference(dtype: torch.dtype, summed: bool, odd: int) -> None:
    n = 2_000_000 + odd
    rows, sums = torch.randn(3, n).to(dtype), torch.linspace(-1, 1, n)
    results = []
    for device in ("cuda", "cpu"):  # on CUDA torch divides by a scalar by multiplying, which rounds twice
        out = torch.empty_like(rows[0], device=device)
        total = sums.to(device, copy=True) if summed else None
        others = rows[[0, 2]].to(device)
        peer_sum.peer_mean(others, rows[1].to(device), 1, out, total)
        results.append((out.cpu(), None if total is None else total.cpu()))
    (out, total), (expected, expected_total) = results
    assert torch.equal(out, expected)
    assert total is None or torch.equal(total, expected_total)
