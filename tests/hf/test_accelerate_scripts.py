"""Accelerate's own test scripts, from the installed package, after `init_distributed` on two ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import environment

SCRIPT = Path(__file__).with_name("accelerate_script.py")
TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops", "test_cli"])
def test_accelerates_own_script(name):
    command, variables = [*TWO_RANKS, str(SCRIPT), name], environment(ACCELERATE_USE_CPU="true")
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert result.stdout.count(f"{name} done on rank") == 2
