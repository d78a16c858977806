"""Measure the training step of one engine on a language model, and where its time goes.

    torchrun --nproc-per-node 4 recipes/benchmark.py --engine ours --model gpt-13b --batch 8 --seq 512

Every run adds a JSON file to `--output`; the table at the end shows all runs of the same job found there, with their
losses next to each other, so that a wrong engine is visible. Do not mix machines or days in one folder. `--cells FILE`
measures one line of options after another in the same processes and frees the memory between them.

    python recipes/benchmark.py trainer --model 8b --layers 16

times Hugging Face's stock Trainer as its users call it: around our models, plain, with DistributedDataParallel, and
with its own FSDP2. It starts the processes itself.
"""

import json
import sys
import time
from pathlib import Path

import torch

import hf_bmtrain as bmt
from bench.cell import Cell
from bench.engines.registry import check, why_missing
from bench.measure import measure
from bench.options import parse
from bench.ranks import RanksApart, attempt, end_alone, end_together, free_memory, start
from bench.recorded import plot_recorded
from bench.search import search
from bench.table import plot, read_reports, table
from bench.trainer import command as trainer
from common.command_line import one_line_errors

LEFT_GB = 0.1


def main() -> None:
    begin = time.perf_counter()
    with one_line_errors():
        cells, options = parse()
        if options.plot_recorded:
            plot_recorded(options.plot_recorded)
            return
        for cell in cells:
            check(cell)
    device = start([cell.engine for cell in cells], options.gather, options.shard_over)
    bmt.print_rank(f"{bmt.world_size()} ranks joined after {time.perf_counter() - begin:.1f} s", flush=True)
    failed = 0
    try:
        for cell in cells:
            failed += not run(cell, options.gather, device, options.output)
        if options.plot and bmt.rank() == 0:
            job = cells[-1].job(bmt.world_size())
            plot(read_reports(options.output, job), job, options.plot)
        end_together(1 if failed else 0)
    except RanksApart as error:
        sys.stderr.write(f"rank {bmt.rank()}: {error}; the cells after this one need processes of their own\n")
        end_alone(1)


def run(cell: Cell, gather: str, device: torch.device, output: Path) -> bool:
    """Measure a cell, write its report and print the table of its job. Return False if it failed. Collective."""
    name, job = cell.name(gather), cell.job(bmt.world_size())
    missing = why_missing(cell)
    if missing is not None:
        bmt.print_rank(missing, flush=True)
    elif cell.largest_batch:
        problem = attempt_search(cell, name, device, output)
    else:
        report, problem = attempt(lambda: measure(cell, name, device))
        if report is not None:
            write(report, output)
    failed = missing is None and problem is not None
    if failed:
        bmt.print_rank(f"{job}: {name} failed: {problem}", flush=True)
    held = free_memory()
    if held > LEFT_GB:
        bmt.print_rank(f"{name} left {held:.2f} GB allocated: later peaks in this run include them", flush=True)
    bmt.print_rank(f"{job}\n{table(read_reports(output, job))}", flush=True)
    return not failed


def attempt_search(cell: Cell, name: str, device: torch.device, output: Path) -> str | None:
    """Search the largest batch. Return why the search failed, or None."""
    if device.type != "cuda":
        return "--largest-batch needs GPUs: the host's memory has no limit that is found without harm"
    try:
        search(cell, name, device, lambda report: write(report, output))
    except RanksApart:
        raise
    except RuntimeError as error:
        return str(error)
    return None


def write(report: dict, folder: Path) -> None:
    """Write a report into `folder`, on rank 0."""
    if bmt.rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{report['job']} {report['engine']}".replace(" ", "_").replace("/", "_")
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["trainer"]:
        sys.exit(trainer.main(sys.argv[2:]))
    main()
