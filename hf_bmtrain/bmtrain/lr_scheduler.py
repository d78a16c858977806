"""Learning-rate schedules: a linear warm-up, then one of five decays.

t is the number of steps taken so far (`num_iter`), w the number of warm-up steps (`warmup_iter`), e the last step
(`end_iter`), and s the peak learning rate (`start_lr`). While t < w, the learning rate is s*t/w, or for `Noam`
s/sqrt(w)*t/w. So with a warm-up the first update has a learning rate of 0, as in BMTrain.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..engine.base.arguments import expect_kind, expect_number

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]

STATE = ("start_lr", "warmup_iter", "end_iter", "num_iter")


class WarmupLRScheduler:
    """Base class of the learning-rate schedules: a linear warm-up, then a decay.

    A subclass defines the decay in `get_lr_decay`.

    Args:
        optimizer: the optimizer. The learning rate of all its `param_groups` is set now and in every `step()`.
        start_lr: the peak learning rate.
        warmup_iter: the number of warm-up steps; 0 for none.
        end_iter: the step at which the decay ends. Schedules whose decay does not end ignore it (-1 is customary).
        num_iter: the number of steps already taken; not 0 if training resumes.

    Attributes:
        current_lr: the learning rate that was set last.

    Raises:
        ValueError: `optimizer` has no `param_groups`, `start_lr` is negative or not finite, `warmup_iter` or `num_iter`
            is negative, or `end_iter` is too small for this schedule.
    """

    own_state: tuple[str, ...] = ()  # names of the attributes that a subclass adds to the state dict

    def __init__(self, optimizer: Any, start_lr: float, warmup_iter: int, end_iter: int, num_iter: int = 0):
        if not hasattr(optimizer, "param_groups") or isinstance(optimizer, type):
            raise ValueError(f"optimizer must have param_groups, but {type(optimizer).__name__} has none")
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter = end_iter
        self.num_iter = num_iter
        self.check()
        self.step(num_iter)

    def check(self) -> None:
        """Check the arguments of the schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            TypeError, ValueError: an argument has the wrong type or is out of range.
        """
        expect_number("start_lr", self.start_lr, "finite and at least 0", lambda rate: 0 <= rate < math.inf)
        expect_number("num_iter", self.num_iter, "finite and at least 0", lambda steps: 0 <= steps < math.inf)
        wanted = "finite and at least 0 (0: no warm-up)"
        expect_number("warmup_iter", self.warmup_iter, wanted, lambda steps: 0 <= steps < math.inf)
        expect_number(
            "end_iter", self.end_iter, "finite (-1 for a schedule without an end)", lambda steps: abs(steps) < math.inf
        )

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the learning rate at step `num_iter` of the warm-up: start_lr * num_iter / warmup_iter."""
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the learning rate at step `num_iter`, after the warm-up. Subclasses must override this method.

        `num_iter` counts from the start of training, not from the end of the warm-up.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError

    def get_lr(self) -> float:
        """Return the learning rate at the current step."""
        formula = self.get_lr_warmup if self.num_iter < self.warmup_iter else self.get_lr_decay
        return formula(self.num_iter)

    def step(self, num_iter: int | None = None) -> None:
        """Advance the schedule and set the optimizer's learning rate.

        Args:
            num_iter: the step to go to, counted from the start of training. None for the step after the current one.

        Raises:
            ValueError: `num_iter` is negative or not finite.
        """
        if num_iter is None:
            num_iter = self.num_iter + 1
        expect_number("num_iter", num_iter, "finite and at least 0", lambda steps: 0 <= steps < math.inf)
        self.num_iter = num_iter
        self.current_lr = self.get_lr()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.current_lr)  # in place: CUDA graphs and compiled steps read this tensor
            else:
                group["lr"] = self.current_lr

    def state_dict(self) -> dict[str, float]:
        """Return a dict with the schedule's arguments and the current step, by name."""
        return {name: getattr(self, name) for name in (*STATE, *self.own_state)}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Continue a schedule from a saved state, and set the optimizer's learning rate.

        Args:
            state_dict: the result of `state_dict()` of a schedule of the same class, of this package or of BMTrain.
                The state of BMTrain's `Exponential` has no `gamma`; the present value is then kept.

        Raises:
            ValueError: `state_dict` is not from a schedule of this class. The schedule is then not changed.
        """
        expect_kind("state_dict", state_dict, dict, "a dict that a schedule's state_dict() returned")
        missing = sorted(set(STATE) - set(state_dict))
        unexpected = sorted(set(map(str, state_dict)) - set(STATE) - set(self.own_state))
        if missing or unexpected:
            raise ValueError(
                f"state_dict is not from a {type(self).__name__} schedule: keys {missing} are missing, and keys "
                f"{unexpected} are unexpected. Create a schedule of the class that was saved."
            )
        before = self.state_dict()
        self.__dict__.update(state_dict)
        try:
            self.check()
            self.step(self.num_iter)
        except (TypeError, ValueError):
            self.__dict__.update(before)
            raise


class NoDecay(WarmupLRScheduler):
    """Schedule with a constant learning rate s after the warm-up.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the peak learning rate.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored (-1 is customary).
        num_iter: t, the number of steps taken already.

    Raises:
        ValueError: an argument is out of range.
    """

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr


class Noam(WarmupLRScheduler):
    """Schedule with linear warm-up to s/sqrt(w), then decay as s/sqrt(t) (Vaswani et al. 2017, section 5.3).

    Without warm-up, step 0 has the learning rate of step 1, which is s.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s in these formulas.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored (-1 is customary).
        num_iter: t, the number of steps taken already.

    Raises:
        ValueError: an argument is out of range.
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr / math.sqrt(max(1, num_iter))


class Linear(WarmupLRScheduler):
    """Schedule with linear decay after the warm-up: the learning rate is max(0, s*(e-t)/(e-w)).

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the peak learning rate.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: e, the step at which the learning rate is 0; above `warmup_iter`.
        num_iter: t, the number of steps taken already.

    Raises:
        ValueError: an argument is out of range.
    """

    def check(self) -> None:
        """Check the arguments of the schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            ValueError: an argument is out of range; `end_iter` must be above `warmup_iter`.
        """
        super().check()
        if self.end_iter <= self.warmup_iter:
            raise ValueError(
                f"Linear decays from warmup_iter to end_iter, so end_iter must be larger than warmup_iter, but "
                f"warmup_iter is {self.warmup_iter} and end_iter is {self.end_iter}"
            )

    def get_lr_decay(self, num_iter: int) -> float:
        left = (self.end_iter - num_iter) / (self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * left)


class Cosine(WarmupLRScheduler):
    """Schedule with cosine decay after the warm-up (Loshchilov & Hutter 2017).

    The learning rate is s*(1+cos(pi*(t-w)/max(1, e-w)))/2, and 0 after step e.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the peak learning rate.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: e, the step at which the learning rate is 0; at least `warmup_iter`.
        num_iter: t, the number of steps taken already.

    Raises:
        ValueError: an argument is out of range.
    """

    def check(self) -> None:
        """Check the arguments of the schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            ValueError: an argument is out of range; `end_iter` must be at least `warmup_iter`.
        """
        super().check()
        if self.end_iter < self.warmup_iter:
            raise ValueError(
                f"Cosine decays from warmup_iter to end_iter, so end_iter must not be smaller than warmup_iter, but "
                f"warmup_iter is {self.warmup_iter} and end_iter is {self.end_iter}"
            )

    def get_lr_decay(self, num_iter: int) -> float:
        progress = min(1.0, (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter))
        return self.start_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Exponential(WarmupLRScheduler):
    """Schedule with exponential decay after the warm-up: the learning rate is s*gamma^(t-w).

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the peak learning rate.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored (-1 is customary).
        num_iter: t, the number of steps taken already.
        gamma: the factor per step, in (0, 1].

    Raises:
        ValueError: an argument is out of range.
    """

    own_state = ("gamma",)

    def __init__(
        self, optimizer: Any, start_lr: float, warmup_iter: int, end_iter: int, num_iter: int = 0, gamma: float = 0.95
    ):
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def check(self) -> None:
        super().check()
        expect_number("gamma", self.gamma, "above 0 and at most 1", lambda gamma: 0 < gamma <= 1)

    def get_lr_decay(self, num_iter: int) -> float:
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)
