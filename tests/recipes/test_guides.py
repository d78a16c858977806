"""The guides and the README: what is marked to run does, and links lead somewhere."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from transformers.training_args import OptimizerNames

from cases import full
from evidence import families
from optimizers import rows_of_the_page
from processes import environment

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "recipes" / "guides").glob("*.md"))
OTHERS = ("README.md", ".github/CHANGELOG.md", ".github/CONTRIBUTING.md", "recipes/README.md")
PAGES = [*(ROOT / page for page in OTHERS), *GUIDES]
RUN = re.compile(r"^<!-- run -->\n```py\n(.+?)^```", re.MULTILINE | re.DOTALL)

FORK_EACH = """
import os, sys, tempfile, traceback
import torch, torch._dynamo
from transformers import LlamaForCausalLM, Trainer
import hf_bmtrain
for number, path in enumerate(sys.argv[1:]):  # each in a process of its own, but the imports are paid for once
    child = os.fork()
    if child == 0:
        os.chdir(tempfile.mkdtemp(dir="."))
        try:
            exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(path, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def snippets() -> dict[str, str]:
    """The programs marked `<!-- run -->`, by guide and number, without those that import a package that is missing."""
    found = {f"{page.stem}-{n}": code for page in GUIDES for n, code in enumerate(RUN.findall(page.read_text("utf-8")))}
    optional = ("peft", "trl", "bitsandbytes")
    missing = [name for name in optional if importlib.util.find_spec(name) is None]
    return {name: code for name, code in found.items() if not any(f"from {each} import" in code for each in missing)}


SNIPPETS = snippets()


@full
def test_snippets_run_as_they_are(tmp_path: Path):
    """Each in an empty folder. One program runs all, in about ten seconds: each begins a world, as a reader's does."""
    for name, code in SNIPPETS.items():
        (tmp_path / f"{name}.py").write_text(code)
    paths = [str(tmp_path / f"{name}.py") for name in SNIPPETS]
    done = subprocess.run(
        [sys.executable, "-c", FORK_EACH, *paths], cwd=tmp_path, env=environment(), timeout=280, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    statuses = re.findall(r"([\w-]+)\.py (-?\d+)$", done.stdout, re.MULTILINE)
    assert statuses == [(name, "0") for name in SNIPPETS], done.stdout


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not link.startswith(("https://", "../../actions/")):  # the latter is a page of the repository's host
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_optimizer_of_trainer_has_a_row():
    assert {name.value for name in OptimizerNames} <= {*rows_of_the_page()}, "run python tests optimizers"
    assert not any("WRONG" in row for row in rows_of_the_page().values())


def test_the_evidence_has_the_table_of_families():
    assert f"<!-- families -->\n{families()}\n" in (ROOT / "recipes" / "guides" / "evidence.md").read_text("utf-8")
