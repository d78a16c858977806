"""Whom a rank names when it ends by an exception: itself, or the rank that made it fail."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hf_bmtrain.faults.process import _report_exceptions
from hf_bmtrain.faults.status import Status

KILLED = "rank 1 was last seen at train.py:7 (main); its process has ended without an exception"


def gathers() -> None:
    """Fails inside torch.distributed, as gloo does when it loses the connection to another rank."""
    fail = SimpleNamespace(wait=mock.Mock(side_effect=RuntimeError("Connection closed by peer")))
    group = mock.Mock(allgather=mock.Mock(return_value=fail))
    with mock.patch("torch.distributed.distributed_c10d._rank_not_in_group", return_value=False):
        torch.distributed.all_gather([torch.zeros(1)], torch.zeros(1), group=group)


def raises() -> None:
    raise RuntimeError("row 17 is damaged")


@pytest.fixture
def told(capsys):
    """What rank 0 prints when a function raises, if its watch finds the cause `problem`.

    first: another rank that has ended before, and its status.
    """

    def told(function, problem: str | None, first: tuple[int, Status] | None = None) -> str:
        watch = mock.Mock(problem=None, status=SimpleNamespace(blamed=[]), **{"raised_before.return_value": first})
        watch.find_cause.return_value = problem
        undo = _report_exceptions(watch, 0)
        try:
            function()
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
        finally:
            undo()
        return capsys.readouterr().err

    return told


def test_a_collective_of_torch_that_fails_names_the_rank_that_was_killed(told):
    (line,) = told(gathers, KILLED).splitlines()
    assert line.startswith("rank 0 ends at") and line.endswith(
        f"(gathers, from line {LINE}) (RuntimeError: Connection closed by peer): {KILLED}"
    )


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
