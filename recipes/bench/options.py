"""The benchmark's command line, and the file of cells."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from bench.cell import STEPS, WARMUP, Cell
from bench.engines.registry import ENGINES
from bench.models import NAMED
from common.command_line import at_least, chart, positive

RECOMPUTE = ("none", "full", "attention", "auto")
SHARD_OVER = ("world", "host", "host+world", "auto")
FLOAT8 = ("none", "rows", "tensor")
QUANTIZE = ("none", "nf4")
OF_THE_PROCESS = ("gather", "shard_over", "output", "plot", "plot_recorded", "cells")


def parse(arguments: Sequence[str] | None = None) -> tuple[list[Cell], argparse.Namespace]:
    """Return the cells to measure, and the options, of which those in OF_THE_PROCESS apply to all cells."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    cells = [make_cell(options)] if options.cells is None else _cells_of_file(parser, options)
    if options.gather != "auto" and all(cell.engine != "ours" for cell in cells):
        raise ValueError(f"--gather {options.gather} is for --engine ours, which is not measured here: leave it out")
    return cells, options


def _cells_of_file(parser, options: argparse.Namespace) -> list[Cell]:
    """Return the cells of the file `options.cells`."""
    cells = []
    for number, line in enumerate(options.cells.read_text().splitlines(), 1):
        words = shlex.split(line, comments=True)
        if words:
            cells.append(_cell_of_line(parser, words, options, f"{options.cells}, line {number}"))
    if not cells:
        raise ValueError(f"{options.cells} has no line with options")
    if len(cells) > 1 and any(cell.engine == "deepspeed" and cell.sequence_parallel > 1 for cell in cells):
        # It replaces transformers' "sdpa" in the whole process, and its groups can be made only once.
        raise ValueError("--engine deepspeed --sequence-parallel needs processes of its own: leave it out of --cells")
    return cells


def make_cell(options: argparse.Namespace) -> Cell:
    return Cell(**{field.name: getattr(options, field.name) for field in fields(Cell)})


def _cell_of_line(parser, words: list[str], options: argparse.Namespace, place: str) -> Cell:
    """Parse one line of a file of cells. The command line's `options` are its defaults."""
    try:
        told = parser.parse_args(words, argparse.Namespace(**vars(options)))
    except SystemExit:
        sys.stderr.write(f"in {place}\n")
        raise
    changed = [name for name in OF_THE_PROCESS if getattr(told, name) != getattr(options, name)]
    if changed:
        raise ValueError(f"{place}: --{changed[0]} holds for all cells: give it on the command line")
    return make_cell(told)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measure the training steps of one engine; see recipes/README.md.",
        epilog="benchmark.py trainer --help: measure the steps of stock Trainer.",
    )
    add = parser.add_argument_group("job").add_argument
    add("--model", default="tiny", help=f"{', '.join(NAMED)}, or a folder or hub name (%(default)s)")
    add("--layers", type=at_least(1), default=0, help="layers of the model (as many as it has)")
    add("--batch", type=at_least(1), default=8, help="rows per process, or per group that shares rows (%(default)s)")
    add("--seq", type=at_least(2), default=512, help="tokens per row (%(default)s)")
    add(
        "--sequence-parallel",
        type=at_least(1),
        default=1,
        metavar="P",
        help="split each row over P ranks (%(default)s)",
    )
    add(
        "--lora", type=at_least(1), default=0, metavar="RANK", help="train PEFT's adapters on linear layers and experts"
    )
    add("--lr", type=positive, default=1e-4, help="learning rate (%(default)s)")
    add = parser.add_argument_group("engine").add_argument
    add("--engine", choices=ENGINES, default="ours", help="what trains (%(default)s)")
    add("--recompute", choices=RECOMPUTE, default="none", help="layers to recompute (%(default)s)")
    add("--compile", action="store_true", help="torch.compile every layer")
    add("--cuda-graphs", action="store_true", help="ours: replay compiled layers as CUDA graphs")
    add("--offload", action="store_true", help="optimizer state in host memory (fsdp2: the weights too)")
    add("--offload-activations", action="store_true", help="inputs of recomputed layers in host memory")
    add("--mlp-chunks", type=at_least(1), default=1, help="ours: chunks of tokens that an MLP computes (%(default)s)")
    add("--state-bits", type=int, choices=(32, 8), default=32, help="ours: bits of each moment of AdamW (%(default)s)")
    add("--tuned", action="store_true", help="the engine's own settings, see bench/engines/<engine>.py")
    add("--linear-loss", action="store_true", help="a loss without whole logits")
    add("--quantize", choices=QUANTIZE, default="none", help="ours: frozen weights in 4 bits (%(default)s)")
    add("--float8", choices=FLOAT8, default="none", help="products in float8: a scale a row, or a tensor (%(default)s)")
    add("--memory-limit", type=positive, default=0.0, metavar="GB", help="memory that a rank may use of its GPU (all)")
    add("--gather", choices=("auto", "collective", "peer"), default="auto", help="how ours gathers (%(default)s)")
    add(
        "--shard-over",
        choices=SHARD_OVER,
        default="world",
        help="with several hosts, as in init_distributed (%(default)s)",
    )
    add = parser.add_argument_group("measurement").add_argument
    add("--warmup", type=at_least(0), default=WARMUP, help="steps that are not timed (%(default)s)")
    add("--steps", type=at_least(1), default=STEPS, help="steps that are timed (%(default)s)")
    add("--largest-batch", action="store_true", help="search the largest batch that fits, starting at --batch")
    add("--no-trace", dest="trace", action="store_false", help="leave out the step under the profiler")
    add("--profile", type=Path, help="write a Chrome trace of one step there")
    add("--cells", type=Path, help="file of option lines: one cell after another in one process group")
    add = parser.add_argument_group("results").add_argument
    add("--plot", type=chart, help="write a bar chart of all runs of the last job there (.png, .svg)")
    add("--plot-recorded", type=chart, help="only draw the results recorded in RESULTS.md there (.svg, .png)")
    add("--output", type=Path, default=Path("outputs/benchmark"), help="folder for the results (%(default)s)")
    return parser
