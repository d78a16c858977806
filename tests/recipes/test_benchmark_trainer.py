"""The benchmark of the stock Trainer, from the command line to its table and chart, on CPU."""

import json

import pytest
from small_job import PYTHON, ROOT, run

from bench.trainer.command import main, make_job, merge, parse
from bench.trainer.grid import table
from bench.trainer.rows import COLUMNS, ROWS, cells_of
from cases import full

pytest.importorskip("peft")
TINY = ("--model", "tiny", "--seq-len", "16", "--rank", "8", "--warmup", "2", "--ranks", "2")


@full
def test_a_cell_is_measured(tmp_path, capsys):
    given = [*TINY, "--steps", "3", "--rows", "lora", "--columns", "plain", "--output", str(tmp_path)]
    assert main([*given, "--plot", str(tmp_path / "bars.png")]) == 0, capsys.readouterr().out
    [report] = map(json.loads, (tmp_path / "trainer.jsonl").read_text().splitlines())
    assert report["spread_ms"][0] <= report["ms"] <= report["spread_ms"][1] and len(report["steps_ms"]) == 3
    assert report["loss"] == pytest.approx(6.24, abs=0.1) and report["peak_GB"] > 0.1
    assert {"torch", "transformers", "accelerate", "peft"} <= set(report["versions"])
    assert "--rows lora --columns plain" in report["command"]
    assert "\nLoRA, PEFT's defaults  " in capsys.readouterr().out
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert main([*given, "--missing"]) == 0  # measures nothing
    assert len((tmp_path / "trainer.jsonl").read_text().splitlines()) == 1
    assert main([*given, "--within", "1e-9"]) == 0
    assert "after 1e-09 s 1 cells are left" in capsys.readouterr().out


@pytest.mark.slow
def test_columns_learn_alike_and_a_cell_that_fails_is_told(tmp_path):
    script = ROOT / "recipes" / "benchmark.py"
    given = ("trainer", *TINY, "--rows", "lora", "--lr", 0.01, "--output", tmp_path)
    done = run(PYTHON, script, *given, "--steps", 12, "--columns", "ours", "ddp", "fsdp2")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in (tmp_path / "trainer.jsonl").read_text().splitlines()]
    assert len(reports) == 5 and reports[0]["loss"] < reports[0]["first_loss"] - 0.1
    for report in reports:
        assert report["first_loss"] == pytest.approx(reports[0]["first_loss"], abs=2e-3)
        assert report["loss"] == pytest.approx(reports[0]["loss"], abs=5e-3), report["column"]
    assert "APART" not in done.stdout
    done = run(PYTHON, script, *given, "--steps", 3, "--columns", "ddp", "--timeout", 0.5)
    assert done.returncode == 1 and "2 of 2 processes did not end within 0.5 s" in done.stdout


def test_a_chart_of_an_unknown_format_is_refused(capsys):
    """Before anything is measured."""
    with pytest.raises(SystemExit):
        parse([*TINY, "--plot", "bars.foo"])
    assert "--plot: bars.foo must end in .png or .svg" in capsys.readouterr().err


def report_of(row: str, column: str, ms: float, **changed: object) -> dict:
    fixed = {"variant": "", "device": "cpu", "date": "2026-01-01", "versions": {"torch": "2"}, "described": "so"}
    measured = {"ms": ms, "mean_ms": ms, "spread_ms": [ms, ms], "peak_GB": 1.0, "loss": 2.0, "first_loss": 3.0}
    return {"row": row, "column": column, **fixed, **measured, "all_seconds": 1.0, **changed}


def test_ours_is_compared_with_the_fastest_rival():
    """A row without rivals of its own has those of another; a rival that trains otherwise is marked."""
    reports = [
        report_of("lora-bf16", "ours", 100.0),
        report_of("lora-bf16", "plain", 90.0, loss=2.5),
        report_of("lora-bf16", "ddp", 120.0, loss=2.3),
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
    assert rows["LoRA, bf16=True"][2].split()[2:] == "2.0000 2.5000 2.3000 APART 2.0000".split()
    assert "0.88 times as fast as FSDP2" in rows["LoRA, bf16=True, Trainer's AdamW"][0]
    assert rows["all weights, in bf16"][0].split()[4:] == ["failed"]
    assert "  full ours: out of memory (1 s, here)" in told


def test_rivals_that_are_the_same_are_measured_once():
    cells = [cell.name() for cell in cells_of(["lora-bf16", "lora-own-adamw"], list(COLUMNS), "usual")]
    assert cells == [
        "lora-bf16 ours", "lora-bf16 ours (fused loss)", "lora-bf16 plain", "lora-bf16 ddp", "lora-bf16 fsdp2",
        "lora-bf16 fsdp2 (kept)", "lora-own-adamw ours", "lora-own-adamw ours (fused loss)",
    ]  # fmt: skip


def test_only_some_variants_are_measured(tmp_path, capsys):
    options = ["--rows", "lora-bf16", "--columns", "plain", "--variants", "all", "--output", str(tmp_path)]
    main([*options, "--within", "1e-9", "--only", "none", "Liger"])
    assert "2 cells, in this order: lora-bf16 plain, lora-bf16 plain (Liger)\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no cell of these rows and columns has the variant 'fused loss'"):
        main([*options, "--only", "Liger", "fused loss"])


def test_a_cell_is_as_slow_as_its_slowest_rank():
    ranks = [report_of("lora", "ours", ms, peak_GB=peak, steps_ms=[ms]) for ms, peak in ((2.0, 5.0), (3.0, 4.0))]
    found = merge(ranks, 2, "", 9.0)
    assert (found["ms"], found["peak_GB"], found["peak_GB_of_ranks"]) == (3.0, 5.0, [5.0, 4.0])
    assert merge([ranks[0], {"problem": "out of memory"}], 2, "", 9.0) == {"problem": "out of memory"}
    late = "1 of 2 processes did not end within 9 s"
    assert merge(ranks[:1], 2, "Timeout (0:00:09)!\nThread", 9.0) == {"problem": late}
    assert merge([], 1, "so\nKilled\n", 9.0) == {"problem": "a process ended without a report: Killed"}
