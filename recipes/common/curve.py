"""The curve of a run, and the versions of its packages."""

import math
import platform
import resource
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    "hf_bmtrain",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "bitsandbytes",
    "tokenizers",
    "datasets",
)
READ_EVERY = 10  # steps between copies from the device, each of which waits for the device


class Curve:
    """Records the loss, learning rate and gradient norm of every step.

    The values are copied from the device every `READ_EVERY` steps, because each copy waits for the device.

    Attributes:
        steps: a dict for each step whose values were copied, with the keys step, epoch, lr, loss and grad_norm.
    """

    def __init__(self) -> None:
        self.steps: list[dict] = []
        self._unread: list[tuple[dict, torch.Tensor, torch.Tensor]] = []

    def add(self, epoch: int, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> bool:
        """Add the values of one step.

        Args:
            epoch: the number of the epoch, from 1.
            loss: a scalar on any device.
            grad_norm: a scalar on any device.
            lr: the learning rate.

        Returns:
            Whether the values were copied to `steps`, which happens every `READ_EVERY` steps.
        """
        step = {"step": len(self.steps) + len(self._unread) + 1, "epoch": epoch, "lr": lr}
        self._unread.append((step, loss.detach(), grad_norm.detach()))
        if len(self._unread) < READ_EVERY:
            return False
        self.read()
        return True

    def read(self) -> None:
        """Copy the values of the last steps from the device to `steps`.

        Values that are inf or nan, as after an fp16 overflow, become None.
        """
        if not self._unread:
            return
        steps, losses, norms = zip(*self._unread, strict=True)
        numbers = torch.stack([torch.stack(losses).float(), torch.stack(norms).float()]).tolist()
        for step, loss, norm in zip(steps, *numbers, strict=True):
            self.steps.append(step | {"loss": finite(loss), "grad_norm": finite(norm)})
        self._unread.clear()

    def mean_loss(self, epoch: int) -> float | None:
        """Return the mean over the finite losses of one epoch, or None if there are none."""
        losses = [step["loss"] for step in self.steps if step["epoch"] == epoch and step["loss"] is not None]
        return sum(losses) / len(losses) if losses else None


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process so far, in GiB: what torch allocated on a GPU, or resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def versions() -> dict[str, str | None]:
    """Return the versions of Python, CUDA and the `PACKAGES`, by name; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
