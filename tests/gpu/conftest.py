"""What the GPU tests share: ranks on the GPUs that are there, and the kernels that a test reached."""

from collections.abc import Iterator

import pytest

from hf_bmtrain.engine.base import launch
from ranks import Ranks


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ranks]:
    ranks = Ranks(1, "cuda")
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module", params=[1, 2])
def gpus(request) -> Iterator[Ranks]:
    """One process, and two, which share a GPU where there is one."""
    ranks = Ranks(request.param, "cuda")
    yield ranks
    ranks.stop()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that a test reached, which must be some: none may be answered by the torch reference alone."""
    names: list[str] = []
    original = launch.Kernel.__call__

    def counting(self, *values, **options):
        names.append(self.name)
        return original(self, *values, **options)

    monkeypatch.setattr(launch.Kernel, "__call__", counting)
    yield names
    assert names
