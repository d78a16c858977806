"""AdamOffloadOptimizer: AdamW with its state in host memory. It can update weights during the backward."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
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
    """AdamOptimizer with its state in page-locked host memory. The results are bitwise equal to AdamOptimizer's.

    The state takes as many bytes of host memory as AdamOptimizer's state takes on the device, and every step copies all
    of it to the device and back. On the CPU nothing is copied, and the optimizer works like AdamOptimizer.

    `step` copies and updates the state in chunks, on separate streams, and returns before the last chunks are updated.
    The next forward can begin before the step is complete: `step` starts with the parameters that the model uses first,
    and the all-gather of a block waits only for the update of that block's parameters.

    Forward, backward, torch operations on parameters, state dicts, loading, `zero_grad` and the next `step` wait for
    the update automatically. Call `wait()` only before other code writes to gradients in place, or accesses the memory
    of parameters without torch operations. Do not read `optimizer.state`, which is still being copied to host memory
    after a `step`: call `state_dict()` or `stored_state()`, which make the host wait for the copy. For bfloat16
    weights, `state_dict` converts the master weights and the second moments to new float32 tensors, which take 8 more
    bytes of host memory per element. `stored_state` returns the tensors as they are stored.

    Args:
        params: the parameters, or parameter groups, as for AdamOptimizer.
        lr: the learning rate.
        betas: β₁ and β₂.
        eps: added to √v, outside the square root.
        weight_decay: the weight decay.
        hold_steps: a parameter's first `hold_steps` steps update the moments but not the weights.
        record_delta: whether to compute, after every step, the mean and variance of its update divided by lr, over the
            elements on all ranks. `get_avg_delta()` and `get_var_delta()` return them. Use it only for inspection,
            because it is slow: the host waits for the step, all state is copied to the device again, in pieces that
            take about 30 MiB of device memory, and a small all-reduce follows.
        decoupled: whether the weight decay is decoupled from the gradient (AdamW). False adds it to the gradient (L2).
        exp_avg_dtype: the dtype of the first moment, float32 or bfloat16.
        state_bits: must be 32; AdamOptimizer also accepts 8.

    Raises:
        RuntimeError: in a step that allocates state, such as the first, if there is too little host memory for it, or
            this memory cannot be page-locked.
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, as in AdamOptimizer, or `state_bits` is not 32.
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
                f"AdamOffloadOptimizer supports only state_bits=32, got state_bits={state_bits!r:.80}. For 8 bits "
                "use AdamOptimizer, whose state then takes 2 to 6 bytes per element on the device."
            )
        super().__init__(
            params, lr, betas, eps, weight_decay, hold_steps, decoupled=decoupled, exp_avg_dtype=exp_avg_dtype
        )
        expect_flag("record_delta", record_delta)
        self._delta = torch.zeros(2, dtype=torch.float64, device="cpu") if record_delta else None
        self._early = _EarlyUpdates()
        self._told = False  # whether `update_in_backward` was entered before, so that it logs its message only once
        self._places: dict[Run, Place] = {}
        self._chunks: list[Chunk] = []
        self._mover: DeviceUpdate | None = None

    def _of(self, groups: list[dict[str, Any]]) -> AdamOffloadOptimizer:
        return type(self)(groups, record_delta=self._delta is not None, exp_avg_dtype=self._exp_avg_dtype)

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "record_delta": self._delta is not None}

    def get_avg_delta(self) -> float:
        """Return the mean of δ, the last step's update divided by lr; 0 without `record_delta=True`.

            w ← w − lr·δ    δ = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps) + wd·w

        With `decoupled=False`, the term wd·w is left out, because m contains it. Steps that do not change the weights
        (with lr=0, or within `hold_steps`) have a δ too. The mean is over all elements, on all ranks, of the parameters
        that had a gradient. `step` has computed it, so this call is not collective, and only waits for the device. A
        skipped step does not change the value.
        """
        return 0.0 if self._delta is None else self._delta[0].item()

    def get_var_delta(self) -> float:
        """Return the variance of δ, the last step's update divided by lr; 0 without `record_delta=True`.

            w ← w − lr·δ    δ = (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps) + wd·w

        With `decoupled=False`, the term wd·w is left out, because m contains it. Steps that do not change the weights
        (with lr=0, or within `hold_steps`) have a δ too. The variance (biased, with divisor n) is over all n elements,
        on all ranks, of the parameters that had a gradient. `step` has computed it, so this call is not collective, and
        only waits for the device. A skipped step does not change the value.
        """
        return 0.0 if self._delta is None else self._delta[1].item()

    def wait(self) -> None:
        """Make the current stream, but not the host, wait until the last step has updated the weights.

        Call it after `step` only before code that does not wait by itself: code that writes to gradients in place, or
        accesses the memory of parameters without torch operations. Forward, backward, torch operations on parameters,
        state dicts, loading, `zero_grad` and the next `step` wait by themselves. The copy of the state to host memory
        may still be running after this call, so read `state_dict()` instead of `optimizer.state`.
        """
        if self._mover is not None:
            self._mover.updated.wait()

    def _finish(self) -> None:
        """Make the host wait until the last step has updated the weights and copied the state back to host memory."""
        if self._mover is not None:
            self._mover.downloaded.synchronize()  # the last download ends after all updates

    # -- a step -------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._check_early()
        # 1. Group the parameters that have gradients, or were updated during the backward, into runs (parameters that
        # are updated together).
        early = self._early.parameters
        rearranged = self._arrange(
            [[p for p in group["params"] if p.grad is not None or p in early] for group in self.param_groups]
        )
        # 2. Queue the updates of those runs that were not updated during the backward.
        left = self._not_early()
        if left:
            self._step_runs(left)
        # 3. Make later all-gathers wait until all ranks have completed these updates. `announce` is collective, so
        # every rank must call it for the flat buffers in the same order.
        for owner in dict.fromkeys(self._states[number].run.owner for number in self._in_order(left)):
            if isinstance(owner, ShardedBuffer) and owner.update.ticket is not None:
                owner.update.announce(owner.shard)
        # 4. A run cannot contain both parameters that were updated during the backward and other parameters, so
        # `_arrange` may have split runs. If so, discard the division into runs: set `_active` to an empty list. The
        # next backward then updates no parameters, and the next `step` makes new runs, without this split.
        if rearranged and early:
            self._active = []
        self._early = _EarlyUpdates()
        # 5. With record_delta, compute the statistics of this step's update. If the step is skipped, keep the
        # statistics of the last step that was not skipped.
        if self._delta is not None and self._states:
            self._finish()
            settings = {p: each for group, each in zip(self.param_groups, self._settings()) for p in group["params"]}
            moments = delta_moments(self._states, [settings[state.run.parameters[0]] for state in self._states])
            earlier, found_inf = self._delta.to(moments.device), getattr(self, "found_inf", None)
            self._delta = moments if found_inf is None else torch.where(found_inf != 0, earlier, moments)

    def _not_early(self) -> list[int]:
        """Return the indices of the runs (parameters updated together) that were not updated during the backward."""
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
            # Other code may have written an unsharded parameter since the last step. `follow_weight` therefore changes
            # each float32 master that does not round to its weight. It does so on the device, without making the host
            # wait.
            if state.run.buffer is None:
                master.follow_weight()
            steps.update(part.run, Elements(gradient, master, exp_avg, state.index_base + part.of_run.start))

        used: dict[ShardedBuffer | torch.nn.Parameter, list[torch.Tensor]] = {}
        for number, gradient in gradients.items():
            used.setdefault(states[number].run.owner, []).append(gradient)
        # A ticket is a handle with which to wait for the update of a flat buffer. A buffer without elements on this
        # rank has no chunks and no update. Its ticket remains DONE, the handle of an operation that is complete.
        tickets = dict.fromkeys(used, DONE)
        chunks = [chunk for chunk in self._chunks if chunk.owner in used]
        for chunk, ticket in zip(chunks, self._mover.carry(chunks, update_part)):
            tickets[chunk.owner] = ticket
        for owner, ticket in tickets.items():
            if isinstance(owner, ShardedBuffer):
                owner.update.begin(ticket, used[owner])
            else:
                ticket.wait()  # wait now, because a later read of an ordinary parameter does not wait

    def _in_order(self, numbers: Sequence[int]) -> list[int]:
        """Return `numbers`, indices of runs, in an order that is the same on all ranks.

        A run consists of parameters that are updated together. The runs of a flat buffer are adjacent in this order.
        """
        return sorted(numbers, key=lambda number: self._states[number].index_base)

    # -- during the backward ------------------------------------------------------------------------------------

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Return a context in which a backward updates each block's parameters as soon as their gradient is reduced.

        Use it to hide the copies of the optimizer state, and the updates, behind the computation of the backward. After
        the context, call `step`, which updates the other parameters. The weights are then bitwise the same as without
        this context. Do not use the weights between the backward and `step`, when only some of them are updated. The
        next forward waits for the whole update, because it begins with the first block, which is updated last.

        What you can no longer do after this backward, because it has already used most gradients:

        * Change settings such as lr: set them before the backward. Otherwise `step` raises RuntimeError. The same holds
          for moving parameters to a parameter group with other settings.
        * Clip, scale or otherwise change gradients. `OptimManager.clip_grad_norm` raises RuntimeError. So does `step`,
          if a used gradient has changed, or if `step` gets a `scale` or `grad_scale`.
        * Skip the step. If a gradient is inf or nan, the weights become inf or nan too, and OptimManager raises
          RuntimeError, at the latest in its next `backward` or `step`.

        Some parameters are updated only by `step`:

        * parameters that are not sharded,
        * all parameters, in the first step of the optimizer, in the first step after the caller has changed
          `optimizer.state`, and in the first step after `load_state_dict` (but usually not after `bmt.load_state`),
        * all parameters, in the first step after some were moved to a parameter group with other settings, or removed,
        * the parameters of a flat buffer (usually of a block), if those with a gradient are not the same as in the last
          step. If the backward has updated other flat buffers in this step, all parameters are updated only by `step`
          in the following step,
        * the parameters of a flat buffer, if the last trainable parameter of the buffer has no gradient,
        * the parameters of a flat buffer, if other code, such as a hook during the backward, has replaced the `.grad`
          of one of them before their update,
        * all parameters of an uneven model, that is, a model in which the ranks may run different blocks. If one rank
          computes its gradients of a block late, the ranks average the gradients of this block a second time, and add
          the second mean to the first. So the gradients are complete only at the end of the backward.

        If the backward raises an error, the updates that it has made remain, and the gradients that they used are
        dropped. Training can go on with the next batch.

        Returns:
            A context manager for the last backward of a step.

        Raises:
            ValueError: the optimizer is in an OptimManager with a loss scale. Whether a step must be skipped is then
                known only after the backward.
            RuntimeError: a second backward inside the context computes gradients of parameters that the first one has
                updated.
            RuntimeError: a backward in an earlier use of this context has updated parameters, and `step` was not called
                after it.

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
                "after the backward. Leave out update_in_backward(), or train in bfloat16 without a loss scale."
            )
        if self._early.parameters:
            raise RuntimeError("update_in_backward() was entered again before step(). Call step() after each use.")
        if not self._is_held():
            # The caller has replaced entries of `state`. Update nothing in backward: `step` first copies the entries to
            # this optimizer's own buffers, and then updates all parameters.
            self._active = []
        by_buffer: dict[ShardedBuffer, list[Any]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if isinstance(parameter, DistributedParameter) and parameter.requires_grad:
                by_buffer.setdefault(parameter.buffer, []).append(parameter)
        negotiation = current_world().schedule.negotiation
        uneven = [buffer for buffer in by_buffer if negotiation.covers(buffer)]
        if uneven and not self._told and current_world().rank == 0:
            _log.info(
                "update_in_backward() leaves %d of %d groups of parameters (usually one per block) to step(), because "
                "the ranks may run different parts of their model. The results are the same",
                len(uneven), len(by_buffer),
            )  # fmt: skip
        self._told = True
        for buffer in uneven:
            del by_buffer[buffer]
        with ExitStack() as hooks:
            for buffer, local_params in by_buffer.items():
                # The hooks of a flat buffer's parameters run in the order of the parameters. So a hook that is added to
                # the last parameter now runs after all hooks that the user has registered on parameters of the buffer.
                last = [local for local in buffer.slices if local.requires_grad][-1]
                update = last.register_post_accumulate_grad_hook(
                    lambda _, local_params=local_params: self._update_early(local_params)
                )
                hooks.enter_context(update)
            try:
                yield
            except BaseException:
                self._abandon_early()
                raise

    @property
    def updated_in_backward(self) -> bool:
        """True if parameters were updated during a backward, and `step` has not been called since.

        OptimManager checks this, because the gradients of these parameters can no longer be clipped, and the update of
        these parameters can no longer be skipped.
        """
        return bool(self._early.parameters)

    def _update_early(self, local_params: list[Any]) -> None:
        """Update the parameters of one flat buffer as soon as their gradients are reduced, before `step`.

        A hook calls this during the backward. In these cases it does nothing, and leaves the update to `step`:

        * There is no valid division of the parameters into runs (parameters updated together) from an earlier step.
        * No parameter of the buffer has a gradient, or those with a gradient are not the same as in the last step.
        * Other code has replaced the `.grad` of a parameter of the buffer.
        * The parameter groups have changed since the last step (see `_keep_settings`).

        Raises RuntimeError if an earlier backward has updated some of these parameters, and `step` has not run since.

        local_params: the trainable local parameters of one flat buffer that are in this optimizer.
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
                "that the first one has already updated. To accumulate gradients, put only the last backward of a step "
                "inside `with optimizer.update_in_backward():`, and call step() after it."
            )
        # Check the parameter groups (`_keep_settings`) only before the first update of a backward, because the check
        # takes a time proportional to the number of all parameters.
        if not self._early.parameters and not self._keep_settings(chain.from_iterable(self._active)):
            return
        for copied in tuple(current_world().copying):
            copied.wait()
        # The weights may be written now, because no rank reads them anymore in this backward: a rank contributes to the
        # reduced gradients only after its own backward of the block. The next forward waits for the update.
        self._step_runs(numbers)
        self._early.parameters.update(gradient_versions(local_params))
        self._early.settings = _snapshot(self._settings())

    def _keep_settings(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether these parameters still have the settings that an update during the backward would use.

        An update during the backward uses the groups in which the parameters were when `_arrange` last divided them
        into runs (parameters that are updated together). The result is False if the caller has since moved some of
        these parameters to a group with other settings, or removed them, or changed the order of groups with different
        settings. Then only `step`, which divides the parameters again, can update them.

        parameters: parameters that `_arrange` has divided into runs.
        """
        settings = _snapshot(self._settings())
        used = {p: each for members, each in zip(self._active, settings) for p in members}
        present = {p: each for group, each in zip(self.param_groups, settings) for p in group["params"]}
        return all(p in used and p in present and used[p] == present[p] for p in parameters)

    def _abandon_early(self) -> None:
        """Forget which parameters a backward has updated. Called if that backward has failed.

        The gradients of these parameters are dropped, because otherwise the next `step` would use them a second time.
        """
        parameters = self._early.parameters
        if parameters:
            _log.warning(
                "rank %d: a backward inside update_in_backward() failed after it had updated %d parameters. Their "
                "updates remain, and their gradients are dropped. To undo the updates, load a checkpoint",
                current_world().rank, len(parameters),
            )  # fmt: skip
        for parameter in parameters:
            parameter.grad = None
        self._early = _EarlyUpdates()

    def _check_early(self) -> None:
        """Raise RuntimeError if gradients or settings have changed since parameters were updated in the backward.

        Such a change would have no effect on the parameters that are already updated. Changes are: a gradient was
        modified or replaced, a setting of a parameter group was changed, an updated parameter was moved to a group with
        other settings or removed, or `step` is to divide the gradients by `grad_scale`.
        """
        parameters = self._early.parameters
        if not parameters:
            return
        if getattr(self, "grad_scale", None) is not None:
            problem = "step() received a loss scale or a clip factor"
        elif any(p.grad is not None and not is_unchanged(p, used) for p, used in parameters.items()):
            problem = "gradients were changed (for example clipped or unscaled)"
        elif _snapshot(self._settings()) != self._early.settings:
            problem = "lr or another setting of a parameter group was changed before step()"
        elif not self._keep_settings(parameters):
            problem = "parameters were moved out of their parameter group before step()"
        else:
            return
        raise RuntimeError(
            f"update_in_backward() updated {len(parameters)} parameters during the backward. Afterwards {problem}, "
            "which is too late for these parameters. Set lr and other settings before the backward (OptimManager steps "
            "its schedulers in time if you call manager.backward). If you clip, scale or change gradients, do not "
            "use update_in_backward()."
        )

    # -- runs (parameters that are updated together) and their state --------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> bool:
        if not super()._arrange(active):
            return False
        runs = [state.run for state in self._states]
        self._places = {run: self._places[run] for run in runs if run in self._places}
        self._chunks, self._mover = [], None
        if self._places:
            self._chunks = cut(runs, self._places, self._in_order(self._not_early()))
            self._mover = DeviceUpdate(self._chunks, self._exp_avg_dtype, runs[0].weights.device)
            for state in self._states:
                # If `uncounted` were True, AdamOptimizer would compare the float32 masters of unsharded parameters with
                # the weights in every step, on the host, where the masters are. Instead, `_update` compares them on the
                # device.
                state.uncounted = False
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
            "AdamOffloadOptimizer: the optimizer state of %d elements is in %d pieces of page-locked host memory",
            sum(run.weights.numel() for run in runs),
            len({place.slab for place in places.values()}),
        )
        return [p.slab.part(p.start, p.start + run.weights.numel()) for run, p in places.items()]

    def _load(self, state_dict: dict, copied: bool) -> None:
        super()._load(state_dict, copied)
        self._places, self._chunks, self._mover = {}, [], None  # free the old state before the next one is allocated
        self._early = _EarlyUpdates()


@dataclass
class _EarlyUpdates:
    """The parameters that were updated during the backward, and the gradients and settings of these updates.

    `_check_early` raises an error if such a gradient or setting is changed after the update, because the change would
    have no effect.

    Attributes:
        parameters: {updated parameter: (the gradient that was used, this gradient's version counter after the update)}.
        settings: the settings of the parameter groups in the update, as `_snapshot` returns them.
    """

    parameters: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = field(default_factory=dict)
    settings: list = field(default_factory=list)


def _snapshot(settings: Sequence[Hyper]) -> list:
    """Return the optimizer settings in a form that can be compared later, to find out whether a setting has changed.

    A tensor is represented by its id and its version (torch's counter of writes).
    """
    return [[(id(x), x._version) if isinstance(x, torch.Tensor) else x for x in numbers] for numbers in settings]
