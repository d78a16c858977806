"""The chart of recorded results shows the numbers of recipes/RESULTS.md."""

import json
import re

from small_job import PYTHON, ROOT, run

from bench.recorded import DATA
from cases import full

RECORDED = json.loads(DATA.read_text("utf-8"))
GROUPS, SCALING = RECORDED["groups"], RECORDED["scaling"]


def section(title: str) -> str:
    """The text of RESULTS.md from the heading `title` to the next heading."""
    results = (ROOT / "recipes" / "RESULTS.md").read_text("utf-8")
    found = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", results, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} sections are called {title!r}"
    return found[0]


def test_each_number_stands_in_its_section():
    for group in GROUPS:
        for cell in group["cells"]:
            fastest, slowest = cell["spread_ms"]
            name = {"hf_bmtrain": "ours"}.get(cell["engine"], cell["engine"])
            lines = section(group["section"]).splitlines()
            rows = [line for line in lines if f"| {cell['ms']} | {fastest}-{slowest} |" in line]
            assert len(rows) == 1, cell
            assert f"| {name}" in rows[0] and f"| {cell['peak_GB']} |" in rows[0], cell


def test_each_number_of_the_scaling_stands_in_its_section():
    text = section(SCALING["section"])
    for gpus, ours in SCALING["ms"]["hf_bmtrain"].items():
        tokens = f"{1000 * SCALING['tokens'] / ours:,.0f}"[:4]
        assert re.search(rf"\| {gpus} \| {ours} \| {tokens}\d+ \| {SCALING['ms']['FSDP2'][gpus]} \|", text), gpus


@full
def test_the_chart_is_drawn(tmp_path):
    done = run(PYTHON, ROOT / "recipes" / "benchmark.py", "--plot-recorded", tmp_path / "results.svg")
    assert (done.returncode, done.stderr) == (0, "")
    drawn = (tmp_path / "results.svg").read_text()
    for group in GROUPS:
        assert group["job"] in drawn
        for cell in group["cells"]:
            assert f"{cell['peak_GB']:.1f} GB" in drawn and f"{cell['ms']:.0f} ms" in drawn
    scaling = (tmp_path / "results_scaling.svg").read_text()
    for steps in SCALING["ms"].values():
        assert all(f"{int(gpus) * SCALING['tokens'] / ms:.1f}" in scaling for gpus, ms in steps.items())
