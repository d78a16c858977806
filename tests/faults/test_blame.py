"""Whom a rank names when it ends by an exception: itself, or the rank that made it fail."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hf_bmtrain.engine.comm.collective_log import CollectiveLog
from hf_bmtrain.engine.comm.communicator import wait_for
from hf_bmtrain.faults.process import _report_exceptions
from hf_bmtrain.faults.status import Status, condition
from hf_bmtrain.faults.watch import Watch

KILLED = "rank 1 was last seen at train.py:7 (main); its process has ended without an exception"


def gathers() -> None:
    """Fails inside torch.distributed, as gloo does when it loses the connection to another rank."""
    fail = SimpleNamespace(wait=mock.Mock(side_effect=RuntimeError("Connection closed by peer")))
    group = mock.Mock(allgather=mock.Mock(return_value=fail))
    with mock.patch("torch.distributed.distributed_c10d._rank_not_in_group", return_value=False):
        torch.distributed.all_gather([torch.zeros(1)], torch.zeros(1), group=group)


def waits() -> None:
    """Fails in an operation of this package, whose search for a cause has found none."""
    with mock.patch("hf_bmtrain.engine.comm.communicator._DIAGNOSIS_SECONDS", 0.0):
        fail = mock.Mock(side_effect=RuntimeError("Connection closed by peer"))
        wait_for(mock.Mock(wait=fail, **{"is_completed.return_value": True}), CollectiveLog("gather"), 9.0)


def reads_memory_of_another_rank() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raises() -> None:
    raise RuntimeError("row 17 is damaged")


@pytest.fixture
def told(capsys):
    """What rank 0 prints when a function raises, if its watch finds the cause `problem`.

    first: another rank that has ended before, and its status.
    """

    def told(function, problem: str | None, first: tuple[int, Status] | None = None) -> str:
        watch = mock.Mock(problem=None, status=SimpleNamespace(blamed=[]), **{"raised_before.return_value": first})
        watch.find_cause.return_value = watch.wait_for_problem.return_value = problem
        undo = _report_exceptions(watch, 0)
        try:
            function()
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
        finally:
            undo()
        return capsys.readouterr().err

    return told


@pytest.mark.parametrize("function", [gathers, waits, reads_memory_of_another_rank])
def test_what_fails_because_a_rank_was_killed_names_that_rank(told, function):
    (line,) = told(function, KILLED).splitlines()
    assert line.startswith("rank 0 ends at") and line.endswith(f"): {KILLED}")
    assert f"({function.__name__}, from line {LINE}) (RuntimeError: C" in line


def seen_by_rank_1(**of_rank_0) -> Watch:
    """The watch of one of two ranks on two hosts."""
    watch = Watch()
    watch._rank, own = 1, CollectiveLog("control")
    watch._control = mock.Mock(size=2, timeout=60.0, collective_log=own, occasions={})
    watch._board = mock.Mock(neighbours=[], lost=False)
    status = Status(place="train.py:7 (main)", **of_rank_0)
    watch._board.read.side_effect = lambda rank: None if rank else status.to_text()
    return watch


def test_a_rank_that_is_silent_is_the_cause_of_a_failed_operation():
    """The kernel may take seconds to end a process, in which it seems to run."""
    watch = seen_by_rank_1(written=time.time() - 6)
    assert watch.find_cause(0.0).startswith("rank 0 was last seen at train.py:7 (main); it has been silent for 6 s")
    assert watch.status.problem  # for a third rank, which takes rank 1 for the first that failed
    assert seen_by_rank_1(written=time.time()).find_cause(0.0) is None
    assert seen_by_rank_1(written=time.time() - 6, ended="raised ValueError: no").find_cause(0.0) is None


@pytest.mark.parametrize(("served", "named"), [("", "rank 0 has"), ("True", "rank 0's launcher has")])
def test_a_lost_store_is_named(monkeypatch, served, named):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", served)
    watch = seen_by_rank_1(written=time.time())
    assert watch._look() is None
    watch._board.lost = True
    assert watch._look() is None  # there is no process group: the program has destroyed it
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert watch._look().startswith(f"{named} probably ended")
    watch.end("has left the program")
    assert watch._look() is None


@pytest.mark.parametrize(
    ("stops", "why"), [(True, "is stopped (by SIGSTOP or a debugger)"), (False, "was silent for 9 s")]
)
def test_a_process_that_another_rank_ends_is_told_before(caplog, stops, why):
    """torchrun ends the other ranks as soon as one is killed, often before they print anything."""
    process, kill, before = subprocess.Popen(["sleep", "60"]), os.kill, []
    try:
        watch = seen_by_rank_1(pid=process.pid, written=time.time() - 9)
        watch._board.neighbours, watch.status.blamed = [0], [0]
        watch.end("has left the program")
        if stops:
            process.send_signal(signal.SIGSTOP)
            while not condition(process.pid):
                time.sleep(0.01)
        with mock.patch("os.kill", lambda *arguments: (before.append(caplog.text), kill(*arguments))):
            watch._tell("No progress for 9 s.")
            assert process.wait(10) == -signal.SIGKILL
            watch._tell("No progress for 10 s.")  # as on a third rank, after the launcher has collected the process
    finally:
        process.kill()
        process.wait()
    (text,) = before
    assert f"rank 1 ends process {process.pid} of rank 0 by SIGKILL, because it {why} and would not end" in text
    assert text.endswith("Every rank must stop: No progress for 9 s.\n") and "ERROR" in text and caplog.text == text


def test_a_killed_process_is_gone_while_the_kernel_frees_its_memory():
    stat = "7 (train (1)) D 1 7 7 0 -1 4194564 1 0 0 0 1 1"
    with mock.patch("pathlib.Path.read_text", return_value=stat):
        assert condition(os.getpid()) == "gone"
    assert condition(os.getpid()) == ""


def test_a_rank_that_ends_before_because_another_was_killed_is_not_blamed(told):
    ended = Status(ended=f"ended at train.py:9 (main): {KILLED}", problem=KILLED)
    for problem in (None, KILLED):
        (line,) = told(gathers, problem, (2, ended)).splitlines()
        assert line.endswith(f": {KILLED}") and "rank 2" not in line
    (line,) = told(gathers, None, (2, Status(ended="raised ValueError: no"))).splitlines()
    assert line.endswith("because rank 2 failed first: see its output.")


def test_an_error_of_the_program_itself_is_printed_in_full(told):
    for function, problem in ((raises, KILLED), (gathers, None)):
        text = told(function, problem)
        assert text.startswith("rank 0 raised the following exception") and "Traceback" in text and KILLED not in text


LINE = next(n for n, line in enumerate(open(__file__), 1) if line == "            function()\n")
