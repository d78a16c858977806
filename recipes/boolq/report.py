"""The report of a run: the curve of its steps and the scores of its epochs."""

import argparse
import json
import time
from pathlib import Path

import torch

from common.curve import Curve, peak_memory, versions


def score(predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, balanced accuracy (mean recall of the classes present) and the share of the larger class.

    Both arguments hold class numbers 0 and 1, shape (rows,).
    """
    right = (predictions == labels).double()
    recalls = [right[labels == answer].mean() for answer in labels.unique()]
    true_share = labels.double().mean().item()
    return {
        "accuracy": right.mean().item(),
        "balanced_accuracy": torch.stack(recalls).mean().item(),
        "majority_share": max(true_share, 1 - true_share),
    }


class Report:
    """Measurements of a run, written to metrics.json and curves.png."""

    def __init__(self, options: argparse.Namespace, job: str, device: torch.device, world_size: int) -> None:
        self.curve = Curve()
        self.epochs: list[dict] = []
        self._run = {
            "job": job,
            "arguments": vars(options),
            "versions": versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "world_size": world_size,
        }
        self._device = device
        self._rows_a_step = options.batch_size * world_size
        self._last = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since the last call, or since the report was made."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def add_epoch(self, epoch: int, scores: dict[str, float], training: float, evaluation: float) -> str:
        """Add one epoch's scores and seconds. Return them as one line of text."""
        loss = self.curve.mean_loss(epoch)
        rate = sum(step["epoch"] == epoch for step in self.curve.steps) * self._rows_a_step / training
        seconds = {"training_seconds": training, "evaluation_seconds": evaluation, "samples_per_second": rate}
        self.epochs.append({"epoch": epoch, "loss": loss} | scores | seconds)
        return (
            f"epoch {epoch}: loss {'not finite' if loss is None else f'{loss:.4f}'}, "
            f"accuracy {scores['accuracy']:.4f}, balanced {scores['balanced_accuracy']:.4f} "
            f"(majority {scores['majority_share']:.4f}), "
            f"{training:.1f} s at {rate:.0f} samples/s + {evaluation:.1f} s evaluation"
        )

    def write(self, folder: Path) -> str:
        """Write metrics.json and curves.png. Return the result and the files' names as two lines of text."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics = self._run | {
            "peak_memory_gib": peak_memory(self._device),
            "seconds": sum(epoch["training_seconds"] + epoch["evaluation_seconds"] for epoch in self.epochs),
            "epochs": self.epochs,
            "steps": self.curve.steps,
        }
        text = json.dumps(metrics, indent=1, default=str, allow_nan=False)
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        last, place = self.epochs[-1], "GPU" if self._device.type == "cuda" else "process"
        return (
            f"accuracy {last['accuracy']:.4f}, {last['samples_per_second']:.0f} samples/s, "
            f"peak memory of rank 0's {place} {metrics['peak_memory_gib']:.2f} GiB\n"
            f"{folder}: metrics.json, {self._plot(folder)}"
        )

    def _plot(self, folder: Path) -> str:
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return "no curves.png, because matplotlib is not installed"
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        steps = [step for step in self.curve.steps if step["loss"] is not None]
        left.plot([step["step"] for step in steps], [step["loss"] for step in steps], linewidth=0.9)
        left.set(title="Training loss", xlabel="step", ylabel="cross-entropy, nats")
        numbers = [epoch["epoch"] for epoch in self.epochs]
        for name in ("accuracy", "balanced_accuracy"):
            right.plot(numbers, [epoch[name] for epoch in self.epochs], "o-", label=name.replace("_", " "))
        right.axhline(self.epochs[-1]["majority_share"], color="grey", ls="--", label="majority share")
        right.set(title="Validation", xlabel="epoch", ylim=(0, 1.02), xticks=numbers)
        right.legend(loc="lower right")
        figure.savefig(folder / "curves.png", dpi=120)
        return "curves.png"
