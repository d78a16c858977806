"""Learning-rate schedules: a linear warm-up, then a constant learning rate (`NoDecay`) or one of four decays.

The formulas in this module use these letters:

* t: the number of steps taken so far (`num_iter`).
* w: the number of warm-up steps (`warmup_iter`).
* e: the step at which `Linear` and `Cosine` end their decay (`end_iter`; the other schedules ignore it).
* s: `start_lr`, which is the learning rate at the end of the warm-up, except for `Noam`.

While t < w, the learning rate is s*t/w (for `Noam`, s/sqrt(w)*t/w). So with a warm-up, the learning rate of the first
update is 0, as in BMTrain.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..engine.base.arguments import expect_kind, expect_number

__all__ = ["Cosine", "Exponential", "Linear", "NoDecay", "Noam", "WarmupLRScheduler"]

STATE = ("start_lr", "warmup_iter", "end_iter", "num_iter")


class WarmupLRScheduler:
    """Base class of the learning-rate schedules: a linear warm-up, then a decay that the subclass defines.

    At step t, the learning rate is `get_lr_warmup(t)` while t < warmup_iter, and `get_lr_decay(t)` from then on. Step 0
    is the first update. With a warm-up, its learning rate is 0, as in BMTrain.

    The constructor sets the learning rate of step `num_iter`. Each call of `step()` goes to the next step and sets its
    learning rate. Call it after every step of the optimizer, or pass the schedule to `OptimManager.add_optimizer`; the
    manager then calls it.

    Args:
        optimizer: the optimizer. The schedule sets the learning rate of all its `param_groups`.
        start_lr: the learning rate at the end of the warm-up (`Noam` scales it).
        warmup_iter: the number of warm-up steps; 0 for none.
        end_iter: the step at which the decay ends. Schedules whose decay does not end ignore this argument; pass -1 or
            None to them.
        num_iter: the number of steps already taken; not 0 if training resumes.

    Attributes:
        current_lr: the learning rate that was set last.
        own_state: a class attribute with the names of the attributes that a subclass adds to `state_dict()`. For
            example, `Exponential` sets it to ("gamma",).

    Raises:
        TypeError: a setting is not a number.
        ValueError: `optimizer` has no `param_groups`.
        ValueError: `start_lr`, `warmup_iter` or `num_iter` is negative or not finite.
        ValueError: `end_iter` is not finite, or is too small for this schedule.
    """

    own_state: tuple[str, ...] = ()  # names of the attributes that a subclass adds to the state dict

    def __init__(self, optimizer: Any, start_lr: float, warmup_iter: int, end_iter: int | None, num_iter: int = 0):
        if not hasattr(optimizer, "param_groups") or isinstance(optimizer, type):
            raise ValueError(f"optimizer must have param_groups, but {type(optimizer).__name__} has none")
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter: Any = end_iter  # a number, or None where it is ignored
        self.num_iter = num_iter
        self.check()
        self.step(num_iter)

    def check(self) -> None:
        """Check the settings of this learning rate schedule. `__init__` and `load_state_dict` call this method.

        Settings that are NumPy numbers are converted to Python numbers.

        Raises:
            TypeError: a setting is not a number.
            ValueError: a setting is out of range.
        """
        self.start_lr = expect_number(
            "start_lr", self.start_lr, "finite and at least 0", lambda rate: 0 <= rate < math.inf
        )
        self.num_iter = expect_number(
            "num_iter", self.num_iter, "finite and at least 0", lambda steps: 0 <= steps < math.inf
        )
        wanted = "finite and at least 0 (0: no warm-up)"
        self.warmup_iter = expect_number("warmup_iter", self.warmup_iter, wanted, lambda steps: 0 <= steps < math.inf)
        if self.end_iter is not None:
            wanted = "finite (-1 for a schedule without an end)"
            self.end_iter = expect_number("end_iter", self.end_iter, wanted, lambda steps: abs(steps) < math.inf)

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the learning rate at a step of the warm-up: start_lr * num_iter / warmup_iter.

        Args:
            num_iter: the step, from 0 to warmup_iter - 1.
        """
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the learning rate at a step after the warm-up. Subclasses must override this method.

        The result is the learning rate itself, not a factor by which `start_lr` is multiplied.

        Args:
            num_iter: the step, at least `warmup_iter`. It counts from the start of training, not from the end of the
                warm-up.

        Raises:
            NotImplementedError: the subclass does not override it.
        """
        raise NotImplementedError

    def get_lr(self) -> float:
        """Return the learning rate at the current step, `num_iter`, without setting it in the optimizer."""
        formula = self.get_lr_warmup if self.num_iter < self.warmup_iter else self.get_lr_decay
        return formula(self.num_iter)

    def step(self, num_iter: int | None = None) -> None:
        """Go to the next step and set its learning rate in the optimizer. Call it after every step of the optimizer.

        An OptimManager to which the schedule was added calls it; in that case, do not call it yourself.

        Args:
            num_iter: the step to go to, counted from the start of training. None for the step after the current one.

        Raises:
            TypeError: `num_iter` is neither a number nor None.
            ValueError: `num_iter` is negative or not finite.
        """
        if num_iter is None:
            num_iter = self.num_iter + 1
        self.num_iter = expect_number(
            "num_iter", num_iter, "finite and at least 0", lambda steps: 0 <= steps < math.inf
        )
        self.current_lr = self.get_lr()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.current_lr)  # in place: CUDA graphs and compiled steps read this tensor
            else:
                group["lr"] = self.current_lr

    def state_dict(self) -> dict[str, float]:
        """Return the schedule's settings and its current step, for `load_state_dict`.

        Returns:
            A dict with the keys "start_lr", "warmup_iter", "end_iter" and "num_iter" (the current step), and for
            `Exponential` also "gamma".
        """
        return {name: getattr(self, name) for name in (*STATE, *self.own_state)}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Replace the schedule's settings and its step by saved values, and set the learning rate in the optimizer.

        If an error is raised, the schedule does not change.

        Args:
            state_dict: the result of `state_dict()` of a schedule of the same class, in this package or in BMTrain. The
                state of BMTrain's `Exponential` has no `gamma`, so the present `gamma` is kept. Unknown keys raise an
                error. They are ignored if the schedule's class is defined outside this package, because such a class
                may add keys in its `state_dict`, and load them itself.

        Raises:
            TypeError: `state_dict` is not a dict, or a value in it is not a number.
            ValueError: `state_dict` is not from a schedule of this class, or a value in it is out of range.
        """
        expect_kind("state_dict", state_dict, dict, "a dict that a schedule's state_dict() returned")
        missing = sorted(set(STATE) - set(state_dict))
        known = {*STATE, *self.own_state}
        of_package = type(self).__module__ == __name__
        unexpected = sorted(set(map(str, state_dict)) - known) if of_package else []
        if missing or unexpected:
            raise ValueError(
                f"state_dict is not from a {type(self).__name__} schedule: keys {missing} are missing, and keys "
                f"{unexpected} are unexpected. Create a schedule of the class that was saved."
            )
        before = {name: getattr(self, name) for name in known}
        self.__dict__.update({name: value for name, value in state_dict.items() if name in known})
        try:
            self.check()
            self.step(self.num_iter)
        except (TypeError, ValueError):
            self.__dict__.update(before)
            raise


class NoDecay(WarmupLRScheduler):
    """Schedule with a linear warm-up, then a constant learning rate.

    At step t, the learning rate is s * t / w while t < w, and s from then on.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the learning rate at the end of the warm-up.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored. It may be any finite number, or None.
        num_iter: the step t at which to begin; not 0 if training resumes.

    Raises:
        TypeError: a setting is not a number.
        ValueError: a setting is out of range, or `optimizer` has no `param_groups`.
    """

    def get_lr_decay(self, num_iter: int) -> float:
        """Return `start_lr`, the learning rate at every step after the warm-up.

        Args:
            num_iter: the step. It is not used.
        """
        return self.start_lr


class Noam(WarmupLRScheduler):
    """Schedule with a linear warm-up, then a decay in inverse proportion to the square root of the step.

    At step t, the learning rate is (s / sqrt(w)) * (t / w) while t < w, and s / sqrt(max(1, t)) from then on. Its
    maximum is s / sqrt(w), or s without a warm-up (Vaswani et al. 2017, section 5.3).

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the factor in these formulas. With a warm-up, it is not the maximum.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored. It may be any finite number, or None.
        num_iter: the step t at which to begin; not 0 if training resumes.

    Raises:
        TypeError: a setting is not a number.
        ValueError: a setting is out of range, or `optimizer` has no `param_groups`.
    """

    def get_lr_warmup(self, num_iter: int) -> float:
        """Return the learning rate at a warm-up step: (start_lr / sqrt(warmup_iter)) * (num_iter / warmup_iter).

        Args:
            num_iter: the step, from 0 to warmup_iter - 1.
        """
        return self.start_lr / math.sqrt(self.warmup_iter) * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the learning rate at a step after the warm-up: start_lr / sqrt(max(1, num_iter)).

        Args:
            num_iter: the step, counted from the start of training.
        """
        return self.start_lr / math.sqrt(max(1, num_iter))


class Linear(WarmupLRScheduler):
    """Schedule with a linear warm-up, then a linear decay to 0.

    At step t, the learning rate is s * t / w while t < w, then s * (e - t) / (e - w), and 0 from step e on.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the learning rate at the end of the warm-up.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: e, the step at which the learning rate is 0; above `warmup_iter`.
        num_iter: the step t at which to begin; not 0 if training resumes.

    Raises:
        TypeError: a setting is not a number.
        ValueError: a setting is out of range, or `optimizer` has no `param_groups`.
    """

    def check(self) -> None:
        """Check the settings of this learning rate schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            TypeError: a setting is not a number.
            ValueError: a setting is out of range, or `end_iter` is not above `warmup_iter`.
        """
        super().check()
        expect_number("end_iter", self.end_iter, "above warmup_iter")
        if self.end_iter <= self.warmup_iter:
            raise ValueError(
                f"Linear decays from warmup_iter to end_iter, so end_iter must be larger than warmup_iter, but "
                f"warmup_iter is {self.warmup_iter} and end_iter is {self.end_iter}"
            )

    def get_lr_decay(self, num_iter: int) -> float:
        """Return max(0, start_lr * (end_iter - num_iter) / (end_iter - warmup_iter)), the rate after the warm-up.

        Args:
            num_iter: the step, counted from the start of training.
        """
        left = (self.end_iter - num_iter) / (self.end_iter - self.warmup_iter)
        return max(0.0, self.start_lr * left)


class Cosine(WarmupLRScheduler):
    """Schedule with a linear warm-up, then half a period of a cosine down to 0 (Loshchilov & Hutter 2017).

    At step t, the learning rate is s * t / w while t < w. If e > w, it is (s / 2) * (1 + cos(pi * (t - w) / (e - w)))
    from step w to step e, and 0 after that. If e = w, it is s at step w, and 0 from step w + 1 on.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the learning rate at the end of the warm-up.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: e, the step at which the learning rate is 0; at least `warmup_iter`.
        num_iter: the step t at which to begin; not 0 if training resumes.

    Raises:
        TypeError: a setting is not a number.
        ValueError: a setting is out of range, or `optimizer` has no `param_groups`.
    """

    def check(self) -> None:
        """Check the settings of this learning rate schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            TypeError: a setting is not a number.
            ValueError: a setting is out of range, or `end_iter` is below `warmup_iter`.
        """
        super().check()
        expect_number("end_iter", self.end_iter, "at least warmup_iter")
        if self.end_iter < self.warmup_iter:
            raise ValueError(
                f"Cosine decays from warmup_iter to end_iter, so end_iter must not be smaller than warmup_iter, but "
                f"warmup_iter is {self.warmup_iter} and end_iter is {self.end_iter}"
            )

    def get_lr_decay(self, num_iter: int) -> float:
        """Return (start_lr / 2) * (1 + cos(pi * p)), the learning rate at a step after the warm-up.

        Here, p = min(1, (num_iter - warmup_iter) / max(1, end_iter - warmup_iter)) is the fraction of the decay that
        is complete.

        Args:
            num_iter: the step, counted from the start of training.
        """
        progress = min(1.0, (num_iter - self.warmup_iter) / max(1, self.end_iter - self.warmup_iter))
        return self.start_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Exponential(WarmupLRScheduler):
    """Schedule with a linear warm-up, then an exponential decay.

    At step t, the learning rate is s * t / w while t < w, and s * gamma^(t - w) from then on.

    Args:
        optimizer: the optimizer whose `param_groups` receive the learning rate.
        start_lr: s, the learning rate at the end of the warm-up.
        warmup_iter: w, the number of warm-up steps; 0 for none.
        end_iter: ignored. It may be any finite number, or None.
        num_iter: the step t at which to begin; not 0 if training resumes.
        gamma: the factor per step, in (0, 1].

    Raises:
        TypeError: a setting is not a number.
        ValueError: a setting is out of range, or `optimizer` has no `param_groups`.
    """

    own_state = ("gamma",)

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int | None,
        num_iter: int = 0,
        gamma: float = 0.95,
    ):
        self.gamma = gamma
        super().__init__(optimizer, start_lr, warmup_iter, end_iter, num_iter)

    def check(self) -> None:
        """Check the settings of this learning rate schedule. `__init__` and `load_state_dict` call this method.

        Raises:
            TypeError: a setting is not a number.
            ValueError: a setting is out of range, or `gamma` is not in (0, 1].
        """
        super().check()
        self.gamma = expect_number("gamma", self.gamma, "above 0 and at most 1", lambda gamma: 0 < gamma <= 1)

    def get_lr_decay(self, num_iter: int) -> float:
        """Return the learning rate at a step after the warm-up: start_lr * gamma^(num_iter - warmup_iter).

        Args:
            num_iter: the step, counted from the start of training.
        """
        return self.start_lr * self.gamma ** (num_iter - self.warmup_iter)
