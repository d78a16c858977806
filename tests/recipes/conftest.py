"""Fixtures of the recipes' tests: files of rows, and the BoolQ job on a small saved model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_job import PLAIN, PYTHON, make_small, train


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """`write_lines(name, *rows)` writes a file in `tmp_path`: dicts as JSON, str and bytes unchanged."""

    def write(name: str, *rows: dict | str | bytes) -> Path:
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        file = tmp_path / name
        file.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
        return file

    return write


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small saved model and few rows of data."""
    return make_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def plain(small: Path) -> dict:
    """The metrics of the job in plain torch, in one process."""
    return train(small, "plain", PYTHON, PLAIN, "--dropout", 0, "--batch-size", 16)
