"""Mixtures of experts in each way to compute them, on two ranks, against one process of plain torch."""

import pytest

from cases import rows_by_default
from zoo_experts import IMPLEMENTATIONS, OWN, STACKED, measure_experts
from zoo_families import FAMILIES

CASES = [
    *((name, implementation, True) for name in STACKED for implementation in IMPLEMENTATIONS),
    *((name, None, False) for name in OWN),
]


@pytest.mark.parametrize(
    ("name", "implementation", "disjoint"),
    rows_by_default(CASES, ("gpt_oss", "grouped_mm", True), ("deepseek_v2", "batched_mm", True)),
)
def test_experts(world, name, implementation, disjoint):
    if FAMILIES[name].missing:
        pytest.skip(f"this transformers has no {FAMILIES[name].missing}")
    for loss, gradient in world(2)(measure_experts, name, implementation, disjoint):
        assert loss <= 1
        assert gradient <= 1
