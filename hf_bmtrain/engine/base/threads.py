"""Jobs for several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

_THREADS = 8  # zlib and the system calls release the interpreter


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call `jobs`, several at a time, and return their results in order. Raises the first error when none is running.

    A ThreadPoolExecutor would refuse jobs once the script has ended, when a thread may still be saving.
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
    for thread in threads:
        thread.start()
    while threads:
        try:
            threads[-1].join()
            threads.pop()
        except BaseException as error:  # an interrupt: the caller closes the files, so wait all the same
            problems.append(error)
    if problems:
        raise problems[0]
    return results
