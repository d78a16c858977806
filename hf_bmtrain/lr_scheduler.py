"""Learning-rate schedules: a linear warm-up, then one of five decays.

`t` is the number of steps taken (`num_iter`), `w` the warm-up's length (`warmup_iter`), `e` the last step
(`end_iter`) and `s` the peak learning rate (`start_lr`). While t < w the learning rate is s*t/w, so the first
update of a run with a warm-up has learning rate 0, as in BMTrain.
"""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]

STATE = ("start_lr", "warmup_iter", "end_iter", "num_iter")


class WarmupLRScheduler:
    """What the five schedules share. Subclasses say how the learning rate decays in `get_lr_decay`.

    Args:
        optimizer: its `param_groups` all receive the same learning rate, at once and after every `step()`.
        start_lr: peak learning rate.
        warmup_iter: steps of warm-up; 0 for none.
        end_iter: step at which the decay ends; schedules without an end ignore it (-1 is customary).
        num_iter: steps taken already.

    Attributes:
        current_lr: the learning rate that the optimizer's groups hold now.

    Raises:
        ValueError: a negative or non-finite `start_lr`, a negative `warmup_iter` or `num_iter`, or an
            `end_iter` the schedule cannot use.
    """

    def __init__(self, optimizer: Any, start_lr: float, warmup_iter: int, end_iter: int, num_iter: int = 0):
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"an optimizer has param_groups, {type(optimizer).__name__} has none")
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.num_iter = num_iter
        self.check()
        self.step(num_iter)

    def check(self) -> None:
        """Raise ValueError if the numbers make no schedule."""
        if not (math.isfinite(self.start_lr) and self.start_lr >= 0):
            raise ValueError(f"start_lr must be finite and at least 0, got {self.start_lr}")
        if self.warmup_iter < 0:
            raise ValueError(f"warmup_iter must be at least 0 (0: no warm-up), got {self.warmup_iter}")

    def get_lr_warmup(self) -> float:
        """The learning rate at a step below `warmup_iter`: s*t/w."""
        return self.start_lr * self.num_iter / self.warmup_iter

    def get_lr_decay(self) -> float:
        """The learning rate at a step from `warmup_iter` on."""
        raise NotImplementedError

    def get_lr(self) -> float:
        """The learning rate at step `num_iter`."""
        return self.get_lr_warmup() if self.num_iter < self.warmup_iter else self.get_lr_decay()

    def step(self, num_iter: int | None = None) -> None:
        """Advance by one step, or go to step `num_iter`, and give the optimizer its new learning rate."""
        if num_iter is None:
            num_iter = self.num_iter + 1
        if num_iter < 0:
            raise ValueError(f"num_iter must be at least 0, got {num_iter}")
        self.num_iter = num_iter
        self.current_lr = self.get_lr()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.current_lr)  # captured graphs and compiled steps hold this very tensor
            else:
                group["lr"] = self.current_lr

    def state_dict(self) -> dict[str, float]:
        """The numbers that define the schedule and where it stands."""
        return {name: getattr(self, name) for name in self.state_names()}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Continue a schedule saved by `state_dict()`, BMTrain's too; the optimizer gets its learning rate.

        Raises:
            ValueError: keys are missing, or belong to another schedule.
        """
        names = set(self.state_names())
        given = set(state_dict) - {"_current_lr"}  # BMTrain saves it, but it follows from the others
        if names != given:
            raise ValueError(
                f"this is not the state of a {type(self).__name__} schedule: "
                f"missing {sorted(names - given)}, unexpected {sorted(given - names)}"
            )
        before = self.state_dict()
        self.__dict__.update((name, state_dict[name]) for name in names)
        try:
            self.check()
            self.step(self.num_iter)
        except ValueError:
            self.__dict__.update(before)
            raise

    def state_names(self) -> tuple[str, ...]:
        """Names of the attributes that are the schedule's state."""
        return STATE


class NoDecay(WarmupLRScheduler):
    """Warm-up, then s. `end_iter` is not used."""

    def get_lr_decay(self) -> float:
        return self.start_lr


class Noam(WarmupLRScheduler):
    """Warm-up to s/sqrt(w), then s/sqrt(t) (Vaswani et al. 2017, section 5.3). `end_iter` is not used.

    Without warm-up step 0 has the learning rate of step 1, s.
    """

    def get_lr_warmup(self) -> float:
        return self.start_lr / math.sqrt(self.warmup_iter) * self.num_iter / self.warmup_iter

    def get_lr_decay(self) -> float:
        return self.start_lr / math.sqrt(max(1, self.num_iter))


class Linear(WarmupLRScheduler):
    """Warm-up, then max(0, s*(e-t)/(e-w)): a straight line to 0 at `end_iter`."""

    def check(self) -> None:
        super().check()
        if self.end_iter <= self.warmup_iter:
            raise ValueError(
                f"Linear decays from warmup_iter to end_iter, so end_iter must be the larger: "
                f"warmup_iter {self.warmup_iter}, end_iter {self.end_iter}"
            )

    def get_lr_decay(self) -> float:
        left = (self.end_iter - self.num_iter) / (self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * left)


class Cosine(WarmupLRScheduler):
    """Warm-up, then s*(1+cos(pi*(t-w)/max(1, e-w)))/2, held at 0 after its end (Loshchilov & Hutter 2017)."""

    def check(self) -> None:
        super().check()
        if self.end_iter < self.warmup_iter:
            raise ValueError(
                f"Cosine decays from warmup_iter to end_iter, so end_iter must not be smaller: "
                f"warmup_iter {self.warmup_iter}, end_iter {self.end_iter}"
            )

    def get_lr_decay(self) -> float:
        progress = min(1.0, (self.num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter))
        return self.start_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Exponential(WarmupLRScheduler):
    """Warm-up, then s*gamma^(t-w). `end_iter` is not used."""

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int,
        num_iter: int = 0,
        gamma: float = 0.95,
    ):
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def check(self) -> None:
        super().check()
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma must lie in (0, 1], got {self.gamma}")

    def get_lr_decay(self) -> float:
        return self.start_lr * self.gamma ** (self.num_iter - self.warmup_iter)

    def state_names(self) -> tuple[str, ...]:
        return (*STATE, "gamma")
