"""Tensor parallelism against whole layers in plain torch, by torchrun: see parallel_program.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cases import in_full
from processes import environment

PROGRAM = Path(__file__).with_name("parallel_program.py")


@pytest.mark.parametrize("ranks", [2, *in_full(4)])  # one group, and two with ZeRO between them
def test_layers_that_two_ranks_compute_together(tmp_path, ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    found = subprocess.run(
        [*command, str(PROGRAM), str(tmp_path)], env=environment(ACCELERATE_USE_CPU="true"), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    assert "equal" in found.stdout
