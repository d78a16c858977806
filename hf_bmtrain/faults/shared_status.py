"""A status text and the collective logs of each rank, which the other ranks can read without waiting for that rank.

Ranks of one host read them from shared memory. Ranks of other hosts read only the text, from the launcher's store.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from ..engine.comm.collective_log import WORDS, CollectiveLog
from ..engine.comm.object_comm import ObjectComm

_log = logging.getLogger("hf_bmtrain")
_TEXT_BYTES = 32 << 10
"""The size of each of the two text areas of a page: 8 bytes for the length of the text, then the text in UTF-8.

A page consists of 8 bytes for the number of texts written so far, two text areas, and _JOURNALS collective logs of
WORDS words of 8 bytes each.
"""
_JOURNALS = 8
_JOURNALS_START = 8 + 2 * _TEXT_BYTES
_PAGE_BYTES = _JOURNALS_START + _JOURNALS * WORDS * 8
_KEY = "board/{}"


class SharedStatus:
    """One page of shared memory per rank, with its status text and collective logs, which others can read at any time.

    The ranks of a host map each other's pages. So the page of a stopped or killed process can still be read, and no
    server is needed. If there are several hosts, each rank also writes its text to the launcher's store.

    Attributes:
        neighbours: the other ranks of this host.
        lost: whether the store could not be reached. It is not asked again then.
    """

    def __init__(self, control: ObjectComm, rank: int) -> None:
        """Map the pages of this host's ranks. Collective: every rank must call it."""
        self._control, self._rank, self._collective_logs = control, rank, 0
        self.lost = False
        places = control.gather(_place())
        self.neighbours = [r for r, place in enumerate(places) if place == places[rank] and r != rank]
        self._several_hosts = len(self.neighbours) + 1 < control.size
        self._pages: dict[int, memoryview] = {}
        self._writing = threading.Lock()
        if control.size > 1:
            self._map()

    def _map(self) -> None:
        """Map one file with a page for each rank of this host. If a rank cannot, no rank does.

        Collective: every rank must call it.
        """
        ranks = sorted([self._rank, *self.neighbours])
        path = _create(len(ranks) * _PAGE_BYTES) if self._rank == ranks[0] else None
        path = self._control.gather(path)[ranks[0]]
        memory = None
        try:
            if path is not None:
                with open(path, "r+b") as file:
                    memory = memoryview(mmap.mmap(file.fileno(), len(ranks) * _PAGE_BYTES))
        except OSError as error:
            _log.info("rank %d cannot map the shared status pages and uses the store: %s", self._rank, error)
        mapped = self._control.gather(memory is not None)
        if path is not None and self._rank == ranks[0]:
            os.unlink(path)  # the mapped memory stays valid
        if memory is not None and all(mapped[rank] for rank in ranks):
            for number, rank in enumerate(ranks):
                self._pages[rank] = memory[number * _PAGE_BYTES : (number + 1) * _PAGE_BYTES]

    def add(self, collective_log: CollectiveLog) -> None:
        """Move a log to this rank's page, and compare each new entry with the logs of the two adjacent ranks.

        Adjacent ranks are enough, because if any two ranks of a host differ, two adjacent ranks do. More comparisons
        would cost time in every operation. Every rank must add the same logs in the same order, with equal entries so
        far. Only the first _JOURNALS logs are shared.
        """
        number, self._collective_logs = self._collective_logs, self._collective_logs + 1
        if self._pages and number < _JOURNALS:
            start = _JOURNALS_START + number * WORDS * 8
            ranks = sorted(self._pages)
            memories = [self._pages[rank][start : start + WORDS * 8].cast("Q") for rank in ranks]
            mine = ranks.index(self._rank)
            nearest = {(mine + step) % len(ranks) for step in (1, -1)} - {mine}
            collective_log.publish(memories[mine], {ranks[place]: memories[place] for place in nearest})

    def show(self, text: str) -> None:
        """Replace this rank's text, cut to the size of a text area. Any thread may call it."""
        if self._pages:
            with self._writing:
                _write(self._pages[self._rank], text.encode()[: _TEXT_BYTES - 8])
        if self._several_hosts or not self._pages:
            self._ask(self._control.show, _KEY.format(self._rank), text)

    def read(self, rank: int) -> str | None:
        """Return the latest text of `rank`, or None if it has not written one or cannot be read any more."""
        if rank in self._pages:
            return _read(self._pages[rank])
        return self._ask(self._control.look, _KEY.format(rank))

    def _ask(self, function: Callable[..., str | None], *arguments: str) -> str | None:
        for last in () if self.lost else (False, True):  # a connection may fail once
            try:
                return function(*arguments)
            except RuntimeError as error:
                _log.debug("rank %d cannot reach the store: %s", self._rank, error)
                self.lost = last
        return None


def _place() -> tuple[str, ...]:
    """Return a key that is equal for processes that can share memory and can see each other's process ids."""
    names = [socket.gethostname(), tempfile.gettempdir()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/mnt"):
        try:
            names.append(os.readlink(path) if "/ns/" in path else open(path).read().strip())
        except OSError:
            names.append("")
    return tuple(names)


def _create(nbytes: int) -> str | None:
    """Create a file of `nbytes` zeros, in /dev/shm if possible. Return its path, or None if there is no space."""
    for folder in ("/dev/shm", tempfile.gettempdir()):
        try:
            handle, path = tempfile.mkstemp(prefix="hf_bmtrain_board_", dir=folder)
        except OSError:
            continue
        try:
            # Reserve the space now. Otherwise, a write to the mapped memory raises SIGBUS if the disk is full.
            os.posix_fallocate(handle, 0, nbytes)
            return path
        except OSError:
            os.unlink(path)
        finally:
            os.close(handle)
    return None


def _write(page: memoryview, data: bytes) -> None:
    """Write `data` to the unused text area, then increment the count, so that readers use this area.

    If the process is stopped or killed in between, readers still see the previous text.
    """
    count: Any = page[:8].cast("Q")
    start = 8 + (count[0] + 1) % 2 * _TEXT_BYTES
    page[start + 8 : start + 8 + len(data)] = data
    page[start : start + 8].cast("Q")[0] = len(data)  # pyright: ignore[reportArgumentType]
    count[0] += 1


def _read(page: memoryview) -> str | None:
    """Return the latest text of a page, or None. Read again if the text was replaced meanwhile."""
    count: Any = page[:8].cast("Q")
    while before := count[0]:
        start = 8 + before % 2 * _TEXT_BYTES
        length: Any = page[start : start + 8].cast("Q")
        data = bytes(page[start + 8 : start + 8 + min(length[0], _TEXT_BYTES)])
        if count[0] == before:
            return data.decode(errors="replace")
    return None
