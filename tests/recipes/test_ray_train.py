"""recipes/ray_train.py: a worker is killed, and the others resume from the last checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from processes import environment, kill_all

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240


def workers(process: subprocess.Popen) -> list[int]:
    """The processes below `process` in which Ray runs the training function."""
    found, trains = [process.pid], []
    for pid in found:  # grows
        with suppress(OSError):
            found += [int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()]
            if Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::RayTrainWorker"):
                trains.append(pid)
    return trains


@pytest.mark.slow
def test_a_killed_worker(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "boolq"
    command = [sys.executable, "recipes/ray_train.py", "--workers", "2", "--save-every", "20", "--epochs", "1"]
    variables = environment(HOME=str(tmp_path), RAY_AUTH_MODE="disabled", ACCELERATE_USE_CPU="true")
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--output", str(out)], cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + SECONDS
            while not (out / "checkpoints" / "checkpoint-20").exists():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.2)
            os.kill(workers(process)[0], signal.SIGKILL)
            status = process.wait(SECONDS)
        finally:
            kill_all(process)
    printed = (tmp_path / "log").read_text()
    assert status == 0, printed
    begun = [int(step) for step in re.findall(r"2 workers begin at step (\d+) of", printed)]
    assert begun[0] == 0 and begun[-1] >= 20, printed
    assert "ended at step" in printed
