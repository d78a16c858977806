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
from small_job import PYTHON, ROOT, STEPS_AN_EPOCH, run

from cases import full
from processes import environment, kill_all

RAY = """
# Ray Train with one worker, in this process. It prints what is reported.
class Result:
    metrics, checkpoint = {"step": -1}, __import__("types").SimpleNamespace(path="")

class TorchTrainer:
    def __init__(self, train, train_loop_config, **options):
        self.fit = lambda: train(train_loop_config) or Result

class Checkpoint:
    from_directory = str

def report(metrics, **options):
    print("loss", metrics["step"], metrics["loss"])

class CheckpointUploadMode:
    NO_UPLOAD = None

FailureConfig = RunConfig = ScalingConfig = init = lambda **options: None
"""


@full
def test_rows_have_the_order_of_the_other_recipes(small: Path, plain: dict, tmp_path: Path) -> None:
    """In both epochs the losses are those of plain torch."""
    for package in ("ray", "ray/train", "ray/train/torch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("import ray.train\n" * (package == "ray") + RAY)
    options = ("--model", small / "model", "--data", small / "data", "--epochs", 2, "--lr", 3e-3, "--dropout", 0)
    options += ("--batch-size", 16, "--save-every", 5, "--output", tmp_path / "boolq")
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "recipes")))
    done = run(PYTHON, ROOT / "recipes" / "ray_train.py", *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    losses = {int(step): float(loss) for step, loss in re.findall(r"^loss (\d+) (\S+)$", done.stdout, re.MULTILINE)}
    assert [*losses] == [*range(5, 2 * STEPS_AN_EPOCH + 1, 5)]
    for step, loss in losses.items():
        assert loss == pytest.approx(plain["steps"][step - 1]["loss"], abs=1e-4)


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
