"""The chart of recorded results: recorded.json, whose numbers are those of RESULTS.md, drawn as horizontal bars."""

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
COLORS = {
    "hf_bmtrain": "#1f6feb", "FSDP2": "#9aa4b2", "DeepSpeed ZeRO-3": "#d9822b", "DDP": "#57606a",
    "plain, 1 rank": "#d0d7de",
}  # fmt: skip
STYLE: dict[Any, object] = {"svg.fonttype": "none", "svg.hashsalt": "recorded", "font.family": "sans-serif"}
"""Text stays text in an SVG file, and equal data give equal bytes."""


def plot_recorded(file: Path) -> None:
    """Draw the recorded steps into `file`, a .svg or .png, and how they scale into a file beside it."""
    recorded = json.loads(DATA.read_text("utf-8"))
    title = f"One training step on {recorded['machine']}, {recorded['date']}"
    plot_groups(recorded["groups"], title, file, (1500, 135))
    plot_scaling(recorded["scaling"], file.with_stem(f"{file.stem}_scaling"))


def plot_scaling(recorded: dict, file: Path) -> None:
    """Draw tokens per second against GPUs into `file`; a dotted line is that of one GPU, multiplied."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
        for engine, steps in recorded["ms"].items():
            gpus = sorted(map(int, steps))
            tokens = [count * recorded["tokens"] / steps[str(count)] for count in gpus]  # thousands a second
            axes.plot(gpus, tokens, "o-", color=COLORS[engine], label=engine)
            axes.plot(gpus, [tokens[0] * count / gpus[0] for count in gpus], ":", color=COLORS[engine], linewidth=1)
            for count, value in zip(gpus, tokens):
                axes.annotate(f"{value:.1f}", (count, value), textcoords="offset points", xytext=(4, -11), fontsize=8)
        axes.set_xticks(gpus)
        axes.set_ylim(0)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("thousand tokens per second")
        axes.set_title(f"{recorded['job']}\n{recorded['machine']}, {recorded['date']}", fontsize=9)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, facecolor="white", metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def plot_groups(groups: list[dict], title: str, file: Path, limits: tuple[float, float] | None = None) -> None:
    """Draw the milliseconds and the peak memory of each cell of `groups` into `file`, a .svg or .png.

    A thin line spans the fastest and the slowest step. The ratio next to a bar is taken within its group, whose cells
    are of one run. limits: of the two axes; None for what the cells need.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for group in groups for cell in group["cells"]]
    if limits is None:
        limits = 1.6 * max(cell["spread_ms"][1] for cell in cells), 1.35 * max(cell["peak_GB"] for cell in cells)
    colors = {name: color for name, color in COLORS.items() if name in {cell["engine"] for cell in cells}}
    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(10, 1.6 + 0.24 * len(cells) + 0.34 * len(groups)))
        time, memory = figure.subplots(1, 2, width_ratios=(3, 2))
        figure.subplots_adjust(left=0.02, right=0.98, top=0.92, bottom=0.14, wspace=0.06)
        _draw(groups, time, memory, limits)
        time.set_xlabel("milliseconds per step (median; thin line: fastest to slowest)")
        memory.set_xlabel("peak memory, GB per GPU")
        figure.suptitle(title)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
        figure.legend(handles, list(colors), loc="lower center", ncols=len(colors), frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, facecolor="white", metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def _draw(groups: list[dict], time, memory, limits: tuple[float, float]) -> None:
    """The bars of all groups from top to bottom, a heading above each group."""
    place = 0.0
    for group in groups:
        time.text(0, place, f"{group['job']}: {group['how']}", va="center", fontsize=9, fontweight="bold")
        place += 1
        first = group["cells"][0]
        for cell in group["cells"]:
            color, (fastest, slowest) = COLORS[cell["engine"]], cell["spread_ms"]
            time.barh(place, cell["ms"], height=0.8, color=color)
            time.plot([fastest, slowest], [place, place], color="#24292f", linewidth=1)
            ratio = "" if cell is first else f"  ({cell['ms'] / first['ms']:.2f} times)"
            time.text(
                max(slowest, cell["ms"]) + limits[0] / 187.5,
                place,
                f"{cell['ms']:.0f} ms{ratio}",
                va="center",
                fontsize=9,
            )
            memory.barh(place, cell["peak_GB"], height=0.8, color=color)
            memory.text(cell["peak_GB"] + limits[1] / 135, place, f"{cell['peak_GB']:.1f} GB", va="center", fontsize=9)
            place += 1
        place += 0.4
    for axes, limit in zip((time, memory), limits):
        axes.set_xlim(0, limit)
        axes.set_ylim(place - 0.6, -0.6)
        axes.patch.set_visible(False)  # a heading may reach over both
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
