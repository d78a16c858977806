"""Observers: what a feature sees of the steps of a world, without a change to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..sharding.gradient import GradientBuffer

if TYPE_CHECKING:  # optimizers are to the right of this folder
    from ..optim.manager import OptimManager


class Observer:
    """Sees the events of a world whose methods it overrides. `Schedule.observe` adds it.

    position: observers of an event run in ascending order of it.
    """

    position = 50

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward of a wrapped model, but not in a recomputation or a rehearsal."""

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        """Called with this rank's own gradient of parameter `index` of a buffer, before the mean over the ranks."""

    def end_backward(self) -> None:
        """Called at the end of a backward, when all gradients have been received."""

    def end_step(self, manager: OptimManager) -> None:
        """Called at the end of `OptimManager.step`. On a GPU the host does not know yet whether it was skipped."""

    def explain_skip(
        self, manager: OptimManager, parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor
    ) -> str | None:
        """Return in words why the last step of `manager` was skipped, None if that is not known. Collective.

        Args:
            parameters: of all its optimizers.
            counts: (len(parameters), 2) int64, the numbers of nan and inf in this rank's part of each averaged
                gradient; -1 where the gradient was freed before it was known that the step is skipped.
        """

    def out_of_memory(self) -> str | None:
        """Return lines for the error by which the device's memory ran out, None for none."""

    def record(self, tensor: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        """Called by `record_tensor` in a forward that is not a recomputation or a rehearsal."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_") and name != "position")
Kind = TypeVar("Kind", bound=Observer)


class Observers:
    """The observers of a world: one tuple per event, of those that override its method, in order of position."""

    before_forward: tuple[Observer, ...]
    before_reduce: tuple[Observer, ...]
    end_backward: tuple[Observer, ...]
    end_step: tuple[Observer, ...]
    explain_skip: tuple[Observer, ...]
    out_of_memory: tuple[Observer, ...]
    record: tuple[Observer, ...]

    def __init__(self) -> None:
        self._all: list[Observer] = []
        self._sort()

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._all)

    def add(self, observer: Observer) -> None:
        """Add `observer` behind those of the same position."""
        self._all.append(observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Remove `observer`; do nothing if it is not there."""
        if any(observer is each for each in self._all):
            self._all = [each for each in self._all if each is not observer]
            self._sort()

    def _sort(self) -> None:
        self._all.sort(key=lambda observer: observer.position)
        for event in EVENTS:
            default = getattr(Observer, event)
            setattr(self, event, tuple(each for each in self._all if getattr(type(each), event) is not default))


class ObserverHandle:
    """What `Schedule.observe` returns."""

    def __init__(self, observers: Observers, observer: Observer, owner: object | None) -> None:
        self._observers, self._observer = observers, weakref.ref(observer)  # an observer may own its handle
        self._freed = None if owner is None else weakref.finalize(owner, observers.remove, observer)
        if self._freed is not None:
            self._freed.atexit = False

    def remove(self) -> None:
        """Remove the observer. A second call does nothing."""
        if self._freed is not None:
            self._freed.detach()
        observer = self._observer()
        if observer is not None:
            self._observers.remove(observer)
