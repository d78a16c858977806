"""The checks of style and types are the same wherever they are run."""

import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["ruff check", "ruff format --check", "pyright"]


def test_pre_commit_and_ci_run_the_same_checks():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == COMMANDS
    job = re.search(r"^job_checks\(\) \{.*?^\}", (ROOT / ".ci" / "run").read_text("utf-8"), re.M | re.S)
    assert job
    assert re.findall(r"^ *stage \w+ \d+ (.+) \|\| failed=1$", job[0], re.M) == COMMANDS


def test_ci_is_a_shell_script_and_names_no_machine():
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert not re.search(r"https?://|/tmp|/home|/root|--index-url", script.read_text("utf-8"))


def test_the_oldest_torch_of_ci_is_the_oldest_that_is_admitted():
    admitted = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    pinned = re.search(r"^torch==([\d.]+)$", (ROOT / ".ci" / "oldest.txt").read_text("utf-8"), re.M)
    assert admitted and pinned
    assert pinned[1].startswith(f"{admitted[1]}.")
