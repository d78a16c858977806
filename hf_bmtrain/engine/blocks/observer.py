"""Observers: objects that are called at certain events of a world's training steps, and do not change the steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..sharding.gradient import GradientBuffer

if TYPE_CHECKING:  # at run time, this folder must not import engine/optim
    from ..optim.manager import OptimManager


class Observer:
    """Base class of observers of the forwards, backwards and steps of a world. Subclasses override some methods.

    `Schedule.observe` adds an observer to a world.

    Attributes:
        position: at each event, observers are called in ascending order of `position`.
    """

    position = 50

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward of a wrapped model, except in recomputations and rehearsals (trial forwards)."""

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        """Called before a gradient is averaged over the ranks.

        Args:
            gradient: the GradientBuffer of the flat buffer that contains the parameter.
            index: the index of the parameter in the flat buffer.
            values: this rank's gradient of the full parameter, before averaging.
        """

    def end_backward(self) -> None:
        """Called at the end of a backward, after every `.grad` is set."""

    def end_step(self, manager: OptimManager) -> None:
        """Called at the end of `manager.step()`. On a GPU, the host does not yet know if the step was skipped."""

    def explain_skip(
        self, manager: OptimManager, parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor
    ) -> str | None:
        """Return a text that explains why the last step of `manager` was skipped, or None if unknown.

        Collective: every rank must call it.

        Args:
            manager: the manager whose step was skipped.
            parameters: the parameters of all optimizers of `manager`.
            counts: (len(parameters), 2) int64, the numbers of nan and of inf in this rank's elements of each averaged
                gradient; -1 if the gradient was freed before the host learned that the step had been skipped.
        """

    def out_of_memory(self) -> str | None:
        """Return lines to be added to a torch.OutOfMemoryError, or None."""

    def record(self, tensor: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        """Called by `record_tensor` with its arguments, except in recomputations and rehearsals."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_") and name != "position")
Kind = TypeVar("Kind", bound=Observer)


class Observers:
    """The observers of a world. For each event, an attribute lists the observers that override the event's method."""

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
        """Add `observer`, after those with the same position."""
        self._all.append(observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Remove `observer`. Do nothing if it was not added."""
        if any(observer is each for each in self._all):
            self._all = [each for each in self._all if each is not observer]
            self._sort()

    def _sort(self) -> None:
        self._all.sort(key=lambda observer: observer.position)
        for event in EVENTS:
            default = getattr(Observer, event)
            setattr(self, event, tuple(each for each in self._all if getattr(type(each), event) is not default))


class ObserverHandle:
    """Removes an observer that `Schedule.observe` has added."""

    def __init__(self, observers: Observers, observer: Observer, owner: object | None) -> None:
        self._observers, self._observer = observers, weakref.ref(observer)  # weak, as an observer may own its handle
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
