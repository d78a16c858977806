"""Puts the recipes where the tests can import them, as Python does for a script that lies beside them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """`write_lines(name, *rows)` writes a file of `tmp_path`: objects as JSON, texts and bytes as they are."""

    def write(name: str, *rows: dict | str | bytes) -> Path:
        lines = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
        file = tmp_path / name
        file.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in lines))
        return file

    return write


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small saved model and few rows of data."""
    from small_job import make_small

    return make_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def plain(small: Path) -> dict:
    """What the job gives in plain torch, in one process."""
    from small_job import PLAIN, PYTHON, train

    return train(small, "plain", PYTHON, PLAIN, "--dropout", 0, "--batch-size", 16)
