"""The runs of one job as a table and as a bar chart."""

import json
from pathlib import Path

QUOTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "gpt-13b 8x512 4 ranks": {
        "megatron-fsdp 0.6.1": (734, 434, 105),
        "deepspeed 0.19.8 recompute=full": (940, 339, 62),
        "bmtrain 1.0.1 recompute=full": (966, 329, 57),
    },
}
"""By job and engine: milliseconds per step, model TFLOP/s per GPU, peak GB; measured in another run."""


def read_reports(folder: Path, job: str) -> list[dict]:
    """Return the reports of `job` in `folder` and the quoted ones, best first."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    # A trace of --profile may be in the same folder. It has no job.
    reports = [report for report in found if isinstance(report, dict) and report.get("job") == job]
    reports += quoted_reports(job, [report["engine"] for report in reports])
    return sorted(reports, key=lambda report: (-report.get("largest_batch", 0), report.get("ms", 0.0)))


def quoted_reports(job: str, measured: list[str]) -> list[dict]:
    """Return the reports in QUOTED of `job`, except for engines that were `measured`."""
    there = {name.split()[0] for name in measured}
    return [
        {"engine": engine, "job": job, "ms": ms, "TFLOPs": tflops, "peak_GB": peak, "other run": True}
        for engine, (ms, tflops, peak) in QUOTED.get(job, {}).items()
        if engine.split()[0] not in there
    ]


def table(reports: list[dict]) -> str:
    """Return one line per run with its losses, followed by its milliseconds by kind of work."""
    width = max([len("engine"), *(len(report["engine"]) for report in reports)]) + 1
    head = ("rows", "ms", "spread", "tokens/s", "TFLOP/s", "of GEMM", "peak GB")
    lines = [f"{'engine':{width}s}" + _columns(head) + "  losses"]
    for report in reports:
        lines.append((f"{report['engine']:{width}s}" + _columns(_values(report)) + "  " + _losses(report)).rstrip())
        if report.get("milliseconds"):
            lines.append("    " + ", ".join(f"{name} {value:g}" for name, value in report["milliseconds"].items()))
    return "\n".join(lines)


def _columns(values: tuple[str, ...]) -> str:
    return "".join(f"{value:>{width}s}" for value, width in zip(values, (6, 9, 16, 10, 9, 9, 9)))


def _values(report: dict) -> tuple[str, ...]:
    """Return the columns of a report, empty where it has no value. `rows` is a search's result."""
    share = f"{report['TFLOPs'] / report['gemm_TFLOPs']:.0%}" if "gemm_TFLOPs" in report else ""
    spread = "other run" if report.get("other run") else "{:.1f}-{:.1f}".format(*report.get("spread_ms", (0, 0)))
    return (
        *(f"{report[name]:{form}}" if name in report else "" for name, form in (("largest_batch", "d"), ("ms", ".1f"))),
        spread,
        f"{report['tokens_a_second_a_rank']:.0f}" if "tokens_a_second_a_rank" in report else "",
        f"{report['TFLOPs']:.3g}" if "TFLOPs" in report else "",
        share,
        f"{report['peak_GB']:.1f}" if "peak_GB" in report else "",
    )


def _losses(report: dict) -> str:
    losses = report.get("losses", [])
    return " ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 4)])


def plot(reports: list[dict], job: str, file: Path) -> None:
    """Draw the milliseconds per step into `file`, best on top. Runs quoted from elsewhere are hatched.

    Of searches, draw the largest batches instead: the milliseconds are of steps with different numbers of rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.5 * len(reports)), layout="constrained")
    value = "largest_batch" if any("largest_batch" in report for report in reports) else "ms"
    bars = axes.barh([r["engine"] for r in reports], [r[value] for r in reports])
    for bar, report in zip(bars, reports):
        bar.set_hatch("//" if report.get("other run") else "")
    axes.bar_label(bars, [f"{r[value]:.0f}" + (" (other run)" if r.get("other run") else "") for r in reports])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step" if value == "ms" else "rows of the largest batch that fits")
    axes.set_title(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
