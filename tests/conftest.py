"""Fixtures of worlds, and what this machine lacks something for: the header names it and how to get it.

pytest counts it as deselected. Which cases run by default is said where they are listed: tests/support/cases.py.
"""

import functools
import importlib.util
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


NEEDED = {
    "test_timm": ["timm"],
    "test_peft": ["peft"],
    "test_trl": ["peft", "trl"],
    "test_sequence_trl": ["peft", "trl"],
    "test_kernel_compile": ["cupy"],
}
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if left_out := [item for item in items if cannot_run(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not cannot_run(item)]


def cannot_run(item: pytest.Item) -> bool:
    """Whether this machine lacks what the test needs: a GPU, or a package that one of its fixtures is named after."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return True
    return any(package in getattr(item, "fixturenames", ()) and is_missing(package) for package in SOURCES)
