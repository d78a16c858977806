"""The updates of a step that a backward makes, each as soon as its gradient is reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter
from .state import RunState


class EarlyUpdates:
    """What of a step has been done before the step: which parameters, with which numbers, from which gradients.

    A buffer's gradient reaches all its slices at once, so a hook on one of them stands for all. The reduction is
    what makes it safe to write the weights then: every rank has left the block's backward, or its part of the
    gradient would be missing; so nobody reads these weights again before the next forward, which waits for the
    update (see PendingUpdate).
    """

    def __init__(self) -> None:
        self.parameters: set[torch.nn.Parameter] = set()
        self._numbers: list = []
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def __contains__(self, state: RunState) -> bool:
        return state.run.parameters[0] in self.parameters

    @contextmanager
    def watch(self, parameters: Iterable[torch.nn.Parameter], reduced: Callable[[list[Any]], None]) -> Iterator[None]:
        """Under `with`, `reduced` gets those of the slices among `parameters` that have a gradient, a buffer at a
        time, when that is reduced."""
        members: dict[ShardedBuffer, list[Any]] = {}
        for parameter in parameters:
            if isinstance(parameter, DistributedParameter) and parameter.requires_grad:
                members.setdefault(parameter.buffer, []).append(parameter)

        def hook_on(slices: list[Any]):
            def hook(parameter: torch.nn.Parameter) -> None:
                reduced([piece for piece in slices if piece.grad is not None])

            # Hooks run in the order of the buffer: this one comes when users' own have seen their gradients.
            last = [piece for piece in slices[0].buffer.slices if piece.requires_grad][-1]
            return last.register_post_accumulate_grad_hook(hook)

        handles = [hook_on(slices) for slices in members.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def admit(self, slices: Sequence[DistributedParameter], states: Sequence[RunState]) -> list[int]:
        """The numbers of the `states` of a buffer whose `slices` have a gradient, where they are made for just these.

        Otherwise none: then it is for `step` to arrange them. RuntimeError where they have been updated already.
        """
        if not slices or not slices[0].buffer.gradient.intact:
            return []
        runs = [number for number, state in enumerate(states) if state.run.buffer is slices[0].buffer]
        members = {id(p) for number in runs for p in states[number].run.parameters}
        if members != {id(p) for p in slices}:
            return []
        if not self.parameters.isdisjoint(slices):
            raise RuntimeError(
                f"A second backward inside update_in_backward() brought gradients of {len(slices)} parameters that "
                "have been updated already. Accumulate outside of it: `with optimizer.update_in_backward():` belongs "
                "around the last backward of a step alone, and step() after it."
            )
        return runs

    def note(self, states: Sequence[RunState], hyper: list) -> None:
        """These `states` of one buffer have been updated by these numbers."""
        self._numbers = _snapshot(hyper)
        with torch._C.DisableTorchFunctionSubclass():  # a GradSlice's version is asked for like any tensor's
            for parameter in (p for state in states for p in state.run.parameters):
                assert parameter.grad is not None
                self.parameters.add(parameter)
                self._gradients.append((parameter, parameter.grad, parameter.grad._version))

    def check_may_begin(self, hindrance: str | None) -> None:
        """Raise where a step cannot be made in parts, because of the `hindrance` or because one is under way."""
        if hindrance is not None:
            raise ValueError(f"update_in_backward() with {hindrance}: leave one of the two out.")
        if self:
            raise RuntimeError("update_in_backward() again before step(): call step() once after each.")

    def check_used_as_they_are(self, hyper: list, grad_scale: torch.Tensor | None) -> None:
        """RuntimeError where a step would have been another one than what the backward has done."""
        if not self:
            return
        problem = None
        if grad_scale is not None:
            problem = "a loss scale or a clip factor came with step()"
        elif self._gradients_changed():
            problem = "gradients were changed after it (clipped or unscaled, say)"
        elif _snapshot(hyper) != self._numbers:
            problem = "lr or another setting of a parameter group changed between it and step()"
        if problem is not None:
            raise RuntimeError(
                f"update_in_backward() has updated {len(self.parameters)} parameters during the backward, and then "
                f"{problem}, too late for them. Change them before the backward (with OptimManager, call "
                "manager.backward), or leave update_in_backward out."
            )

    def _gradients_changed(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(
                parameter.grad is not None and (parameter.grad is not used or used._version != version)
                for parameter, used, version in self._gradients
            )

    def end(self) -> None:
        """The step is made."""
        self.parameters, self._numbers, self._gradients = set(), [], []


def _snapshot(hyper: list) -> list:
    """To be compared later, without reading a tensor, which may lie on a device."""
    return [[(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in numbers] for numbers in hyper]


class UpdatesInBackward(torch.optim.Optimizer):
    """An optimizer over runs that may make a step in parts.

    overlap_forward: whether the weights may still be on their way when a step returns.
    """

    def __init__(self, params: Iterable, defaults: dict[str, Any], overlap_forward: bool) -> None:
        super().__init__(params, defaults)
        self.loss_scale: torch.Tensor | None = None
        self._overlap_forward = overlap_forward
        self._active: list[list[torch.nn.Parameter]] = []  # by group, what the runs are made of; none: to be made
        self._states: list[RunState] = []
        self._early = EarlyUpdates()

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Under `with`, a backward updates each block as soon as its gradient is reduced, and `step` does the rest.

            for batch in batches[:-1]:
                model(batch).backward()  # accumulates
            with optimizer.update_in_backward():
                model(batches[-1]).backward()
            optimizer.step()

        The weights after `step` are the same bits as without it; between the two they are partly updated, and
        belong to nobody. It is for what needs no look at all gradients together: clipping, a loss scale and skipping
        come too late, and raise in `clip_grad_norm` and `step`; an inf or nan is in the weights, of which
        OptimManager tells by an error. `step` counts the parameters of the first step, of the first after a load,
        and wherever others than the last time have gradients, among the rest, as it does ordinary parameters.

        ValueError with a loss scale; RuntimeError for a second backward inside, and where `step` is still to come.
        """
        self._early.check_may_begin(self._hindrance())
        parameters = [p for group in self.param_groups for p in group["params"]]
        with self._early.watch(parameters, self._gradient_reduced):
            yield
        if not self._overlap_forward:
            self.wait()

    def _hindrance(self) -> str | None:
        """With what a step cannot be made in parts."""
        return None if self.loss_scale is None else "a loss scale, which may skip the step when all gradients are there"

    @property
    def updated_in_backward(self) -> bool:
        """Whether a backward has updated parameters, and `step` is still to come."""
        return bool(self._early)

    def _gradient_reduced(self, slices: list[DistributedParameter]) -> None:
        if not self._active:
            return
        runs = self._early.admit(slices, self._states)
        if runs:
            self._step_runs(runs, True)
            self._early.note([self._states[number] for number in runs], self._hyper())

    def wait(self) -> None:
        """The current stream waits until the last update has written the weights."""
        raise NotImplementedError

    def _hyper(self) -> list:
        """The numbers of a step, a group each."""
        raise NotImplementedError

    def _step_runs(self, numbers: Sequence[int], beside: bool) -> None:
        """One step of these runs, whose gradients are there; on another stream if they may lag behind."""
        raise NotImplementedError
