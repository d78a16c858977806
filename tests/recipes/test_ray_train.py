"""The BoolQ job under Ray Train: a killed worker is started again and resumes."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_job import ROOT

from processes import environment, kill_all


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_killed_worker_resumes(small: Path, tmp_path: Path) -> None:
    """It begins at the last checkpoint, and the workers copy no checkpoint."""
    output, log = tmp_path / "boolq", tmp_path / "log"
    command = [sys.executable, str(ROOT / "recipes" / "ray_train.py"), "--workers", "2", "--save-every", "10"]
    command += [
        "--model",
        str(small / "model"),
        "--data",
        str(small / "data"),
        "--epochs",
        "2",
        "--output",
        str(output),
    ]
    variables = environment(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", RAY_USAGE_STATS_ENABLED="0")
    with log.open("w") as file, subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT) as job:
        try:
            while job.poll() is None and "saved checkpoint-20" not in log.read_text():
                time.sleep(0.1)
            worker = re.search(r"pid=(\d+)\)\S* saved checkpoint-20", log.read_text())
            assert worker is not None, log.read_text()[-4000:]
            os.kill(int(worker[1]), signal.SIGKILL)
            assert job.wait() == 0, log.read_text()[-4000:]
        finally:
            kill_all(job)
    steps = 24  # 2 epochs of 400 rows, 32 a step
    begun = [int(step) for step in re.findall(rf"2 workers begin at step (\d+) of {steps}", log.read_text())]
    assert begun[0] == 0 and begun[-1] >= 20, begun
    assert f"ended at step {steps}" in log.read_text()
    saved = {path.parent.name for path in output.rglob("model.safetensors")}
    assert saved == {f"checkpoint-{step}" for step in (10, 12, 20, 24)}
    assert len(list(output.rglob("model.safetensors"))) == len(saved)
