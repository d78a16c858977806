"""What ranks show each other, and operations that are refused before they are issued."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import hf_bmtrain as bmt
from cases import full, in_full
from hf_bmtrain.engine.comm.collective_log import WORDS, CollectiveLog, code
from hf_bmtrain.faults import status
from hf_bmtrain.faults.shared_status import SharedStatus
from hf_bmtrain.faults.status import Status
from hf_bmtrain.faults.watch import Watch
from processes import environment
from ranks import Ranks


def published(*entries) -> list[CollectiveLog]:
    """Journals of as many ranks, with memory that all of them read, before their next entries."""
    memories = [memoryview(bytearray(8 * WORDS)).cast("Q") for _ in entries]
    collective_logs = [CollectiveLog("gather") for _ in entries]
    for number, collective_log in enumerate(collective_logs):
        for entry in entries[number]:
            collective_log.note(entry)
        collective_log.publish(memories[number], {r: memory for r, memory in enumerate(memories) if r != number})
        collective_log.explain = lambda collective_log, rank, theirs: (
            f"rank {rank} differs in {collective_log.compare(theirs)}"
        )
    return collective_logs


def test_another_operation_is_refused_before_it_is_issued():
    first, second = published([1, 2], [1, 2])
    first.note(code("all-gather", 12736))
    with pytest.raises(RuntimeError, match=r"rank 0 differs in Difference\(number=3, mine=\d+, theirs=\d+, first=True"):
        second.note(code("all-gather", 4160))
    with pytest.raises(RuntimeError, match="rank 0 differs"):
        second.note(code("all-gather", 12736))
    assert second.told and not first.told


@full
def test_ranks_far_apart_are_compared():
    first, second = published([], [])
    for entry in range(3 * WORDS):
        first.note(entry)
    second.note(0)  # what the first one had here is not kept any more
    for entry in range(3 * WORDS, 3 * WORDS + 5):
        first.note(entry)
    for entry in range(1, 3 * WORDS + 5):
        second.note(entry)
    first.note(5)
    with pytest.raises(RuntimeError):
        second.note(6)


def seen_by_all() -> tuple[list[str | None], list[str]]:
    """The texts that all ranks show, and the lines of this process's memory map that name a file of texts."""
    world = bmt.current_world()
    board = SharedStatus(world.control, world.rank)
    board.show(f"é of rank {world.rank}" + "x" * 100 * world.rank)
    world.gather_objects(None)
    end = time.monotonic() + 5  # the store takes a text without an answer, and other ways may be faster
    while None in (texts := [board.read(rank) for rank in range(world.size)]) and time.monotonic() < end:
        time.sleep(0.01)
    return texts, [line for line in Path("/proc/self/maps").read_text().splitlines() if "hf_bmtrain_board_" in line]


@pytest.mark.parametrize("size", [2, *in_full(3)])
def test_texts_are_read_by_all_ranks_and_leave_no_file(world, size):
    expected = [f"é of rank {rank}" + "x" * 100 * rank for rank in range(size)]
    for texts, mapped in world(size)(seen_by_all):
        assert texts == expected
        assert len(mapped) == 2  # the world's own texts, and those of `seen_by_all`
        assert all(line.endswith("(deleted)") for line in mapped), mapped


def read_from_a_stopped_rank() -> int | None:
    """Read, while rank 1 writes without end and is stopped again and again: how many of 200 times there was no text."""
    world = bmt.current_world()
    board = SharedStatus(world.control, world.rank)
    board.show("x" * 20_000)
    identifier = world.gather_objects(os.getpid())[1]
    if world.rank == 1:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            board.show("x" * 20_000)
    missed = 0
    if world.rank == 0:
        for _ in range(200):
            os.kill(identifier, signal.SIGSTOP)
            try:
                missed += board.read(1) != "x" * 20_000
            finally:
                os.kill(identifier, signal.SIGCONT)
            time.sleep(0.001)
    world.gather_objects(None)
    return missed


@full
def test_a_rank_that_is_stopped_while_it_writes_is_read(world):
    assert world(2)(read_from_a_stopped_rank) == [0, 0]


def seen_at_the_start() -> str:
    world = bmt.current_world()
    watch = Watch()
    with mock.patch.object(Watch, "_compare"):  # the logs stay with the watch of this world
        watch.open(world.control, world.rank, lambda: None, lambda: False)
    world.gather_objects(None)
    text = watch.missing()
    world.gather_objects(None)
    watch.stop()
    return text


def test_a_rank_is_seen_as_soon_as_it_has_started(world):
    assert not any("not reported its status" in text for text in world(2)(seen_at_the_start))


def without_shared_memory():
    with mock.patch("tempfile.mkstemp", side_effect=OSError):
        return seen_by_all()


@full
def test_texts_go_through_the_store_where_no_memory_is_shared(world):
    for texts, mapped in world(2)(without_shared_memory):
        assert texts == ["é of rank 0", "é of rank 1" + "x" * 100]
        assert len(mapped) == 1  # the world's own texts


def test_a_store_that_ends_is_asked_no_more():
    control = mock.Mock(size=1, **{"gather.return_value": [("here",)], "look.side_effect": RuntimeError("Broken pipe")})
    board = SharedStatus(control, 0)
    assert not board.lost and board.read(0) is None and board.lost
    board.show("status")
    assert control.look.call_count == 2 and not control.show.called


def one_gathers_another_size():
    world = bmt.current_world()
    for _ in range(3):
        world.gather.all_gather(torch.empty(2 * 8), torch.ones(8)).wait()
    if world.rank == 1:
        time.sleep(0.5)
    numel = 4160 if world.rank else 12736
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0: all-gather of 25472 elements.*rank 1: all-gather of 8320 elements"):
        world.gather.all_gather(torch.empty(2 * numel), torch.ones(numel)).wait()
    return time.monotonic() - begin


@full
def test_operations_of_other_sizes_are_errors_of_python():
    """gloo would end the process."""
    ranks = Ranks(2)
    assert all(seconds < 5 for seconds in ranks(one_gathers_another_size))
    ranks.stop()


def test_the_place_is_the_users_line(tmp_path):
    mine = Status()
    mine.look(threading.get_ident())
    assert "test_board.py:" in mine.place
    assert "(test_the_place_is_the_users_line" in mine.place and mine.waits == "" and not mine.task
    again = Status.from_text(mine.to_text())
    assert again == mine


BARRIER = """
import threading, time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist
from hf_bmtrain.engine.comm.object_comm import ObjectComm
from hf_bmtrain.faults.status import Status, line_now

control, never = ObjectComm(1, timedelta(seconds=9)), SimpleNamespace(is_completed=threading.Event().wait)
control._group = "other ranks"
with mock.patch.object(dist, "all_reduce", return_value=never):
    thread = threading.Thread(target=control.barrier, args=("save",), daemon=True)
    thread.start()
    time.sleep(0.5)
status = Status()
status.look(thread.ident)
print(status.waits, line_now())
"""


def test_folders_named_like_torch_or_the_package(tmp_path):
    """The package's own waits were taken for those of torch, and the lines of the program for the package's."""
    scripts = tmp_path / "pytorch" / "hf_bmtrain_experiments"
    scripts.mkdir(parents=True)
    (tmp_path / "pytorch" / "hf_bmtrain").symlink_to(Path(bmt.__file__).parent)
    (scripts / "train.py").write_text(BARRIER)
    variables, command = environment(), [sys.executable, str(scripts / "train.py")]
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "pytorch"), variables["PYTHONPATH"]])
    told = subprocess.run(command, cwd=scripts, env=variables, stdout=subprocess.PIPE, text=True, timeout=200).stdout
    assert told == f"'save' train.py:{len(BARRIER.splitlines())} (<module>)\n"


def read_a_long_status() -> list[tuple[str, str]]:
    world = bmt.current_world()
    watch = Watch()
    with mock.patch.object(Watch, "_compare"):  # the logs stay with the watch of this world
        watch.open(world.control, world.rank, lambda: None, lambda: False)
    for each in range(40):
        world.control.occasions[each] = "\N{GRINNING FACE}" * 500
    watch.status.problem = f"rank 1 raised ValueError: {'文' * 6000}"
    watch.end(f"raised ValueError: {'文' * 6000}")
    world.gather_objects(None)
    found = [(status.ended[:20], str(status.problem)[:20]) for _, status in sorted(watch._read_all().items())]
    world.gather_objects(None)
    watch.stop()
    for each in range(40):
        del world.control.occasions[each]
    return found


def test_a_status_with_long_texts_is_read_by_all_ranks(world):
    """A text that was cut off could not be read: every rank that waited failed in its excepthook, without a reason."""
    assert world(2)(read_a_long_status) == [[("raised ValueError: 文", "rank 1 raised ValueE")] * 2] * 2


def test_a_watch_that_fails_says_so(world, caplog):
    watch = Watch()
    with mock.patch.object(Watch, "_look", side_effect=ValueError("broken")), mock.patch.object(watch._stopped, "wait"):
        watch._stopped.wait.return_value = False
        watch._run()
    assert "rank 0 no longer watches the other ranks" in caplog.text and "ValueError: broken" in caplog.text


@full
def test_the_condition_of_a_process():
    assert status.condition(os.getpid()) == ""
    child = os.fork()
    if not child:
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    assert status.condition(child) == "stopped"
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert status.condition(child) == "gone"
