"""What is logged while ranks wait for one that is slow or stuck."""

import logging
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from hf_bmtrain.engine.comm.collective_log import CollectiveLog
from hf_bmtrain.engine.runtime.monitor import EXIT
from hf_bmtrain.faults.meeting import hang_seconds
from hf_bmtrain.faults.status import Status
from hf_bmtrain.faults.watch import _DEVICE, Watch


class Waiting:
    """Rank 0's watch, with as many other ranks as statuses are given, by time since rank 0 began to wait."""

    def __init__(self, *others: Status, waits: str = "all-gather of 8 elements") -> None:
        self.begun = self.now = 1e9
        self.others = dict(enumerate(others, 1))
        self.watch = Watch()
        self.watch._control = SimpleNamespace(size=1 + len(others), timeout=1800.0, collective_log=CollectiveLog("c"))
        self.watch._board = SimpleNamespace(read=self.read, neighbours=[])
        self.watch.status = Status(place="train.py:7 (main)", waits=waits, waits_since=self.begun)

    def read(self, rank: int) -> str:
        status = self.watch.status if rank == 0 else self.others[rank]
        status.written = self.now
        return status.to_text()

    def look(self, seconds: float) -> str | None:
        self.now = self.begun + seconds
        with mock.patch("time.time", return_value=self.now):
            return self.watch._of_all()


def loading(since: float, moved: float = 0.0, place: str = "data.py:3 (read)") -> Status:
    return Status(place=place, since=since, task="in its data loader", moved=moved)


@pytest.fixture
def said(caplog):
    """The warnings at each of some seconds after rank 0 began to wait."""

    def said(waiting: Waiting, *seconds: float) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_bmtrain"):
            assert not any(waiting.look(each) for each in seconds)
        return [record.getMessage() for record in caplog.records]

    return said


def test_a_rank_is_named_within_ten_seconds_by_default(said):
    assert hang_seconds() == 8
    waiting = Waiting(loading(1e9 - 1))
    assert said(waiting, 1, 5, 7) == []
    (line,) = said(waiting, 8, 9, 10, 29)
    assert line == (
        "No progress for 8 s: rank 1 is at data.py:3 (read), for 9 s, in its data loader, which is slow or stuck. "
        "rank 0 waits for all-gather of 8 elements at train.py:7 (main)."
    )


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (loading(1e9 + 20, place="data.py:9 (parse)"), "22 s ago it was at data.py:3 (read)."),
        (loading(1e9, moved=1e9 + 25), "it has run other code in the last 22 s, so it may only be slow."),
        (loading(1e9, moved=1e9 + 2), "it has not moved in the last 22 s."),
    ],
)
def test_after_thirty_seconds_it_is_said_what_has_changed(said, later, words):
    waiting = Waiting(loading(1e9))
    assert len(said(waiting, 8)) == 1
    waiting.others[1] = later
    (line,) = said(waiting, 30, 31, 59)
    assert line.startswith("No progress for 30 s: rank 1 is at data.py:") and f"slow or stuck; {words}" in line
    assert len(said(waiting, 60, 61, 119)) == 1 and len(said(waiting, 120, 239)) == 1


def test_an_operation_of_torch_ends_when_every_other_rank_has_left(said):
    """Such as `if rank == 0: trainer.evaluate()`. Another rank that still runs may belong to its subgroup."""
    left = Status(ended="has left the program", waits=repr(EXIT), place="train.py:3 (main)")
    running = Status(place="train.py:9 (main)", since=1e9)
    alone = Waiting(left, left, waits="torch.distributed.all_gather in evaluate")
    assert alone.look(7) is None
    assert alone.look(8).startswith(
        "No progress for 8 s: rank 1 has left the program; rank 2 has left the program. rank 0 waits for torch."
        "distributed.all_gather in evaluate at train.py:7 (main). No other rank can join this operation any more. If "
        "the call is inside `if rank == 0:`, take it out"
    )
    for others, waits in (
        ((left, running), "torch.distributed.all_gather"),
        ((left, left), "all-gather of 8 elements"),
        ((Status(ended="has left the program"),), "torch.distributed.all_gather"),  # its device may still work
    ):
        assert len(said(Waiting(*others, waits=waits), 8)) == 1


def test_what_was_said_of_an_earlier_wait_is_no_change(said):
    """A rank that is slow at every step is described anew."""
    waiting = Waiting(loading(1e9))
    said(waiting, 8)
    waiting.watch._control.collective_log.note(1)  # an operation: the wait is over
    with mock.patch.object(Status, "look"), mock.patch("time.time", return_value=1e9 + 20):
        waiting.watch._observe()
    assert waiting.watch.status.waits_since == 1e9 + 20
    (line,) = said(waiting, 28)
    assert "in its data loader, which is slow or stuck. rank 0" in line


@pytest.mark.parametrize(("since", "reported"), [(1e9 + 7, False), (1e9 + 1, True)])
def test_ranks_that_all_wait_are_reported_once_the_last_has_waited(said, since, reported):
    """The last one may have come to the others just now."""
    waiting = Waiting(Status(place="save.py:3 (main)", waits="'save'", waits_since=since))
    lines = said(waiting, 8)
    assert ["in operations that do not match" in line for line in lines] == [True] * reported
    assert len(said(waiting, 12)) == (not reported)


def test_a_status_from_before_a_stop_is_not_taken_for_one_of_now(said):
    waiting = Waiting(Status(place="save.py:3 (main)", waits="'save'", waits_since=1e9))
    waiting.read = waiting.watch._board.read = lambda rank: waiting.others[1].to_text()  # not written again
    waiting.others[1].written = 1e9 + 3.5
    assert said(waiting, 8) == []
    (line,) = said(waiting, 10)
    assert "rank 1 was last seen at save.py:3 (main); it has been silent for 6 s" in line


def test_a_rank_that_was_not_looked_at_has_not_waited(said):
    """After a stop, or native code that held the interpreter lock, its old operation may be just about to end."""
    waiting = Waiting(Status())
    waiting.watch._control.collective_log.note(1)
    other = Waiting(Status())
    other.watch.status.waits = "all-gather of 8 elements"
    look = mock.patch.object(Status, "look", lambda status, thread: setattr(status, "written", time.time()))
    for later in (0, 1, 5):  # it did not run between the last two
        with look, mock.patch("time.time", return_value=1e9 + later):
            other.watch._observe()
    waiting.others[1] = other.watch.status
    waiting.read = waiting.watch._board.read = lambda rank: (
        waiting.watch.status if rank == 0 else waiting.others[1]
    ).to_text()
    waiting.watch.status.written = 1e9 + 8
    assert said(waiting, 8) == []
    for later in (6, 7, 8, 9, 10, 11):
        with look, mock.patch("time.time", return_value=1e9 + later):
            other.watch._observe()
    waiting.watch.status.written = 1e9 + 11
    (line,) = said(waiting, 11)
    assert "in operations that do not match" in line


def test_ranks_that_all_compute_are_not_reported(said):
    waiting = Waiting(Status(place="train.py:7 (main)", waits=_DEVICE), waits=_DEVICE)
    assert said(waiting, 8, 100) == []


def test_a_rank_on_whose_device_another_waits_is_named(said):
    """In a collective of torch.distributed, which returns before it is complete."""
    (line,) = said(Waiting(Status(place="data.py:3 (read)", since=1e9), waits=_DEVICE), 8)
    assert "rank 1 is at data.py:3 (read), for 8 s, running code" in line and "rank 0 waits for its device at" in line
    (line,) = said(Waiting(Status(place="train.py:9 (main)", since=1e9, waits=_DEVICE)), 8)
    assert "rank 1 is at train.py:9 (main), for 8 s, waiting for its device: slow work, or a collective of" in line


def test_a_device_counts_as_waited_for_once_the_program_has_not_moved():
    watch = Waiting(Status()).watch
    watch._busy = lambda: True
    watch.status = Status()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    watch._program = thread.ident
    begin = time.time()
    try:
        for later, waits in ((0, ""), (4, ""), (6, _DEVICE), (7, _DEVICE)):
            with mock.patch("time.time", return_value=begin + later):
                watch._observe()
            assert watch.status.waits == waits
        assert watch.status.waits_since == begin
    finally:
        release.set()
        thread.join()
