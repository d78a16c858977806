"""The runs of one job side by side: a table, and a bar chart."""

import json
from pathlib import Path

from benchmark_quoted import quoted_reports


def read_reports(folder: Path, job: str) -> list[dict]:
    """What was measured of `job` in `folder` and what is quoted of it, the fastest first."""
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted([r for r in reports if r["job"] == job] + quoted_reports(job), key=lambda report: report["ms"])


def table(reports: list[dict]) -> str:
    """A line a run, with its losses, and below it where the milliseconds went."""
    lines = [
        f"{'engine':24s}{'ms':>9s}{'spread':>16s}{'tokens/s':>10s}{'TFLOP/s':>9s}{'of GEMM':>9s}{'peak GB':>9s}  losses"
    ]
    for report in reports:
        lines.append(_line(report))
        if report.get("milliseconds"):
            lines.append("    " + ", ".join(f"{name} {value:g}" for name, value in report["milliseconds"].items()))
    return "\n".join(lines)


def _line(report: dict) -> str:
    spread = "{:.1f}-{:.1f}".format(*report["spread_ms"]) if "spread_ms" in report else "other run"
    tokens = f"{report['tokens_a_second_a_rank']:.0f}" if "tokens_a_second_a_rank" in report else ""
    share = f"{report['TFLOPs'] / report['gemm_TFLOPs']:.0%}" if "gemm_TFLOPs" in report else ""
    peak = f"{report['peak_GB']:.1f}" if "peak_GB" in report else ""
    losses = report.get("losses", [])
    shown = " ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 4)])
    return (
        f"{report['engine']:24s}{report['ms']:9.1f}{spread:>16s}{tokens:>10s}{report['TFLOPs']:9.3g}{share:>9s}{peak:>9s}"
        f"  {shown}".rstrip()
    )


def plot(reports: list[dict], job: str, file: Path) -> None:
    """Milliseconds a step, the fastest on top; what was measured in another run is hatched."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.5 * len(reports)), layout="constrained")
    bars = axes.barh([r["engine"] for r in reports], [r["ms"] for r in reports])
    for bar, report in zip(bars, reports):
        bar.set_hatch("//" if report.get("other run") else "")
    axes.bar_label(bars, [f"{r['ms']:.0f}" + (" (other run)" if r.get("other run") else "") for r in reports])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step")
    axes.set_title(job)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    pyplot.close(figure)
