"""Wait for all ranks in `init_distributed`, and name the ranks that do not arrive.

The ranks communicate through keys of torch's TCPStore. Each rank that arrives sets a key that ends in its rank, and
increments the key "count" (again if its connection breaks then). The key "all" is set only once. If all ranks arrive in
time, the last of them sets it to "met". If the timeout of a waiting rank expires first, that rank sets it to the list
of missing ranks, or to "met" if none is missing. The key "told" counts the ranks that have read this list.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from datetime import timedelta
from urllib.parse import urlparse

from torch.distributed import TCPStore

from .status import line_now

_log = logging.getLogger("hf_bmtrain")
_PAUSE = 0.02
_FAREWELL_SECONDS = 5.0
"""Maximum time in seconds that rank 0 waits until the other ranks have read the list of missing ranks. The list is in
torch's TCPStore, whose server may run in the process of rank 0, which is about to end."""
REPEAT_SECONDS = 30.0
"""The number of seconds for which a rank is waited for before the second warning about it. `Watch` uses twice
HF_BMTRAIN_HANG_SECONDS instead if that is longer."""
_MET = "met"
_CAUSES = (
    "raised an exception or exited earlier (its own log says why), hangs, was not started, or was given another address"
)


def hang_seconds() -> float:
    """Return how many seconds ranks wait for another rank before a warning names that rank.

    This is the value of the environment variable HF_BMTRAIN_HANG_SECONDS, or 8 if it is not set. The waiting ranks
    check once a second, so by default a rank is named within 10 s after it has stopped. Raises ValueError if the value
    is not a number above 0.
    """
    given = os.environ.get("HF_BMTRAIN_HANG_SECONDS", "8")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:  # also true for nan
        raise ValueError(
            f"HF_BMTRAIN_HANG_SECONDS must be a number of seconds, got {given!r}. Set it to a number above 0, or "
            "unset it"
        )
    return seconds


def meet(rank: int, size: int, timeout: timedelta, init_method: str) -> TCPStore | None:
    """Wait until every rank has called this function, and return the TCPStore that the ranks used for this.

    Collective: every rank must call it. `init_distributed` calls it before it creates torch's process group. If ranks
    are missing, the lowest of the waiting ranks logs up to two warnings that name the missing ranks: when it has waited
    for HF_BMTRAIN_HANG_SECONDS (8 by default), and when it has waited for 30 s.

    Args:
        rank: this rank.
        size: the number of ranks.
        timeout: the maximum time to wait for the other ranks.
        init_method: the URL with the address of the store, as for `torch.distributed.init_process_group`.

    Returns:
        The store. Keep a reference to it until torch's process group has been created, which uses the same server. With
        torchrun, the server usually runs in the launcher. Otherwise, it runs in rank 0, and ends when rank 0 deletes
        this object. If `init_method` does not give a host and port, as with "file://", this function does not wait,
        and returns None.

    Raises:
        RuntimeError: a rank did not arrive within `timeout`. The error names the missing ranks.
        RuntimeError: this is rank 0, and it cannot open the store. The error gives the address of the store.
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
                absent, reason = missed, "The timeout of one of the waiting ranks has expired."
                _say_farewell(store, rank)
                break
            reason = "The other ranks have not arrived."
        except (RuntimeError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
        if store is None and rank == 0:
            raise RuntimeError(
                f"rank 0 cannot open the store for init_distributed at {place[0]}:{place[1]}. The port may be in use: "
                f"choose a different port. ({reason})"
            )
        absent = [0] if store is None else _absent(store, size)
        # Only the lowest waiting rank logs the warning. `absent` is empty if the last missing rank has just arrived.
        if seconds < limit and absent and rank == next(other for other in range(size) if other not in absent):
            arrived = [other for other in warned if other not in absent]
            _log.warning(
                "rank %d has been waiting for %.0f s in init_distributed, at %s. Missing: %s. A missing rank is slow, "
                "or it %s.%s",
                rank, time.monotonic() - begun, line_now(), _names(absent), _CAUSES,
                f" Arrived since the last warning: {_names(arrived) if arrived else 'none'}." if warned else "",
            )  # fmt: skip
        warned = absent
    raise RuntimeError(
        f"rank {rank} waited for {time.monotonic() - begun:.0f} s, but not all of the {size} ranks reached "
        f"init_distributed. Missing: {_names(absent)}. A missing rank {_CAUSES}. ({reason})"
    )


def _place(init_method: str) -> tuple[str, int] | None:
    """Return the host and port of torch's TCPStore, or None if `init_method` does not give them.

    "tcp://" URLs contain host and port; for "env://", these are in MASTER_ADDR and MASTER_PORT.

    init_method: a URL, as for `torch.distributed.init_process_group`.
    """
    url = urlparse(init_method)
    if url.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return (url.hostname, url.port) if url.scheme == "tcp" and url.hostname and url.port else None


def _come(place: tuple[str, int], rank: int, size: int, end: float) -> TCPStore:
    """Open torch's TCPStore in `init_distributed`, and record in it that this rank has arrived.

    This function does not wait for the other ranks. Raises RuntimeError or OSError if the store cannot be opened.

    place: the host and port of the store.
    rank: this process's rank.
    size: the number of ranks.
    end: the time, on the clock of `time.monotonic()`, until which to try to open the store.
    """
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not serves:
        _wait_for_server(place, end)
    left = timedelta(seconds=max(0.01, end - time.monotonic()))
    store = TCPStore(*place, world_size=size, is_master=serves, timeout=left, wait_for_workers=False, multi_tenant=True)
    store.set(_key(str(rank)), "")
    # If the connection breaks after a rank was counted, the rank calls this function again and is counted twice. So
    # check the ranks' own keys, too. The count only saves this check, of `size` keys, on the ranks that come early.
    if store.add(_key("count"), 1) >= size and store.check([_key(str(other)) for other in range(size)]):
        store.compare_set(_key("all"), "", _MET)
    return store


def _wait_for_server(place: tuple[str, int], end: float) -> None:
    """Wait until the store's server at `place`, a host and a port, accepts a connection.

    Raises OSError if there is no connection by the time `end`, on the clock of `time.monotonic()`. TCPStore itself
    could wait, but it logs errors if no server answers in time.
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
    """Wait until all ranks have arrived in `init_distributed`, the timeout of a rank expires, or `end` is reached.

    Returns [] if all ranks have arrived, the list of missing ranks if a rank's timeout has expired, and otherwise None.
    This function polls, because `TCPStore.wait` logs a warning at the end of its timeout.

    store: the store in which each rank records that it has arrived.
    end: a time on the clock of `time.monotonic()`.
    """
    while not store.check([_key("all")]):
        if time.monotonic() >= end:
            return None
        time.sleep(_PAUSE)
    return _ranks_of(store.get(_key("all")))


def _give_up(store: TCPStore, size: int) -> list[int]:
    """Return the list of missing ranks when this rank's timeout in `init_distributed` has expired.

    The list is written to the store, so that all other ranks stop waiting too. If another rank has already written a
    list, that list is returned. If all ranks have just arrived, [] is returned.

    store: the store in which each rank records that it has arrived.
    size: the number of ranks.
    """
    # Set the key "all" to the list of missing ranks, unless another rank has already set it. If no rank is missing, the
    # last rank has just recorded its arrival, but has not set "all" yet. Then set it to "met" here.
    return _ranks_of(store.compare_set(_key("all"), "", " ".join(map(str, _absent(store, size))) or _MET))


def _ranks_of(shown: bytes) -> list[int]:
    """Return the ranks that are missing in `init_distributed`, from the value of the key "all" in the TCPStore.

    shown: the value. It is b"met" if all ranks have arrived; the result is then []. If the timeout of a rank has
        expired, the value lists the missing ranks, such as b"1 3".
    """
    return [] if shown.decode() == _MET else [int(rank) for rank in shown.decode().split()]


def _say_farewell(store: TCPStore, rank: int) -> None:
    """Record in the store that this rank has read the list of missing ranks.

    Rank 0 then waits at most 5 s until the other ranks have read the list too, because the store may end with the
    process of rank 0.

    store: the TCPStore with the list.
    rank: this rank.
    """
    end = time.monotonic() + _FAREWELL_SECONDS
    with contextlib.suppress(RuntimeError):  # raised if the store has already ended, together with rank 0
        told = store.add(_key("told"), 1)
        while rank == 0 and told < store.add(_key("count"), 0) and time.monotonic() < end:
            time.sleep(_PAUSE)
            told = store.add(_key("told"), 0)


def _absent(store: TCPStore, size: int) -> list[int]:
    """Return the ranks that have not arrived in `init_distributed`, or [0] if `store` does not answer.

    Each rank that arrives sets a key in `store`. The store's server runs in rank 0 or in its launcher, so if the store
    does not answer, rank 0 counts as missing.

    size: the number of ranks.
    """
    try:
        return [rank for rank in range(size) if not store.check([_key(str(rank))])]
    except RuntimeError:
        return [0]


def _key(name: str) -> str:
    """Return the full name of a key in the TCPStore in which ranks record that they have reached `init_distributed`.

    The full name contains the number of restarts, because a launcher that restarts the ranks may keep the store with
    the keys from before the restart.

    name: the last part of the full name, such as "count" or a rank.
    """
    return f"hf_bmtrain/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def _names(ranks: list[int]) -> str:
    """Return a string such as "rank 3" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
