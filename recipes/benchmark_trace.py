"""Where the milliseconds of one step went, read off torch's profiler."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

KINDS = (
    ("gather", r"AllGather"),
    ("reduce", r"ReduceScatter|AllReduce"),
    ("optimizer", r"[Aa]dam|squared_norm|lpnorm|LpNorm"),
    ("attention", r"flash|fmha|attention|mha_"),
    ("GEMM", r"gemm|nvjet|cutlass|xmma|gemv|splitK"),
    ("peer copies", r"Memcpy PtoP"),
    ("summing", r"peer_mean"),
    ("packing", r"CopyFunctor|foreach_copy|CatArray|split_with_sizes|chunk_cat|Memcpy|Memset"),
)
BESIDE = ("gather", "reduce", "peer copies", "summing", "packing")
"""What may run beside the computation, in the order in which time that several cover is given to the first."""
Interval = tuple[float, float]


def profile_step(step: Callable[[], object], trace: Path | None) -> dict[str, float]:
    """Milliseconds of one step by kind, exposed communication and idle time; a Chrome trace if `trace` is given."""
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            step()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return account(json.loads(path.read_text())["traceEvents"])


def account(events: Iterable[dict]) -> dict[str, float]:
    """Milliseconds of device time by kind; `exposed …` is what neither computation nor an earlier kind covers."""
    found: dict[str, list[Interval]] = {name: [] for name, _ in KINDS} | {"element-wise": []}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found[kind_of(event["name"])].append((event["ts"], event["ts"] + event["dur"]))
    covered = merge(interval for name, own in found.items() if name not in BESIDE for interval in own)
    result = {name: length(own) for name, own in found.items()}
    for name in BESIDE:
        longer = merge([*covered, *found[name]])
        result[f"exposed {name}"] = length(longer) - length(covered)
        covered = longer
    if not covered:
        return {}
    result["idle"] = covered[-1][1] - covered[0][0] - length(covered)
    return {name: round(value / 1e3, 2) for name, value in result.items()}


def kind_of(kernel: str) -> str:
    return next((name for name, pattern in KINDS if re.search(pattern, kernel)), "element-wise")


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union, as disjoint intervals in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
