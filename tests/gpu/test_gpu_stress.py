"""A short run of `stress.py` on GPUs, and what it sees when a wait is missing."""

from unittest import mock

import pytest

from hf_bmtrain.engine.sharding.buffer import ShardedBuffer
from stress import CELLS, GATHERS, pausing, run_cell, stress

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gather", GATHERS)
def test_late_streams_change_nothing(gather):
    assert stress("cuda", 10, CELLS[::5], [gather]) == 0


def without_waiting(cell, steps, seed):
    """A compute stream that does not wait for gathers, which come late."""
    with mock.patch.object(ShardedBuffer, "wait", return_value=None), pausing(seed):
        return run_cell(cell, steps, seed)


@pytest.mark.parametrize("gather", GATHERS)
def test_a_missing_wait_is_seen(gather):
    with pytest.raises(AssertionError, match="was computed with"):
        stress("cuda", 10, CELLS[:1], [gather], without_waiting)
