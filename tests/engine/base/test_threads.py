"""Jobs in threads: the caller gets an error only when no job runs any more, because it may close the jobs' files."""

import threading
import time

import pytest

from hf_bmtrain.engine.base.threads import in_threads


@pytest.mark.parametrize("begins", [False, True], ids=["not started", "started"])
def test_jobs_have_ended_if_a_thread_cannot_start(monkeypatch, begins):
    """As if the system had no more threads, or as with a KeyboardInterrupt while a thread starts."""
    threads, ended = [], []

    class Scarce(threading.Thread):
        def start(self):
            threads.append(self)
            if len(threads) < 3 or begins:
                super().start()
            if len(threads) == 3:
                raise RuntimeError("can't start new thread")

    def job():
        time.sleep(0.2)
        ended.append(None)

    monkeypatch.setattr(threading, "Thread", Scarce)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        in_threads([job] * 20)
    count = len(ended)
    assert len(threads) == 3 and count <= 3, "a thread began another job"
    time.sleep(0.5)
    assert len(ended) == count, "a job ran after the error"
