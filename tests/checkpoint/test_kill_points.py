"""A kill at any file operation of a save leaves a checkpoint that resumes bit by bit (kill_points.py)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases import full
from processes import environment

TESTS = Path(__file__).resolve().parents[1]


def killed(*words: str) -> int:
    """Run the script. Returns the number of points."""
    command = [sys.executable, str(TESTS), "kill_points", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^(\d+) points, 0 failed$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return int(found.group(1))


def test_some_points():
    """Of rank 0 of 2, which does everything that one rank alone does."""
    assert killed("--ranks", "2", "--victim", "0", "--kinds", "first", "steady", "--every", "60") >= 4


@full
def test_some_points_of_hugging_faces_loops():
    """Files of torch.save and json are among them, and rank 1's random state."""
    through = ["--through", "accelerate", "trainer", "bmt_trainer"]
    assert killed(*through, "--ranks", "2", "--kinds", "steady", "--every", "30") >= 12


@full
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("through", ["accelerate", "trainer", "bmt_trainer"])
def test_many_points_of_hugging_faces_loops(ranks, through):
    assert killed("--through", through, "--ranks", str(ranks), "--every", "7") >= 60


@full
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["first", "steady", "replaced", "again"])
def test_many_points(ranks, kind):
    assert killed("--ranks", str(ranks), "--kinds", kind, "--every", "7") >= 25
