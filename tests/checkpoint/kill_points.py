"""Kill a rank at every file operation of a save, resume, and compare the losses with the undisturbed run's.

`python tests kill_points` does it for 1, 2 and 3 ranks, each as the victim, blocking and not; hours. `--every 20`,
`--ranks 2`, `--victim 0` do less. A point is the N-th file operation of a rank during a save (before it, and for
writes also after half of the bytes): SIGKILL there, then to the other ranks, as a launcher does. New processes load,
compare, train and save, and are killed at the next point. Kinds of points:

- first: the folder is empty; there is a checkpoint afterwards, or none and training starts over
- steady: after a save by the same processes, the one before it deleted (keep=1)
- replaced: a checkpoint of that step exists
- again: the first save of processes that resumed; it removes what the last kill left

The ranks are forks of this process, which has imported all and has no threads of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_bmtrain as bmt
from file_operations import counting, die
from resumable import Training
from tiny_models import build

KINDS = ("first", "steady", "replaced", "again")
LAST = 40  # a step from which training starts over, so that the learning rate has not become 0
SECONDS = 60  # that processes may take


@dataclass(frozen=True)
class Case:
    """ranks: of the world. victim: the rank that is killed."""

    ranks: int
    victim: int
    non_blocking: bool
    kind: str

    def label(self) -> str:
        how = "non_blocking" if self.non_blocking else "blocking"
        return f"ranks {self.ranks}, victim {self.victim}, {how}, {self.kind}"


# -- in a rank ------------------------------------------------------------------------------------------------------


class Rank:
    """What a rank does between a kill and the next. It reports by lines of JSON: [rank, what, ...]."""

    def __init__(self, case: Case, point: int, folder: Path, pipe: int) -> None:
        self._case, self._point, self._folder = case, point, folder
        self._rank, self._pipe, self._write = bmt.rank(), pipe, os.write
        self._training = Training(blocks=1)

    def report(self, *what: Any) -> None:
        self._write(self._pipe, (json.dumps([self._rank, *what]) + "\n").encode())

    def run(self) -> None:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.report("warning", record.getMessage())
        logging.getLogger("hf_bmtrain").addHandler(handler)
        resumed = self._training.load(self._folder)
        self.report("resumed", resumed and resumed.step, resumed and resumed.extra)
        self._train()
        if self._case.kind == "first" or self._training.step >= LAST:
            self._start_over()
        if self._case.kind in ("steady", "replaced"):
            self._save()
        if self._case.kind == "steady":
            self._train()
        with counting(self._act) if self._rank == self._case.victim else contextlib.nullcontext():
            self._save()
        self.report("survived")

    def truth(self) -> None:
        for _ in range(LAST + 3):
            self._train()

    def _train(self) -> None:
        (loss,) = self._training.train(self._training.step + 1)
        self.report("loss", self._training.step, loss.hex())

    def _save(self) -> None:
        self.report("saving", self._training.step)
        saving = self._training.save(self._folder, keep=1, non_blocking=self._case.non_blocking)
        step = self._training.step
        if self._case.non_blocking:
            self._train()
            saving.wait()
        self.report("saved", step)

    def _act(self, number: int, operation: str, where: Any) -> None:
        if number == self._point:
            self.report("killed", operation, str(where))
            die()

    def _start_over(self) -> None:
        bmt.synchronize()
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
        self.report("empty")
        bmt.synchronize()
        self._training = Training(blocks=1)
        self._train()


def fork_rank(rank: int, port: int, method: str, *arguments: Any) -> int:
    """Start a rank that calls a method of Rank. Returns the process's id."""
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
        worker = Rank(*arguments)
        try:
            getattr(worker, method)()
        except BaseException:
            worker.report("error", traceback.format_exc()[-2000:])
        else:
            status = 0
    finally:
        os._exit(status)


# -- around the ranks -----------------------------------------------------------------------------------------------


def launch(case: Case, point: int, folder: Path, method: str = "run") -> list[list[Any]]:
    """Run the ranks until all have ended; one that dies takes the others along. Returns what they reported."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    running = {fork_rank(rank, store.port, method, case, point, folder, writing) for rank in range(case.ranks)}
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
        self._losses, self._ranks = losses, case.ranks
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
            elif what == "loss" and self._losses[rank, values[0]] != values[1]:
                self.problems.append(f"rank {rank} step {values[0]}: {values[1]}, {self._losses[rank, values[0]]}")
            elif what == "warning" or (what == "error" and not killed):  # ranks fail when another has died
                self.problems.append(f"rank {rank}: {what} {values[0]}")
            elif what == "empty":
                self._saved, self._saving = None, set()
            elif what == "saving":
                self._saving = {values[0]}
            elif what == "saved":
                self._saved, self._saving = values[0], set()
        if len(resumed) < self._ranks or len({*resumed.values()}) > 1:
            self.problems.append(f"resumed: {resumed}")
        if self.survived(lines):
            left = sorted(path.name for path in folder.iterdir())
            if left != [".lock", f"checkpoint-{self._saved}"]:
                self.problems.append(f"left over: {left}")

    def survived(self, lines: list[list[Any]]) -> bool:
        return sum(line[1] == "survived" for line in lines) == self._ranks


def undisturbed(ranks: int, folder: Path) -> dict[tuple[int, int], str]:
    """Losses by (rank, step)."""
    lines = launch(Case(ranks, 0, False, "again"), 0, folder, "truth")
    losses = {(rank, step): loss for rank, what, step, loss in lines if what == "loss"}
    assert len(losses) == ranks * (LAST + 3), lines
    return losses


def kill_everywhere(case: Case, every: int, losses: dict, root: Path) -> tuple[int, int]:
    """Every point of a case, or one in `every`. Returns how many there were, and how many failed."""
    folder = Path(tempfile.mkdtemp(dir=root))
    judge, operations, failed = Judge(case, losses), Counter(), 0
    began, point, last = time.monotonic(), 1 + zlib.crc32(case.label().encode()) % every, None
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--victim", type=int, nargs="+", help="only these ranks")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--blocking", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--every", type=int, default=1, metavar="K", help="only each K-th point")
    parser.add_argument("--folder", type=Path, help="of the checkpoints; in memory unless told")
    options = parser.parse_args()
    torch.set_num_threads(1)
    build("llama", blocks=1)  # imports what the ranks need
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(dir=options.folder or (memory if memory.is_dir() else None), prefix="kill_points"))
    total: dict[str, int] = defaultdict(int)
    for ranks in options.ranks:
        losses = undisturbed(ranks, root)
        for victim in sorted({*range(ranks)} & {*(options.victim or range(ranks))}):
            for non_blocking in {"yes": [False], "no": [True], "both": [False, True]}[options.blocking]:
                for kind in options.kinds:
                    case = Case(ranks, victim, non_blocking, kind)
                    points, failed = kill_everywhere(case, options.every, losses, root)
                    total["points"] += points
                    total["failed"] += failed
    shutil.rmtree(root)
    print(f"{total['points']} points, {total['failed']} failed")
    return int(total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
