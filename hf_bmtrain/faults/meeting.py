"""The rendezvous of the ranks in `init_distributed`, which names the ranks that do not arrive.

The ranks meet in torch's TCPStore. Each rank that arrives sets a key named by its number and increments "count". The
key "all" is set once: the last rank to arrive sets it to "met", or the first rank to give up sets it to the list of
missing ranks. "told" counts the ranks that have read this list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from datetime import timedelta
from urllib.parse import urlparse

from torch.distributed import TCPStore

from .status import Status

_log = logging.getLogger("hf_bmtrain")
_PAUSE = 0.02
_FAREWELL_SECONDS = 5.0
"""Seconds that rank 0, whose process serves the store, waits for the others to read which ranks are missing."""
REPEAT_SECONDS = 30.0
"""Seconds of waiting after which the second warning is logged."""
_MET = "met"
_CAUSES = "raised or exited earlier (its own log says why), hangs, was not started, or was given another address"


def hang_seconds() -> float:
    """Return the seconds, from HF_BMTRAIN_HANG_SECONDS, after which a warning names a rank that others wait for.

    By default 8, so that a rank is named within 10 s after it has stopped: the watch looks once in a second.
    """
    return float(os.environ.get("HF_BMTRAIN_HANG_SECONDS", "8"))


def meet(rank: int, size: int, timeout: timedelta, init_method: str) -> TCPStore | None:
    """Wait until every rank has called this function, and return the store in which they met. Collective.

    After HF_BMTRAIN_HANG_SECONDS, and again after 30 s, the lowest rank that is waiting logs a warning that names the
    missing ranks.

    Args:
        rank: this rank.
        size: the number of ranks.
        timeout: the time to wait for the others.
        init_method: as for `torch.distributed.init_process_group`.

    Returns:
        The store. Keep it until torch's process group, which uses the same server, has been created. None, without
        waiting, if `init_method` has no host and port.

    Raises:
        RuntimeError: if a rank did not arrive within `timeout`; the error names the missing ranks.
    """
    place = _place(init_method)
    if place is None:
        return None
    begun, store, absent, reason = time.monotonic(), None, [0], ""
    limit, warned = timeout.total_seconds(), []
    for seconds in (*sorted(each for each in (hang_seconds(), REPEAT_SECONDS) if each < limit), limit):
        try:
            store = store or _come(place, rank, size, begun + seconds)
            missed = _wait_for_all(store, begun + seconds)
            if missed is None and seconds == limit:
                missed = _give_up(store, size)
            if missed == []:
                return store
            if missed is not None:
                absent, reason = missed, "One rank has waited for its whole timeout."
                _say_farewell(store, rank)
                break
            reason = "The other ranks have not arrived."
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
        if store is None and rank == 0:
            raise RuntimeError(
                f"rank 0: cannot open the store for init_distributed at {place[0]}:{place[1]}: is the port in use? "
                f"({reason})"
            )
        absent = [0] if store is None else _absent(store, size)
        # `absent` is empty if the last rank has arrived just now.
        if seconds < limit and absent and rank == next(other for other in range(size) if other not in absent):
            status = Status()
            status.look(threading.get_ident())
            arrived = [other for other in warned if other not in absent]
            _log.warning(
                "rank %d has been waiting for %.0f s in init_distributed, at %s. Missing: %s. A missing rank is slow, "
                "or it %s.%s",
                rank, time.monotonic() - begun, status.place, _names(absent), _CAUSES,
                f" Arrived since the last warning: {_names(arrived) if arrived else 'none'}." if warned else "",
            )  # fmt: skip
        warned = absent
    raise RuntimeError(
        f"rank {rank}: not all of the {size} ranks reached init_distributed. Missing: {_names(absent)}, after waiting "
        f"for {time.monotonic() - begun:.0f} s. A missing rank {_CAUSES}. ({reason})"
    )


def _place(init_method: str) -> tuple[str, int] | None:
    """Return the host and port that `init_method` names, None if it names none."""
    url = urlparse(init_method)
    if url.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return (url.hostname, url.port) if url.scheme == "tcp" and url.hostname and url.port else None


def _come(place: tuple[str, int], rank: int, size: int, end: float) -> TCPStore:
    """Open the store as torch does, but without waiting for the others, and note there that this rank has arrived.

    end: the time, by `time.monotonic()`, until which to try.
    """
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_server(place, end)
    left = timedelta(seconds=max(0.01, end - time.monotonic()))
    store = TCPStore(*place, world_size=size, is_master=serves, timeout=left, wait_for_workers=False, multi_tenant=True)
    store.set(_key(str(rank)), "")
    if store.add(_key("count"), 1) == size:
        store.compare_set(_key("all"), "", _MET)
    return store


def _wait_for_server(place: tuple[str, int], end: float) -> None:
    """Wait until the store's server at `place` accepts a connection; raise OSError if none does by the time `end`.

    TCPStore could wait too, but it logs errors if no server answers in time.
    """
    while True:
        try:
            socket.create_connection(place, timeout=max(0.01, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_PAUSE)


def _wait_for_all(store: TCPStore, end: float) -> list[int] | None:
    """Wait until every rank has arrived or one has given up, at most until the time `end`.

    Returns [] if all have arrived, the missing ranks if one has given up, and None if neither has happened by `end`.
    The function polls, because `TCPStore.wait` logs a warning when its time is over.
    """
    while not store.check([_key("all")]):
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)
    return _ranks_of(store.get(_key("all")))


def _give_up(store: TCPStore, size: int) -> list[int]:
    """Store the missing ranks, so that no rank can start any more, and return them.

    If another rank was first, its result counts: the ranks that it stored, or [] if all had arrived just before.
    """
    return _ranks_of(store.compare_set(_key("all"), "", " ".join(map(str, _absent(store, size) or [0]))))


def _ranks_of(shown: bytes) -> list[int]:
    """Return the missing ranks that `shown`, the value of the key "all", lists; [] if it is "met"."""
    return [] if shown.decode() == _MET else [int(rank) for rank in shown.decode().split()]


def _say_farewell(store: TCPStore, rank: int) -> None:
    """Note in the store that this rank has read which ranks are missing.

    Rank 0 then waits, for some seconds at most, until the others have read it, because its process serves the store.
    """
    end = time.monotonic() + _FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # rank 0, whose process serves the store, may have ended
        told = store.add(_key("told"), 1)
        while rank == 0 and told < store.add(_key("count"), 0) and time.monotonic() < end:
            time.sleep(_PAUSE)
            told = store.add(_key("told"), 0)


def _absent(store: TCPStore, size: int) -> list[int]:
    """Return the ranks that have not arrived; [0] also if the store, which rank 0's process serves, does not answer."""
    try:
        return [rank for rank in range(size) if not store.check([_key(str(rank))])]
    except RuntimeError:
        return [0]


def _key(name: str) -> str:
    """Return a key of the store for `name`.

    It has the number of restarts, because a launcher that restarts the ranks may keep the store with its old keys.
    """
    return f"hf_bmtrain/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _names(ranks: list[int]) -> str:
    """Return "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
