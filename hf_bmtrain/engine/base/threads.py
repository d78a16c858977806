"""Run functions in several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 8  # the jobs (zlib, file access) release the GIL, so several threads run them in parallel


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call the functions `jobs`, without arguments, in up to 8 threads, and return their results in the given order.

    If a job raises, no further jobs are started, and its error is raised after all running jobs have ended. A
    KeyboardInterrupt in the calling thread, or a thread that cannot be started, has the same effect.

    A ThreadPoolExecutor would refuse jobs after the main thread has ended. At that time, another thread may still be
    saving a checkpoint and call this function. So this function starts its own threads.
    """
    results, problems = [None] * len(jobs), []
    remaining, lock = iter(range(len(jobs))), threading.Lock()

    def work() -> None:
        while not problems:
            with lock:
                number = next(remaining, None)
            if number is None:
                return
            try:
                results[number] = jobs[number]()
            except BaseException as error:
                problems.append(error)

    threads = [threading.Thread(target=work, name="hf_bmtrain job") for _ in range(min(_THREADS, len(jobs)))]
    try:
        for thread in threads:
            thread.start()
    except BaseException as error:
        problems.append(error)  # the system has no more threads, or KeyboardInterrupt
    while threads:
        try:
            # A thread without an `ident` has not begun. If it still begins, it finds the problem and starts no job.
            if threads[-1].ident is not None:
                threads[-1].join()
            threads.pop()
        except BaseException as error:
            # For example, KeyboardInterrupt. Keep waiting for the running jobs, because the caller may close their
            # files after the exception.
            problems.append(error)
    if problems:
        raise problems[0]
    return results
