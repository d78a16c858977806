"""Accelerate's own test scripts, from the installed package, after `init_distributed` on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("accelerate_script.py")
TESTS = SCRIPT.parents[1]
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops", "test_cli"])
def test_accelerates_own_script(name):
    path = os.pathsep.join([str(TESTS.parent), str(TESTS / "support")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [*TWO_RANKS, str(SCRIPT), name], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.count(f"{name} done on rank") == 2
