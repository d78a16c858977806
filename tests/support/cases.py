"""Cases of a parametrized test that do not run by default are marked `full`, where they are listed.

Those that do are written by hand: every value once, in the configuration most likely to break.
"""

import importlib.util
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

full = pytest.mark.full
slow = pytest.mark.slow


needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="PEFT is not installed")


def in_full(*values: Any) -> list[Any]:
    """Values of one parameter, marked `full`: `parametrize("size", [2, *in_full(1, 3)])`."""
    return [pytest.param(value, marks=full) for value in values]


def in_slow(*values: Any) -> list[Any]:
    """Values of one parameter, marked `slow`: like others, and run with these only before a release."""
    return [pytest.param(value, marks=slow) for value in values]


def by_default(cases: Iterable[Any], *default: Any) -> list[Any]:
    """All cases of one parameter, marked `full` but for those of `default`."""
    return [case if shown else pytest.param(case, marks=full) for case, shown in _divided(cases, default)]


def rows_by_default(rows: Iterable[Sequence[Any]], *default: Sequence[Any]) -> list[Any]:
    """All rows of several parameters, marked `full` but for those of `default`."""
    return [row if shown else pytest.param(*row, marks=full) for row, shown in _divided(rows, default)]


def _divided(cases: Iterable[Any], default: Sequence[Any]) -> list[tuple[Any, bool]]:
    """Each case, and whether it is in `default`. A case of `default` that is none of them is a ValueError."""
    cases = list(cases)
    if unknown := [case for case in default if case not in cases]:
        raise ValueError(f"not among the cases: {unknown}")
    return [(case, case in default) for case in cases]


def rows_in_full(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Rows of several parameters, marked `full`."""
    return [pytest.param(*row, marks=full) for row in rows]


def rows_in_slow(rows: Iterable[Sequence[Any]]) -> list[Any]:
    """Rows of several parameters, marked `slow`: like others, and run with these only before a release."""
    return [pytest.param(*row, marks=slow) for row in rows]


def pairwise(default: Sequence[tuple[Any, ...]], *options: Sequence[Any]) -> list[Any]:
    """The rows of `default`, and marked `full` the others that it takes for each pair of two values to occur."""
    places = [range(len(values)) for values in options]
    chosen = [tuple(list(values).index(value) for values, value in zip(options, row, strict=True)) for row in default]
    missing = {pair for row in itertools.product(*places) for pair in _pairs(row)}
    missing = missing.difference(*map(_pairs, chosen))
    added = []
    while missing:
        best = max(itertools.product(*places), key=lambda row: len(missing & _pairs(row)))  # the first of the best
        missing -= _pairs(best)
        added.append(tuple(values[place] for values, place in zip(options, best, strict=True)))
    return [*default, *rows_in_full(added)]


def _pairs(row: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """All pairs of places in the row, each with the number of its option."""
    return set(itertools.combinations(enumerate(row), 2))
