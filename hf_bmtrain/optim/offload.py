"""AdamOffloadOptimizer: AdamW with its state in host memory, and updates during the backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..comm.streams import DONE, has_own_memory
from ..ops.adam_step import Hyper, master_dtype
from ..ops.residual import Master
from ..ops.torch_internals import WithoutTorchFunction
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter
from .adam import AdamOptimizer
from .delta import DeltaRecord
from .device_update import DeviceUpdate
from .runs import Run, RunState, by_owner, index_bases
from .slabs import Chunk, ChunkUpdate, Place, allocate_slabs, cut

_log = logging.getLogger("hf_bmtrain")


class AdamOffloadOptimizer(AdamOptimizer):
    """AdamOptimizer with its state in page-locked host memory. The results are bitwise the same.

    An element of bfloat16 weights takes 10 bytes of host memory and as many over PCIe each way, of float16 weights 12,
    of float32 weights 8; 2 less with exp_avg_dtype=torch.bfloat16. The state dict is AdamOptimizer's; for bfloat16
    weights it takes 8 bytes more per element. On CPU nothing is copied, and it works like AdamOptimizer.

    `step` copies the state through the device in chunks, on streams of its own, and returns before the last chunks are
    updated. The chunks of the first buffers are the first, so that the next forward can begin early: a buffer waits for
    its own update when it is gathered (see PendingUpdate). Forward, backward, `parameter.gather()`, `state_dict`,
    loading, `.data` and the next `step` wait by themselves. After a `step`, call `wait()` before any other read or
    write of slices or of `optimizer.state`, and before writing to their gradients (an average over
    `model.parameters()`, for example).

    record_delta: after every step compute the mean and the variance of its update over all elements, in units of the
    learning rate (see DeltaRecord), for `get_avg_delta()` and `get_var_delta()`. This is slow, for inspection only: the
    host waits for the step, all state is copied to the device once more, in parts of about 30 MiB, and the ranks
    reduce three numbers.

    Raises RuntimeError if the host memory is insufficient for the state.
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
        exp_avg_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, hold_steps, exp_avg_dtype=exp_avg_dtype)
        self._delta = DeltaRecord() if record_delta else None
        self._early = _EarlyUpdates()
        self._places: dict[Run, Place] = {}
        self._chunks: list[Chunk] = []
        self._mover: DeviceUpdate | None = None

    def get_avg_delta(self) -> float:
        """The mean of the last step's update in units of the learning rate; 0 without `record_delta`."""
        return 0.0 if self._delta is None else self._delta.mean

    def get_var_delta(self) -> float:
        """The variance of the last step's update in units of the learning rate; 0 without `record_delta`."""
        return 0.0 if self._delta is None else self._delta.variance

    def wait(self) -> None:
        """Make the current stream wait until the last update has written the weights. The host does not wait."""
        if self._mover is not None:
            self._mover.updated.wait()

    def _finish(self) -> None:
        """Make the host wait until weights and state are those of the last step."""
        if self._mover is not None:
            self._mover.updated.synchronize()
            self._mover.downloaded.synchronize()

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        early = self._early
        early.check_unchanged(self._settings(), getattr(self, "grad_scale", None))
        # 1. Cut the parameters that have gradients, or have been updated during the backward, into runs.
        rearranged = self._arrange(
            [[p for p in group["params"] if p.grad is not None or p in early.parameters] for group in self.param_groups]
        )
        # 2. Update the runs that the backward has not updated.
        left = [number for number, state in enumerate(self._states) if state not in early]
        if left:
            self._step_runs(left)
            self._announce(left)
        # 3. These runs were cut to fit around those that the backward has updated: cut anew in the next step.
        if rearranged and early:
            self._active = []
        early.clear()
        # 4. Look at the result.
        if self._delta is not None:
            self._finish()
            settings = dict(zip((id(group) for group in self.param_groups), self._settings()))
            by_parameter = {p: settings[id(group)] for group in self.param_groups for p in group["params"]}
            of_states = [by_parameter[state.run.parameters[0]] for state in self._states]
            self._delta.record(self._states, of_states, getattr(self, "found_inf", None))

    def _update(self, numbers: Sequence[int]) -> None:
        if self._mover is None:
            return super()._update(numbers)
        owners = by_owner(self._states, numbers)
        chunks = [chunk for chunk in self._chunks if self._states[chunk.parts[0].run].run.owner in owners]
        update = ChunkUpdate(chunks, self._states, numbers, self._steps.update)
        tickets = dict.fromkeys(owners, DONE)  # a rank may hold nothing of a buffer
        for chunk, ticket in zip(chunks, self._mover.carry(update)):
            tickets[self._states[chunk.parts[0].run].run.owner] = ticket
        for owner, ticket in tickets.items():
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, [update.gradients[number] for number in owners[owner]])
            else:
                ticket.wait()  # nothing waits before an ordinary parameter is read

    def _announce(self, numbers: Sequence[int]) -> None:
        """Announce the pending updates of these runs to the gathering communicator, alike on all ranks. Collective."""
        for owner in by_owner(self._states, numbers):
            if isinstance(owner, ShardedBuffer) and owner.update.ticket is not None:
                owner.update.announce(owner.shard)

    # -- during the backward ------------------------------------------------------------------------------------

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Update each block during the backward as soon as its gradient is reduced; `step` updates the rest.

            for batch in batches[:-1]:
                model(batch).backward()  # accumulates
            with optimizer.update_in_backward():
                model(batches[-1]).backward()
            optimizer.step()

        The weights after `step` are bitwise the same as without it; between the backward and `step` they are partly
        updated and must not be used. The state of all blocks is copied during the backward, from the last block to
        the first, so the next forward begins after the last chunk.

        Use it only if the update does not depend on all gradients together: clipping, loss scaling and skipping come
        too late, and `clip_grad_norm` and `step` raise. An inf or nan reaches the weights, and OptimManager raises.
        `step` updates ordinary parameters, and all parameters of a buffer in the first step, in the first after a load
        and whenever other parameters of the buffer have gradients than in the last step.

        Raises ValueError with a loss scale, and RuntimeError for a second backward inside or a missing `step`.
        """
        if self.loss_scale is not None:
            raise ValueError(
                "update_in_backward() with a loss scale, which may skip the step when all gradients are there: leave "
                "one of the two out."
            )
        if self._early:
            raise RuntimeError("update_in_backward() again before step(): call step() once after each.")
        with ExitStack() as hooks:
            for slices in self._slices_by_buffer():
                # Hooks run in the order of the buffer: the last one runs after users' hooks have seen their gradients.
                last = [piece for piece in slices[0].buffer.slices if piece.requires_grad][-1]
                hook = last.register_post_accumulate_grad_hook(lambda _, slices=slices: self._update_early(slices))
                hooks.callback(hook.remove)
            yield

    @property
    def updated_in_backward(self) -> bool:
        """True if a backward has updated parameters and `step` has not been called since."""
        return bool(self._early)

    def _slices_by_buffer(self) -> list[list[Any]]:
        slices: dict[ShardedBuffer, list[Any]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, DistributedParameter) and parameter.requires_grad:
                slices.setdefault(parameter.buffer, []).append(parameter)
        return list(slices.values())

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
        states = [self._states[number] for number in numbers]
        if {id(p) for state in states for p in state.run.parameters} != {id(p) for p in slices}:
            return
        self._early.check_first_backward(slices)
        self._step_runs(numbers)
        self._early.record(states, self._settings())

    # -- runs and state -----------------------------------------------------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> bool:
        if not super()._arrange(active):
            return False
        runs = [state.run for state in self._states]
        self._places = {run: self._places[run] for run in runs if run in self._places}
        if not self._places:
            self._chunks, self._mover = [], None
            return True
        left = [number for number, state in enumerate(self._states) if state not in self._early]
        owners = by_owner(self._states, left).values()  # no chunk belongs to two: each may be updated by itself
        self._chunks = [chunk for numbers in owners for chunk in cut(runs, self._places, list(numbers))]
        numel = max((chunk.stop - chunk.start for chunk in self._chunks), default=0)
        masters = [place.slab.master for place in self._places.values()]
        width = max(0 if master is None else master.itemsize for master in masters)
        self._mover = DeviceUpdate(numel, width, self._exp_avg_dtype, runs[0].weights.device)
        return True

    def _kind(self, parameter: torch.nn.Parameter) -> object:
        return super()._kind(parameter), parameter in self._early.parameters

    def _allocate(self, runs: Sequence[Run]) -> list[tuple[Master, torch.Tensor]]:
        """Allocate slabs in the order of buffers, not of groups, so that the first buffers are updated first."""
        if not runs or not has_own_memory(runs[0].weights.device):
            return super()._allocate(runs)
        bases = index_bases(self.param_groups)
        ordered = sorted(runs, key=lambda run: (bases[run.owner], run.start))
        dtypes = [master_dtype(run.weights.dtype, run.weights.device) for run in ordered]
        self._places.update(allocate_slabs(ordered, dtypes, self._exp_avg_dtype))
        _log.info(
            "the Adam state of %d elements is stored in %d slabs of page-locked host memory",
            sum(run.weights.numel() for run in runs),
            len({self._places[run].slab for run in runs}),
        )
        states = []
        for run in runs:
            place = self._places[run]
            stored, exp_avg, exp_avg_sq = place.slab.part(place.start, place.start + run.weights.numel())
            master = Master(run.weights, stored, exp_avg_sq)
            master.reset()
            states.append((master, exp_avg))
        return states

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self._early.clear()


class _EarlyUpdates:
    """The updates that the backward has made: their parameters, and the settings and gradients that they used."""

    def __init__(self) -> None:
        self.parameters: set[torch.nn.Parameter] = set()
        self._settings: list = []
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def __contains__(self, state: RunState) -> bool:
        return state.run.parameters[0] in self.parameters

    def record(self, states: Sequence[RunState], settings: Sequence[Hyper]) -> None:
        """Note that these `states` of one buffer have been updated with these settings of the parameter groups."""
        self._settings = _snapshot(settings)
        with WithoutTorchFunction():  # read a GradSlice's version like that of any tensor
            for parameter in (p for state in states for p in state.run.parameters):
                assert parameter.grad is not None
                self.parameters.add(parameter)
                self._gradients.append((parameter, parameter.grad, parameter.grad._version))

    def clear(self) -> None:
        self.parameters, self._settings, self._gradients = set(), [], []

    def check_first_backward(self, slices: Sequence[DistributedParameter]) -> None:
        """Raise RuntimeError if any of these has been updated already."""
        if not self.parameters.isdisjoint(slices):
            raise RuntimeError(
                f"A second backward inside update_in_backward() brought gradients of {len(slices)} parameters that "
                "have been updated already. Accumulate outside of it: `with optimizer.update_in_backward():` belongs "
                "around the last backward of a step alone, and step() after it."
            )

    def check_unchanged(self, settings: Sequence[Hyper], grad_scale: torch.Tensor | None) -> None:
        """Raise RuntimeError if `step` would have made another update than the backward."""
        if not self:
            return
        problem = None
        if grad_scale is not None:
            problem = "a loss scale or a clip factor came with step()"
        elif self._gradients_changed():
            problem = "gradients were changed after it (clipped or unscaled, say)"
        elif _snapshot(settings) != self._settings:
            problem = "lr or another setting of a parameter group changed between it and step()"
        if problem is not None:
            raise RuntimeError(
                f"update_in_backward() has updated {len(self.parameters)} parameters during the backward, and then "
                f"{problem}, too late for them. Change them before the backward (with OptimManager, call "
                "manager.backward), or leave update_in_backward out."
            )

    def _gradients_changed(self) -> bool:
        with WithoutTorchFunction():
            return any(
                parameter.grad is not None and (parameter.grad is not used or used._version != version)
                for parameter, used, version in self._gradients
            )


def _snapshot(settings: Sequence[Hyper]) -> list:
    """Return a value to compare with later settings, without reading tensors, which may be on a device."""
    return [[(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in numbers] for numbers in settings]
