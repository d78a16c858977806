"""Compiled blocks that are replayed as CUDA graphs, on one and two GPUs: equal to those that are launched."""

import importlib.util

import pytest
import torch

from graph_checks import beside_no_graphs, dropout_changes, kept_outputs
from hf_bmtrain.engine.base.torch_internals import top_saved_tensors_hooks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(top_saved_tensors_hooks is None, reason="torch 2.6 has no CUDA graphs of blocks"),
]

CASES = {
    "recomputed": {"family": "llama"},
    "kept": {"family": "llama", "use_checkpoint": False},
    "attention": {"family": "gpt2", "use_checkpoint": "attention"},
    "auto": {"family": "gpt2", "use_checkpoint": "auto"},
    "level 2": {"family": "bert", "zero_level": 2},
    "accumulated": {"family": "llama", "backwards": 3, "use_checkpoint": False},
    "evaluated": {"family": "llama", "evaluate": True},
    "experts": {"family": "mixtral", "use_checkpoint": False, "dtype": torch.bfloat16},
    "encoder and decoder": {"family": "t5"},
    "float8": {"family": "llama", "float8": True, "use_checkpoint": False, "dtype": torch.bfloat16},
    "float8, recomputed": {"family": "gpt2", "float8": True, "dtype": torch.bfloat16, "evaluate": True},
    "float8, compiled later": {
        "family": "llama",
        "float8": True,
        "use_checkpoint": False,
        "dtype": torch.bfloat16,
        "later": True,
    },
}
ADAPTERS = {
    "adapters": {"family": "llama", "adapters": True},
    "adapters on experts": {"family": "mixtral", "adapters": True, "use_checkpoint": False, "dtype": torch.bfloat16},
}
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=needs_peft) for case in ADAPTERS)])
def test_equal(gpus, case) -> None:
    for graphs, blocks in gpus(run, {**CASES, **ADAPTERS}[case]):
        # Torch may divide the graph of a forward or backward into several.
        assert graphs >= 2 * blocks, f"{graphs} graphs were replayed for {blocks} blocks"


def run(options):
    return beside_no_graphs(**options)


def test_recomputed_by_a_checkpoint(gpus) -> None:
    """Router logits leave the block on the side, so torch's checkpoint recomputes it, and no graphs are used."""
    gpus(run, {"family": "mixtral", "dtype": torch.bfloat16})


def test_forwards_before_a_backward(gpus) -> None:
    """The results of the first forward are not overwritten by the second."""
    for graphs, blocks in gpus(run, {"family": "llama", "forwards": 2, "use_checkpoint": False}):
        assert graphs == 4 * blocks


def test_other_lengths(gpus) -> None:
    gpus(run, {"family": "llama", "length": lengths, "steps": 10})


def lengths(step):
    return 7 + step % 2


def test_dropout(gpus) -> None:
    for losses, graphs in gpus(dropout_changes, "bert"):
        assert graphs and len(set(losses)) == len(losses)


def test_outputs_kept_beyond_a_step(gpus) -> None:
    for same, refused in gpus(kept_outputs):
        assert same and "still in use" in refused
