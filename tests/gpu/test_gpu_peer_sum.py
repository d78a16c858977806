"""The kernel that adds up the ranks' rows, on a GPU against float64: odd sizes, misalignment, poisoned surroundings."""

import pytest
import torch

import kernel_checks as checks
from hf_bmtrain.engine.ops import grad_norm, peer_sum

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


def test_squares_of_several_parts() -> None:
    parts, expected = [], []
    for n in (0, 1, 5000, 3_000_017):
        rows, mine, out = torch.randn(2, n).cuda(), torch.randn(n).cuda(), torch.empty(n).cuda()
        parts.append(peer_sum.peer_mean(rows, mine, 0, out))
        expected.append(out.double().square().sum())
    found = torch.full((4,), torch.nan, dtype=torch.float64).cuda()
    grad_norm.add_squares(parts, found)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=0)
    again = torch.empty_like(found)
    grad_norm.add_squares(parts, again)
    assert torch.equal(found, again)
