"""A master comes back from its bfloat16 weight, its 16-bit residual and the mark, bit by bit."""

import pytest
import torch

from cases import full, in_full
from hf_bmtrain.engine.ops.residual import Master, join, split

EXPONENTS = (0, 1, 127, 128, 254)
SIGNED = [sign << 31 | exponent << 23 for sign in (0, 1) for exponent in EXPONENTS]


def binade(first: int) -> torch.Tensor:
    """All 2^23 float32 numbers of one sign and exponent, given by the bits of the first."""
    return (torch.arange(1 << 23) + first).to(torch.int32).view(torch.float32)


def halves(masters: torch.Tensor, exp_avg_sq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = len(masters)
    kept = torch.empty(n, dtype=torch.bfloat16), torch.empty(n, dtype=torch.int16), exp_avg_sq.clone()
    split(masters, *kept)
    return kept


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize(
    "first", [1 << 31 | 127 << 23, *in_full(*(first for first in SIGNED if first != 1 << 31 | 127 << 23))], ids=hex
)
def test_every_master_of_a_binade_comes_back(first: int) -> None:
    masters, squares = binade(first), torch.rand(1 << 23)
    squares[::3] = 0
    weight, residual, marked = halves(masters, squares)
    assert torch.equal(weight.view(torch.int16), masters.bfloat16().view(torch.int16))
    found, exp_avg_sq = join(weight, residual, marked)
    assert same_bits(found, masters)
    assert same_bits(exp_avg_sq, squares)
    assert int((marked.view(torch.int32) < 0).sum()) == 1 << 6  # one a pair of bfloat16 neighbours


@full
@pytest.mark.parametrize("first", [1 << 31 | 127 << 23, *in_full(100 << 23)], ids=hex)
def test_even_weights_need_the_mark(first: int) -> None:
    """65,537 masters round to an even weight and 65,535 to an odd one: 16 bits alone do not tell them apart."""
    weight, residual, marked = halves(binade(first), torch.zeros(1 << 23))
    inner = (weight.view(torch.int16).int() & 0xFFFF)[1 << 16 : -(1 << 16)]
    weights, counts = inner.unique(return_counts=True)
    assert {65537} == {*counts[1:-1][weights[1:-1] % 2 == 0].tolist()}
    assert {65535} == {*counts[1:-1][weights[1:-1] % 2 == 1].tolist()}
    code = (weight.view(torch.int16).long() << 16 | residual.long() & 0xFFFF) << 1 | (marked.view(torch.int32) < 0)
    assert len(code.unique()) == 1 << 23 > len((code >> 1).unique())


@full
def test_what_is_not_a_number_stays_so() -> None:
    bits = torch.tensor([0x7F800000, -0x800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF])
    masters = bits.to(torch.int32).view(torch.float32)
    found, _ = join(*halves(masters, torch.ones(len(masters))))
    torch.testing.assert_close(found, masters, rtol=0, atol=0, equal_nan=True)
    assert found[:2].tolist() == [torch.inf, -torch.inf]


def every_weight(residuals: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All bfloat16 bit patterns against residuals at the borders and at random, with and without the mark."""
    values = torch.cat([torch.tensor([-32768, -32767, -1, 0, 1, 32767]), torch.randint(-32768, 32768, (residuals,))])
    weight = torch.arange(-32768, 32768).to(torch.int16).repeat_interleave(len(values) + 1)
    residual = torch.cat([values, values.new_tensor([-32768])]).to(torch.int16).repeat(1 << 16)
    mark = torch.tensor([1.0] * len(values) + [-1.0]).repeat(1 << 16)
    return weight.view(torch.bfloat16), residual, mark


@full
def test_a_written_weight_has_a_master_that_rounds_to_it() -> None:
    weight, residual, mark = every_weight(9)
    master, _ = join(weight, residual, mark)
    number = ~weight.isnan()
    assert torch.equal(master.bfloat16().view(torch.int16)[number], weight.view(torch.int16)[number])
    assert bool(master[~number].isnan().all())
    kept = halves(master, mark.abs())
    again, _ = join(*kept)
    assert same_bits(again[number], master[number])


def test_masters_follow_as_residuals_do() -> None:
    """What AdamOptimizer does with a float32 master is what the residual does by lying there."""
    weight, residual, mark = every_weight(9)
    master, _ = join(weight, residual, mark)
    master[::1000] = torch.nan
    _, residual, mark = halves(master, mark.abs())
    for written in (weight, weight.roll(12345), torch.full_like(weight, 0.5), torch.zeros_like(weight)):
        expected, _ = join(written, residual, mark)
        found = master.clone()
        Master(written, found, mark).follow_weight()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert bool((found.abs() < 1e-38).all())
