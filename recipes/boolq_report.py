"""What a run has measured: the curve of its steps and the scores of its epochs, written and drawn."""

import argparse
import json
import math
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("hf_bmtrain", "torch", "transformers", "accelerate", "tokenizers", "datasets")
READ_EVERY = 10  # steps; reading a number waits for the device


class Curve:
    """Loss, learning rate and gradient norm of every step, read from the device every `READ_EVERY` steps."""

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self._unread: list[tuple[dict, torch.Tensor, torch.Tensor]] = []

    def add(self, epoch: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> bool:
        """Note one step; `loss` and `grad_norm` are scalars on any device. True if it is in `steps` now."""
        step = {"step": len(self.steps) + len(self._unread) + 1, "epoch": epoch, "lr": lr}
        self._unread.append((step, loss.detach(), grad_norm.detach()))
        if len(self._unread) < READ_EVERY:
            return False
        self.read()
        return True

    def read(self) -> None:
        """Bring `steps` up to date. What is not finite, as where fp16 overflows, becomes None."""
        if not self._unread:
            return
        steps, losses, norms = zip(*self._unread, strict=True)
        numbers = torch.stack([torch.stack(losses).float(), torch.stack(norms).float()]).tolist()
        for step, loss, norm in zip(steps, *numbers, strict=True):
            self.steps.append(step | {"loss": finite(loss), "grad_norm": finite(norm)})
        self._unread.clear()

    def mean_loss(self, epoch: int) -> float | None:
        """The mean over one epoch's steps, None if none of them is finite."""
        losses = [step["loss"] for step in self.steps if step["epoch"] == epoch and step["loss"] is not None]
        return sum(losses) / len(losses) if losses else None


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


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
    """Everything a run leaves behind besides the model."""

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
        self._last = time.perf_counter()

    def seconds(self) -> float:
        """Seconds since the last call, or since the beginning."""
        before, self._last = self._last, time.perf_counter()
        return self._last - before

    def add_epoch(self, epoch: int, scores: dict[str, float], training: float, evaluation: float) -> str:
        """Note one epoch's scores and seconds; returns them as one line of text."""
        loss = self.curve.mean_loss(epoch)
        seconds = {"training_seconds": training, "evaluation_seconds": evaluation}
        self.epochs.append({"epoch": epoch, "loss": loss} | scores | seconds)
        return (
            f"epoch {epoch}: loss {'not finite' if loss is None else f'{loss:.4f}'}, "
            f"accuracy {scores['accuracy']:.4f}, balanced {scores['balanced_accuracy']:.4f} "
            f"(majority {scores['majority_share']:.4f}), {training:.1f} s + {evaluation:.1f} s evaluation"
        )

    def write(self, folder: Path) -> str:
        """Write metrics.json and curves.png; returns what was written as one line of text."""
        folder.mkdir(parents=True, exist_ok=True)
        metrics = self._run | {
            "seconds": sum(epoch["training_seconds"] + epoch["evaluation_seconds"] for epoch in self.epochs),
            "epochs": self.epochs,
            "steps": self.curve.steps,
        }
        text = json.dumps(metrics, indent=1, default=str, allow_nan=False)
        (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
        return f"{folder}: metrics.json, {self._plot(folder)}"

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


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
