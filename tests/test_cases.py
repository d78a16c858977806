"""Which cases run by default (tests/support/cases.py)."""

import itertools

import pytest

from cases import by_default, pairwise

OPTIONS = ([1, 2, 3], ["a", "b"], [True, False], ["x", "y", "z"])


def test_every_pair_of_values_occurs_in_fewer_rows():
    default = [(2, "a", True, "x"), (1, "b", False, "z")]
    rows = pairwise(default, *OPTIONS)
    assert rows[:2] == default
    assert all([mark.name for mark in row.marks] == ["full"] for row in rows[2:])
    plain = [*default, *(row.values for row in rows[2:])]
    for (i, first), (j, second) in itertools.combinations(enumerate(OPTIONS), 2):
        assert {(row[i], row[j]) for row in plain} == {*itertools.product(first, second)}
    assert len(rows) < 12 < len([*itertools.product(*OPTIONS)])


def test_a_default_that_is_no_case_is_refused():
    with pytest.raises(ValueError, match=r"not among the cases: \['d'\]"):
        by_default("abc", "d")
