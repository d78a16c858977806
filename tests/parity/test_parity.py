"""Cells of the parity table in which each pair of options occurs; `python tests parity` prints all, with errors."""

import pytest

from cases import full, pairwise
from parity import VARIANTS, Cell, Errors, measure
from tiny_models import FAMILIES

NAMES = ("size", "family", "zero_level", "recompute", "accumulation", "variant")
OPTIONS = ([1, 2, 3], FAMILIES, (2, 3), (False, True), (1, 3), VARIANTS)
DEFAULT = [
    (2, "llama", 3, True, 3, "frozen first block"), (3, "gpt2", 3, False, 1, "tied"), (2, "bert", 2, True, 1, "bf16"),
    (2, "t5", 3, True, 3, "tied"), (3, "mixtral", 3, True, 1, "plain"), (1, "llama", 2, False, 1, "frozen embeddings"),
]  # fmt: skip


@pytest.mark.parametrize(NAMES, pairwise(DEFAULT, *OPTIONS))
def test_parity(world, size: int, family, zero_level, recompute, accumulation, variant):
    check(world(size)(measure, Cell(family, zero_level, recompute, accumulation, variant))[0])


@full
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout(world, family: str):
    """Compared where there is one rank, and so one random stream."""
    check(world(1)(measure, Cell(family, 3, True, 3, "dropout"))[0])


@pytest.mark.parametrize(
    NAMES[1:],
    [
        *pairwise([("llama", 3, True, 3, "tied")], ["llama"], *OPTIONS[2:]),
        *pairwise([("t5", 3, True, 1, "tied")], ["t5"], (2, 3), (False, True), [1], VARIANTS),
    ],
)
def test_parity_by_copies(peers, family, zero_level, recompute, accumulation, variant):
    check(peers(2)(measure, Cell(family, zero_level, recompute, accumulation, variant))[0])


def check(errors: Errors) -> None:
    assert errors.loss <= 1
    assert errors.gradient <= 1
