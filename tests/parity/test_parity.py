"""Every cell of the parity table, by world size; `python tests/parity.py` prints the errors."""

import pytest

from parity import Cell, cells, measure

ALWAYS = {1: lambda cell: True, 2: lambda cell: True, 3: lambda cell: cell.zero_level == 3}
"""Three ranks on ZeRO-2 run with the full table only."""


def _parameters():
    for size in (1, 2, 3):
        for cell in cells(size):
            marks = () if ALWAYS[size](cell) else (pytest.mark.full,)
            yield pytest.param(size, cell, id=f"{size}-{cell.label()}", marks=marks)


@pytest.mark.parametrize(("size", "cell"), _parameters())
def test_parity(world, size: int, cell: Cell):
    errors = world(size)(measure, cell)[0]
    assert errors.loss <= 1
    assert errors.gradient <= 1
