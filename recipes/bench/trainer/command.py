"""`benchmark.py trainer`: measures the cells one after another, each in processes of its own, and prints the table."""

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.trainer.grid import line_of, name_of, plot, read, table
from bench.trainer.rows import COLUMNS, ROWS, VARIANTS, Cell, Job, cells_of
from common.command_line import at_least, chart, positive

MODELS = {
    "tiny": "llama-tiny", "bert": "bert-classifier", "gpt2": "gpt2-small",
    "1b": "llama-1b", "3b": "llama-3b", "8b": "llama-8b",
}  # fmt: skip
RECIPES = Path(__file__).resolve().parents[2]
GRACE = 60.0
"""Seconds that torchrun has to end its processes."""
OVERDUE = "Timeout ("
"""What faulthandler prints when a process's time is over."""


def main(arguments: Sequence[str]) -> int:
    """Measure and print. Return the exit status: 1 if a cell failed."""
    options = parse(arguments)
    job = make_job(options)
    file = options.output / "trainer.jsonl"
    failed = 0
    told = " ".join(["recipes/benchmark.py", "trainer", *map(shlex.quote, arguments)])
    cells = [] if options.table_only else cells_of(options.rows, options.columns, options.variants)
    if options.only:
        chosen = ["" if name == "none" else name for name in options.only]
        if unknown := set(chosen) - {cell.variant for cell in cells}:
            raise SystemExit(
                f"--only: no cell of these rows and columns has the variant {', '.join(sorted(unknown))!r}"
            )
        cells = [cell for cell in cells if cell.variant in chosen]
    if options.missing:
        there = {name_of(report) for report in read(file, job) if "ms" in report}
        cells = [cell for cell in cells if cell.name() not in there]
    print(f"{job.name()}: {len(cells)} cells, in this order: {', '.join(map(Cell.name, cells))}", flush=True)
    begin = time.perf_counter()
    for number, cell in enumerate(cells):
        if time.perf_counter() - begin > options.within:
            print(f"  after {options.within:g} s {len(cells) - number} cells are left", flush=True)
            break
        report = run(cell, job, options.timeout, options.output / "logs")
        report |= {"job": asdict(job), "command": told, "date": datetime.date.today().isoformat()}
        with file.open("a") as out:
            out.write(json.dumps(report) + "\n")
        print(line_of(report), flush=True)
        failed += "problem" in report
    reports = read(file, job)
    print(table(reports, job), flush=True)
    if options.plot and any("ms" in report for report in reports):
        plot(reports, job, options.plot)
    return 1 if failed else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py trainer", description="Measure steps of Hugging Face's stock Trainer; see recipes/README.md."
    )
    add = parser.add_argument
    ranks = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    add("--model", default="tiny", help=f"{', '.join(MODELS)}; or a folder or hub name (%(default)s)")
    add("--layers", type=at_least(1), default=0, help="layers of the model (as many as it has)")
    add("--rank", type=at_least(1), default=16, help="of the adapters (%(default)s)")
    add("--batch-size", type=at_least(1), default=2, help="rows per process (%(default)s)")
    add("--seq-len", type=at_least(1), default=2048, help="tokens per row (%(default)s)")
    add("--warmup", type=at_least(1), default=5, help="steps that are not timed (%(default)s)")
    add("--steps", type=at_least(1), default=12, help="steps that are timed (%(default)s)")
    add("--lr", type=positive, default=3e-4, help="learning rate (%(default)s)")
    add("--ranks", type=at_least(1), default=ranks, help="processes (%(default)s)")
    usual = [name for name, row in ROWS.items() if not row.long]
    told = f"some of: {', '.join(ROWS)} (all but the long ones)"
    add("--rows", nargs="+", choices=ROWS, default=usual, metavar="ROW", help=told)
    add("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS), metavar="COLUMN", help=", ".join(COLUMNS))
    add("--variants", choices=VARIANTS, default="usual", help="how many ways of a column to try (%(default)s)")
    told = "only the cells of these variants, by the names that the first line prints; none: those without one"
    add("--only", nargs="+", metavar="VARIANT", help=told)
    add("--missing", action="store_true", help="only the cells that --output has no times of")
    add("--timeout", type=positive, default=300.0, help="seconds for a cell (%(default)s)")
    add("--within", type=positive, default=float("inf"), help="start no cell after so many seconds")
    add("--plot", type=chart, help="write a bar chart there (.png, .svg)")
    add("--table-only", action="store_true", help="measure nothing: print what --output holds of this job")
    add("--output", type=Path, default=Path("outputs/trainer"), help="folder for the results (%(default)s)")
    return parser.parse_args(arguments)


def make_job(options: argparse.Namespace) -> Job:
    model: str = options.model
    return Job(
        MODELS.get(model, model), options.layers, options.rank, options.batch_size, options.seq_len,
        options.warmup, options.steps, options.lr, options.ranks,
    )  # fmt: skip


def run(cell: Cell, job: Job, timeout: float, logs: Path) -> dict:
    """Measure a cell in processes of its own. Return its report, with "problem" if it failed."""
    begin = time.perf_counter()
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        words = [json.dumps({"cell": asdict(cell), "job": asdict(job)}), folder, str(timeout)]
        ranks = cell.ranks(job)
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        log = logs / f"{cell.name()} {job.name()}.log".replace(" ", "_").replace("/", "_")
        with log.open("w") as out:
            launched = subprocess.Popen(
                [sys.executable, *start, "-m", "bench.trainer.process", *words],
                env=environment(ranks), stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launched.wait(timeout + GRACE)  # the processes end by themselves after `timeout`
            finally:
                end(launched)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    report = asdict(cell) | merge(found, ranks, log.read_text(errors="replace"), timeout)
    report["all_seconds"] = round(time.perf_counter() - begin, 1)
    return report | ({"log": str(log)} if "problem" in report else {})


def environment(ranks: int) -> dict[str, str]:
    """Return the environment of a cell's processes: no network, and one process sees one GPU, or Trainer would use
    DataParallel."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    found = {"OMP_NUM_THREADS": str(threads)} | os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    found["PYTHONPATH"] = os.pathsep.join([str(RECIPES), *filter(None, [os.environ.get("PYTHONPATH")])])
    if not torch.cuda.is_available():
        found["ACCELERATE_USE_CPU"] = "true"
    elif ranks == 1:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return found


def end(launched: subprocess.Popen) -> None:
    """End what was started: torchrun ends its processes when it is told to."""
    if launched.poll() is not None:
        return
    launched.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launched.wait(GRACE)
        return
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait()


def merge(found: list[dict], ranks: int, log: str, timeout: float) -> dict:
    """Return the report of a cell from those of its ranks: the slowest rank's times, the peak of each."""
    problems = [report["problem"] for report in found if "problem" in report]
    if problems:
        return {"problem": problems[0]}
    if len(found) < ranks:
        late = f"{ranks - len(found)} of {ranks} processes did not end within {timeout:g} s"
        last = (log.strip().splitlines() or ["nothing was printed"])[-1].strip()
        return {"problem": late if OVERDUE in log else f"a process ended without a report: {last[:300]}"}
    slowest = max(found, key=lambda report: report["ms"])
    return {
        **found[0],
        **{name: slowest[name] for name in ("ms", "mean_ms", "spread_ms", "steps_ms")},
        "peak_GB": max(report["peak_GB"] for report in found),
        "peak_GB_of_ranks": [round(report["peak_GB"], 2) for report in found],
    }
