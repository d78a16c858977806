"""Cases marked `gpu` are skipped, visibly, where there is no CUDA device; of long files a sample runs by default."""

import zlib
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


@pytest.fixture(scope="module")
def peers() -> Iterator[Callable[[int], Ranks]]:
    """`world`, with every shard pulled and every gradient of a block pushed."""
    worlds: dict[int, Ranks] = {}
    yield lambda size: worlds.setdefault(size, Ranks(size, gather="peer"))
    for ranks in worlds.values():
        ranks.stop()


SAMPLED = {
    "test_parity": 4, "test_block": 4, "test_peer": 4, "test_linear_loss": 4, "test_loss": 2, "test_causal_loss": 4,
    "test_kernel_bodies": 4, "test_adam": 3, "test_manager": 3, "test_offload": 3, "test_checks": 3,
    "test_torch_optimizers": 3, "test_manager_state": 3, "test_accelerate": 3, "test_guards": 3,
    "test_checkpoints": 3, "test_misuse": 3, "test_published_examples": 4, "test_compile": 4, "test_generation": 4,
    "test_distributed": 2, "test_state_dict": 2, "test_bmtrain_defects": 2, "test_train_gpt2": 3,
    "test_trainer_matrix": 3, "test_transformers_cases": 4, "test_twenty_steps": 3, "test_auto_wrap": 2, "test_zoo": 2,
    "test_programs": 2, "test_hold_steps": 3, "test_delta": 2, "test_peft": 3, "test_foreign_checkpoint": 8,
    "test_timm": 3, "test_planner": 4,
}  # fmt: skip
"""One case in so many of a file runs by default, chosen by its name; `pytest -m "full or not full"` runs all."""


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        share = SAMPLED.get(item.path.stem, 1)
        if zlib.crc32(item.name.encode()) % share:
            item.add_marker("full")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
