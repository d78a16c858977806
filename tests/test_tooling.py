"""What is run where: checks of style and types, the jobs of CI, versions, and the site's pages."""

import re
import subprocess
from pathlib import Path

import yaml

import hf_bmtrain as bmt
from hf_bmtrain.features.installation.command import TESTED

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


def test_every_place_names_one_version():
    project, cite = read("pyproject.toml"), read(".github/CITATION.cff")
    changelog, readme = read(".github/CHANGELOG.md"), read("README.md")
    places = {
        "pyproject.toml": re.search(r'^version = "(.+)"$', project, re.M),
        "CITATION.cff": re.search(r"^version: (.+)$", cite, re.M),
        "CHANGELOG.md": re.search(r"^## ([\d.]+)", changelog, re.M),
        "README.md": re.search(r"Version ([\d.]+), Apache", readme),
    }
    assert {place: match and match[1] for place, match in places.items()} == dict.fromkeys(places, bmt.__version__)


def test_the_workflow_runs_every_job_of_ci():
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    run = {row["job"] for row in jobs["cpu"]["strategy"]["matrix"]["include"]}
    assert run == set(re.findall(r"^job_(\w+)\(\)", read(".ci/run"), re.M)) - {"environment"}
    queues = re.findall(r"^printf '%s\\n' ([\w ]+) >", read(".ci/run"), re.M)
    assert run == {job for queue in queues for job in queue.split()} - {"environment"}


def test_the_site_lists_every_guide():
    listed = set(re.findall(r"guides/\w+\.md", read(".github/mkdocs.yml")))
    assert {f"guides/{path.name}" for path in (ROOT / "recipes" / "guides").glob("*.md")} == listed - {
        "guides/index.md"
    }


def test_releases_of_torch_that_ci_installs_count_as_tested():
    pinned = [re.search(r"^torch==(\d+\.\d+)", path.read_text("utf-8"), re.M) for path in (ROOT / ".ci").glob("*.txt")]
    assert {match[1] for match in pinned if match} <= set(TESTED["torch"])


def read(path: str) -> str:
    return (ROOT / path).read_text("utf-8")
