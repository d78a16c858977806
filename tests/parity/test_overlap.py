"""The check of overlap sees made-up timelines that lack it, and passes one that has it."""

import pytest

from cases import in_full, rows_in_full
from overlap import find_problems

BLOCKS = 4
COMPUTE, GATHER, REDUCE = 7, 20, 24


def event(name, begin, duration, stream, cat="kernel"):
    return {"name": name, "cat": cat, "ts": float(begin), "dur": float(duration), "args": {"stream": stream}}


def timeline(late=(), copies=False):
    """A step whose blocks compute 100 µs each. late: transfers that come after the next block: (kind, block, phase)."""
    events = [event("spin_kernel", -60_000, 60_000, COMPUTE), {"name": "a range on the host", "cat": "cpu_op"}]
    order = [*range(BLOCKS), *reversed(range(BLOCKS))]
    name, cat = (
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy") if copies else ("ncclDevKernel_AllGather_RING", "kernel")
    )
    for number, block in enumerate(order):
        forward, begin = number < BLOCKS, 110 * number
        events.append(event("spin_kernel(long)", begin, 5, COMPUTE))
        events += [event("nvjet_gemm", begin + 5 + 50 * half, 50, COMPUTE) for half in range(2)]
        ahead = block + 1 if forward else block - 1
        phase = "forward" if forward else "backward"
        if number == 0:
            events.append(event(name, -50, 50, GATHER, cat))
        if 0 <= ahead < BLOCKS:
            start = begin + 105 if ("gather", ahead, phase) in late else begin + 1
            events.append(event(name, start, 60, GATHER, cat))
            if copies:
                events.append(event("Memcpy DtoD (Device -> Device)", start, 30, GATHER + 1, cat))
        if not forward:
            start = begin + (215 if ("reduce", block) in late else 105)
            events.append(event("ncclDevKernel_ReduceScatter_Sum_bf16", start, 60, REDUCE))
    return events


@pytest.mark.parametrize("copies", [True, *in_full(False)])
def test_a_good_timeline_passes(copies):
    assert find_problems(timeline(copies=copies), BLOCKS) == []


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (("gather", 2, "backward"), "gather of block 2 in backward: 0 of its"),
        (("reduce", 3), "reduction of block 3: 0 of its"),
        *rows_in_full(
            [
                (("gather", 1, "forward"), "gather of block 1 in forward: 0 of its"),
                (("gather", 3, "forward"), "gather of block 3 in forward: 0 of its"),
                (("gather", 0, "backward"), "gather of block 0 in backward: 0 of its"),
                (("reduce", 1), "reduction of block 1: 0 of its"),
            ]
        ),
    ],
)
def test_a_late_transfer_is_seen(late, message):
    (problem,) = find_problems(timeline(late=(late,), copies=True), BLOCKS)
    assert problem.startswith(message)


def test_a_compute_stream_that_waits_is_seen():
    """Every transfer in its place, but nothing computed meanwhile."""
    events = [e for e in timeline() if "gemm" not in e["name"]]
    assert len(find_problems(events, BLOCKS)) == 3 * (BLOCKS - 1)


def test_transfers_on_the_compute_stream_are_none():
    events = timeline()
    for each in events:
        if "AllGather" in each["name"]:
            each["args"]["stream"] = COMPUTE
    (problem,) = find_problems(events, BLOCKS)
    assert f"{{{REDUCE}: {BLOCKS}}}" in problem


def test_a_step_without_its_marks_is_refused():
    (problem,) = find_problems(timeline()[:-20], BLOCKS)
    assert "marks" in problem
