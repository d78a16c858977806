"""What of the tests runs by default: a sample of the long files, and nothing that this machine lacks something for.

A report's header names what is left out and how to get it; pytest counts it as deselected.
"""

import functools
import importlib.util
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import Ranks, with_tensors_on_gpu

Worlds = Callable[[int], Callable[..., list[Any]]]


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """`world(size)(function, *arguments)` runs the function on every rank of a world of that size."""
    with worlds(request.config.getoption("--device"), "auto") as get:
        yield get


@pytest.fixture(scope="module")
def peers(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """`world`, with every shard pulled and every gradient of a block pushed: copies between the ranks."""
    with worlds(request.config.getoption("--device"), "peer") as get:
        yield get


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@contextmanager
def worlds(device: str, gather: str) -> Iterator[Worlds]:
    started: dict[int, Ranks] = {}

    def get(size: int) -> Callable[..., list[Any]]:
        ranks = started.setdefault(size, Ranks(size, device, gather))
        return ranks if device == "cpu" else functools.partial(ranks, with_tensors_on_gpu)

    yield get
    for ranks in started.values():
        ranks.stop()


SAMPLED = {
    "test_agreement": 4,
    "test_accelerate": 9, "test_accelerate_state": 4, "test_adam": 6, "test_announced_updates": 6, "test_attributes": 6,
    "test_auto_wrap": 2, "test_bad_inputs": 8, "test_bitsandbytes": 2,
    "test_benchmark": 4, "test_benchmark_search": 6, "test_block": 12, "test_bmtrain_defects": 2,
    "test_boolq_through_hugging_face": 4, "test_causal_loss": 8, "test_check_parity": 6, "test_checkpoints": 3,
    "test_checks": 3,
    "test_compile": 8, "test_containers": 32, "test_delta": 4, "test_distributed": 4, "test_finetune_bert_boolq": 2,
    "test_foreign_checkpoint": 8, "test_generation": 4, "test_guards": 3, "test_hold_steps": 9, "test_in_backward": 4,
    "test_keep_frozen": 3,
    "test_kernel_bodies": 24, "test_kernel_compile": 4, "test_launchers": 8, "test_linear_loss": 6, "test_loss": 2,
    "test_loss_scale": 2, "test_manager": 6, "test_manager_state": 9, "test_misuse": 6, "test_offload": 14,
    "test_on_demand": 12, "test_parameter_state": 6, "test_parity": 36, "test_peer": 8, "test_peer_reduce": 2,
    "test_peft": 6, "test_quantized": 4, "test_quantized_experts": 8, "test_planner": 24, "test_programs": 10,
    "test_reading_questions": 2, "test_reducing_optimizers": 3, "test_residual": 4, "test_scripts": 3,
    "test_skipped_steps": 3,
    "test_state_dict": 2, "test_store": 2, "test_timm": 3, "test_torch_optimizers": 3, "test_train_gpt2": 9,
    "test_trainer": 2, "test_trl": 2, "test_trainer_matrix": 48, "test_transformers_cases": 16, "test_twenty_steps": 6,
    "test_torch_functions": 24, "test_unused": 6, "test_update_stream": 3, "test_usages": 18, "test_users": 3,
    "test_world": 12, "test_zoo": 4, "test_zoo_float8": 3,
    "test_save_state": 8, "test_damage": 6, "test_failures": 4, "test_from_pretrained": 8, "test_merge": 3,
    "test_torch_dcp": 6, "test_fill": 8,
}  # fmt: skip
"""One case in so many of a file runs by default, chosen by its name, so that `python -m pytest` takes about
fifteen minutes on two cores; `pytest -m "full or not full"` runs all."""

NEEDED = {"test_timm": ["timm"], "test_peft": ["peft"], "test_trl": ["peft", "trl"], "test_kernel_compile": ["cupy"]}
"""Packages without which a file cannot be imported."""
SOURCES = {
    "timm": "pip install timm", "peft": 'pip install -e ".[ci]"', "trl": 'pip install -e ".[ci]"',
    "cupy": 'pip install -e ".[ci]"', "bitsandbytes": "pip install bitsandbytes",
}  # fmt: skip


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def pytest_report_header() -> list[str]:
    lines = [] if torch.cuda.is_available() else ["left out: tests marked gpu (no CUDA device)"]
    for package in filter(is_missing, SOURCES):
        files = ", ".join(file for file, packages in NEEDED.items() if package in packages)
        lines.append(f"left out: {files} and tests that use {package} (to get it: {SOURCES[package]})")
    return lines


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if any(is_missing(package) for package in NEEDED.get(collection_path.stem, [])) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "of the ranks that `world` and `peers` start; on a GPU some tests fail whose tolerance is the CPU's"
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help=told)
    parser.addoption("--part", default="1/1", metavar="K/N", help="run part K of N of the cases that the sample lacks")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("--part").split("/"))
    files: dict[Path, list[tuple[int, int, pytest.Item]]] = defaultdict(list)
    for item in items:
        quotient, remainder = divmod(zlib.crc32(item.name.encode()), SAMPLED.get(item.path.stem, 1))
        files[item.path].append((quotient, remainder, item))
    left_out = {item for item in items if cannot_run(item)}
    for cases in files.values():
        least = min(remainder for _, remainder, _ in cases)  # not 0 in a short file, which keeps a case all the same
        for quotient, remainder, item in cases:
            if remainder != least:
                item.add_marker("full")
                if quotient % parts != part - 1:
                    left_out.add(item)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def cannot_run(item: pytest.Item) -> bool:
    """Whether this machine lacks what the test needs: a GPU, or a package that one of its fixtures is named after."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return True
    return any(package in getattr(item, "fixturenames", ()) and is_missing(package) for package in SOURCES)
