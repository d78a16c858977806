"""Whether gathers and reductions of a step ran beside computation, read off the device events of torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Iterable

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MARK = re.compile("spin_kernel")
TRAVEL = re.compile("AllGather|ReduceScatter|Memcpy PtoP|Memcpy DtoD|peer_mean")
LONGEST_MARK = 1000.0
"""Microseconds: what spins longer only lets the host run ahead."""
SHARE = 0.2
"""Of the shorter of the two, how much must run side by side: what is serialised shares nothing, and a transfer that
overlaps may lie apart in part, as it waits for the other rank as well."""
Interval = tuple[float, float]


def find_problems(events: Iterable[dict], blocks: int) -> list[str]:
    """What is wrong in one forward and backward of a chain of `blocks` alike blocks under ZeRO-3; nothing: [].

    events: of a Chrome trace. The step marks the beginning of every block, first in the forward, then in the
    backward, by a short `torch.cuda._sleep` on the compute stream. Demanded is that the gather of block i + 1 runs
    beside the forward of block i, that of block i − 1 beside the backward of block i, and the reduction of block i
    beside the backward of block i − 1. The k-th collective or copy of a stream is the k-th gather or reduction of
    the step: all blocks are gathered in the forward, all but the last again in the backward, and all are reduced.
    """
    device = sorted((e for e in events if e.get("cat") in DEVICE), key=lambda event: event["ts"])
    marks = [e for e in device if MARK.search(e["name"]) and e["dur"] < LONGEST_MARK]
    if len(marks) != 2 * blocks:
        return [f"{len(marks)} marks, not one for the forward and one for the backward of each of {blocks} blocks"]
    compute = _stream(marks[0])
    sections = _sections([e for e in device if _stream(e) == compute], marks)
    lanes: dict[int, list[Interval]] = {}
    for event in device:
        if _stream(event) != compute and TRAVEL.search(event["name"]):
            lanes.setdefault(_stream(event), []).append(_interval(event))
    gathers, reductions = _in_turn(lanes, 2 * blocks - 1), _in_turn(lanes, blocks)
    if not gathers or not reductions:
        counts = {stream: len(lane) for stream, lane in lanes.items()}
        wanted = f"{2 * blocks - 1} gathers and one with {blocks} reductions"
        return [f"no stream beside {compute} with {wanted}; transfers by stream: {counts}"]
    last, problems = blocks - 1, []
    for number, gather in enumerate(gathers):
        if 0 < number < blocks:
            problems += _check(f"gather of block {number} in forward", gather, sections[number - 1])
        elif number >= blocks:
            problems += _check(f"gather of block {2 * last - number} in backward", gather, sections[number])
    for number, reduction in enumerate(reductions[:-1]):
        problems += _check(f"reduction of block {last - number}", reduction, sections[blocks + number + 1])
    return problems


def _stream(event: dict) -> int:
    return event["args"]["stream"]


def _interval(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _sections(computing: list[dict], marks: list[dict]) -> list[list[Interval]]:
    """What the compute stream did after each mark, until the next one."""
    begins = [mark["ts"] for mark in marks] + [float("inf")]
    busy = [_interval(event) for event in computing if not MARK.search(event["name"])]
    return [[own for own in busy if begin <= own[0] < end] for begin, end in zip(begins, begins[1:])]


def _in_turn(lanes: dict[int, list[Interval]], count: int) -> list[Interval]:
    """The transfers of the streams that have `count` of them. Those with the same number are parts of one, of which the
    longest counts: a copy within the GPU is over soon, and may begin long before those from the others."""
    chosen = [lane for lane in lanes.values() if len(lane) == count]
    return [max(parts, key=lambda part: part[1] - part[0]) for parts in zip(*chosen)]


def _check(what: str, transfer: Interval, section: list[Interval]) -> list[str]:
    length, busy = transfer[1] - transfer[0], sum(end - begin for begin, end in section)
    beside = sum(max(0.0, min(end, transfer[1]) - max(begin, transfer[0])) for begin, end in section)
    if beside >= SHARE * min(length, busy) and busy > 0:
        return []
    return [f"{what}: {beside:.0f} of its {length:.0f} µs run beside the block that computes then ({busy:.0f} µs)"]
