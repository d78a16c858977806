"""Runs trainings in which nothing is wrong but ranks are slow at random, and shows whether any of them fails.

    python tests noisy --runs 20
    python tests noisy --seconds 60 --delay 30 --timeout 1800

Each run has another seed: 2 or 3 ranks, weights gathered by collectives or pulled, with sleeps of up to --seconds,
pauses of whole processes, loaders of other speeds, evaluations of other lengths where weights are pulled, and slow
saves. It is right if every rank ends well, no line says "error", the trained weights have the bits of a run without
noise, that run names no rank, no rank is called stopped, silent or ended that was not, and operations are never said
not to match. What the ranks say is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fault_cases import Case
from warm_server import WarmServer

from faults import Run, Settings, warm_server

CASE = Case("none", "", fails=False, job="noisy_job")
WRONG = re.compile(r"error|abort|differ|terminate|traceback", re.IGNORECASE)
NAMED = re.compile(r"No progress|Missing: rank")
CLAIMS = {
    "is stopped": ("pause",), "has been silent": ("pause", "hold_the_lock"), "has ended": (), "do not match": (),
}  # fmt: skip
"""What is said of a rank that cannot answer, and the noises that make it true."""


def false_claims(lines: list[str]) -> list[str]:
    """What lines of a run say of a rank that made no such noise."""
    text = "\n".join(lines)
    return [
        part
        for line in lines if NAMED.search(line)
        for part in re.split(r"(?=rank \d+ (?:was last seen|is|waits) )", line)
        for claim, noises in CLAIMS.items()
        if claim in part and not any(f"# {part[:part.index(' ', 5)]}: {noise}" in text for noise in noises)
    ]  # fmt: skip


def compare(server: WarmServer, seed: int, options: argparse.Namespace, folder: Path) -> tuple[bool, str]:
    """One seed with noise and without. Returns whether all is right, and what is printed of it."""
    ranks, gather = 2 + seed % 3 // 2, "peer" if seed % 2 else "auto"
    weights, texts, exits = [], [], []
    for seconds in (options.seconds, 0.0):
        variables = {"NOISE_SEED": str(seed), "NOISE_SECONDS": str(seconds)}
        delay = options.delay if seconds else None
        settings = Settings(options.timeout, options.limit, delay, gather, False, variables, look=0.5)
        run = Run(server, CASE, ranks, options.launcher, folder / f"{seed}-{seconds:g}", settings)
        outcome = run()
        weights.append([run.reported(rank, "done") for rank in range(ranks)])
        logs = [(run.folder / f"rank-{rank}.log").read_text("utf-8", errors="replace") for rank in range(ranks)]
        texts.append("\n".join(logs).splitlines())
        exits.append(outcome.exits)
    noises = sum(line.startswith("# rank") for line in texts[0])
    said = [line for line in texts[0] if not line.startswith("#")]
    ended = all(code == 0 for code in exits[0])
    same = ended and None not in weights[0] and len({*weights[0], *weights[1]}) == 1
    false = [*false_claims(texts[0]), *(line for line in texts[1] if NAMED.search(line))]
    right = same and not false and not any(WRONG.search(line) for line in said)
    words = "right" if right else "WRONG, the weights differ" if ended and not same else f"WRONG {false}"
    head = f"seed {seed}, {ranks} ranks, {gather}: {words}; {noises} noises, exits {exits}, {len(said)} lines said"
    return right, "\n".join([head, *(f"    {line}" for line in said[:12])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--jobs", type=int, default=2, help="that run at the same time")
    parser.add_argument("--launcher", choices=("none", "torchrun"), default="none")
    parser.add_argument("--seconds", type=float, default=4, help="the longest noise")
    parser.add_argument("--delay", type=float, default=2, help="seconds after which a hang is explained")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that ranks wait for others")
    parser.add_argument("--limit", type=float, default=400, help="seconds that a run may take")
    parser.add_argument("--library", type=Path, help="a folder that holds another hf_bmtrain")
    parser.add_argument("--output", type=Path, help="a folder for the logs of all runs")
    options = parser.parse_args()
    folder = (options.output or Path(tempfile.mkdtemp(prefix="noisy"))).resolve()
    wrong = 0
    with warm_server(options.library) as server, ThreadPoolExecutor(options.jobs) as pool:
        seeds = range(options.first, options.first + options.runs)
        for done in as_completed([pool.submit(compare, server, seed, options, folder) for seed in seeds]):
            right, told = done.result()
            wrong += not right
            print(told, flush=True)
    print(f"{options.runs} runs, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
