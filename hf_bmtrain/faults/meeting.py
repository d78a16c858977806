"""The place where the ranks of a launch first meet, which knows who has not come."""

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
"""For which rank 0, which serves the store, waits for the others to read there who has not come."""
_MET = "met"
_CAUSES = "raised or ended before (its own log says why), hangs, was not started, or was given another address"


def hang_seconds() -> float:
    """Return the seconds after which a rank that does not come is named."""
    return float(os.environ.get("HF_BMTRAIN_HANG_SECONDS", "30"))


def meet(rank: int, size: int, timeout: timedelta, init_method: str) -> TCPStore | None:
    """Wait until every rank has called this, and return the store where they met.

    It must be kept until torch's process group, which uses the same server, is there. Raises RuntimeError, with the
    ranks that did not come, after the timeout; before, one rank warns of them. Returns None at once for an
    `init_method` without a host and a port.
    """
    place = _place(init_method)
    if place is None:
        return None
    begun, store, absent, reason = time.monotonic(), None, [0], ""
    warned, limit = hang_seconds(), timeout.total_seconds()
    for seconds in (min(warned, limit), limit):
        try:
            store = store or _come(place, rank, size, begun + seconds)
            missed = _wait_for_all(store, begun + seconds) or (_give_up(store, size) if seconds == limit else None)
            if missed == []:
                return store
            if missed is not None:
                absent, reason = missed, "a rank has waited for the whole timeout"
                _say_farewell(store, rank)
                break
            reason = "the others have not come"
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
        if store is None and rank == 0:
            raise RuntimeError(f"rank 0: the ranks cannot meet at {place[0]}:{place[1]}. ({reason})")
        absent = [0] if store is None else _absent(store, size)
        if seconds < limit and rank == next(other for other in range(size) if other not in absent):
            status = Status()
            status.look(threading.get_ident())
            _log.warning(
                "rank %d waits in init_distributed at %s, for %.0f s: %s has not come. It is slow, or it %s.",
                rank, status.place, time.monotonic() - begun, _names(absent), _CAUSES,
            )  # fmt: skip
    raise RuntimeError(
        f"rank {rank}: the {size} ranks did not meet in init_distributed: {_names(absent)} did not come within "
        f"{time.monotonic() - begun:.0f} s. It {_CAUSES}. ({reason})"
    )


def _place(init_method: str) -> tuple[str, int] | None:
    """Return host and port, None if there are none."""
    url = urlparse(init_method)
    if url.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return (url.hostname, url.port) if url.scheme == "tcp" and url.hostname and url.port else None


def _come(place: tuple[str, int], rank: int, size: int, end: float) -> TCPStore:
    """Open the store as torch does, but without waiting for the others, and show there that this rank has come."""
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
    """Wait until the store's server answers, at most until `end`. torch logs errors if it waits for that in vain."""
    while True:
        try:
            socket.create_connection(place, timeout=max(0.01, end - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_PAUSE)


def _wait_for_all(store: TCPStore, end: float) -> list[int] | None:
    """Wait until every rank has come or one has given up, at most until `end`. torch would log warnings at the end.

    Returns the ranks that did not come, none if all have, or None if it is not known yet.
    """
    while not store.check([_key("all")]):
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)
    return _ranks_of(store.get(_key("all")))


def _give_up(store: TCPStore, size: int) -> list[int]:
    """Show the ranks that have not come, so that none begins any more. Returns those that the first one has shown."""
    return _ranks_of(store.compare_set(_key("all"), "", " ".join(map(str, _absent(store, size)))))


def _ranks_of(shown: bytes) -> list[int]:
    return [] if shown.decode() == _MET else [int(rank) for rank in shown.decode().split()]


def _say_farewell(store: TCPStore, rank: int) -> None:
    """Note that this rank knows who has not come. Rank 0 waits for the others, whose store ends with its process."""
    end = time.monotonic() + _FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # rank 0 may have ended already
        told = store.add(_key("told"), 1)
        while rank == 0 and told < store.add(_key("count"), 0) and time.monotonic() < end:
            time.sleep(_PAUSE)
            told = store.add(_key("told"), 0)


def _absent(store: TCPStore, size: int) -> list[int]:
    """Return the ranks that have not come: rank 0 if the store is gone, which is in its process."""
    try:
        return [rank for rank in range(size) if not store.check([_key(str(rank))])] or [0]
    except RuntimeError:
        return [0]


def _key(name: str) -> str:
    """Return a key of this attempt: a launcher that starts the ranks again may keep its store."""
    return f"hf_bmtrain/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
