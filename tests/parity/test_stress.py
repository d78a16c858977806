"""The program that makes streams late on GPUs runs here without: equal runs are equal, others are told apart."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import by_default
from stress import CELLS, count_differences, train


def trained(cell, other):
    one, two, three = train(cell, 3), train(cell, 3), train(other, 3)
    assert len(one[2]) > 100 * len(one[1]), "no shards"
    return count_differences(one, two), count_differences(one, three), bmt.rank()


@pytest.mark.parametrize("cell", by_default(CELLS[5::11], CELLS[5]), ids=str)
def test_runs_repeat_and_others_differ(world, cell):
    """A run that accumulates otherwise is another one from the first step on."""
    other = next(c for c in CELLS if c.frozen != cell.frozen and c.accumulation == cell.accumulation)
    for same, different, _ in world(2)(trained, cell, other):
        assert same == 0
        assert different >= 2


def test_one_bit_is_seen():
    one = [torch.zeros(5, dtype=torch.uint8) for _ in range(3)]
    other = [each.clone() for each in one]
    other[1][3] = 1
    assert count_differences(one, one) == 0
    assert count_differences(one, other) == 1
