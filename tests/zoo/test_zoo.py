"""Families of the zoo: some always, all others with `pytest -m zoo`; `python tests zoo` tables the errors."""

import pytest
import torch

import hf_bmtrain as bmt
from cases import full
from ranks import on_ranks
from zoo_check import gradient_errors, measure
from zoo_families import FAMILIES, KINDS

DEFAULT = ("deepseek_v3", "qwen2_vl")
ALWAYS = (
    "llama", "gpt2", "mixtral", "gpt_oss", "deepseek_v3", "mamba", "zamba2", "bert", "deberta_v2", "albert in groups",
    "t5", "whisper", "swin", "wav2vec2_conformer", "qwen2_vl",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DEFAULT else full if name in ALWAYS else pytest.mark.zoo)
        for name in FAMILIES
    ],
)
def test_zoo(world, name: str):
    if FAMILIES[name].missing:
        pytest.skip(f"this transformers has no {FAMILIES[name].missing}")
    row = world(2)(measure, name)[0]
    assert row.blocks
    assert row.loss <= 1
    assert row.gradient <= 1


@full
def test_names_are_distinct():
    assert len(FAMILIES) == sum(map(len, KINDS.values()))
    assert set(ALWAYS) <= set(FAMILIES)


@on_ranks(1)
def test_comparison_sees_errors():
    """A missing average, a stale weight and a lost gradient are each seen by the comparison."""
    family = FAMILIES["llama"]
    twin = family.build()
    twin(**family.inputs(0)).loss.backward()
    right = {name: p.grad.clone() for name, p in twin.named_parameters()}
    assert max(gradient_errors(right, twin).values()) == 0
    for name in right:
        assert gradient_errors(right | {name: 2 * right[name]}, twin)[name] > 1
        assert gradient_errors(right | {name: torch.full_like(right[name], float("nan"))}, twin)[name] == float("inf")
    return bmt.rank()
