"""What is shipped, and what `import hf_bmtrain` costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from cases import full, in_slow

ROOT = Path(__file__).resolve().parents[2]
IMPORT_SECONDS = 1.0  # after torch, whose import takes two to three
NOT_IMPORTED = ["transformers", "accelerate", "datasets", "peft", "cupy", "matplotlib"]
SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SHOW_IMPORT = """
import json, sys, time
import torch
start = time.process_time()
import hf_bmtrain
print(json.dumps([time.process_time() - start, hf_bmtrain.__file__, sorted(sys.modules)]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the checkout, so that no build folder is left behind in it."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("hf_bmtrain", "kernels", "recipes", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", work / "dist", ".", cwd=source)
    (built,) = (work / "dist").iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_holds_the_package_and_the_cuda_sources_only(unpacked):
    """A missing folder is one that `packages` in pyproject.toml does not list."""
    modules = {p.relative_to(ROOT) for p in (ROOT / "hf_bmtrain").rglob("*.py")}
    sources = {Path("hf_bmtrain", p.relative_to(ROOT)) for p in (ROOT / "kernels").glob("*.cu*")}
    shipped = {p.relative_to(unpacked) for p in unpacked.rglob("*") if p.is_file()}
    assert sources
    typed = Path("hf_bmtrain", "py.typed")  # type checkers read the package's annotations
    assert {p for p in shipped if p.parts[0] == "hf_bmtrain"} == modules | sources | {typed}
    assert {p.parts[0] for p in shipped if p.parts[0] != "hf_bmtrain"} == {f"{wheel_name()}.dist-info"}
    assert not (unpacked / "hf_bmtrain" / "kernels" / "__init__.py").exists()


def wheel_name() -> str:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert version
    return f"hf_bmtrain-{version[1]}"


def test_the_wheel_says_what_it_needs(unpacked):
    metadata = (unpacked / f"{wheel_name()}.dist-info" / "METADATA").read_text("utf-8")
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert set(needed) == {"torch", "transformers", "accelerate", "datasets", "safetensors", "numpy", "tqdm"}
    extras = re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)
    assert set(extras) >= {"cuda12", "cuda13", "test", "recipes", "ci"}
    assert "License-Expression: Apache-2.0" in metadata


@full
def test_the_unpacked_wheel_imports_and_holds_its_cuda_sources(unpacked):
    """With the wheel's folder first on the path nothing is taken from the checkout."""
    show = "import importlib.resources as r; print(*(r.files('hf_bmtrain') / 'kernels').iterdir(), sep='\\n')"
    found = [Path(line) for line in run(sys.executable, "-c", show, cwd=unpacked).splitlines()]
    assert {p.name for p in found} >= {p.name for p in (ROOT / "kernels").glob("*.cu*")}
    assert all(p.is_relative_to(unpacked) for p in found)


@pytest.fixture(scope="module")
def imported():
    """(seconds of CPU time, file, modules) of `import hf_bmtrain` in a new process; the quicker of two."""
    return min(json.loads(run(sys.executable, "-c", SHOW_IMPORT, cwd=ROOT)) for _ in range(2))


def test_the_import_is_quick(imported):
    assert imported[0] < IMPORT_SECONDS


def test_what_the_import_leaves_out(imported):
    assert "hf_bmtrain" in imported[2]
    assert not set(NOT_IMPORTED) & set(imported[2])


@full
@pytest.mark.parametrize("size", [2, *in_slow(1)])
def test_the_readmes_program_runs(tmp_path, size):
    """As it is printed: its loss falls, and a plain Hugging Face model loads what it saves."""
    readme = (ROOT / "README.md").read_text("utf-8")
    program = re.search(r"<!-- example -->\n```py\n(.+?)```", readme, re.DOTALL)
    assert program
    (tmp_path / "train.py").write_text(program[1])
    launcher = () if size == 1 else ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    printed = run(sys.executable, *launcher, "train.py", cwd=tmp_path)
    losses = re.findall(r"^step \d+ loss (\S+)", printed, re.MULTILINE)
    assert len(losses) == 40
    assert float(losses[-1]) < 0.3 < float(losses[0])
    config = transformers.BertConfig(**SIZES)  # the README's
    plain = transformers.AutoModelForSequenceClassification.from_config(config)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


@full
def test_hugging_face_can_be_imported_beside_the_checkout():
    """With the checkout first on the path, its folder `kernels` must not pass for Hugging Face's package."""
    run(sys.executable, "-c", "import hf_bmtrain, transformers; transformers.AutoModel", cwd=ROOT)
