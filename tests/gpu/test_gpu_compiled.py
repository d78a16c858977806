"""Blocks through Inductor on one and two GPUs: equal to those that are not compiled, and compiled once."""

import pytest

from compile_checks import check, compiled_once, float8_gradients

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_compiled_once_for_all_layers(gpus, family, use_checkpoint) -> None:
    for graphs, layers in gpus(compiled_once, family, use_checkpoint, "inductor", 1e-4):
        check(graphs, layers, use_checkpoint)


@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_in_float8(gpus, family, use_checkpoint) -> None:
    for off in gpus(float8_gradients, family, use_checkpoint, "inductor"):
        assert off and max(off.values()) < 0.3, off
