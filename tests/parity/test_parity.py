"""Every cell of the parity table, by world size; `python tests parity` prints the errors."""

from collections.abc import Iterator

import pytest

from parity import Cell, Errors, cells, measure

ALWAYS = {1: lambda cell: True, 2: lambda cell: True, 3: lambda cell: cell.zero_level == 3}
"""Three ranks on ZeRO-2 run with the full table only."""


def _parameters() -> Iterator[object]:
    for size in (1, 2, 3):
        for cell in cells(size):
            marks = () if ALWAYS[size](cell) else (pytest.mark.full,)
            yield pytest.param(size, cell, id=f"{size}-{cell.label()}", marks=marks)


@pytest.mark.parametrize(("size", "cell"), [*_parameters()])
def test_parity(world, size: int, cell: Cell):
    check(world(size)(measure, cell)[0])


CELLS_BY_COPIES = [c for c in cells(2) if c.family in ("llama", "t5") and c.accumulation == 1]
CELLS_BY_COPIES += [c for c in cells(2) if c.family == "llama" and c.zero_level == 3 and c.accumulation > 1]


@pytest.mark.parametrize("cell", CELLS_BY_COPIES, ids=lambda cell: cell.label())
def test_parity_by_copies(peers, cell: Cell):
    check(peers(2)(measure, cell)[0])


def check(errors: Errors) -> None:
    assert errors.loss <= 1
    assert errors.gradient <= 1
