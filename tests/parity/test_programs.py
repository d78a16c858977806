"""Random programs around training equal plain torch's; `python tests programs` runs as many as there is time for."""

import pytest

from programs import run

SEEDS = {1: range(24), 2: range(100, 124), 3: range(200, 212)}


@pytest.mark.parametrize(("size", "seed"), [(size, seed) for size in SEEDS for seed in SEEDS[size]])
def test_program(world, tmp_path, size, seed):
    world(size)(run, seed, str(tmp_path))
