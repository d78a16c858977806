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
