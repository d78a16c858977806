"""Tensor parallelism against whole layers in plain torch, by torchrun: see parallel_program.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cases import full, in_full
from processes import environment

PROGRAM = Path(__file__).with_name("parallel_program.py")
GUIDE = Path(__file__).resolve().parents[3] / "recipes" / "guides" / "bmtrain.md"


def launch(ranks: int, *command: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command],
        env=environment(ACCELERATE_USE_CPU="true"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@pytest.mark.parametrize("ranks", [2, *in_full(4)])  # one group, and two with ZeRO between them
def test_layers_that_two_ranks_compute_together(tmp_path, ranks):
    assert "equal" in launch(ranks, str(PROGRAM), str(tmp_path))


@full
def test_the_guide(tmp_path):
    (code,) = re.findall(r"^<!-- torchrun 2 -->\n```py\n(.+?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "guide.py").write_text(f"{code}\nassert 0 < loss.item() < 1e3\n")
    launch(2, str(tmp_path / "guide.py"))
