"""One process on the first GPU, for the tests of a file."""

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    ranks = Ranks(1, "cuda")
    yield ranks
    ranks.stop()
