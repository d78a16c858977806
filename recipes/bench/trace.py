"""Milliseconds of one step by kind of work and stream, from torch's profiler."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

KINDS = (
    ("GEMM", r"^triton_tem_"),  # Triton's own products
    ("element-wise", r"^triton_"),  # named after what they fuse, which may be an attention's neighbour
    ("rounding", r"^(quantize_rows|absmax_\w+|round_\w+|transpose_codes)"),  # to float8
    ("gather", r"AllGather|Broadcast"),
    ("reduce", r"ReduceScatter|AllReduce"),
    ("optimizer", r"[Aa]dam|squared_norm|piece_squares|segment_squares|lpnorm|LpNorm"),
    ("attention", r"flash|fmha|attention|mha_|sdpa"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|gemv|splitK"),
    ("offload", r"Memcpy (HtoD|DtoH)"),
    ("gather", r"Memcpy PtoP"),
    ("packing", r"CopyFunctor|foreach_copy|CatArray|split_with_sizes|chunk_cat|Memcpy|Memset"),
)
"""(kind, pattern): the first pattern found in the name of a kernel, copy or fill gives its kind."""
TRAVELLING = ("gather", "reduce", "offload")
PEER_REDUCE = r"^peer_"
PULLS = ("Memcpy PtoP", "Memcpy DtoD")
LONGEST = 5
Interval = tuple[float, float]


class Work(NamedTuple):
    """A kernel, copy or fill on the device. begin, end: microseconds."""

    name: str
    stream: int
    begin: float
    end: float


def profile_step(step: Callable[[], object], trace: Path | None) -> dict:
    """Run one step under the profiler and return its `account`.

    trace: also write a Chrome trace there, which includes the host's side.
    """
    with profiling(trace) as found:
        step()
    return found


@contextmanager
def profiling(trace: Path | None) -> Iterator[dict]:
    """Profile what runs in this context. The dict has its `account` afterwards. trace: as in `profile_step`."""
    activity = torch.profiler.ProfilerActivity
    wanted = [activity.CUDA, *([activity.CPU] if trace else [])]  # recording the host's side slows the host down
    found: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile(activities=wanted) as profiler:
            yield found
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        found.update(account(json.loads(path.read_text())["traceEvents"]))


def account(events: Iterable[dict]) -> dict:
    """Return the device's time by kind and by stream.

    milliseconds: device time of each kind; of gathers, reductions and offloading also the part that no computation
    covers (exposed); idle time. streams: side streams, by their main kind: milliseconds in which one was busy, and in
    which it was busy and the compute stream was not (exposed). longest element-wise: kernels that match no pattern.
    """
    work = [work_of(event) for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not work:
        return {"milliseconds": {}}
    compute = compute_stream(work)
    reducing = reduce_streams(work, compute)
    kinds = [kind_on(item, compute, reducing) for item in work]
    return {
        "milliseconds": milliseconds(work, kinds),
        "streams": by_stream(work, kinds, compute),
        "longest element-wise": longest(item for item, kind in zip(work, kinds) if kind == "element-wise"),
    }


def work_of(event: dict) -> Work:
    stream = event.get("args", {}).get("stream", event.get("tid", 0))
    return Work(event["name"], stream, event["ts"], event["ts"] + event["dur"])


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name)), "element-wise")


def kind_on(item: Work, compute: int, reducing: set[int]) -> str:
    """Return the kind of `item`. Copies on side streams pull weights, or gradients if their stream is in `reducing`."""
    if item.stream in reducing:
        return "reduce"
    if item.stream != compute and item.name.startswith(PULLS):
        return "gather"
    return kind_of(item.name)


def compute_stream(work: list[Work]) -> int:
    """Return the stream with the most computation."""
    spent: dict[int, float] = {}
    for item in work:
        if kind_of(item.name) not in TRAVELLING:
            spent[item.stream] = spent.get(item.stream, 0.0) + item.end - item.begin
    return max(spent, key=lambda stream: spent[stream]) if spent else work[0].stream


def reduce_streams(work: list[Work], compute: int) -> set[int]:
    """Return the side streams that pull gradients and sum them.

    Weights are pulled from the start of the forward on, gradients shortly before they are summed.
    """
    summed = [item for item in work if item.stream != compute and re.search(PEER_REDUCE, item.name)]
    if not summed:
        return set()
    middle = (min(item.begin for item in work) + min(item.begin for item in summed)) / 2
    first: dict[int, float] = {}
    for item in work:
        if item.stream != compute and item.name.startswith(PULLS):
            first[item.stream] = min(item.begin, first.get(item.stream, item.begin))
    return {item.stream for item in summed} | {stream for stream, begin in first.items() if begin > middle}


def milliseconds(work: list[Work], kinds: list[str]) -> dict[str, float]:
    """Return the milliseconds of each kind, the exposed ones of TRAVELLING, and the idle ones."""
    found: dict[str, list[Interval]] = {kind: [] for kind, _ in KINDS}
    for item, kind in zip(work, kinds):
        found[kind].append((item.begin, item.end))
    result = {kind: length(own) for kind, own in found.items()}
    covered = merge(interval for kind, own in found.items() if kind not in TRAVELLING for interval in own)
    for kind in TRAVELLING:  # time that two of them share counts for the first
        more = merge([*covered, *found[kind]])
        result[f"exposed {kind}"] = length(more) - length(covered)
        covered = more
    result["idle"] = covered[-1][1] - covered[0][0] - length(covered)
    return {kind: round(value / 1e3, 2) for kind, value in result.items()}


def by_stream(work: list[Work], kinds: list[str], compute: int) -> dict[str, dict[str, float]]:
    """Return busy and exposed milliseconds of all streams, those with the same main kind together."""
    spent: dict[int, dict[str, float]] = {}
    for item, kind in zip(work, kinds):
        own = spent.setdefault(item.stream, {})
        own[kind] = own.get(kind, 0.0) + item.end - item.begin
    roles = {stream: max(own, key=lambda kind: own[kind]) for stream, own in spent.items()} | {compute: "compute"}
    intervals: dict[str, list[Interval]] = {}
    for item in work:
        intervals.setdefault(roles[item.stream], []).append((item.begin, item.end))
    computing = merge(intervals["compute"])
    result = {}
    for role, own in intervals.items():
        exposed = length(merge([*computing, *own])) - length(computing) if role != "compute" else 0.0
        result[role] = {"busy": round(length(merge(own)) / 1e3, 2), "exposed": round(exposed / 1e3, 2)}
    return result


def longest(work: Iterable[Work]) -> dict[str, float]:
    """Return the milliseconds of the LONGEST names that took most."""
    spent: dict[str, float] = {}
    for item in work:
        spent[item.name] = spent.get(item.name, 0.0) + item.end - item.begin
    names = sorted(spent, key=lambda name: -spent[name])[:LONGEST]
    return {name[:120]: round(spent[name] / 1e3, 2) for name in names}


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
