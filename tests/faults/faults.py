"""Makes one thing go wrong on one rank of a small training, and shows what the ranks say about it, and when.

    python tests faults --ranks 2 3 --launcher none torchrun --output FOLDER
    python tests faults --only sigkill_step raise_forward@0

Each run is a row. first: seconds from the fault to the first line that a rank prints. named: to when rank, cause and
line of the script have all been named. ended: until the processes have ended, in their order, or "never". exits: the
ranks' exit codes. said: what was named, of (r)ank, (c)ause and (p)lace. told: the ranks whose own output names rank and
cause. lines: printed by each rank since the fault. root: the rank that torchrun calls the root cause. resumed: the step
from which the training went on afterwards. Output of the ranks is in FOLDER/<run>/rank-N.log.

Outcomes: named; blamed, where a process ended or stopped and the first line does not name its rank, or calls another
rank the one that failed; unnamed, where something is not named; silent, where nobody says anything or all ranks
succeed; hang, where it did not end; fine, where nothing was to be said. A rank that a C++ abort ended is counted
besides.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_cases import CASES, JOBS, Case
from warm_server import Started, WarmServer

from processes import environment
from ranks import free_port, place_on_host

TORCHRUN = Path(__file__).with_name("warm_torchrun.py")
SILENT = re.compile(rb"^\s*$|^# |^\{'|UserWarning|warnings\.warn|FutureWarning|^\[rank\d+\]:\[W|TORCH_WARN")
SELF = re.compile(rb"\brank \d+: (?=(all_gather|all_reduce|reduce_scatter|broadcast) of)")
"""Says who speaks, not whose fault it is."""


@dataclass
class Settings:
    """timeout: of the waits of ranks. limit: seconds after the fault, when all are killed.

    delay: of explanations; None for the default. gather: of init_distributed. resumes: whether the training is resumed
    afterwards. variables: of the environment.
    look: seconds between two looks at a run. device: of the ranks, "cpu" or "cuda".
    """

    timeout: float = 25.0
    limit: float = 90.0
    delay: float | None = None
    gather: str = "auto"
    resumes: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    look: float = 0.05
    device: str = "cpu"


@dataclass
class Outcome:
    """What a run did. The fields are the columns of the table."""

    run: str
    outcome: str = ""
    first: float | None = None
    named: float | None = None
    ended: float | None = None
    ends: list[float] = field(default_factory=list)
    exits: list[int | None] = field(default_factory=list)
    said: str = ""
    told: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    root: int | None = None
    aborted: list[int] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    resumed: str = ""
    done: list[bool] = field(default_factory=list)

    def row(self) -> str:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}"

        exits = ",".join("?" if code is None else str(code) for code in self.exits)
        rest = [
            f"told {','.join(map(str, self.told)) or '-'}", f"lines {','.join(map(str, self.lines))}",
            *([f"root {self.root}"] if self.root is not None else []),
            *([f"ABORT {self.aborted}"] if self.aborted else []),
            *([f"left {self.left}"] if self.left else []), *([self.resumed] if self.resumed else []),
        ]  # fmt: skip
        ended = "/".join(f"{each:.1f}" for each in sorted(self.ends)) + ("" if self.ended is not None else "/never")
        return (
            f"{self.run:42} {self.outcome:8} {seconds(self.first):>5} {seconds(self.named):>5} {ended:>11}  "
            f"{exits:12} {self.said:4} {'; '.join(rest)}"
        )


HEAD = f"{'run':42} {'outcome':8} {'first':>5} {'named':>5} {'ended':>11}  {'exits':12} {'said':4}"


class Run:
    """One job with a fault, in a folder of its own."""

    def __init__(
        self, server: WarmServer, case: Case, ranks: int, launcher: str, folder: Path, settings: Settings
    ) -> None:
        self._server, self._case, self._ranks, self._launcher = server, case, ranks, launcher
        self._settings = settings
        self.outcome = Outcome(f"{case.label} {ranks} {launcher}")
        self.folder = folder / self.outcome.run.replace(" ", "-").replace(":", "-")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._sizes: dict[Path, int] = {}
        self._grown: list[tuple[float, Path, int]] = []  # when, which file, to what size
        self._first = ""  # the first line about the fault
        self._launcher_told: float | None = None  # when torchrun said which rank has failed

    def __call__(self) -> Outcome:
        before = shared_memory()
        codes = self._run(self._case.name, self._case.stays, [])
        self._judge(codes)
        if self._settings.gather == "peer":
            self.outcome.left += sorted(shared_memory() - before)
        if self._settings.resumes and any((self.folder / "checkpoints").glob("checkpoint-*")) and self._case.fails:
            self._resume()
        return self.outcome

    # -- processes --------------------------------------------------------------------------------------------------

    def _run(self, fault: str, stays: bool, arguments: list[str], logs: str = "") -> list[int | None]:
        """The exit codes of the ranks, or of the launcher. stays: the rank of the fault need not end."""
        stays = stays and self._launcher == "none"
        started = self._start(fault, arguments, logs)
        begun, limit, ended = time.time(), self._settings.limit, False
        ends: dict[int, float] = {}
        while not ended and time.time() < max(begun, self._fault_time() or begun + 30) + limit:
            time.sleep(self._settings.look)
            self._look_at_logs()
            codes = [each.poll() for each in started]
            waiting = [rank for rank, code in enumerate(codes) if code is None]
            for rank, code in enumerate(codes):
                if code is not None:
                    ends.setdefault(rank, time.time() - (self._fault_time() or begun))
            ended = not waiting or (stays and waiting == [self._case.rank])
        end = time.time()
        codes = [each.poll() for each in started]
        for process in self._own_processes():
            with contextlib.suppress(ProcessLookupError):
                if ended and not stays:
                    self.outcome.left.append(f"process {process}")
                os.kill(process, signal.SIGKILL)
        for each in started:
            each.wait(10)
        self._look_at_logs()
        self.outcome.ended = end - (self._fault_time() or begun) if ended else None
        self.outcome.ends = list(ends.values())
        return codes

    def _start(self, fault: str, arguments: list[str], logs: str) -> list[Started]:
        job = str(JOBS[self._case.job])
        variables = environment(
            FAULT=fault, FAULT_RANK=str(self._case.rank), FAULT_STEP=str(self._case.step),
            FAULT_LOGS=str(self.folder), FAULT_TIMEOUT=str(self._settings.timeout), FAULT_GATHER=self._settings.gather,
            ACCELERATE_USE_CPU=str(self._settings.device == "cpu"), **self._settings.variables,
        )  # fmt: skip
        if self._settings.delay is not None:
            variables["HF_BMTRAIN_HANG_SECONDS"] = str(self._settings.delay)
        devices = self._ranks
        if self._settings.device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(torch.cuda.device_count())))
            devices = torch.cuda.device_count()
        if self._launcher == "torchrun":
            variables["FAULT_LOG_NAME"] = logs
            command = [str(TORCHRUN), "--standalone", f"--nproc-per-node={self._ranks}", job, *arguments]
            return [self._server.start(command, variables, self.folder / f"launcher{logs}.log")]
        place = {"WORLD_SIZE": str(self._ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(self._ranks):
            if fault == "never_started" and rank == self._case.rank:
                (self.folder / "fault.json").write_text(json.dumps(time.time()))
                continue
            own = variables | place | {"RANK": str(rank)} | place_on_host(rank, self._ranks, devices)
            started.append(self._server.start([job, *arguments], own, self.folder / f"rank-{rank}{logs}.log"))
        return started

    def _own_processes(self) -> list[int]:
        """Processes of this run that are alive."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                # The environment that a fork was given is not seen there, but what it opened is.
                logs = {os.readlink(link) for link in path.with_name("fd").iterdir()}
                if any(log.startswith(f"{self.folder}{os.sep}") for log in logs):
                    found.append(int(path.parent.name))
        return found

    # -- what they said -------------------------------------------------------------------------------------------

    def _look_at_logs(self) -> None:
        now = time.time()
        for path in self.folder.glob("rank-*.log"):
            size = path.stat().st_size
            if size > self._sizes.get(path, 0):
                self._sizes[path] = size
                self._grown.append((now, path, size))
        launcher = self.folder / "launcher.log"
        if self._launcher_told is None and launcher.exists() and "failed (exitcode" in launcher.read_text("utf-8"):
            self._launcher_told = now

    def _fault_time(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "fault.json").read_text())
        return None

    def _text(self, rank: int, until: float | None = None) -> str:
        """What a rank printed from the fault on."""
        path, fault = self._log(rank), self._fault_time()

        def size_at(moment: float | None) -> int:
            sizes = [size for when, of, size in self._grown if of == path and (moment is None or when <= moment)]
            return max(sizes, default=0)

        begin, end = 0 if fault is None else size_at(fault), size_at(until)
        lines = SELF.sub(b"", path.read_bytes()[begin:end]).splitlines() if end > begin else []
        return "\n".join(line.decode(errors="replace") for line in lines if not SILENT.search(line))

    def _log(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def _judge(self, codes: list[int | None]) -> None:
        outcome, patterns = self.outcome, self._case.patterns()
        fault, ranks = self._fault_time(), range(self._ranks)
        texts = [self._text(rank) for rank in ranks]
        if fault is not None:
            for when, _, _ in sorted(self._grown):
                so_far = [self._text(rank, when) for rank in ranks]
                if outcome.first is None and any(so_far):
                    outcome.first = max(0.0, when - fault)
                    self._first = "\n".join(so_far).strip().splitlines()[0]
                if all(pattern.search("\n".join(so_far)) for pattern in patterns.values()):
                    outcome.named = max(0.0, when - fault)
                    break
        outcome.exits, together = codes, "\n".join(texts)
        if self._launcher == "torchrun":
            together += self._read_launcher()
        said = {name for name, pattern in patterns.items() if pattern.search(together)}
        if outcome.root == self._case.rank:
            said.add("rank")
        if outcome.named is None and said == {*patterns}:  # by torchrun
            told = self._launcher_told
            outcome.named = outcome.ended if told is None or fault is None else max(0.0, told - fault)
        outcome.said = "".join(sorted(name[0] for name in said))
        short = [pattern for name, pattern in patterns.items() if name != "place"]
        outcome.told = [rank for rank in ranks if all(pattern.search(texts[rank]) for pattern in short)]
        outcome.lines = [len(text.splitlines()) for text in texts]
        outcome.done = [self.reported(rank, "done") is not None for rank in ranks]
        aborted = [rank for rank in ranks if "terminate called" in texts[rank]]
        outcome.aborted = sorted({*aborted, *(rank for rank, code in enumerate(outcome.exits) if code == -6)})
        outcome.outcome = self._classify(together, codes)

    def _read_launcher(self) -> str:
        """Take the exit codes from what torchrun printed, which is returned."""
        text = (self.folder / "launcher.log").read_text("utf-8", errors="replace")
        failures = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", text)
        codes = {int(rank): int(code) for rank, code in failures}
        root = re.search(r"Root Cause \(first observed failure\):.*?rank +: (\d+)", text, re.DOTALL)
        self.outcome.root = int(root[1]) if root else None
        self.outcome.exits = [codes.get(rank, 0 if self.outcome.exits == [0] else None) for rank in range(self._ranks)]
        return text

    def _classify(self, text: str, codes: list[int | None]) -> str:
        if self._fault_time() is None and self._case.name != "none":
            return "missed"
        if not self._case.fails:
            good = all(code == 0 for code in codes) and all(self.outcome.done)
            return "fine" if good else "WRONG"
        if self.outcome.ended is None:
            return "hang"
        if all(code == 0 for code in codes) and all(self.outcome.done):
            return "silent"
        if self._case.of_process and self._first and not self._case.is_named_by(self._first):
            return "blamed"
        if self.outcome.named is not None:
            return "named"
        return "unnamed" if text.strip() else "silent"

    def reported(self, rank: int, key: str) -> Any:
        with contextlib.suppress(OSError):
            for line in (self.folder / f"report-{rank}.jsonl").read_text("utf-8").splitlines():
                if json.loads(line)[0] == key:
                    return json.loads(line)[1]
        return None

    # -- afterwards ------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        for path in self.folder.glob("report-*"):
            path.rename(path.with_name(f"before-{path.name}"))
        ended, ends = self.outcome.ended, self.outcome.ends
        codes = self._run("none", False, ["--resume"], "-resumed")
        self.outcome.ended, self.outcome.ends = ended, ends
        steps = {self.reported(rank, "resumed") for rank in range(self._ranks)}
        good = all(code == 0 for code in codes) and len(steps) == 1 and None not in steps
        self.outcome.resumed = f"resumed {steps.pop()}" if good else f"NOT RESUMED {codes} {steps}"


def shared_memory() -> set[str]:
    """Names of files in shared memory that no process has mapped."""
    mapped = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {*re.findall(r"/dev/shm/(hf_bmtrain_\w+)", path.read_text())}
    return {path.name for path in Path("/dev/shm").glob("hf_bmtrain_*")} - mapped


@contextlib.contextmanager
def warm_server(library: Path | None = None) -> Iterator[WarmServer]:
    """Under `with`, a server for runs. library: a folder that holds another hf_bmtrain."""
    found = [] if library is None else [str(library.resolve())]
    paths = os.pathsep.join([str(Path(__file__).parent), *(path for path in sys.path if path)])
    with WarmServer(environment() | {"PYTHONPATH": os.pathsep.join([*found, paths])}) as server:
        yield server


def chosen(names: list[str] | None, jobs: list[str]) -> list[Case]:
    return [case for case in CASES if case.job in jobs and (not names or {case.name, case.label} & {*names})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--launcher", nargs="+", choices=("none", "torchrun"), default=["none"])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of faults, as NAME or NAME@RANK")
    parser.add_argument("--job", nargs="+", choices=JOBS, default=list(JOBS), help="a bare loop, and Trainer")
    parser.add_argument("--all", action="store_true", help="2 and 3 ranks, both launchers")
    parser.add_argument("--jobs", type=int, default=2, help="that run at the same time")
    parser.add_argument("--limit", type=float, default=90, help="seconds after the fault, when a job counts as hanging")
    parser.add_argument("--timeout", type=float, default=25, help="seconds that ranks wait for others")
    parser.add_argument("--delay", type=float, help="seconds after which a hang is explained; by default the library's")
    parser.add_argument("--no-resume", action="store_true", help="do not resume the trainings afterwards")
    parser.add_argument("--gather", choices=("auto", "peer"), default="auto")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="ranks share a GPU if there are too few"
    )
    parser.add_argument("--library", type=Path, help="a folder that holds another hf_bmtrain")
    parser.add_argument("--output", type=Path, help="a folder for the logs of all runs")
    options = parser.parse_args()
    ranks, launchers = ([2, 3], ["none", "torchrun"]) if options.all else (options.ranks, options.launcher)
    settings = Settings(
        options.timeout, options.limit, options.delay, options.gather, not options.no_resume, device=options.device
    )
    if options.device == "cuda" and "torchrun" in launchers and torch.cuda.device_count() < max(ranks):
        parser.error("torchrun gives every rank a GPU of its own: use --launcher none where ranks share one")
    folder = (options.output or Path(tempfile.mkdtemp(prefix="faults"))).resolve()
    outcomes: list[Outcome] = []
    print(HEAD, flush=True)
    with warm_server(options.library) as server, ThreadPoolExecutor(options.jobs) as pool:
        runs = [
            Run(server, case, size, launcher, folder, settings)
            for launcher in launchers for size in ranks for case in chosen(options.only, options.job)
            if not (case.name == "never_started" and launcher == "torchrun")
        ]  # fmt: skip
        for done in as_completed([pool.submit(run) for run in runs]):
            outcomes.append(done.result())
            print(outcomes[-1].row(), flush=True)
    return summarize(outcomes)


def summarize(outcomes: list[Outcome]) -> int:
    counts = Counter(outcome.outcome for outcome in outcomes)
    told = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    aborts, left = (sum(bool(getattr(each, name)) for each in outcomes) for name in ("aborted", "left"))
    failed = sum(each.resumed.startswith("NOT") for each in outcomes)
    print(f"{len(outcomes)} runs: {told}; {aborts} with aborts, {left} left something behind, {failed} did not resume")
    return int(bool(set(counts) - {"named", "fine"} or aborts or left or failed))


if __name__ == "__main__":
    sys.exit(main())
