"""Random programs around training equal plain torch's; `python tests programs` runs as many as there is time for."""

import pytest

from cases import rows_in_full
from programs import run

SEEDS = {1: range(2), 2: range(101, 105), 3: range(201, 203)}


@pytest.mark.parametrize(
    ("size", "seed"), [(2, 100), (3, 200), *rows_in_full((size, seed) for size in SEEDS for seed in SEEDS[size])]
)
def test_program(world, tmp_path, size, seed):
    world(size)(run, seed, str(tmp_path))
