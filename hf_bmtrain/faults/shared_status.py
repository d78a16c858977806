"""Share each rank's status text and collective logs, so that other ranks can read them even if that rank hangs.

A collective log lists the operations that a rank has issued. Ranks of the same host read each other's status text and
logs from shared memory. Ranks of other hosts read only the status text, from the launcher's store (torch's TCPStore).
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
"""The size in bytes of each of the two text areas of a page.

Each rank has a page of shared memory. It contains, one after the other: the number of status texts that the rank has
written so far (8 bytes); two text areas, each with the length of a status text (8 bytes) and the text in UTF-8; and
_JOURNALS collective logs of WORDS words of 8 bytes.
"""
LONGEST_TEXT = _TEXT_BYTES - 8
"""The maximum length of a status text in a page, in bytes of UTF-8."""
_JOURNALS = 8
_JOURNALS_START = 8 + 2 * _TEXT_BYTES
_PAGE_BYTES = _JOURNALS_START + _JOURNALS * WORDS * 8
_KEY = "board/{}"


class SharedStatus:
    """Writes this rank's status text and collective logs to shared memory, and reads the texts of other ranks.

    The status text says what a rank is doing, and how its program has ended. Other ranks read it to report a rank that
    hangs or fails. A collective log lists the operations that a rank has issued. Ranks of the same host compare their
    logs.

    Each rank has a page (a region of the shared memory). All ranks of a host map all pages of this host, so the page of
    a suspended or killed process can still be read, and no server is needed. If there are several hosts, or if the
    memory cannot be mapped, each rank also writes its text to the launcher's store (torch's TCPStore).

    Attributes:
        neighbours: the other ranks of this host.
        lost: whether two attempts in a row to reach the launcher's store have failed. The store is then no longer used.
    """

    def __init__(self, control: ObjectComm, rank: int) -> None:
        """Map the shared memory of this host's ranks, which has a page (a region) for each of these ranks.

        Collective: every rank must call it.

        Args:
            control: exchanges Python objects between the ranks.
            rank: this rank.
        """
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
        """Map a file into the memory of all ranks of this host. The file has a page (a region) for each of these ranks.

        Collective: every rank must call it. A page contains the rank's status text and logs of operations. If a rank of
        this host cannot map the file, no rank of this host uses the file.
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
            _log.info(
                "rank %d cannot share memory with the other ranks of its host (%s), so these ranks report their status "
                "through the launcher's store instead. Training is not affected, but differences between the ranks' "
                "operations are detected later",
                self._rank,
                error,
            )
        mapped = self._control.gather(memory is not None)
        if path is not None and self._rank == ranks[0]:
            os.unlink(path)  # the name is no longer needed: memory into which the file is mapped stays valid
        if memory is not None and all(mapped[rank] for rank in ranks):
            for number, rank in enumerate(ranks):
                self._pages[rank] = memory[number * _PAGE_BYTES : (number + 1) * _PAGE_BYTES]

    def add(self, collective_log: CollectiveLog) -> None:
        """Move a collective log to this rank's page of shared memory, where other ranks can read it.

        A collective log lists the operations that this rank has issued on one communicator. After this call, the log
        compares each new operation, before it is issued, with the logs of two neighbours: the previous and the next
        rank of this host that use the communicator (the last and the first rank are neighbours too). If the logs
        differ, RuntimeError is raised. Two neighbours are enough: if the logs of any two ranks differ, then the logs of
        some two adjacent ranks differ too.

        Every rank must add its logs in the same order. At the time of this call, the log must have the same entries on
        all ranks that use the communicator. Only the first 8 logs are shared: calls for further logs do nothing. If
        there is no shared memory, no call does anything. Differences in logs that are not shared are found only when
        the ranks send each other their last operations.
        """
        number, self._collective_logs = self._collective_logs, self._collective_logs + 1
        if self._pages and number < _JOURNALS:
            start = _JOURNALS_START + number * WORDS * 8
            ranks = sorted(set(self._pages).intersection(collective_log.ranks or self._pages))
            memories = [self._pages[rank][start : start + WORDS * 8].cast("Q") for rank in ranks]
            mine = ranks.index(self._rank)
            nearest = {(mine + step) % len(ranks) for step in (1, -1)} - {mine}
            collective_log.publish(memories[mine], {ranks[place]: memories[place] for place in nearest})

    def show(self, text: str) -> None:
        """Publish `text` as this rank's status, in place of its previous text. Any thread may call this method.

        The ranks of this host read the text from shared memory, which stores only its first LONGEST_TEXT bytes. If
        there are other hosts, or shared memory cannot be used, the full text is also written to the launcher's store.
        """
        if self._pages:
            with self._writing:
                _write(self._pages[self._rank], text.encode()[:LONGEST_TEXT])
        if self._several_hosts or not self._pages:
            self._ask(self._control.show, _KEY.format(self._rank), text)

    def read(self, rank: int) -> str | None:
        """Return the latest status text of `rank`, or None if there is none, or the launcher's store cannot be reached.

        If `rank` runs on this host, and the ranks of this host could map their shared memory, the text is read from
        this memory. Otherwise, it is read from the launcher's store (torch's TCPStore).
        """
        if rank in self._pages:
            return _read(self._pages[rank])
        return self._ask(self._control.look, _KEY.format(rank))

    def _ask(self, function: Callable[..., str | None], *arguments: str) -> str | None:
        for last in () if self.lost else (False, True):  # two attempts, because a connection may fail once
            try:
                return function(*arguments)
            except RuntimeError as error:
                _log.debug("rank %d cannot reach the launcher's store: %s", self._rank, error)
                self.lost = last
        return None


def _place() -> tuple[str, ...]:
    """Return a key that identifies this process's host and container.

    Processes with equal keys can map the same files into memory, and refer to each other by the same process ids.
    """
    names = [socket.gethostname(), tempfile.gettempdir()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/mnt"):
        try:
            names.append(os.readlink(path) if "/ns/" in path else open(path).read().strip())
        except OSError:
            names.append("")
    return tuple(names)


def _create(nbytes: int) -> str | None:
    """Create a file of `nbytes` zero bytes, in /dev/shm if possible. Return its path, or None if that fails."""
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
    """Write `data`, a status text in UTF-8, to a page of shared memory, as its latest text.

    A page has two areas for texts. `data` is written to the area that does not contain the latest text. Then the page's
    count of texts is incremented, so that readers use the new text. If the process is suspended or killed before the
    increment, readers still use the previous text.

    page: this rank's page. It begins with the count, and the two areas follow.
    """
    count: Any = page[:8].cast("Q")
    start = 8 + (count[0] + 1) % 2 * _TEXT_BYTES
    page[start + 8 : start + 8 + len(data)] = data
    page[start : start + 8].cast("Q")[0] = len(data)  # pyright: ignore[reportArgumentType]
    count[0] += 1


def _read(page: memoryview) -> str | None:
    """Return the latest status text in a page of shared memory, or None if there is none.

    If the page's rank writes a new text while this function reads, the function reads again.
    """
    count: Any = page[:8].cast("Q")
    while before := count[0]:
        start = 8 + before % 2 * _TEXT_BYTES
        length: Any = page[start : start + 8].cast("Q")
        data = bytes(page[start + 8 : start + 8 + min(length[0], _TEXT_BYTES)])
        if count[0] == before:
            return data.decode(errors="replace")
    return None
