"""Statistics of parameters and of what a forward computes, over all ranks."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .runtime.world import current_world
from .sharding.parameter import DistributedParameter

_COLUMNS = ("name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean")


@dataclass(frozen=True)
class _Moments:
    """Of `count` numbers: their mean, the sum of squared distances from it, and their extremes (float64)."""

    count: int
    mean: float
    squares: float
    low: float
    high: float

    @classmethod
    def of(cls, values: torch.Tensor) -> _Moments:
        if values.numel() == 0:
            return cls(0, 0.0, 0.0, math.inf, -math.inf)
        wide = values.detach().double()
        mean = wide.mean()
        numbers = torch.stack([mean, (wide - mean).square().sum(), wide.min(), wide.max()])
        return cls(values.numel(), *numbers.tolist())

    def __add__(self, other: _Moments) -> _Moments:
        """Of both sets together (Chan, Golub & LeVeque 1979)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        return _Moments(count, mean, squares, min(self.low, other.low), max(self.high, other.high))

    @property
    def std(self) -> float:
        """Unbiased, as torch.std; nan for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan


@dataclass
class _Local:
    """What one rank knows of one line of a summary."""

    name: str
    shape: tuple[int, ...]
    values: _Moments
    gradient: _Moments | None


def _line(ranks: Sequence[_Local], shape: tuple[int, ...]) -> dict[str, Any]:
    """One line from all ranks' knowledge of it."""
    total = _sum([local.values for local in ranks])
    gradients = [local.gradient for local in ranks if local.gradient is not None]
    gradient = _sum(gradients) if gradients else None
    return {
        "name": ranks[0].name, "shape": shape,
        "std": total.std, "mean": total.mean, "max": total.high, "min": total.low,
        "grad_std": None if gradient is None else gradient.std,
        "grad_mean": None if gradient is None else gradient.mean,
    }  # fmt: skip


def _sum(moments: Sequence[_Moments]) -> _Moments:
    total = moments[0]
    for other in moments[1:]:
        total = total + other
    return total


# -- parameters ---------------------------------------------------------------------------------------------------


def inspect_model(model: torch.nn.Module, param_name: str, prefix: str = "") -> list[dict[str, Any]]:
    """One dict for every parameter of `model` whose name fits the pattern `param_name` (`*`, `?`, `[…]`). Collective.

    Keys: name (with `prefix` in front, which the pattern sees too), shape (whole), std (unbiased), mean, max, min of
    the whole parameter; grad_std and grad_mean, None where there is no gradient. Nothing is gathered: every rank
    contributes the moments of what it holds. A tied parameter has a line under each of its names.
    """
    world = current_world()
    world.assemble("inspect_model")
    chosen = [
        (prefix + name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if fnmatch.fnmatchcase(prefix + name, param_name)
    ]
    mine = [_parameter(name, parameter) for name, parameter in chosen]
    everyone = world.gather_objects(mine)
    lines = []
    for number, (_, parameter) in enumerate(chosen):
        sharded = isinstance(parameter, DistributedParameter)
        ranks = [rank[number] for rank in everyone] if sharded else [mine[number]]
        lines.append(_line(ranks, mine[number].shape))
    return lines


def _parameter(name: str, parameter: torch.nn.Parameter) -> _Local:
    shape = parameter.full_shape if isinstance(parameter, DistributedParameter) else parameter.shape
    gradient = None if parameter.grad is None else _Moments.of(parameter.grad.as_subclass(torch.Tensor))
    return _Local(name, tuple(shape), _Moments.of(parameter.data), gradient)  # waits for a pending update


# -- what a forward computes --------------------------------------------------------------------------------------


@dataclass
class _Record:
    tensor: torch.Tensor
    name: str
    group: str | None
    wants_gradient: bool
    version: int


class InspectTensor:
    """What `record_tensor` noted inside one `with inspect_tensor()`."""

    def __init__(self) -> None:
        self._records: list[_Record] = []

    def add(self, x: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        wants = requires_grad and x.requires_grad
        if wants:
            x.retain_grad()
        self._records.append(_Record(x, name, group, wants, x._version))

    def get_summary(self) -> list[dict[str, Any]]:
        """One dict for every record, in order, over all ranks' tensors. Collective.

        Keys as in `inspect_model`; shape counts dimension 0 over all ranks; a gradient that backward has not reached
        is None. A name is `group.name`, and `group.0.name`, `group.1.name`, … where one was recorded several times.
        RuntimeError where the ranks have recorded different names, or where a recorded tensor was modified in place.
        """
        world = current_world()
        world.assemble("get_summary")
        written = ", ".join(record.name for record in self._records if record.tensor._version != record.version)
        world.raise_everywhere(
            "Recorded tensors were modified in place afterwards, so their values are gone: record x.clone(), or write "
            "`x = x + y` for `x += y`",
            written or None,
        )
        mine = [self._local(name, record) for name, record in zip(self._names(), self._records)]
        everyone: list[list[_Local]] = world.gather_objects(mine)
        names = [[local.name for local in rank] for rank in everyone]
        if any(other != names[0] for other in names):
            raise RuntimeError(
                f"The ranks have recorded different tensors, so there are no statistics over all of them: {names}. "
                "Call record_tensor on every rank, equally often."
            )
        lines = []
        for ranks in zip(*everyone):
            shape = ranks[0].shape
            rows = (sum(local.shape[0] for local in ranks), *shape[1:]) if shape else ()
            lines.append(_line(ranks, rows))
        return lines

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> torch.Tensor | None:
        """This rank's recorded tensor, with its `.grad`; the `index`-th of that name (the first), None if none."""
        found = [record.tensor for record in self._records if (record.name, record.group) == (name, group)]
        index = 0 if index is None else index
        return found[index] if 0 <= index < len(found) else None

    def _names(self) -> list[str]:
        often = Counter((record.group, record.name) for record in self._records)
        met: Counter = Counter()
        names = []
        for record in self._records:
            key = record.group, record.name
            parts = [record.group, str(met[key]) if often[key] > 1 else None, record.name]
            names.append(".".join(part for part in parts if part is not None))
            met[key] += 1
        return names

    def _local(self, name: str, record: _Record) -> _Local:
        x = record.tensor
        gradient = x.grad if record.wants_gradient else None
        moments = None if gradient is None else _Moments.of(gradient)
        return _Local(name, tuple(x.shape), _Moments.of(x), moments)


@contextmanager
def inspect_tensor() -> Iterator[InspectTensor]:
    """`with bmt.inspect.inspect_tensor() as inspector:` run forward and backward, then ask `inspector`.

    Under it `record_tensor` notes what it is given, once a call of the forward also where a block recomputes. It keeps
    the tensors: use it for one step now and then.
    """
    step = current_world().schedule
    if step.inspector is not None:
        raise RuntimeError("inspect_tensor is already active: one `with inspect_tensor()` at a time.")
    step.inspector = inspector = InspectTensor()
    try:
        yield inspector
    finally:
        step.inspector = None


def record_tensor(x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True) -> None:
    """Note the activation `x` under `name` for the active `inspect_tensor`; does nothing where there is none.

    group: a prefix of the name. requires_grad: keep its gradient too. Raises ValueError for a parameter.
    """
    if isinstance(x, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
        raise ValueError(f"record_tensor takes an activation, not a {type(x).__name__}: see inspect_model for weights.")
    step = current_world().schedule
    if step.inspector is not None and not step.in_backward:  # in backward it is a recomputation of what is noted
        step.inspector.add(x, name, group, requires_grad)


def format_summary(summary: Sequence[dict[str, Any]]) -> str:
    """`summary`, as `inspect_model` and `get_summary` give it, as a table in text: one line each below a header."""
    rows = [_COLUMNS, *(tuple(_cell(line[column]) for column in _COLUMNS) for line in summary)]
    widths = [max(len(row[number]) for row in rows) for number in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
