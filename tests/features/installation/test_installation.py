"""python -m hf_bmtrain: what it says of machines with and without GPUs, and of missing packages."""

import dataclasses
import os
import subprocess
import sys

import pytest

from cases import full, rows_in_full
from hf_bmtrain.features.installation.command import TESTED, obstacles, report, screen
from hf_bmtrain.features.installation.facts import PACKAGES, Facts, Gpu, installed, links, needed

NEEDED = {"torch": "2.6", "transformers": "5", "accelerate": "1.14"} | dict.fromkeys(
    ("datasets", "safetensors", "numpy", "tqdm"), ""
)
VERSIONS = {**dict.fromkeys(PACKAGES, "3.1"), "torch": "2.11.0+cu130", "transformers": "5.17.0", "accelerate": "1.15.0"}
H200 = Gpu("NVIDIA H200", 140 << 30, (9, 0))
TWO = Facts(VERSIONS, NEEDED, "13.0", (H200, H200), nccl="2.27.5", links=("NV18",))
CPU = Facts(VERSIONS | {"torch": "2.13.0+cpu", "cupy": None, "bitsandbytes": None}, NEEDED)
TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\t0-47\nGPU1\tNV18\t X \tNODE\t0-47\nNIC0\tSYS\tNODE\t X\n\nLegend:\n  X    = Self\n"
)


def test_the_command_says_what_this_environment_has():
    done = subprocess.run([sys.executable, "-m", "hf_bmtrain", "--report"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == last == "```"
    for name in ("torch", "transformers", "accelerate"):
        assert any(line.split()[:2] == [name, installed(name)] for line in done.stdout.splitlines())
    assert os.uname().nodename not in done.stdout.split()
    assert len(done.stdout.splitlines()) <= 40


@pytest.mark.parametrize("facts", [CPU, TWO])
def test_it_fits_on_a_screen(facts):
    lines = screen(facts, "1.0").splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "Nothing is missing."


@pytest.mark.parametrize(
    ("facts", "changes", "said"),
    [
        (TWO, {}, "each GPU can access the memory of every other"),
        (TWO, {"blocked": ((0, 1), (1, 0))}, "NCCL, because not every GPU"),
        (CPU, {"packages": CPU.packages | {"transformers": "4.9", "tqdm": None}}, "pip install 'transformers>=5' tqdm"),
        (TWO, {"trouble": {"CuPy": "pip install 'hf_bmtrain[cuda13]'"}}, "CuPy: pip install 'hf_bmtrain[cuda13]'"),
        *rows_in_full([
            (TWO, {}, "links: NV18 (NVLink); "),
            (TWO, {}, "copies between GPUs for shards of 16 MiB or more"),
            (TWO, {"gpus": (H200,), "links": ()}, "GPU, one process\n"),
            (TWO, {"gpus": (H200, Gpu("NVIDIA T4", 15 << 30, (7, 5)))}, "float16 with a loss scale"),
            (TWO, {"float8": "no float8 products"}, "float8=True     no float8 products"),
            (CPU, {"unseen": True}, "install a torch for CUDA"),
            (CPU, {"unseen": True, "cuda": "13.0"}, "look at nvidia-smi"),
            (CPU, {"unseen": True, "cuda": "13.0", "trouble": {"torch": "old driver"}}, "torch: old driver"),
            (CPU, {"packages": CPU.packages | {"peft": None}}, "for LoRA and other adapters: pip install peft"),
            (CPU, {"packages": CPU.packages | {"torch": "2.9.1"}}, "2.14; not with this version"),
            (CPU, {"needed": {}}, "not installed"),
        ]),
    ],
)  # fmt: skip
def test_what_is_said(facts, changes, said):
    assert said in screen(dataclasses.replace(facts, **changes), "1.0")


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({"packages": VERSIONS | {"accelerate": "1.9.0"}}, 1),
        ({"packages": VERSIONS | {"transformers": "5"}, "needed": NEEDED | {"transformers": "5.0"}}, 0),
        *rows_in_full([({}, 0), ({"packages": VERSIONS | {"peft": None}}, 0), ({"trouble": {"CuPy": "", "a": ""}}, 2)]),
    ],
)  # fmt: skip
def test_only_what_prevents_training_is_an_obstacle(changes, count):
    assert len(obstacles(dataclasses.replace(TWO, **changes))) == count


@full
def test_links_are_read_from_nvidia_smi():
    assert links(TOPOLOGY, 2) == ("NV18",)
    assert links(TOPOLOGY, 1) == links("", 2) == ()


def test_a_report_shows_chosen_variables_alone(monkeypatch):
    monkeypatch.setenv("HF_BMTRAIN_HANG_SECONDS", "7")
    monkeypatch.setenv("HF_TOKEN", "secret")
    text = report("screen")
    assert "HF_BMTRAIN_HANG_SECONDS=7" in text
    assert "secret" not in text


def test_what_is_needed_is_what_the_package_requires():
    assert needed() in (NEEDED, {})
    assert set(TESTED) <= set(PACKAGES)
