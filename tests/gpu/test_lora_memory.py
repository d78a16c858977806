"""The engines that `lora_memory` compares compute the same, on small models on the CPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cases import full
from processes import environment

pytest.importorskip("peft")
TESTS = Path(__file__).resolve().parents[1]
TINY = ("--model", "llama-8b", "--layers", 2, "--vocabulary", 512, "--rows", 1, "--length", 16, "--steps", 5)
TINY += ("--dtype", "float32")
OUT_OF_MEMORY = """
import lora_memory, torch
def measure(options, device):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\\nAnd more")
lora_memory.measure = measure
lora_memory.main()
"""


def start(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)


def report(ranks: int, *words: object, width: int = 128) -> dict:
    done = start(ranks, TESTS, "lora_memory", *TINY, "--width", width, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_sharded_and_replicated_models_train_alike(tmp_path):
    plain = report(2, "--engine", "ddp")
    sharded = report(2, "--engine", "bmt", "--no-recompute")
    filled = report(2, "--engine", "bmt", "--folder", tmp_path)
    assert sharded["losses"] == filled["losses"] == pytest.approx(plain["losses"], abs=1e-3)
    assert plain["losses"][-1] < plain["losses"][0] - 0.1
    assert plain["trainable"] == sharded["trainable"] == filled["trainable"] > 0
    assert plain["ranks"] == 2 and filled["options"]["from files"]


@pytest.mark.slow
def test_a_base_that_is_quantized_from_files_is_that_of_a_whole_one(tmp_path):
    words = ("--engine", "bmt", "--quantize", "nf4", "--distinct", 1)
    whole, filled = report(2, *words), report(2, *words, "--folder", tmp_path)
    assert whole["losses"] == filled["losses"]
    assert [file.name for file in tmp_path.rglob("layer-*")] == ["layer-0.bin"]
    plain = report(2, "--engine", "ddp", "--distinct", 1)
    assert whole["losses"] == pytest.approx(plain["losses"], abs=0.05) and whole["losses"] != plain["losses"]


@pytest.mark.slow
def test_nf4_is_that_of_bitsandbytes():
    pytest.importorskip("bitsandbytes")
    theirs = report(1, "--engine", "bnb", "--double-quantization", width=256)
    ours = report(1, "--engine", "bmt", "--quantize", "nf4", width=256)
    assert ours["losses"][0] == pytest.approx(theirs["losses"][0], abs=1e-4)
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-3)  # Adam enlarges what rounding leaves near 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_bitsandbytes_is_asked_for():
    done = start(1, TESTS, "lora_memory", *TINY, "--engine", "bnb")
    assert done.returncode == 1
    assert done.stderr.endswith("--engine bnb needs bitsandbytes: pip install bitsandbytes\n")


@full
def test_too_little_memory_is_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {os.fspath(TESTS / 'scripts')!r}){OUT_OF_MEMORY}")
    done = start(2, script, "--engine", "bmt")
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines
    for line in lines:
        rank = line.pop("rank")
        assert rank in (0, 1)
        assert line == {"engine": "bmt", "out of memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}
