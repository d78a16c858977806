"""Train a causal language model for a few steps with one engine and say how fast it was, and where the time went.

    torchrun --nproc-per-node 4 recipes/benchmark.py --engine ours --model gpt-13b --batch 8 --length 512

Every run adds a JSON file to `--output`; the table at the end shows all runs of the same job found there, with their
losses side by side, so that a wrong engine shows. Times of different machines or days do not belong in one folder.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from benchmark_engines import ENGINES, start
from benchmark_models import NAMED, make_config
from benchmark_table import plot, read_reports, table
from benchmark_trace import profile_step

import hf_bmtrain as bmt


def main() -> None:
    options = parse_options()
    device = start(options.engine, options.gather)
    config = make_config(options.model, options.length)
    engine = ENGINES[options.engine](config, options, device)
    batches = [make_batch(step, options, config.vocab_size, device) for step in range(options.warmup + options.steps)]
    losses, seconds = timed_steps(engine.step, batches, options.warmup)
    report = {
        "engine": name_of(options),
        "described": engine.described,
        "job": job_of(options),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "ms": 1e3 * statistics.median(seconds),
        "spread_ms": [1e3 * min(seconds), 1e3 * max(seconds)],
        "tokens_a_second_a_rank": options.batch * options.length / statistics.median(seconds),
        "TFLOPs": engine.flops_a_token * options.batch * options.length / statistics.median(seconds) / 1e12,
        "losses": losses,
    }
    if device.type == "cuda":
        mapped = bmt.current_world().step.mapped_bytes  # beside torch's allocator
        report["peak_GB"] = (torch.cuda.max_memory_allocated() + mapped) / 1e9
        report["gemm_TFLOPs"] = gemm_speed(device)
        report["milliseconds"] = profile_step(
            lambda: engine.step(batches[-1]), options.profile if bmt.rank() == 0 else None
        )
    if bmt.rank() == 0:
        write(report, options.output)
        reports = read_reports(options.output, report["job"])
        print(f"{report['job']}\n{table(reports)}", flush=True)
        if options.plot:
            plot(reports, report["job"], options.plot)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="ours")
    add("--model", default="tiny", help=f"{', '.join(NAMED)}, or a folder or hub name (%(default)s)")
    add("--batch", type=int, default=8, help="rows a process (%(default)s)")
    add("--length", type=int, default=512, help="tokens a row (%(default)s)")
    add("--gather", choices=("auto", "collective", "peer"), default="auto", help="how ours gathers (%(default)s)")
    add("--recompute", action="store_true", help="recompute the layers' forward in backward")
    add("--compile", action="store_true", help="torch.compile every layer")
    add("--warmup", type=int, default=3, help="steps that are not timed (%(default)s)")
    add("--steps", type=int, default=8, help="steps that are timed (%(default)s)")
    add("--plot", type=Path, help="write a bar chart of all runs of this job there (.png, .svg)")
    add("--profile", type=Path, help="write a Chrome trace of one step there")
    add("--output", type=Path, default=Path("outputs/benchmark"), help="folder for the results (%(default)s)")
    return parser.parse_args(arguments)


def name_of(options: argparse.Namespace) -> str:
    gather = "" if options.gather == "auto" else f" {options.gather}"
    return options.engine + gather + (" compiled" if options.compile else "")


def job_of(options: argparse.Namespace) -> str:
    """What has to be equal for two runs to be compared."""
    recompute = "recomputed" if options.recompute else "kept"
    return f"{options.model} {options.batch}x{options.length} {recompute} {bmt.world_size()} ranks"


def make_batch(step: int, options: argparse.Namespace, vocabulary: int, device: torch.device) -> torch.Tensor:
    """This rank's rows of random tokens, the same for every engine."""
    generator = torch.Generator().manual_seed(1000 * step + bmt.rank())
    return torch.randint(vocabulary, (options.batch, options.length), generator=generator).to(device)


def timed_steps(step, batches: list[torch.Tensor], warmup: int) -> tuple[list[float], list[float]]:
    """Losses (mean over ranks) and seconds of the steps after `warmup`, read when all is done."""
    losses, marks = [], []
    for batch in batches:
        marks.append(mark(batch.device))
        losses.append(step(batch))
    marks.append(mark(batches[0].device))
    means = [bmt.sum_loss(loss).item() for loss in losses]
    seconds = [between(a, b) for a, b in zip(marks, marks[1:])]
    return means, seconds[warmup:]


def mark(device: torch.device):
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(begin, end) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def gemm_speed(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a square bf16 product of random numbers: the ceiling of this machine, now."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        torch.mm(a, b)
    begin = mark(device)
    for _ in range(repeats):
        torch.mm(a, b)
    end = mark(device)
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / between(begin, end) / 1e12


def write(report: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{report['job']} {report['engine']}".replace(" ", "_").replace("/", "_")
    (folder / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
