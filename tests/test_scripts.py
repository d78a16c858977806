"""`python tests NAME` finds and runs the scripts of the tests."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from cases import full

TESTS = Path(__file__).resolve().parent
SCRIPTS = runpy.run_path(str(TESTS / "__main__.py"))
NAMES = [
    "adam8_curve", "bad_inputs", "bmtrain_suite", "build_site", "checkpoint_speed", "convergence", "damage",
    "docstrings", "evidence", "faults", "float8_curves", "float8_signal", "gpt2_memory", "hook_time", "host_traffic",
    "identical", "kill_points", "library_usages", "load_memory", "lora_memory", "memory_contract",
    "model_center_suite", "muon_curve", "noisy", "notebook", "optimizers", "parity", "peer_reduction", "plain_boolq",
    "plan_memory", "programs", "sequence_zoo", "state_memory", "step_path", "stress", "torch_functions",
    "trainer_cost", "trainer_matrix", "trainer_resume", "trainer_usages", "upstream_cases", "usages", "zoo",
    "zoo_bf16",
]  # fmt: skip


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, check=False)


def test_all_are_listed_with_their_first_line(tmp_path):
    listed = dict(line.split(maxsplit=1) for line in run(cwd=tmp_path).stdout.splitlines())
    assert sorted(listed) == NAMES
    assert all(listed.values())


def test_every_name_is_unique_in_tests_and_recipes():
    """Modules of these folders are imported by their bare name."""
    names = [path.stem for path in TESTS.rglob("*.py") if path.name not in ("conftest.py", "__main__.py")]
    assert sorted(names) == sorted({*names})


def test_the_search_path_is_that_of_pytest(pytestconfig):
    assert [str(path) for path in pytestconfig.getini("pythonpath")] == [
        str(TESTS.parent / folder) for folder in SCRIPTS["SEARCHED"]
    ]


@full
@pytest.mark.parametrize("words", [("parity", "--help"), ("programs", "--ranks", "2", "--seeds", "0:1")])
def test_a_script_runs_from_anywhere(tmp_path, words):
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"usage: python tests {words[0]}|1 programs, 0 wrong", done.stdout)


def test_an_unknown_name_is_refused(tmp_path):
    done = run("paritee", cwd=tmp_path)
    assert done.returncode == 1
    assert "no script 'paritee' in tests; there are " in done.stderr
    assert set(NAMES) <= set(re.findall(r"\w+", done.stderr))
