"""Statistics of parameters and activations, computed over all ranks."""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.base.arguments import expect_flag, expect_kind, expect_module
from ..engine.blocks.observer import Observer
from ..engine.runtime.world import current_world
from ..engine.sharding.parameter import DistributedParameter

_COLUMNS = {"name": 4, "shape": 20, "max": 10, "min": 10, "std": 10, "mean": 10, "grad_std": 10, "grad_mean": 10}
"""{column of `format_summary`'s table: its minimum width in characters}, the same as in BMTrain."""


@dataclass(frozen=True)
class _Moments:
    """Statistics of a set of numbers, in float64. `+` combines the statistics of two sets.

    Attributes:
        count: how many numbers there are.
        mean: their mean.
        squares: the sum of (number - mean)².
        low: the smallest number, or inf if the set is empty.
        high: the largest number, or -inf if the set is empty.
    """

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
        """Return the statistics of the numbers in `self` and `other` together (Chan, Golub & LeVeque 1979)."""
        count = self.count + other.count
        if not self.count or not other.count:
            return self if self.count else other
        apart = other.mean - self.mean
        mean = self.mean + apart * other.count / count
        squares = self.squares + other.squares + apart * apart * self.count * other.count / count
        # As in torch, the minimum and the maximum are nan if any of the numbers is nan. With Python's min and max
        # alone, this would depend on the order of the numbers.
        low = math.nan if math.isnan(self.low) else min(other.low, self.low)
        high = math.nan if math.isnan(self.high) else max(other.high, self.high)
        return _Moments(count, mean, squares, low, high)

    @property
    def std(self) -> float:
        """The unbiased standard deviation, like torch.std; nan for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan


class _Local:
    """Statistics of the elements that one rank has of a tensor, and of the gradient of these elements.

    Args:
        name: the name of the tensor in the summary.
        shape: the shape of the tensor; for a sharded parameter, that of the full parameter.
        values: the elements that this rank has.
        gradient: their gradient, or None if there is none.
    """

    def __init__(self, name: str, shape: torch.Size, values: torch.Tensor, gradient: torch.Tensor | None) -> None:
        self.name, self.shape = name, tuple(shape)
        self.values = _Moments.of(values)
        self.gradient = None if gradient is None else _Moments.of(gradient)


def _version_of(tensor: torch.Tensor) -> int | None:
    """Return torch's version counter, which in-place writes increment; None for inference tensors, which have none."""
    return None if tensor.is_inference() else tensor._version


def _line(ranks: Sequence[_Local], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the dict that describes one tensor in a summary: its name, its shape and statistics over all ranks.

    ranks: the statistics of each rank's elements.
    shape: the shape to put into the dict.
    """
    total = functools.reduce(operator.add, [local.values for local in ranks])
    gradients = [local.gradient for local in ranks if local.gradient is not None]
    gradient = functools.reduce(operator.add, gradients) if gradients else None
    return {
        "name": ranks[0].name, "shape": shape,
        "std": total.std, "mean": total.mean, "max": total.high, "min": total.low,
        "grad_std": None if gradient is None else gradient.std,
        "grad_mean": None if gradient is None else gradient.mean,
    }  # fmt: skip


# -- parameters ---------------------------------------------------------------------------------------------------


def inspect_model(model: torch.nn.Module, param_name: str, prefix: str = "") -> list[dict[str, Any]]:
    """Compute statistics of a model's parameters from the ranks' shards, without gathering full parameters.

    Collective: every rank must call it.

    Args:
        model: the model, sharded or not.
        param_name: a pattern for the names of parameters (`*`, `?`, `[...]`), such as "*.weight".
        prefix: a string to put before each name, for example "model." if `model` is the attribute `model` of a larger
            module. `param_name` must match the name with this prefix.

    Returns:
        A list with a dict for each parameter whose name matches. A tied parameter has a dict for each of its names. The
        keys are:

        * name: the parameter's name, with the prefix.
        * shape: the shape of the full parameter.
        * std (unbiased), mean, max and min: over all elements of the full parameter.
        * grad_std and grad_mean: over all elements of the full `.grad`, as it is stored; 0.0 if there is no gradient.
          If training uses a loss scale, the stored gradient is multiplied by it.

        For a parameter that is not sharded, the statistics cover only this rank's copy.
    """
    world = current_world()
    expect_module("model", model)
    expect_kind("param_name", param_name, str, "a pattern of names, such as '*.weight'")
    expect_kind("prefix", prefix, str, "a str")
    world.barrier("inspect_model")
    mine, sharded = [], []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if fnmatch.fnmatchcase(prefix + name, param_name):
            gradient = None if parameter.grad is None else parameter.grad.as_subclass(torch.Tensor)
            # Reading `.data` waits until an asynchronous optimizer step is complete.
            values = parameter.data.as_subclass(torch.Tensor)
            shape = parameter.shape
            if isinstance(parameter, DistributedParameter):
                shape = parameter.buffer.storage.whole_shape(parameter.index)
            sharded.append(isinstance(parameter, DistributedParameter))
            mine.append(_Local(prefix + name, shape, values, gradient))
    ranks = zip(*world.gather_objects(mine))
    lines = [_line(all_ranks if cut else [own], own.shape) for own, cut, all_ranks in zip(mine, sharded, ranks)]
    return [{key: 0.0 if value is None else value for key, value in line.items()} for line in lines]


# -- activations --------------------------------------------------------------------------------------------------


@dataclass
class _Record:
    """A tensor that `record_tensor` recorded.

    wants_gradient: whether the tensor's gradient is also kept.
    version: the value of torch's counter of in-place writes to the tensor when the tensor was recorded. A later
        in-place write increments the counter.
    """

    tensor: torch.Tensor
    name: str
    group: str | None
    wants_gradient: bool
    version: int | None


class InspectTensor:
    """The tensors recorded by `record_tensor` inside one `with inspect_tensor()`, which creates this object.

    Read it after the backward: `get_summary` computes statistics over all ranks, `get_tensor` returns one tensor of
    this rank, and `summary` lists all tensors of this rank.
    """

    def __init__(self) -> None:
        self._records: list[_Record] = []

    def add(self, x: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        """Record a tensor. Called by `record_tensor`, which model code should call instead.

        Args:
            x: the tensor. The record refers to `x` itself, not to a copy.
            name: its name.
            group: a prefix of its name in the summary; None for no prefix.
            requires_grad: whether to keep its gradient too, if `x` requires one (`x.retain_grad()`).
        """
        wants = requires_grad and x.requires_grad
        if wants:
            x.retain_grad()
        self._records.append(_Record(x, name, group, wants, _version_of(x)))

    @property
    def summary(self) -> list[dict[str, Any]]:
        """The tensors that this rank has recorded, in order, each as a dict.

        The keys are name, group, summary_name (the name in the result of `get_summary`), shape and tensor.
        """
        return [
            {"name": r.name, "group": r.group, "summary_name": name, "shape": r.tensor.shape, "tensor": r.tensor}
            for name, r in zip(self._names(), self._records)
        ]

    def get_summary(self) -> list[dict[str, Any]]:
        """Compute statistics of the recorded tensors over all ranks. Collective: every rank must call it.

        Returns:
            A list, equal on all ranks, with a dict for each recorded tensor, in order. All values describe the
            concatenation of the ranks' tensors on dimension 0. Scalars are combined as if they had shape (1,), so their
            statistics are over one number of each rank. The keys are:

            * name: `group.N.name`, or `N.name` without a group. N counts the tensors of the same group and name, from
              0.
            * shape: the shape of the concatenation; () for scalars.
            * std (unbiased), mean, max, min: over all elements.
            * grad_std, grad_mean: of the gradient, or None if no gradient was kept. Each rank's elements have the
              gradient of that rank's own loss, times the loss scale if there is one.

        Raises:
            RuntimeError: a recorded tensor was modified in place later.
            RuntimeError: the ranks have recorded different names.
            RuntimeError: the ranks have recorded a tensor with shapes that differ in more than dimension 0.
        """
        world = current_world()
        world.barrier("get_summary")
        written = ", ".join(record.name for record in self._records if _version_of(record.tensor) != record.version)
        world.raise_everywhere(
            "Recorded tensors were modified in place afterwards, so their values are lost. Record x.clone(), or write "
            "`x = x + y` instead of `x += y`",
            written or None,
        )
        mine = [
            _Local(name, record.tensor.shape, record.tensor, record.tensor.grad if record.wants_gradient else None)
            for name, record in zip(self._names(), self._records)
        ]
        everyone: list[list[_Local]] = world.gather_objects(mine)
        names = [[local.name for local in rank] for rank in everyone]
        if any(other != names[0] for other in names):
            raise RuntimeError(
                "The ranks recorded different tensors, so no statistics over all ranks can be computed. The names that "
                f"each rank recorded, in rank order: {names}. Call record_tensor on every rank the same number of "
                "times, with the same names."
            )
        lines = []
        for ranks in zip(*everyone):
            shapes = [tuple(local.shape) for local in ranks]
            if len({(len(shape), *shape[1:]) for shape in shapes}) > 1:
                raise RuntimeError(
                    f"The ranks recorded {ranks[0].name} with different shapes: {shapes} (in rank order). Only "
                    "dimension 0 may differ."
                )
            rows = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if shapes[0] else ()
            lines.append(_line(ranks, rows))
        return lines

    def get_tensor(self, name: str, group: str | None = None, index: int | None = None) -> torch.Tensor | None:
        """Return a tensor that this rank recorded. Not collective.

        After the backward, the tensor's `.grad` is its gradient, if the tensor requires a gradient and `record_tensor`
        was called with `requires_grad=True` (the default).

        Args:
            name: the `name` that was passed to `record_tensor`.
            group: the `group` that was passed to `record_tensor`; None if there was none.
            index: the index, from 0, among the tensors that were recorded with this name and group. There are several,
                for example, if there were several forwards. None means 0.

        Returns:
            The recorded tensor itself, not a copy; None if no such tensor was recorded.
        """
        found = [record.tensor for record in self._records if (record.name, record.group) == (name, group)]
        index = index or 0
        return found[index] if 0 <= index < len(found) else None

    def _names(self) -> list[str]:
        """Return the name of each recorded tensor in the summary: `group.N.name`, or `N.name` without a group.

        N counts the tensors of the same group and name, from 0.
        """
        numbers = defaultdict(itertools.count)
        names = []
        for record in self._records:
            parts = [record.group, str(next(numbers[record.group, record.name])), record.name]
            names.append(".".join(part for part in parts if part is not None))
        return names


class _Recording(Observer):
    """Passes tensors from `record_tensor` to an InspectTensor while `inspect_tensor` is active.

    It is an observer, because `record_tensor` calls the method `record` of all registered observers.

    inspector: the InspectTensor that keeps the recorded tensors.
    """

    def __init__(self, inspector: InspectTensor) -> None:
        self.inspector = inspector

    def record(self, tensor: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        self.inspector.add(tensor, name, group, requires_grad)


@contextmanager
def inspect_tensor() -> Iterator[InspectTensor]:
    """Record the tensors that are passed to `record_tensor` inside this context.

    The model's forward calls `record_tensor(x, name)` where an activation is of interest. Every forward adds its
    tensors; a recomputation in backward adds none. Recorded tensors, with their autograd graph, stay in memory as long
    as the `InspectTensor` exists.

    Returns:
        A context manager that yields an `InspectTensor`, which contains the recorded tensors.

    Raises:
        RuntimeError: another `inspect_tensor` is active.

    Example::

        with bmt.inspect.inspect_tensor() as inspector:
            model(batch).backward()
        print(bmt.inspect.format_summary(inspector.get_summary()))
    """
    schedule = current_world().schedule
    if schedule.observer(_Recording) is not None:
        raise RuntimeError("inspect_tensor is already active: use one `with inspect_tensor()` at a time.")
    inspector = InspectTensor()
    handle = schedule.observe(_Recording(inspector))
    try:
        yield inspector
    finally:
        handle.remove()


def record_tensor(x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True) -> None:
    """Record an activation in the active `inspect_tensor` context; do nothing outside one.

    Args:
        x: the activation, any shape. No copy is made, so do not modify `x` in place afterwards.
        name: its name in the summary.
        group: a prefix of the name; None for no prefix.
        requires_grad: whether to keep its gradient too, if `x` requires one.

    Raises:
        ValueError: `x` is a parameter, or not a tensor.
        TypeError: another argument has the wrong type.
    """
    if isinstance(x, torch.nn.Parameter) or not isinstance(x, torch.Tensor):
        raise ValueError(
            f"record_tensor takes an activation as x, got type {type(x).__name__}. Use inspect_model for parameters."
        )
    expect_kind("name", name, str, "a str")
    expect_kind("group", group, (str, type(None)), "a str or None")
    expect_flag("requires_grad", requires_grad)
    schedule = current_world().schedule
    observers = schedule.observers.record
    if observers and not schedule.repeats:
        for observer in observers:
            observer.record(x, name, group, requires_grad)


def format_summary(summary: Sequence[dict[str, Any]]) -> str:
    """Return a summary as a text table: a header, and one line per parameter or recorded tensor.

    The columns are name, shape, max, min, std, mean, grad_std and grad_mean, which are keys of each dict in `summary`.

    Args:
        summary: the result of `inspect_model` or `InspectTensor.get_summary`.

    Raises:
        TypeError: `summary` is not a list of dicts.
        ValueError: a dict in `summary` lacks one of these eight keys.
    """
    expect_kind("summary", summary, (list, tuple), "a list, from inspect_model or get_summary")
    for line in summary:
        expect_kind("summary", line, Mapping, "a list of dicts, from inspect_model or get_summary")
        if not _COLUMNS.keys() <= line.keys():
            raise ValueError(
                "summary must be a result of inspect_model or get_summary, but a dict in it lacks one of the keys "
                f"{list(_COLUMNS)}"
            )
    rows = [tuple(_COLUMNS), *(tuple(_cell(line[column]) for column in _COLUMNS) for line in summary)]
    longest = [max(map(len, column)) for column in zip(*rows)]
    widths = [max(least, length + 1) for least, length in zip(_COLUMNS.values(), longest)]
    return "\n".join(" ".join(["", *(cell.ljust(w - 1) for cell, w in zip(row, widths))]).rstrip() for row in rows)


def _cell(value: Any) -> str:
    """Return the string for a table cell: "-" for None, four decimals for a float, otherwise `str(value)`."""
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
