"""The curve of a run's steps, and the versions it was made with."""

import math
import platform
from importlib.metadata import PackageNotFoundError, version

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


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for a package that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
