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

    The state takes as many bytes of host memory as AdamOptimizer takes on the device, and every step copies all of it
    to the device and back. A state dict of bfloat16 weights takes 8 more bytes per element. On the CPU nothing is
    copied, and the optimizer works like AdamOptimizer.

    `step` copies and updates the state in chunks, on separate streams, and returns before the last chunks are updated.
    It begins with the parameters that the model uses first, so that the next forward can begin early: each buffer's
    all-gather waits for the update of that buffer (see PendingUpdate). Forward, backward, `parameter.gather()`,
    `state_dict`, loading, `.data` and the next `step` wait by themselves. After a `step`, call `wait()` before any
    other read or write of parameters or of `optimizer.state` (an average over `model.parameters()`, for example), and
    before writing to gradients.

    Args:
        params: the parameters, or parameter groups, as for AdamOptimizer.
        lr: the learning rate.
        betas: β₁ and β₂.
        eps: added to √v, outside the square root.
        weight_decay: the weight decay.
        hold_steps: the number of steps at the start of training that update the moments but not the weights.
        record_delta: whether to compute, after every step, the mean and variance of its update over all elements, in
            units of the learning rate (see `delta_moments`), for `get_avg_delta()` and `get_var_delta()`. For
            inspection only, because it is slow: the host waits for the step, all state is copied to the device once
            more, in parts of about 30 MiB, and one small all-reduce follows.
        decoupled: whether the weight decay is decoupled from the gradient (AdamW). False adds it to the gradient (L2).
        exp_avg_dtype: the dtype of the first moment, float32 or bfloat16.
        state_bits: 32; the 8 bits of AdamOptimizer are refused.

    Raises:
        RuntimeError: in the first step, if the host memory is insufficient for the state.
        ValueError: an argument is out of range, as in AdamOptimizer.
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
        state_bits: int = 32,
    ) -> None:
        if not isinstance(state_bits, int) or state_bits != 32:
            raise ValueError(
                f"AdamOffloadOptimizer keeps float32 state, got state_bits={state_bits!r:.80}: with state_bits=8 use "
                "AdamOptimizer, whose state then takes 2 to 4 bytes per element on the device"
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, hold_steps, decoupled=decoupled, exp_avg_dtype=exp_avg_dtype
        )
        expect_flag("record_delta", record_delta)
        self._delta = torch.zeros(2, dtype=torch.float64, device="cpu") if record_delta else None
        self._early = _EarlyUpdates()
        self._places: dict[Run, Place] = {}
        self._chunks: list[Chunk] = []
        self._mover: DeviceUpdate | None = None

    def _of(self, groups: list[dict[str, Any]]) -> AdamOffloadOptimizer:
        return type(self)(groups, record_delta=self._delta is not None, exp_avg_dtype=self._exp_avg_dtype)

    def get_avg_delta(self) -> float:
        """Return the mean of the last step's update in units of the learning rate; 0 without `record_delta`.

        Waits for the device. A skipped step does not change the value.
        """
        return 0.0 if self._delta is None else self._delta[0].item()

    def get_var_delta(self) -> float:
        """Return the variance of the last step's update in units of lr²; 0 without `record_delta`.

        Waits for the device. A skipped step does not change the value.
        """
        return 0.0 if self._delta is None else self._delta[1].item()

    def wait(self) -> None:
        """Make the current stream, but not the host, wait until the last step has written weights and state."""
        if self._mover is not None:
            self._mover.updated.wait()

    def _finish(self) -> None:
        """Make the host wait until the last step has written the weights and, in host memory, the state."""
        if self._mover is not None:
            self._mover.downloaded.synchronize()  # the last download, which waited for the last update

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._check_early()
        # 1. Arrange the parameters that have gradients, or were updated during the backward, in runs.
        early = self._early.parameters
        rearranged = self._arrange(
            [[p for p in group["params"] if p.grad is not None or p in early] for group in self.param_groups]
        )
        # 2. Queue the update of the runs that were not updated during the backward.
        left = self._not_early()
        if left:
            self._step_runs(left)
        # 3. Let later all-gathers wait for these updates, on all ranks. Collective, so in the same order on every rank.
        for owner in dict.fromkeys(self._states[number].run.owner for number in self._in_order(left)):
            if isinstance(owner, ShardedBuffer) and owner.update.ticket is not None:
                owner.update.announce(owner.shard)
        # 4. A run has either only parameters that were updated during the backward, or none (`_kind`). If step 1 had to
        # divide runs for that reason, arrange them again in the next step, when adjacent parameters may form one run.
        if rearranged and early:
            self._active = []
        self._early = _EarlyUpdates()
        # 5. With record_delta, compute the statistics of this update; keep the old ones if the step was skipped.
        if self._delta is not None and self._states:
            self._finish()
            settings = {p: each for group, each in zip(self.param_groups, self._settings()) for p in group["params"]}
            moments = delta_moments(self._states, [settings[state.run.parameters[0]] for state in self._states])
            earlier, found_inf = self._delta.to(moments.device), getattr(self, "found_inf", None)
            self._delta = moments if found_inf is None else torch.where(found_inf != 0, earlier, moments)

    def _not_early(self) -> list[int]:
        """Return the indices of the runs that were not updated during the backward."""
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
        tickets = dict.fromkeys(used, DONE)  # DONE stays if there is no chunk: this rank stores no element
        chunks = [chunk for chunk in self._chunks if chunk.owner in used]
        for chunk, ticket in zip(chunks, self._mover.carry(chunks, update_part)):
            tickets[chunk.owner] = ticket
        for owner, ticket in tickets.items():
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, used[owner])
            else:
                ticket.wait()  # now: nothing would wait later, when an ordinary parameter is read

    def _in_order(self, numbers: Sequence[int]) -> list[int]:
        """Sort indices of runs by `index_base`: runs of a buffer become adjacent, and all ranks get the same order."""
        return sorted(numbers, key=lambda number: self._states[number].index_base)

    # -- during the backward ------------------------------------------------------------------------------------

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """In the backward inside this context, update each block's parameters as soon as their gradient is reduced.

        `step` updates all other parameters. After `step` the weights are bitwise the same as without this context;
        between the backward and `step` only some are updated, so do not use them. The state is copied from the last
        block to the first while the backward runs, so the next forward cannot begin before the last chunk is updated.

        Use it only if no update depends on all gradients together. Clipping, loss scaling and skipping a step come too
        late after such a backward: `clip_grad_norm` and `step` raise. An inf or nan in a gradient reaches the weights,
        and OptimManager raises. Ordinary parameters are updated only by `step`. So are all parameters of a flat buffer
        in the first step, in the first step after a load, and whenever the set of the buffer's parameters that have a
        gradient differs from that of the last step.

        Returns:
            A context manager for the last backward of a step.

        Raises:
            ValueError: the optimizer has a loss scale.
            RuntimeError: a second backward runs inside the context, or `step` has not been called since the last one.

        Example::

            for batch in batches[:-1]:
                model(batch).backward()  # accumulates
            with optimizer.update_in_backward():
                model(batches[-1]).backward()
            optimizer.step()
        """
        if self.loss_scale is not None:
            raise ValueError(
                "update_in_backward() cannot be used with a loss scale: whether a step must be skipped is known only "
                "after the backward. Use one or the other."
            )
        if self._early.parameters:
            raise RuntimeError("update_in_backward() was entered again before step(): call step() once after each.")
        by_buffer: dict[ShardedBuffer, list[Any]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, DistributedParameter) and parameter.requires_grad:
                by_buffer.setdefault(parameter.buffer, []).append(parameter)
        with ExitStack() as hooks:
            for buffer, local_params in by_buffer.items():
                # Hooks run parameter by parameter, in the buffer's order: so a hook on the last parameter, added now,
                # runs after the user's hooks on all of them.
                last = [local for local in buffer.slices if local.requires_grad][-1]
                update = last.register_post_accumulate_grad_hook(
                    lambda _, local_params=local_params: self._update_early(local_params)
                )
                hooks.enter_context(update)
            yield

    @property
    def updated_in_backward(self) -> bool:
        """Whether parameters were updated during a backward, and `step` has not been called since."""
        return bool(self._early.parameters)

    def _update_early(self, local_params: list[Any]) -> None:
        """Update `local_params`, parameters of one flat buffer whose gradient has just been reduced.

        All parameters of a buffer get their gradients at once. If those with a gradient are not exactly those in the
        optimizer's runs of this buffer, this leaves the update to `step`, which arranges the runs first. The weights
        may be written now: every rank has contributed to the reduced gradient, so every rank has left the block's
        backward, and the next forward waits for the update (see PendingUpdate).
        """
        local_params = [local for local in local_params if local.grad is not None]
        if not self._active or not local_params or not local_params[0].buffer.gradient.intact:
            return
        numbers = [number for number, state in enumerate(self._states) if state.run.buffer is local_params[0].buffer]
        if {p for number in numbers for p in self._states[number].run.parameters} != set(local_params):
            return
        if not self._early.parameters.keys().isdisjoint(local_params):
            raise RuntimeError(
                f"A second backward inside update_in_backward() produced gradients of {len(local_params)} parameters "
                "that are updated already. To accumulate, put only the last backward of a step inside "
                "`with optimizer.update_in_backward():`, and call step() after it."
            )
        for copied in tuple(current_world().copying):
            copied.wait()
        self._step_runs(numbers)
        self._early.parameters.update(gradient_versions(local_params))
        self._early.settings = _snapshot(self._settings())

    def _check_early(self) -> None:
        """Raise RuntimeError if gradients or settings have changed since parameters were updated in the backward."""
        parameters = self._early.parameters
        if not parameters:
            return
        if getattr(self, "grad_scale", None) is not None:
            problem = "a loss scale or a clip factor was given to step()"
        elif any(p.grad is not None and not is_unchanged(p, used) for p, used in parameters.items()):
            problem = "gradients were changed after it (for example clipped or unscaled)"
        elif _snapshot(self._settings()) != self._early.settings:
            problem = "lr or another setting of a parameter group changed between it and step()"
        else:
            return
        raise RuntimeError(
            f"update_in_backward() updated {len(parameters)} parameters during the backward, and then {problem}, too "
            "late for these parameters. Make the change before the backward (with OptimManager, call "
            "manager.backward), or do not use update_in_backward."
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
            "allocated the Adam state of %d elements in %d slabs of page-locked host memory",
            sum(run.weights.numel() for run in runs),
            len({place.slab for place in places.values()}),
        )
        return [p.slab.part(p.start, p.start + run.weights.numel()) for run, p in places.items()]

    def _load(self, state_dict: dict, copied: bool) -> None:
        super()._load(state_dict, copied)
        self._early = _EarlyUpdates()


@dataclass
class _EarlyUpdates:
    """What was updated during the backward, and with what.

    Attributes:
        parameters: the updated parameters, each with the gradient tensor that was used and this tensor's version.
        settings: a copy of the parameter groups' settings that were used.
    """

    parameters: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = field(default_factory=dict)
    settings: list = field(default_factory=list)


def _snapshot(settings: Sequence[Hyper]) -> list:
    """Return a copy of `settings` to compare with later ones. Each tensor in it becomes its id and version."""
    return [[(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in numbers] for numbers in settings]
