"""A rank's last operations in the schema of torch's Flight Recorder. Its analyser, torchfrtrace, compares the ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engine.comm.collective_log import KEPT, Journal, kind_and_number

_VARIABLES = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_VERSION = "2.10"
_GROUP = "hf_bmtrain"
_NAMES = {
    "all-gather": "_all_gather_base", "reduce-scatter": "_reduce_scatter_base", "all-reduce": "all_reduce",
    "broadcast": "broadcast",
}  # fmt: skip
_STEP = KEPT // 8


def path_of(rank: int) -> str | None:
    """Return the file that the environment names for the dump of `rank`, as torch would; None if it names none."""
    prefix = next(filter(None, map(os.environ.get, _VARIABLES)), None)
    return None if prefix is None else f"{prefix}{rank}"


def first_of(counts: Sequence[int]) -> int:
    """Return the number of the entry from which ranks with so many entries dump a journal, the same for all.

    The analyser takes an entry that only some ranks have for an operation that the others left out.
    """
    return max(0, max(counts) - KEPT // 2) // _STEP * _STEP + 1


def entries_of(
    journal: Journal, backend: str, size: int, first: int, unfinished: bool, words: Callable[[int], str]
) -> list[dict[str, Any]]:
    """Return the entries of a journal from number `first` on.

    What is no collective, such as the name of the buffer that is gathered next, is shown as a barrier whose size is the
    entry's number. A frame has the entry in words. Times are not kept, and of the operations that are not complete only
    whether there are any (`unfinished`): the last one is "scheduled" then.
    """
    found, last = [], None
    for number in range(first, journal.count + 1):
        entry = journal.entry(number)
        if entry is None:
            continue
        kind, amount = kind_and_number(entry)
        whole, part = [[amount]], [[amount // size]]
        given, made = {"all-gather": (part, whole), "reduce-scatter": (whole, part)}.get(kind, (whole, whole))
        found.append({
            "process_group": (journal.name, _GROUP), "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
            "is_p2p": False, "profiling_name": f"{backend}:{_NAMES.get(kind, 'barrier')}", "state": "completed",
            "retired": True, "input_sizes": given, "output_sizes": made, "input_dtypes": [], "output_dtypes": [],
            "time_created_ns": 0, "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
            "frames": [{"name": words(entry), "filename": journal.name, "line": number}],
        })  # fmt: skip
        if kind in _NAMES or kind == "exchange":
            last = found[-1]
    if unfinished and last is not None:
        last |= {"state": "scheduled", "retired": False}
    return found


def write(path: str, rank: int, size: int, entries: Sequence[dict[str, Any]]) -> None:
    """Write the entries of all journals to `path`, which has all of them or is not written."""
    last = {each["process_group"][0]: each for each in entries}
    ranks = str([*range(size)])
    dumped = {
        "version": _VERSION,
        "rank": rank,
        "pg_config": {name: {"name": name, "desc": _GROUP, "ranks": ranks} for name in last},
        "pg_status": {name: {"last_enqueued_collective": each["op_id"]} for name, each in last.items()},
        "entries": [{**each, "record_id": number, "pg_id": 0} for number, each in enumerate(entries)],
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{os.getpid()}.new")
    unfinished.write_bytes(pickle.dumps(dumped))
    unfinished.replace(target)
