"""Observers: objects with methods that are called at events of training, such as the end of a backward or step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..sharding.gradient import GradientBuffer

if TYPE_CHECKING:  # at run time, engine/blocks may not import engine/optim (see the order of imports in README.md)
    from ..optim.manager import OptimManager


class Observer:
    """Base class of objects whose methods are called at certain points of training, for example to measure or check it.

    For example, an observer can check each gradient for nan before it is averaged, or measure the time of each step.
    Each method below says when it is called. The methods of this class do nothing; a subclass overrides those that it
    needs. To use an observer, pass it to `Schedule.observe`. Every rank has its own observers.

    Attributes:
        position: a number that determines the order of observers (default: 50). At each point of training, observers
            with a lower position are called first.
    """

    position = 50

    def before_forward(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before each forward of a sharded model, except during a backward and in rehearsals (trial forwards).

        model: the model.
        args, kwargs: the arguments of the forward.
        """

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        """Called before the gradient of one parameter is averaged over the ranks.

        If several modules outside the blocks share a parameter, each of them computes a gradient of it. This method is
        called once for each of these gradients.

        Args:
            gradient: the GradientBuffer, which averages the gradients of all parameters of one flat buffer.
            index: the index of the parameter in the flat buffer.
            values: this rank's gradient of the full parameter, before averaging.
        """

    def end_backward(self) -> None:
        """Called at the end of a backward, after the `.grad` of every parameter has been set."""

    def end_step(self, manager: OptimManager) -> None:
        """Called at the end of `manager.step()`.

        On a GPU, the host does not know yet whether the step was skipped because a gradient contained inf or nan. If
        the step was skipped, `explain_skip` is called later, for example in the manager's next `backward`.
        """

    def explain_skip(
        self, manager: OptimManager, parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor
    ) -> str | None:
        """Return an explanation of why the last step of `manager` was skipped, or None if the reason is unknown.

        Collective: every rank must call it.

        Args:
            manager: the manager whose step was skipped.
            parameters: the parameters that the optimizers of `manager` had in the skipped step.
            counts: (len(parameters), 2) int64. Row i has the number of nan and the number of inf in this rank's
                elements of the averaged gradient of parameter i. Both are -1 if there is no gradient, or if it was
                freed before the host learned that the step had been skipped.
        """

    def out_of_memory(self) -> str | None:
        """Return a note to add to a torch.OutOfMemoryError, or None to add nothing.

        Called if the error is raised in the forward of a model, or in `backward` or `step` of an OptimManager.
        """

    def record(self, tensor: torch.Tensor, name: str, group: str | None, requires_grad: bool) -> None:
        """Called for each activation that the user's code passes to `record_tensor`.

        Not called in recomputations or rehearsals (trial forwards).

        Args:
            tensor: an activation, of any shape.
            name: its name.
            group: a prefix of the name; None for no prefix.
            requires_grad: whether the gradient of the activation should be recorded too.
        """


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_") and name != "position")
Kind = TypeVar("Kind", bound=Observer)


class Observers:
    """All observers of this rank (objects whose methods are called at events of training), ordered by their `position`.

    For each method of `Observer`, the attribute of the same name contains the observers that override the method. To
    report an event, call the method of each of them.
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
        """Add `observer`. Among observers with the same `position`, those that were added earlier are called first."""
        self._all.append(observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Remove `observer`, so that its methods are not called any longer. Do nothing if it was not added."""
        if any(observer is each for each in self._all):
            self._all = [each for each in self._all if each is not observer]
            self._sort()

    def _sort(self) -> None:
        self._all.sort(key=lambda observer: observer.position)
        for event in EVENTS:
            default = getattr(Observer, event)
            setattr(self, event, tuple(each for each in self._all if getattr(type(each), event) is not default))


class ObserverHandle:
    """The handle that `Schedule.observe` returns. Call `remove` to remove the observer.

    Args:
        observers: the collection that contains the observer.
        observer: the observer.
        owner: an object; when it is freed, the observer is removed. None if the observer stays until `remove`.
    """

    def __init__(self, observers: Observers, observer: Observer, owner: object | None) -> None:
        # The reference is weak, because the observer may store this handle. With a strong reference, the observer and
        # the handle would then keep each other alive.
        self._observers, self._observer = observers, weakref.ref(observer)
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
