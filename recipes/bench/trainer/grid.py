"""The stock Trainer's cells as one table and as a chart."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.recorded import plot_groups
from bench.trainer.rows import COLUMNS, ROWS, Cell, Job

APART, ROUNDING = 0.2, 5e-4
"""A loss is marked if it differs from that of ours by more than this part of the loss's fall and of the loss itself."""
WIDTH = 16


def read(file: Path, job: Job) -> list[dict]:
    """Return the reports of `job` in `file`, of each cell the last."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        report = json.loads(line)
        if report["job"] == asdict(job):
            found[report["row"], report["column"], report["variant"]] = report
    return list(found.values())


def measured(reports: list[dict]) -> list[str]:
    """Return the rows that have a cell of their own."""
    return [name for name in ROWS if any(report["row"] == name for report in reports)]


def best(reports: list[dict], row: str, column: str) -> dict:
    """Return the report of a place in the table: of the fastest variant, or of one that failed, {} if there is none."""
    source = row if column == "ours" else ROWS[row].rivals or row
    own = [report for report in reports if (report["row"], report["column"]) == (source, column)]
    return min(own, key=lambda report: report.get("ms", float("inf")), default={})


def name_of(report: dict) -> str:
    return Cell(report["row"], report["column"], report["variant"]).name()


def line_of(report: dict) -> str:
    """Return one cell in one line."""
    name = name_of(report)
    if "problem" in report:
        return f"  {name}: {report['problem']} ({report['all_seconds']:.0f} s, {report['log']})"
    spread = "{:.1f}-{:.1f}".format(*report["spread_ms"])
    return (
        f"  {name}: {report['ms']:.1f} ms ({spread}; mean {report['mean_ms']:.1f}), {report['peak_GB']:.2f} GB, loss "
        f"{report['first_loss']:.4f} to {report['loss']:.4f}; {report['described']} ({report['all_seconds']:.0f} s)"
    )


def table(reports: list[dict], job: Job) -> str:
    """Return times, memory and losses of all rows, and a line for each variant and each cell that failed."""
    rows = measured(reports)
    if not rows:
        return f"{job.name()}: nothing was measured"
    lines = [heading(reports, job)]
    lines += block("milliseconds per step", reports, rows, time_of, faster)
    lines += ["", *block("peak GB of a rank", reports, rows, lambda cells, column: number(cells[column], "peak_GB"))]
    lines += ["", *block("loss of the timed steps", reports, rows, lambda cells, column: loss_of(cells, column, job))]
    notes = [line_of(report) for report in reports if report["variant"] or "problem" in report]
    kinds = [f"  {kinds_of(report)}" for report in reports if report.get("milliseconds")]
    if kinds:
        lines += ["", "milliseconds by kind of one more step of rank 0, under the profiler", *kinds]
    return "\n".join([*lines, *([""] if notes else []), *notes])


def kinds_of(report: dict) -> str:
    found = ", ".join(f"{kind} {value:g}" for kind, value in report["milliseconds"].items() if value)
    return f"{name_of(report)}: {found}"


Cells = dict[str, dict]
"""The reports of a row by column."""


def block(
    title: str,
    reports: list[dict],
    rows: list[str],
    text_of: Callable[[Cells, str], str],
    last: Callable[[Cells], str] = lambda cells: "",
) -> list[str]:
    """Return a heading, and a line for each row: what `text_of` says of each column, and `last` of them together."""
    width = max(len(title), *(len(ROWS[name].title) for name in rows)) + 1
    lines = [f"{title:{width}s}" + "".join(f"{text:>{WIDTH}s}" for text in COLUMNS.values())]
    for name in rows:
        cells = {column: best(reports, name, column) for column in COLUMNS}
        texts = [text_of(cells, column) for column in COLUMNS]
        lines.append(f"{ROWS[name].title:{width}s}" + "".join(f"{text:>{WIDTH}s}" for text in texts) + last(cells))
    return lines


def heading(reports: list[dict], job: Job) -> str:
    """Return the job, with the device, date and versions of its cells: of all of them, if they are not the same."""
    told = {f"{r['device']}, {r['date']}, {versions_of(r)}" for r in reports if "ms" in r}
    return "; ".join([job.name(), " AND ".join(sorted(told))])


def versions_of(report: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in report["versions"].items() if value)


def number(report: dict, name: str) -> str:
    return f"{report[name]:.2f}" if name in report else ""


def time_of(cells: Cells, column: str) -> str:
    cell = cells[column]
    return f"{cell['ms']:.1f}" if "ms" in cell else "failed" if cell else ""


def faster(cells: Cells) -> str:
    """Return how many times as fast ours is as the faster of DDP and FSDP2, or without these as the plain Trainer."""
    ours = cells["ours"]
    rivals = {column: cells[column] for column in ("ddp", "fsdp2") if "ms" in cells[column]}
    if not rivals and "ms" in cells["plain"]:
        rivals = {"plain": cells["plain"]}
    if not rivals or "ms" not in ours:
        return ""
    column = min(rivals, key=lambda name: rivals[name]["ms"])
    return f"    {rivals[column]['ms'] / ours['ms']:.2f} times as fast as {COLUMNS[column]}"


def loss_of(cells: Cells, column: str, job: Job) -> str:
    """Return a loss, marked if ours is another. One rank sees other rows than several, and is not compared then."""
    if "loss" not in cells[column]:
        return ""
    own = cells[column]["loss"]
    ours = cells[column] if column == "plain" and job.ranks > 1 else cells["ours"] if "loss" in cells["ours"] else {}
    expected = ours.get("loss", own)
    allowed = APART * abs(ours.get("first_loss", own) - expected) + ROUNDING * abs(expected)
    return f"{own:.4f}" + (" APART" if abs(own - expected) > allowed else "")


def plot(reports: list[dict], job: Job, file: Path) -> None:
    """Draw the table's cells into `file`, a group for each row."""
    groups = []
    for name in measured(reports):
        bars = [{"engine": COLUMNS[column]} | best(reports, name, column) for column in COLUMNS]
        bars = [bar for bar in bars if "ms" in bar]
        if bars:
            groups.append({"job": ROWS[name].title, "how": f"{job.batch} x {job.seq} tokens a rank", "cells": bars})
    device = next(report["device"] for report in reports if "ms" in report)
    plot_groups(groups, f"Stock Trainer, {job.name()}, {device}", file)
