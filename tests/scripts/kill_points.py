"""Kill a rank at every file operation of a save, resume, and compare the losses with the undisturbed run's.

`python tests kill_points` does it for 1, 2 and 3 ranks, each as the victim, blocking and not; hours. `--every 20`,
`--ranks 2`, `--victim 0` do less; several processes may do a part each. A point is the N-th file operation of a rank
during a save (before it, and for writes also after half of the bytes; file_operations.py says what is seen): SIGKILL
there, then to the other ranks, as a launcher does. New processes load, compare, train and save, and are killed at the
next point. `--through` says what saves: `bmt.save_state`, Accelerate (total_limit=1, automatic naming), stock Trainer
with BMTrainCallback, or bmt.hf.Trainer (save_total_limit=1). Kinds of points:

- first: the folder is empty; there is a checkpoint afterwards, or none and training starts over
- steady: after a save by the same processes, the one before it deleted (keep=1)
- replaced: a checkpoint of that step exists; with Accelerate, a folder of the caller's is saved to twice
- again: the first save of processes that resumed; it removes what the last kill left. With Trainer also their start

The ranks are forks of this process, which has imported all and has no threads of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_bmtrain as bmt
from killed_ranks import KINDS, LAST, RANKS, Case
from tiny_models import build

SECONDS = 60  # that processes may take


def fork_rank(rank: int, port: int, method: str, *arguments: Any) -> int:
    """Start a rank that calls a method of its class in RANKS. Returns the process's id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        size = arguments[0].ranks
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True", ACCELERATE_USE_CPU="True",
        )  # fmt: skip
        bmt.init_distributed(timeout=SECONDS / 2)
        getattr(RANKS[arguments[0].through](*arguments), method)()
        status = 0
    except BaseException:
        line = json.dumps([rank, "error", traceback.format_exc()[-2000:]])
        os.write(arguments[-1], f"{line}\n".encode())
    finally:
        os._exit(status)


# -- around the ranks -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def store_port() -> Iterator[int]:
    """Under `with`, the port of a store, in another process: ranks are forked here, where no thread may run."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            held = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(writing, str(held.port).encode())
            time.sleep(2 * SECONDS)
        finally:
            os._exit(0)
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    try:
        yield port
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def launch(case: Case, point: int, folder: Path, method: str = "run") -> list[list[Any]]:
    """Run the ranks until all have ended; one that dies takes the others along. Returns what they reported."""
    with store_port() as port:
        return _launch(port, case, point, folder, method)


def _launch(port: int, case: Case, point: int, folder: Path, method: str) -> list[list[Any]]:
    reading, writing = os.pipe()
    running = {fork_rank(rank, port, method, case, point, folder, writing) for rank in range(case.ranks)}
    os.close(writing)
    text, end = b"", time.monotonic() + SECONDS
    os.set_blocking(reading, False)
    while running:
        time.sleep(0.005)
        with contextlib.suppress(BlockingIOError):
            text += os.read(reading, 1 << 20)
        process, status = os.waitpid(-1, os.WNOHANG)
        running.discard(process)
        if status or time.monotonic() > end:
            for each in running:
                os.kill(each, signal.SIGKILL)
            for each in running:
                os.waitpid(each, 0)
            running = set()
    os.set_blocking(reading, True)
    while more := os.read(reading, 1 << 20):
        text += more
    os.close(reading)
    lines = [json.loads(line) for line in text.decode().splitlines()]
    if time.monotonic() > end:
        lines.append([-1, "error", f"not done within {SECONDS} s"])
    return lines


class Judge:
    """Compares what the ranks report with the undisturbed losses. Its `problems` are of the latest reports."""

    def __init__(self, case: Case, losses: dict[tuple[int, int], str]) -> None:
        self._losses, self._ranks, self._case = losses, case.ranks, case
        self._saved: int | None = None
        self._saving: set[int] = set()
        self.problems: list[str] = []

    def hear(self, lines: list[list[Any]], folder: Path) -> None:
        self.problems = []
        may = {self._saved, *self._saving}
        resumed = {}
        killed = False
        for rank, what, *values in lines:
            killed = killed or what == "killed"
            if what == "resumed":
                resumed[rank] = values[0]
                expected = values[0] and {"rank": rank, "position": values[0]}
                if values[0] not in may or values[1] != expected:
                    self.problems.append(f"rank {rank} resumed at {values}, saved were {may}")
                self._saved, self._saving = values[0], set()
            elif what == "loss" and self._losses[rank, values[0]] != values[1]:
                self.problems.append(f"rank {rank} step {values[0]}: {values[1]}, {self._losses[rank, values[0]]}")
            elif what == "warning" and "did not finish saving" in values[0]:  # Trainer's, which was set aside
                continue
            elif what == "warning" or (what == "error" and not killed):  # ranks fail when another has died
                self.problems.append(f"rank {rank}: {what} {values[0]}")
            elif what == "empty":
                self._saved, self._saving = None, set()
            elif what == "saving":
                self._saving = {values[0]}
            elif what == "saved":
                self._saved, self._saving = values[0], set()
        if (len(resumed) < self._ranks and not killed) or len({*resumed.values()}) > 1:  # Trainer's start may be killed
            self.problems.append(f"resumed: {resumed}")
        if self.survived(lines):
            assert self._saved is not None
            left = RANKS[self._case.through].left_over(self._case, folder, self._saved)
            if left:
                self.problems.append(f"left over: {left}")

    def survived(self, lines: list[list[Any]]) -> bool:
        return sum(line[1] == "survived" for line in lines) == self._ranks


def undisturbed(through: str, ranks: int, folder: Path) -> dict[tuple[int, int], str]:
    """Losses by (rank, step)."""
    lines = launch(Case(through, ranks, 0, False, "again"), 0, folder / "truth", "truth")
    losses = {(rank, step): loss for rank, what, step, loss in lines if what == "loss"}
    assert len(losses) == ranks * (LAST + 3), lines
    return losses


def kill_everywhere(case: Case, every: int, first: int | None, losses: dict, root: Path) -> tuple[int, int]:
    """Every point of a case, or one in `every` from `first` on. Returns how many there were, and how many failed."""
    folder = Path(tempfile.mkdtemp(dir=root))
    judge, operations, failed = Judge(case, losses), Counter(), 0
    began, point, last = time.monotonic(), first or 1 + zlib.crc32(case.label().encode()) % every, None
    if case.kind == "again":  # something to lose
        judge.hear(launch(case, 0, folder), folder)
    while True:
        lines = launch(case, point, folder)
        judge.hear(lines, folder)
        for problem in judge.problems:  # what is wrong now comes from the point before
            print(f"  FAILED {case.label()}, point {last}: {problem}", flush=True)
        failed += bool(judge.problems)
        killed = [values for _, what, *values in lines if what == "killed"]
        if killed:
            operations[killed[0][0]] += 1
        elif judge.survived(lines) or judge.problems:
            break
        last, point = (point, *killed[0]), point + every
    shutil.rmtree(folder)
    points = sum(operations.values())
    which = ", ".join(f"{number} {name}" for name, number in sorted(operations.items()))
    print(f"{case.label()}: {points} points in {time.monotonic() - began:.0f} s ({which}), {failed} failed", flush=True)
    return points, failed


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for through in options.through:
        for ranks in options.ranks:
            for victim in sorted({*range(ranks)} & {*(options.victim or range(ranks))}):
                for non_blocking in {"yes": [False], "no": [True], "both": [False, True]}[options.blocking]:
                    for kind in options.kinds:
                        trainer = through.endswith("trainer")
                        if not (non_blocking and through != "save_state") and not (kind == "replaced" and trainer):
                            yield Case(through, ranks, victim, non_blocking, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--through", nargs="+", choices=RANKS, default=["save_state"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--victim", type=int, nargs="+", help="only these ranks")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--blocking", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="only each K-th point")
    parser.add_argument("--first", type=int, metavar="J", help="the first of them, 1 to K; one by chance unless told")
    parser.add_argument("--folder", type=Path, help="of the checkpoints; in memory unless told")
    options = parser.parse_args()
    torch.set_num_threads(1)
    build("llama", blocks=1), bmt.hf.Trainer  # imports what the ranks need
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=options.folder or (memory if memory.is_dir() else None), prefix="kill_points"))
    total: dict[str, int] = defaultdict(int)
    losses: dict[tuple[str, int], dict] = {}
    for case in cases(options):
        key = case.through, case.ranks
        losses[key] = losses.get(key) or undisturbed(*key, root)
        points, failed = kill_everywhere(case, options.every, options.first, losses[key], root)
        total["points"] += points
        total["failed"] += failed
    shutil.rmtree(root)
    print(f"{total['points']} points, {total['failed']} failed")
    return int(total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
