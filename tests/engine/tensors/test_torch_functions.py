"""The rule for functions of slices, one by one: `torch_functions.py` prints the table."""

import warnings

import pytest
import torch_functions

from cases import in_full

PARTS = 8
LABELS = [*torch_functions.functions()]


def these_functions(labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plain torch's, about scalars
        table = torch_functions.outcomes(labels)
    assert not (problems := torch_functions.judge(table)), "\n".join(problems)
    outcomes = [outcome.split(":")[0] for outcome in table.values()]
    assert outcomes.count("right") >= 0.6 * len(outcomes)


@pytest.mark.parametrize("part", [0, *in_full(*range(1, PARTS))])
def test_functions(world, part):
    assert len(LABELS) >= 300
    world(2)(these_functions, LABELS[part::PARTS])
