"""The report of a run: the curve of its steps and the scores of its epochs."""

import argparse
import json
import time
from pathlib import Path

import torch

from common.curve import Curve, peak_memory, versions


def score(predictions: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Return the scores of a classifier with two classes, each from 0 to 1.

    Args:
        predictions: (rows,), the predicted classes, 0 or 1.
        labels: (rows,), the correct classes, 0 or 1.

    Returns:
        A dict with accuracy, balanced_accuracy (the mean over the classes in `labels` of the fraction of rows of the
        class that are predicted correctly), and majority_share (the fraction of rows in the larger class).
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
    """The measurements of a run, which `write` writes to metrics.json and curves.png.

    Args:
        options: the options of the command line, which are written to metrics.json.
        job: a description of the model and the data.
        device: this rank's device.
        world_size: the number of ranks.
    """

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
        """Return the seconds since the last call or, at the first call, since this object was created."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def add_epoch(self, epoch: int, scores: dict[str, float], training: float, evaluation: float) -> str:
        """Add the results of an epoch. Return them as one line of text.

        Args:
            epoch: the number of the epoch, from 1.
            scores: the result of `score` for the validation rows.
            training: how many seconds the training took.
            evaluation: how many seconds the evaluation took.
        """
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
        """Write metrics.json and curves.png to `folder`. Return two lines of text with the results and file names."""
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
