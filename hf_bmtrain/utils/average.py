"""A number that moves slowly."""

from __future__ import annotations


class AverageRecorder:
    """Exponential moving average, unbiased from the first value on (Kingma & Ba 2015, section 3).

    After n values it is Σ α^(n-i) v_i / Σ α^(n-i). alpha: in [0, 1), the share that stays. start_value: before any.
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0.0) -> None:
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha is the share of the old average that stays, in [0, 1), got {alpha}")
        self.alpha, self._start = alpha, start_value
        self._sum, self._weight = 0.0, 0.0

    def record(self, value: float) -> None:
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(value)
        self._weight = self.alpha * self._weight + (1 - self.alpha)

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else self._start
