"""AdamOffloadOptimizer: AdamW with its state in host memory, and updates during the backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...engine.base.arguments import expect_flag
from ...engine.comm.streams import DONE, has_own_memory
from ...engine.ops.adam_step import Elements, Hyper, master_dtype
from ...engine.ops.residual import Master
from ...engine.optim.adam import AdamOptimizer
from ...engine.optim.runs import Run, StateTensors, gradient_versions, is_unchanged
from ...engine.runtime.world import current_world
from ...engine.sharding.buffer import ShardedBuffer
from ...engine.sharding.parameter import DistributedParameter
from .delta import delta_moments
from .device_update import DeviceUpdate
from .slabs import Chunk, Part, Place, allocate_slabs, cut

_log = logging.getLogger("hf_bmtrain")


class AdamOffloadOptimizer(AdamOptimizer):
    """AdamOptimizer with its state in page-locked host memory. The results are bitwise the same.

    It takes as many bytes of host memory as AdamOptimizer takes on the device, and as many over PCIe each way per step;
    the state dict of bfloat16 weights takes 8 bytes more per element. On CPU nothing is copied, and it works like
    AdamOptimizer.

    `step` copies the state through the device in chunks, on streams of its own, and returns before the last chunks are
    updated. The chunks of the first buffers come first, so that the next forward can begin early: a buffer waits for
    its own update when it is all-gathered (see PendingUpdate). Forward, backward, `parameter.gather()`, `state_dict`,
    loading, `.data` and the next `step` wait by themselves. After a `step`, call `wait()` before any other read or
    write of parameters or of `optimizer.state`, and before writing to their gradients (an average over
    `model.parameters()`, for example).

    Args:
        params: as for AdamOptimizer, as are all arguments but `record_delta`.
        lr: the learning rate.
        betas: β₁ and β₂.
        eps: added to √v, outside the square root.
        weight_decay: the decay of the weights.
        hold_steps: the number of first steps that update the moments alone.
        record_delta: compute, after every step, the mean and the variance of its update over all elements, in units of
            the learning rate (see `delta_moments`), for `get_avg_delta()` and `get_var_delta()`. It is slow, for
            inspection only: the host waits for the step, all state is copied to the device once more, in parts of about
            30 MiB, and the ranks reduce three numbers.
        decoupled: False adds the decay to the gradient instead.
        exp_avg_dtype: the dtype of the first moment.

    Raises:
        RuntimeError: in the first step, if the host memory is insufficient for the state.
        ValueError: as AdamOptimizer.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        record_delta: bool = False,
        *,
        decoupled: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, hold_steps, decoupled=decoupled, exp_avg_dtype=exp_avg_dtype
        )
        expect_flag("record_delta", record_delta)
        self._delta = torch.zeros(2, dtype=torch.float64, device="cpu") if record_delta else None
        self._early = _EarlyUpdates()
        self._places: dict[Run, Place] = {}
        self._chunks: list[Chunk] = []
        self._mover: DeviceUpdate | None = None

    def get_avg_delta(self) -> float:
        """Return the mean of the last step's update in units of the learning rate; 0 without `record_delta`.

        Waits for the device. A skipped step leaves the values of the last one.
        """
        return 0.0 if self._delta is None else self._delta[0].item()

    def get_var_delta(self) -> float:
        """Return the variance of the last step's update, as `get_avg_delta` returns the mean."""
        return 0.0 if self._delta is None else self._delta[1].item()

    def wait(self) -> None:
        """Make the current stream wait until the last update has written weights and state. The host does not wait."""
        if self._mover is not None:
            self._mover.updated.wait()

    def _finish(self) -> None:
        """Make the host wait until weights and state are those of the last step."""
        if self._mover is not None:
            self._mover.downloaded.synchronize()  # after the last update

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._check_early()
        # 1. Cut the parameters that have gradients, or have been updated during the backward, into runs.
        early = self._early.parameters
        rearranged = self._arrange(
            [[p for p in group["params"] if p.grad is not None or p in early] for group in self.param_groups]
        )
        # 2. Update the runs that the backward has not updated.
        left = self._not_early()
        if left:
            self._step_runs(left)
        # 3. Announce the pending updates to the gathering communicator, alike on all ranks.
        for owner in dict.fromkeys(self._states[number].run.owner for number in self._in_order(left)):
            if isinstance(owner, ShardedBuffer) and owner.update.ticket is not None:
                owner.update.announce(owner.shard)
        # 4. These runs were cut to fit around those that the backward has updated: cut anew in the next step.
        if rearranged and early:
            self._active = []
        self._early = _EarlyUpdates()
        # 5. Look at the result.
        if self._delta is not None and self._states:
            self._finish()
            settings = {p: each for group, each in zip(self.param_groups, self._settings()) for p in group["params"]}
            moments = delta_moments(self._states, [settings[state.run.parameters[0]] for state in self._states])
            earlier, found_inf = self._delta.to(moments.device), getattr(self, "found_inf", None)
            self._delta = moments if found_inf is None else torch.where(found_inf != 0, earlier, moments)

    def _not_early(self) -> list[int]:
        """Return the numbers of the runs that the backward has not updated."""
        return [n for n, state in enumerate(self._states) if state.run.parameters[0] not in self._early.parameters]

    def _update(self, numbers: Sequence[int]) -> None:
        if self._mover is None:
            return super()._update(numbers)
        states, steps = self._states, self._steps
        gradients = {number: states[number].run.gradient() for number in numbers}

        def update_part(part: Part, chunk: StateTensors) -> None:
            state, gradient = states[part.run], gradients[part.run][part.of_run]
            stored, exp_avg, exp_avg_sq = chunk.part(part.of_chunk.start, part.of_chunk.stop)
            master = Master(state.run.weights[part.of_run], stored, exp_avg_sq)
            steps.update(part.run, Elements(gradient, master, exp_avg, state.index_base + part.of_run.start))

        used: dict[ShardedBuffer | torch.nn.Parameter, list[torch.Tensor]] = {}
        for number, gradient in gradients.items():
            used.setdefault(states[number].run.owner, []).append(gradient)
        tickets = dict.fromkeys(used, DONE)  # a rank may hold nothing of a buffer
        chunks = [chunk for chunk in self._chunks if chunk.owner in used]
        for chunk, ticket in zip(chunks, self._mover.carry(chunks, update_part)):
            tickets[chunk.owner] = ticket
        for owner, ticket in tickets.items():
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, used[owner])
            else:
                ticket.wait()  # nothing waits before an ordinary parameter is read

    def _in_order(self, numbers: Sequence[int]) -> list[int]:
        """Sort numbers of runs by their elements, so that a buffer's are adjacent, in the same order on all ranks."""
        return sorted(numbers, key=lambda number: self._states[number].index_base)

    # -- during the backward ------------------------------------------------------------------------------------

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Update each block during the backward as soon as its gradient is reduced; `step` updates the rest.

        The weights after `step` are bitwise the same as without it; between the backward and `step` they are partly
        updated and must not be used. The state of all blocks is copied during the backward, from the last block to the
        first, so the next forward begins after the last chunk.

        Use it only if the update does not depend on all gradients together: clipping, loss scaling and skipping come
        too late, and `clip_grad_norm` and `step` raise. An inf or nan reaches the weights, and OptimManager raises.
        `step` updates ordinary parameters, and all parameters of a buffer in the first step, in the first after a load
        and whenever other parameters of the buffer have gradients than in the last step.

        Raises:
            ValueError: there is a loss scale.
            RuntimeError: a second backward inside, or no `step` since the last one.

        Example::

            for batch in batches[:-1]:
                model(batch).backward()  # accumulates
            with optimizer.update_in_backward():
                model(batches[-1]).backward()
            optimizer.step()
        """
        if self.loss_scale is not None:
            raise ValueError(
                "update_in_backward() with a loss scale, which may skip the step when all gradients are there: leave "
                "one of the two out."
            )
        if self._early.parameters:
            raise RuntimeError("update_in_backward() again before step(): call step() once after each.")
        by_buffer: dict[ShardedBuffer, list[Any]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, DistributedParameter) and parameter.requires_grad:
                by_buffer.setdefault(parameter.buffer, []).append(parameter)
        with ExitStack() as hooks:
            for buffer, slices in by_buffer.items():
                # Hooks run in the order of the buffer: the last one runs after users' hooks have seen their gradients.
                last = [piece for piece in buffer.slices if piece.requires_grad][-1]
                update = last.register_post_accumulate_grad_hook(lambda _, slices=slices: self._update_early(slices))
                hooks.enter_context(update)
            yield

    @property
    def updated_in_backward(self) -> bool:
        """True if a backward has updated parameters and `step` has not been called since."""
        return bool(self._early.parameters)

    def _update_early(self, slices: list[Any]) -> None:
        """Update a buffer whose gradient has been reduced, if its runs are exactly the slices with a gradient.

        Otherwise `step` does, after arranging the runs. The gradient of a buffer reaches all its slices at once.
        Its reduction makes it safe to write the weights: every rank has left the block's backward, or its part of the
        gradient would be missing, and the next forward waits for the update (see PendingUpdate).
        """
        slices = [piece for piece in slices if piece.grad is not None]
        if not self._active or not slices or not slices[0].buffer.gradient.intact:
            return
        numbers = [number for number, state in enumerate(self._states) if state.run.buffer is slices[0].buffer]
        if {p for number in numbers for p in self._states[number].run.parameters} != set(slices):
            return
        if not self._early.parameters.keys().isdisjoint(slices):
            raise RuntimeError(
                f"A second backward inside update_in_backward() brought gradients of {len(slices)} parameters that "
                "have been updated already. Accumulate outside of it: `with optimizer.update_in_backward():` belongs "
                "around the last backward of a step alone, and step() after it."
            )
        for copied in tuple(current_world().copying):
            copied.wait()
        self._step_runs(numbers)
        self._early.parameters.update(gradient_versions(slices))
        self._early.settings = _snapshot(self._settings())

    def _check_early(self) -> None:
        """Raise RuntimeError if `step` would have made another update than the backward."""
        parameters = self._early.parameters
        if not parameters:
            return
        if getattr(self, "grad_scale", None) is not None:
            problem = "a loss scale or a clip factor came with step()"
        elif any(p.grad is not None and not is_unchanged(p, used) for p, used in parameters.items()):
            problem = "gradients were changed after it (clipped or unscaled, say)"
        elif _snapshot(self._settings()) != self._early.settings:
            problem = "lr or another setting of a parameter group changed between it and step()"
        else:
            return
        raise RuntimeError(
            f"update_in_backward() has updated {len(parameters)} parameters during the backward, and then {problem}, "
            "too late for them. Change them before the backward (with OptimManager, call manager.backward), or leave "
            "update_in_backward out."
        )

    # -- runs and state -----------------------------------------------------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> bool:
        if not super()._arrange(active):
            return False
        runs = [state.run for state in self._states]
        self._places = {run: self._places[run] for run in runs if run in self._places}
        self._chunks, self._mover = [], None
        if self._places:
            self._chunks = cut(runs, self._places, self._in_order(self._not_early()))
            self._mover = DeviceUpdate(self._chunks, self._exp_avg_dtype, runs[0].weights.device)
        return True

    def _kind(self, parameter: torch.nn.Parameter) -> object:
        return super()._kind(parameter), parameter in self._early.parameters

    def _allocate(self, runs: Sequence[Run]) -> list[StateTensors]:
        if not runs or not has_own_memory(runs[0].weights.device):
            return super()._allocate(runs)
        dtypes = [master_dtype(run.weights.dtype, run.weights.device) for run in runs]
        places = allocate_slabs(runs, dtypes, self._exp_avg_dtype)
        self._places.update(places)
        _log.info(
            "the Adam state of %d elements is stored in %d slabs of page-locked host memory",
            sum(run.weights.numel() for run in runs),
            len({place.slab for place in places.values()}),
        )
        return [p.slab.part(p.start, p.start + run.weights.numel()) for run, p in places.items()]

    def _load(self, state_dict: dict, copy: bool) -> None:
        super()._load(state_dict, copy)
        self._early = _EarlyUpdates()


@dataclass
class _EarlyUpdates:
    """What the backward has updated, by parameter the gradient that it used, and with which settings."""

    parameters: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = field(default_factory=dict)
    settings: list = field(default_factory=list)


def _snapshot(settings: Sequence[Hyper]) -> list:
    """Return a value to compare with later settings, without reading tensors, which may be on a device."""
    return [[(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in numbers] for numbers in settings]
