"""The benchmark of the stock Trainer, from the command line to its table and chart, on CPU."""

import json

import pytest
from small_job import PYTHON, ROOT, run

from bench.trainer.command import make_job, merge, parse
from bench.trainer.grid import table
from bench.trainer.rows import COLUMNS, ROWS, cells_of
from cases import full

pytest.importorskip("peft")
TINY = ("--model", "tiny", "--seq-len", 16, "--rank", 2, "--warmup", 2, "--steps", 3, "--ranks", 2)


def benchmark(folder, *options):
    script = ROOT / "recipes" / "benchmark.py"
    done = run(PYTHON, script, "trainer", *TINY, *options, "--output", folder, "--plot", folder / "bars.png")
    reports = [json.loads(line) for line in (folder / "trainer.jsonl").read_text().splitlines()]
    return done, {(r["row"], r["column"], r["variant"]): r for r in reports}


def test_a_cell_is_measured(tmp_path):
    done, reports = benchmark(tmp_path, "--rows", "lora", "--columns", "plain")
    assert done.returncode == 0, done.stdout + done.stderr
    [report] = reports.values()
    assert report["spread_ms"][0] <= report["ms"] <= report["spread_ms"][1] and len(report["steps_ms"]) == 3
    assert report["loss"] == pytest.approx(6.24, abs=0.1) and report["peak_GB"] > 0.1
    assert {"torch", "transformers", "accelerate", "peft"} <= set(report["versions"])
    assert "--rows lora --columns plain" in report["command"]
    assert "LoRA, PEFT's defaults" in done.stdout
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


@full
def test_columns_learn_alike_and_a_cell_that_fails_is_told(tmp_path):
    done, reports = benchmark(tmp_path, "--rows", "lora", "full", "--lr", 0.01)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("lora", "full"):
        losses = {column: report["loss"] for (name, column, _), report in reports.items() if name == row}
        assert losses["ours"] < reports[row, "ours", ""]["first_loss"] - 0.01
        for column in ("ddp", "fsdp2"):
            assert losses[column] == pytest.approx(losses["ours"], abs=5e-3), (row, column)
    assert "APART" not in done.stdout
    done, reports = benchmark(tmp_path, "--rows", "lora", "--columns", "ddp", "--timeout", 0.5)
    assert done.returncode == 1 and "did not end within 0.5 s" in done.stdout
    assert reports["lora", "ddp", ""]["problem"] == "2 of 2 processes did not end within 0.5 s"


def report_of(row: str, column: str, ms: float, **changed: object) -> dict:
    fixed = {"variant": "", "device": "cpu", "date": "2026-01-01", "versions": {"torch": "2"}, "described": "so"}
    measured = {"ms": ms, "mean_ms": ms, "spread_ms": [ms, ms], "peak_GB": 1.0, "loss": 2.0, "first_loss": 3.0}
    return {"row": row, "column": column, **fixed, **measured, "all_seconds": 1.0, **changed}


def test_ours_is_compared_with_the_fastest_rival():
    """A row without rivals of its own has those of another; a rival that trains otherwise is marked."""
    reports = [
        report_of("lora-bf16", "ours", 100.0),
        report_of("lora-bf16", "plain", 90.0, loss=2.5),
        report_of("lora-bf16", "ddp", 120.0, loss=2.1),
        report_of("lora-bf16", "fsdp2", 150.0),
        report_of("lora-bf16", "fsdp2", 110.0, variant="kept"),
        report_of("lora-own-adamw", "ours", 125.0),
        {**report_of("full", "ours", 1.0), "problem": "out of memory", "log": "here"},
    ]
    del reports[-1]["ms"]
    told = table(reports, make_job(parse(["--ranks", "2"]))).splitlines()
    rows = {
        title: [line for line in told if line.startswith(title + "  ")] for title in (r.title for r in ROWS.values())
    }
    assert rows["LoRA, bf16=True"][0].split()[2:] == "100.0 90.0 120.0 110.0 1.10 times as fast as FSDP2".split()
    assert rows["LoRA, bf16=True"][2].split()[2:] == "2.0000 2.5000 2.1000 APART 2.0000".split()
    assert "0.88 times as fast as FSDP2" in rows["LoRA, bf16=True, Trainer's AdamW"][0]
    assert rows["all weights, in bf16"][0].split()[4:] == ["failed"]
    assert "  full ours: out of memory (1 s, here)" in told


def test_rivals_that_are_the_same_are_measured_once():
    cells = [cell.name() for cell in cells_of(["lora-bf16", "lora-own-adamw"], list(COLUMNS), every=False)]
    assert cells == [
        "lora-bf16 ours", "lora-bf16 plain", "lora-bf16 ddp", "lora-bf16 fsdp2", "lora-bf16 fsdp2 (kept)",
        "lora-own-adamw ours",
    ]  # fmt: skip


def test_a_cell_is_as_slow_as_its_slowest_rank():
    ranks = [report_of("lora", "ours", ms, peak_GB=peak, steps_ms=[ms]) for ms, peak in ((2.0, 5.0), (3.0, 4.0))]
    found = merge(ranks, 2, "", 9.0)
    assert (found["ms"], found["peak_GB"], found["peak_GB_of_ranks"]) == (3.0, 5.0, [5.0, 4.0])
    assert merge([ranks[0], {"problem": "out of memory"}], 2, "", 9.0) == {"problem": "out of memory"}
    late = "1 of 2 processes did not end within 9 s"
    assert merge(ranks[:1], 2, "Timeout (0:00:09)!\nThread", 9.0) == {"problem": late}
    assert merge([], 1, "so\nKilled\n", 9.0) == {"problem": "a process ended without a report: Killed"}
