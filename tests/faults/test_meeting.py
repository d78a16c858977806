"""Ranks that meet at the start, and what is logged about those that do not come."""

import logging
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
from torch.distributed import TCPStore

from hf_bmtrain.faults import meeting
from ranks import free_port


@pytest.fixture
def warnings(caplog, monkeypatch):
    """What ranks log when they meet, as threads of this process. late: for each rank, the seconds until it comes."""
    monkeypatch.setenv("HF_BMTRAIN_HANG_SECONDS", "0.5")

    def warnings(*late: float) -> list[str]:
        address, stores = f"tcp://127.0.0.1:{free_port()}", {}

        def come(rank: int) -> None:
            time.sleep(late[rank])
            stores[rank] = meeting.meet(rank, len(late), timedelta(seconds=20), address)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(late))]
        with caplog.at_level(logging.WARNING, "hf_bmtrain"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(stores) == len(late) and None not in stores.values()
        return [record.getMessage() for record in caplog.records]

    return warnings


@pytest.mark.parametrize("given", ["10s", "", "0", "-1", "nan", "-inf"])
def test_seconds_that_are_no_number(monkeypatch, given):
    """With 0, rank 0 could not open its store; with nan, a warning would come at once and every second."""
    monkeypatch.setenv("HF_BMTRAIN_HANG_SECONDS", given)
    with pytest.raises(ValueError, match=f"HF_BMTRAIN_HANG_SECONDS must be a number of seconds, got '{given}'"):
        meeting.hang_seconds()


def test_ranks_that_come_together_log_nothing(warnings):
    assert warnings(0.0, 0.2, 0.1) == []


def test_a_late_rank_is_named_and_again_with_who_has_come(warnings):
    with mock.patch.object(meeting, "REPEAT_SECONDS", 1.5):
        first, second = warnings(0.0, 1.0, 2.5)
    assert "rank 0 has been waiting for 0 s in init_distributed" in first or "waiting for 1 s" in first
    assert "Missing: ranks 1, 2." in first and "Arrived" not in first
    assert "Missing: rank 2." in second and second.endswith("Arrived since the last warning: rank 1.")


def test_a_rank_that_comes_while_another_gives_up_is_there(monkeypatch):
    """Rank 1 has recorded that it is there, but has not been counted yet when the timeout of rank 0 expires."""
    monkeypatch.setenv("HF_BMTRAIN_HANG_SECONDS", "20")
    address, stores, gave_up = f"tcp://127.0.0.1:{free_port()}", {}, threading.Event()

    class LateCount(meeting.TCPStore):
        def add(self, key: str, amount: int) -> int:
            if threading.current_thread().name == "1":
                gave_up.wait(20)
            return super().add(key, amount)

    monkeypatch.setattr(meeting, "TCPStore", LateCount)

    def come(rank: int) -> None:
        stores[rank] = meeting.meet(rank, 2, timedelta(seconds=(2, 20)[rank]), address)
        gave_up.set()

    threads = [threading.Thread(target=come, args=(rank,), name=str(rank)) for rank in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join()
    gave_up.set()
    threads[1].join()
    assert sorted(stores) == [0, 1]


@pytest.mark.parametrize("method", ["add", "compare_set"])
def test_a_rank_whose_connection_breaks_is_not_counted_twice(monkeypatch, method):
    """The store counts the rank, but the answer or the next request is lost, so the rank records its arrival again."""
    monkeypatch.setenv("HF_BMTRAIN_HANG_SECONDS", "0.5")
    address, late, left, stores = f"tcp://127.0.0.1:{free_port()}", (0.0, 0.0, 2.0), {}, []
    failing = {"add": "1", "compare_set": "2"}[method]  # the last rank alone calls compare_set

    def broken(store: TCPStore, *given):
        if threading.current_thread().name == failing and not broken.called:
            broken.called = True
            if method == "add":
                TCPStore.add(store, *given)
            raise RuntimeError("Connection reset by peer")
        return getattr(TCPStore, method)(store, *given)

    broken.called = False
    monkeypatch.setattr(meeting, "TCPStore", type("Breaking", (TCPStore,), {method: broken}))
    begun = time.monotonic()

    def come(rank: int) -> None:
        time.sleep(late[rank])
        stores.append(meeting.meet(rank, len(late), timedelta(seconds=10), address))  # rank 0's runs the server
        left[rank] = time.monotonic() - begun

    threads = [threading.Thread(target=come, args=(rank,), name=str(rank)) for rank in range(len(late))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken.called and sorted(left) == [0, 1, 2]
    assert min(left.values()) >= max(late), "a rank did not wait for the last one"
    assert max(left.values()) < 8, "a rank waited until its timeout"
