"""Tensor parallelism against whole layers in plain torch, by torchrun: see parallel_program.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import full, in_slow
from processes import environment

PROGRAM = Path(__file__).with_name("parallel_program.py")
TRAINER = Path(__file__).with_name("trainer_program.py")
GUIDE = Path(__file__).resolve().parents[3] / "recipes" / "guides" / "bmtrain.md"


def launch(ranks: int, *command: str) -> str:
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *command],
        env=environment(ACCELERATE_USE_CPU="true"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return found.stdout


@full
@pytest.mark.parametrize("ranks", [4, *in_slow(2)])  # two groups with ZeRO between them, and one
def test_layers_that_two_ranks_compute_together(tmp_path, ranks):
    assert "equal" in launch(ranks, str(PROGRAM), str(tmp_path))


@full
@pytest.mark.parametrize("ranks", [2, *in_slow(4)])
def test_a_trainer_script(tmp_path, ranks):
    """With accumulation, short last batches, evaluations, checkpoints and a resume, as transformers alone trains."""
    (tmp_path / "one").mkdir()
    subprocess.run(
        [sys.executable, str(TRAINER), str(tmp_path / "one")],
        env=environment(WORLD_SIZE="0"), capture_output=True, timeout=300, check=True,
    )  # fmt: skip
    launch(ranks, str(TRAINER), str(tmp_path))
    found, expected = (torch.load(each / "results.pt", weights_only=True) for each in (tmp_path, tmp_path / "one"))
    for regression, (logs, weights) in expected.items():
        for mine, true in zip(found[regression][0], logs, strict=True):
            # Trainer counts the FLOPs of padding, of which smaller batches have less.
            timed = {
                name for name in true if "second" in name or "runtime" in name or ranks > 2 and name == "total_flos"
            }
            kept = {name: value for name, value in true.items() if name not in timed}
            assert {name: mine[name] for name in kept} == pytest.approx(kept, rel=1e-5)
        for mine, true in zip(found[regression][1], weights):
            for name, value in true.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


@full
def test_the_guide(tmp_path):
    (code,) = re.findall(r"^<!-- torchrun 2 -->\n```py\n(.+?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "guide.py").write_text(f"{code}\nassert 0 < loss.item() < 1e3\n")
    launch(2, str(tmp_path / "guide.py"))
