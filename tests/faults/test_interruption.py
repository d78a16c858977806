"""What ranks print when Ctrl-C or SIGINT interrupts them: one of them prints one line."""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from warm_server import Started, WarmServer

from cases import full
from faults import SILENT, TORCHRUN, warm_server
from hf_bmtrain.engine.comm.collective_log import CollectiveLog
from hf_bmtrain.engine.comm.communicator import wait_for
from hf_bmtrain.faults.process import Exits, _leave, _report_exceptions
from hf_bmtrain.faults.status import Status
from hf_bmtrain.faults.watch import Watch
from processes import environment
from ranks import free_port, place_on_host

INTERRUPTED = "was interrupted (Ctrl-C or SIGINT) at train.py:7 (main)"
ENDED = f"ended at train.py:7 (main): rank 0 {INTERRUPTED}."
SAVES_NOTHING = "hf_bmtrain saves no checkpoint when it is interrupted."
ON_ALL = re.compile(
    r"hf_bmtrain: interrupted \(Ctrl-C or SIGINT\) on all 2 ranks; "
    r"rank [01] was at \S+\.py:\d+ \(\w+, from line \d+\)\. " + re.escape(SAVES_NOTHING)
)
LATER = sys.float_info.max


def interrupts() -> None:
    raise KeyboardInterrupt


def interrupts_a_finally() -> None:
    try:
        raise ValueError("row 17 is damaged")
    finally:
        interrupts()


def interrupts_a_failed_operation() -> None:
    try:
        waits_for_the_other()
    finally:
        interrupts()


def waits_for_the_other() -> None:
    """Fails in an operation of this package, as gloo does when the other rank has ended."""
    with mock.patch("hf_bmtrain.engine.comm.communicator._DIAGNOSIS_SECONDS", 0.0):
        fail = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
        wait_for(mock.Mock(wait=fail, **{"is_completed.return_value": True}), CollectiveLog("gather"), 9.0)


@contextlib.contextmanager
def uninterrupted():
    """Fail if KeyboardInterrupt is raised, which would end the whole run of tests."""
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("a KeyboardInterrupt was not handled")


@pytest.fixture
def told(capsys, monkeypatch):
    """What rank 0 of 2 prints when a function raises. status: of rank 1, at first and after rank 0 has ended."""
    monkeypatch.setattr("hf_bmtrain.faults.process._INTERRUPTED_SECONDS", 0.3, raising=False)

    def told(function, status: Status, after: Status | None = None, problem: str | None = None) -> str:
        watch = Watch()
        watch._control = mock.Mock(size=2, collective_log=CollectiveLog("control"), occasions={})
        watch._control.collective_log.problem = problem
        watch._board = mock.Mock(neighbours=[], lost=False)
        watch._board.read.side_effect = lambda rank: (
            (after if after and watch.status.ended else status) if rank else watch.status
        ).to_text()
        undo = _report_exceptions(watch, 0)
        try:
            function()
        except (RuntimeError, KeyboardInterrupt):
            with uninterrupted():
                sys.excepthook(*sys.exc_info())
        finally:
            undo()
        return capsys.readouterr().err

    return told


def runs() -> Status:
    return Status(written=time.time())


def test_the_first_of_the_interrupted_ranks_prints_one_line(told):
    (line,) = told(interrupts, runs(), Status(ended=INTERRUPTED, ended_at=LATER)).splitlines()
    assert ON_ALL.fullmatch(line) and "rank 0 was at" in line
    assert told(interrupts, Status(ended=INTERRUPTED, ended_at=1.0)) == ""


def test_a_rank_says_only_what_it_knows_of_the_others(told):
    (line,) = told(interrupts, runs(), Status(ended=ENDED, ended_at=LATER)).splitlines()
    assert line.startswith("hf_bmtrain: interrupted (Ctrl-C or SIGINT) on rank 0 of 2; rank 0 was at ")
    assert line.endswith(f"The other ranks end too. {SAVES_NOTHING}")
    (line,) = told(interrupts, runs()).splitlines()
    assert " on rank 0 of 2; " in line and "It is not known yet whether the others were interrupted too" in line


def test_a_second_interruption_ends_the_wait_for_the_others(told, monkeypatch):
    monkeypatch.setattr("hf_bmtrain.faults.process._INTERRUPTED_SECONDS", 1e6, raising=False)
    with mock.patch("time.sleep", side_effect=KeyboardInterrupt):
        (line,) = told(interrupts, runs()).splitlines()
    assert " on rank 0 of 2; " in line


def test_a_rank_that_ends_because_another_was_interrupted_names_it(told):
    watch = Watch()
    problem = watch._of_one(1, Status(ended=INTERRUPTED))
    assert problem == f"rank 1 {INTERRUPTED}."
    for known in (problem, None):
        (line,) = told(waits_for_the_other, Status(ended=INTERRUPTED, ended_at=1.0), problem=known).splitlines()
        assert line.startswith("rank 0 ends at ") and line.endswith(f": {problem}") and "failed" not in line


def test_a_failure_before_the_interruption_is_named_instead(told):
    (line,) = told(interrupts, Status(ended="raised ValueError: no", ended_at=1.0)).splitlines()
    assert line.endswith("because rank 1 failed first: see its output.")
    (line,) = told(interrupts, runs(), problem="rank 1 was last seen at train.py:7").splitlines()
    assert line.endswith("(KeyboardInterrupt): rank 1 was last seen at train.py:7")


def test_an_error_that_the_program_was_handling_is_not_lost(told):
    earlier = Status(ended=INTERRUPTED, ended_at=1.0)
    assert "ValueError: row 17 is damaged" in told(interrupts_a_finally, earlier)
    assert told(interrupts_a_failed_operation, earlier) == ""


def test_a_rank_that_is_interrupted_at_the_end_of_its_program_still_closes_its_communicators(monkeypatch, capfd):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("hf_bmtrain.faults.process.wait_loader", lambda: None)
    monkeypatch.delattr(sys, "last_value", raising=False)
    world, opened = mock.Mock(**{"barrier.side_effect": KeyboardInterrupt}), mock.Mock()
    with uninterrupted():
        _leave(world, mock.Mock(problem=None), [opened], False, Exits())
    assert opened.close.call_args.kwargs == {"abort": True} and world.control.close.called
    assert capfd.readouterr().err == ""


# -- processes --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os

import torch

import hf_bmtrain as bmt

bmt.init_distributed(timeout=60)


def train():
    while True:
        bmt.sum_loss(torch.ones(()))
        open(f"{os.environ['FAULT_LOGS']}/ready-{bmt.rank()}", "a").close()


train()
"""
SECONDS = 120
"""The processes that start and end may have to share the machine with others."""


@pytest.fixture(scope="module")
def server():
    with warm_server() as started:
        yield started


class Training:
    """Ranks that have begun to train, in a folder of their own. launcher: "none" or "torchrun"."""

    def __init__(self, server: WarmServer, folder: Path, size: int, launcher: str) -> None:
        self._folder, self._size = folder, size
        script = folder / "train.py"
        script.write_text(SCRIPT, "utf-8")
        variables = environment(FAULT_LOGS=str(folder), FAULT_LOG_NAME="")
        if launcher == "torchrun":
            command = [str(TORCHRUN), "--standalone", f"--nproc-per-node={size}", str(script)]
            self.processes = [server.start(command, variables, folder / "launcher.log")]
        else:
            place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            of_ranks = [place | {"RANK": str(rank)} | place_on_host(rank, size, size) for rank in range(size)]
            self.processes = [
                server.start([str(script)], variables | (own if size > 1 else {}), folder / f"rank-{rank}.log")
                for rank, own in enumerate(of_ranks)
            ]
        end = time.monotonic() + SECONDS
        while len([*folder.glob("ready-*")]) < size:
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)

    def interrupt(self, *processes: Started) -> list[int]:
        """Send SIGINT to some of the processes, and return the exit codes of all."""
        for process in processes:
            os.kill(process.pid, signal.SIGINT)
        try:
            return [process.wait(SECONDS) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def logs(self) -> list[list[str]]:
        """The lines that each rank has printed, but for the warnings of other packages."""
        logs = [(self._folder / f"rank-{rank}.log").read_bytes().splitlines() for rank in range(self._size)]
        return [[line.decode() for line in log if not SILENT.search(line)] for log in logs]


@full
@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_ctrl_c_prints_one_line(server, tmp_path, launcher):
    training = Training(server, tmp_path, 2, launcher)
    codes = training.interrupt(*training.processes)  # torchrun sends SIGINT to its ranks
    assert codes == ([1] if launcher == "torchrun" else [-signal.SIGINT] * 2)
    (line,) = sum(training.logs(), [])
    assert ON_ALL.fullmatch(line), line


@full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted_alone_is_named_and_ends_the_others(server, tmp_path, rank):
    training = Training(server, tmp_path, 2, "none")
    codes = training.interrupt(training.processes[rank])
    assert codes[rank] == -signal.SIGINT and codes[1 - rank] == 1
    logs = training.logs()
    (own,), (other,) = logs[rank], logs[1 - rank]
    assert own.startswith(f"hf_bmtrain: interrupted (Ctrl-C or SIGINT) on rank {rank} of 2; rank {rank} was at ")
    assert own.endswith(f"The other ranks end too. {SAVES_NOTHING}")
    assert other.startswith(f"rank {1 - rank} ends at ") and "failed" not in other
    assert f"rank {rank} was interrupted (Ctrl-C or SIGINT) at " in other


@full
def test_one_process_prints_what_python_prints(server, tmp_path):
    training = Training(server, tmp_path, 1, "none")
    assert training.interrupt(*training.processes) == [-signal.SIGINT]
    (log,) = training.logs()
    assert log[0] == "Traceback (most recent call last):" and log[-1] == "KeyboardInterrupt"
    assert not any("interrupted" in line for line in log)
