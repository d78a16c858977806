"""Blocks through Inductor on one and two GPUs: equal to those that are not compiled, and compiled once."""

from collections.abc import Iterator

import pytest
import torch

from ranks import Ranks
from test_compiled import check, compiled_once

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[1, 2])
def gpus(request) -> Iterator[Ranks]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    ranks = Ranks(request.param, "cuda")
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_once_for_all_layers(gpus, family, use_checkpoint) -> None:
    for graphs, layers in gpus(compiled_once, family, use_checkpoint, "inductor", 1e-4):
        check(graphs, layers, use_checkpoint)
