"""Cases marked `gpu` are skipped, visibly, where there is no CUDA device."""

from collections.abc import Callable, Iterator

import pytest
import torch

from ranks import Ranks


@pytest.fixture(scope="session")
def world() -> Iterator[Callable[[int], Ranks]]:
    """`world(size)(function, *arguments)` runs the function on every rank of a world of that size."""
    worlds: dict[int, Ranks] = {}
    yield lambda size: worlds.setdefault(size, Ranks(size))
    for ranks in worlds.values():
        ranks.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
