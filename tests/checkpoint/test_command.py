"""python -m hf_bmtrain.checkpoint, without a GPU or a process group."""

import subprocess
import sys

import pytest

from processes import environment
from resumable import damage, three_checkpoints


def command(*arguments):
    process = subprocess.run(
        [sys.executable, "-m", "hf_bmtrain.checkpoint", *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return process.returncode, process.stdout + process.stderr


@pytest.mark.slow
def test_verify_and_inspect(world, tmp_path):
    world(2)(three_checkpoints, str(tmp_path))
    status, printed = command("verify", tmp_path)
    assert status == 0, printed
    assert printed.count(": intact, ") == 3
    damage(tmp_path / "checkpoint-2" / "optimizer.safetensors")
    (tmp_path / "checkpoint-1" / "state.pt").unlink()
    status, printed = command("verify", tmp_path)
    assert status == 1
    assert "checkpoint-2: damaged: optimizer.safetensors: bytes" in printed
    assert "checkpoint-1: damaged: state.pt is missing" in printed
    assert "checkpoint-3: intact" in printed
    status, printed = command("inspect", tmp_path / "checkpoint-3")
    assert status == 0
    assert "step 3, saved by 2 ranks with hf_bmtrain" in printed
    assert "model.embed_tokens.weight.exp_avg  (61, 24)  float32" in printed
    assert command("verify", tmp_path / "nothing")[0] == 1
    status, printed = command("merge", tmp_path / "checkpoint-3", "--output", tmp_path / "checkpoint_merged")
    assert status == 1 and "would take it for one of its own checkpoints" in printed
    model = tmp_path / "checkpoint-3" / "model.safetensors"
    data = model.read_bytes()
    model.write_bytes(data[:8] + b"[" + data[9:])
    status, printed = command("inspect", tmp_path / "checkpoint-3")
    assert status == 1 and "    damaged: " in printed and "Traceback" not in printed
    assert "model.norm.weight.exp_avg_sq" in printed  # of a file after the damaged one
