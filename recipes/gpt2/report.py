"""The report of a run of the GPT recipe: metrics.json and loss.png."""

import json
from pathlib import Path

from common.curve import Curve


def write_report(folder: Path, run: dict, curve: Curve, held_out: list[dict]) -> str:
    """Write metrics.json and, if matplotlib is installed, loss.png. Return their names as one line of text.

    Args:
        folder: the folder for the files; created if necessary.
        run: entries for metrics.json that describe the run, such as its options and duration.
        curve: the losses of the steps.
        held_out: a dict with the keys step and loss for every evaluation on held-out rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = run | {"held_out": held_out, "steps": curve.steps}
    text = json.dumps(metrics, indent=1, default=str, allow_nan=False)
    (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"{folder}: metrics.json, no loss.png, because matplotlib is not installed"
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    steps = [step for step in curve.steps if step["loss"] is not None]
    axes.plot([step["step"] for step in steps], [step["loss"] for step in steps], linewidth=0.9, label="training")
    axes.plot([point["step"] for point in held_out], [point["loss"] for point in held_out], "o-", label="held out")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token", ylim=(0, None))
    axes.legend()
    figure.savefig(folder / "loss.png", dpi=120)
    return f"{folder}: metrics.json, loss.png"
