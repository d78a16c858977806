"""Observers: objects that are called at events of training (forward, backward, step), and do not change training."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..sharding.gradient import GradientBuffer

if TYPE_CHECKING:  # at run time, this folder must not import engine/optim
    from ..optim.manager import OptimManager


class Observer:
    """Base class of observers, which are called on each rank at events of its forwards, backwards and steps.

    Each method is an event. Subclasses override the methods of the events that they need. `Schedule.observe` adds an
    observer.

    Attributes:
        position: determines the order of observers. At each event, those with a lower position are called first.
    """

    position = 50

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward of a wrapped model, except in recomputations and rehearsals (trial forwards).

        args, kwargs: the arguments of the forward.
        """

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        """Called before the gradient of one parameter is averaged over the ranks.

        If several modules outside the blocks share a parameter, this is called for the gradient from each of them.

        Args:
            gradient: the GradientBuffer, which averages the gradients of all parameters of one flat buffer.
            index: the index of the parameter in the flat buffer.
            values: this rank's gradient of the full parameter, before averaging.
        """

    def end_backward(self) -> None:
        """Called at the end of a backward, after the `.grad` of every parameter has been set."""

    def end_step(self, manager: OptimManager) -> None:
        """Called at the end of `manager.step()`. On a GPU, it is not known yet whether the step was skipped."""

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
        """Return text to add to a torch.OutOfMemoryError of a forward, backward or step; None if there is none."""

    def record(self, tensor: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        """Called for each call of `record_tensor`, with its arguments, except in recomputations and trial forwards."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_") and name != "position")
Kind = TypeVar("Kind", bound=Observer)


class Observers:
    """The observers of a world, in the order of their positions.

    For each method of `Observer`, the attribute of the same name lists the observers that override it.
    """

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
    """The handle that `Schedule.observe` returns, for removing the observer."""

    def __init__(self, observers: Observers, observer: Observer, owner: object | None) -> None:
        self._observers, self._observer = observers, weakref.ref(observer)  # weak: an observer may own its handle
        self._freed = None if owner is None else weakref.finalize(owner, observers.remove, observer)
        if self._freed is not None:
            self._freed.atexit = False

    def remove(self) -> None:
        """Remove the observer. Does nothing if it was removed already."""
        if self._freed is not None:
            self._freed.detach()
        observer = self._observer()
        if observer is not None:
            self._observers.remove(observer)
