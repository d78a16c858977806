"""OptimManager: loss scaling, gradient clipping, and one step of several optimizers and their schedulers."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from ..base.arguments import expect_flag, expect_kind, expect_number, expect_tensor
from ..base.checksums import checksums, find_differences
from ..base.torch_internals import WithoutTorchFunction, amp_update_scale_, foreach_div_, foreach_mul_, foreach_norm
from ..comm.agreement import contents
from ..comm.collective_log import value_code
from ..comm.communicator import Communicator, all_reduce_largest
from ..ops.grad_norm import accumulate_squared_norm, as_real
from ..runtime.world import current_world
from ..sharding.parameter import DistributedParameter
from .adam import AdamOptimizer
from .runs import Run, gradient_versions, is_unchanged, neighbours, with_gradients
from .skipped_steps import SkippedSteps
from .state import load_state, save_state

_CHECKSUMS = "checksums"
"""The key of the checksums in a saved state. `load_state_dict` verifies the other entries with them."""
_Seen = dict[torch.nn.Parameter, tuple[weakref.ref[torch.Tensor], int]]
"""{parameter: (weak reference to its `.grad`, torch's version counter of this `.grad`)}, to find later changes.

The references are weak, so that the memory of a gradient is freed when the user sets `.grad` to None.
"""


class OptimManager:
    """Steps several optimizers and their schedulers, with loss scaling and gradient clipping.

    A step whose gradients contain inf or nan is skipped: neither optimizers nor schedulers step, and the gradients are
    dropped. The loss scale, if there is one, is divided by `loss_scale_factor`, but not below `min_loss_scale`. One
    line in the log "hf_bmtrain" names, as far as they are known, the block, the parameter and the rank of the inf or
    nan. With a loss scale, skipped steps are normal. They are logged at INFO, and every eighth in a row as a warning.
    Without a loss scale, or at the minimum scale, all skipped steps are logged as warnings.

    On a GPU, a step is completed only by a later call: the next `backward`, `scale_loss` or `step`, or the call that
    saves or loads a state or sets `loss_scale`. In that call, the host reads whether the step was skipped, and either
    advances the schedulers or drops the gradients. On the CPU, `step` itself completes the step. With AdamOptimizer,
    the host does not wait for the device in `step`. With other optimizers it waits, because it must know before the
    update whether to skip.

    Args:
        loss_scale: the initial loss scale, for float16. A power of two adds no rounding. None for no scaling.
        loss_scale_factor: the factor by which the scale grows and shrinks. A number below 1 is replaced by its
            reciprocal, as in BMTrain. None uses the value of `init_distributed`, which is 2 by default.
        loss_scale_steps: the number of steps in a row without overflow after which the scale grows. None uses the value
            of `init_distributed`, which is 1024 by default.
        min_loss_scale: the minimum loss scale.
        max_loss_scale: the maximum loss scale.
        grad_scale: the number by which the sum of the ranks' gradients is divided. None uses the number of ranks, which
            gives the mean.
        max_skipped_steps: the number of skipped steps in a row after which the call that completes the step (on the
            CPU, `step` itself; on a GPU, usually the next `backward`) raises RuntimeError. With a loss scale, a skipped
            step counts only if the step just before it was also skipped and left the scale at its minimum. None for no
            limit.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Example::

        manager = bmt.optim.OptimManager()
        manager.add_optimizer(optimizer, lr_scheduler)
        for batch in batches:
            manager.zero_grad()
            manager.backward(model(batch))
            manager.clip_grad_norm(optimizer.param_groups, 1.0)
            manager.step()
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float | None = None,
        loss_scale_steps: int | None = None,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float("inf"),
        grad_scale: float | None = None,
        max_skipped_steps: int | None = 25,
    ) -> None:
        world = current_world()
        if loss_scale is not None:
            _expect_positive("loss_scale", loss_scale, " or None")
        if grad_scale is not None:
            _expect_positive("grad_scale", grad_scale, " or None, because it divides the sum of the ranks' gradients")
        _expect_positive("min_loss_scale", min_loss_scale)
        wanted = f"at least min_loss_scale, {min_loss_scale}"
        expect_number("max_loss_scale", max_loss_scale, wanted, lambda scale: scale >= min_loss_scale)
        if loss_scale_factor is not None:
            expect_number("loss_scale_factor", loss_scale_factor, "above 0 and finite", lambda x: 0 < x < float("inf"))
            loss_scale_factor = max(loss_scale_factor, 1 / loss_scale_factor)
        if loss_scale_steps is not None:
            expect_number("loss_scale_steps", loss_scale_steps, "at least 1", lambda steps: steps >= 1, integer=True)
        self.grad_scale = world.size if grad_scale is None else grad_scale
        # The reduction computes the mean over ranks. If the loss is multiplied by this factor, the mean becomes the sum
        # divided by `grad_scale`.
        self._mean_scale = world.size / self.grad_scale
        self._device, self._reduce = world.device, world.shard_group
        self.loss_scale_factor = world.loss_scale_factor if loss_scale_factor is None else loss_scale_factor
        self.loss_scale_steps = world.loss_scale_steps if loss_scale_steps is None else loss_scale_steps
        self._bounds = min_loss_scale, max_loss_scale
        self._scale: torch.Tensor | None = None
        if loss_scale is not None:
            self._scale = torch.tensor(loss_scale, dtype=torch.float32, device=self._device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=self._device)
        # The following four attributes concern the coming step. `_forget_norms` resets them after it.
        # For each optimizer, the clip factor that its update will apply, and the gradients that the factor is for.
        self._clips: dict[torch.optim.Optimizer, tuple[torch.Tensor, _Seen]] = {}
        self._checked: _Seen = {}  # gradients that were searched for inf and nan
        self._found_inf = torch.zeros(1, dtype=torch.float32, device=self._device)  # 1 if inf or nan was found
        # The gradients that optimizers used in a step in which another optimizer then raised an error. If this step is
        # repeated, the optimizers must not use them a second time.
        self._updated: dict[torch.optim.Optimizer, _Seen] = {}
        # The attributes from here to `_parameters` describe the last step.
        self._skipped: HostFlag | None = None  # the skip flag, until the host has read it
        self._updated_in_backward = False  # whether an optimizer has already updated weights during the backward
        # The gradients that the last step used, with their version counters. If the host learns later that this step
        # was skipped, `_end_last_step` drops them: it sets each `.grad` that is still the same, unmodified tensor to
        # None. A `.grad` that was replaced or written since belongs to a later backward, and is kept.
        self._used: _Seen = {}
        # The schedulers that have not advanced yet, because one of them raised an error. If `step` is repeated, it
        # continues with them, and the optimizers, which have all made this step, do not make it twice.
        self._due: list[Any] = []
        self._parameters: list[torch.nn.Parameter] = []  # the optimizers' parameters in the last step
        self._skips = SkippedSteps(max_skipped_steps)
        self._steps = 0  # the number of steps so far, including those that were skipped
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self._compared = 0  # the number of optimizers when the ranks last compared their managers

    @property
    def loss_scale(self) -> float:
        """The current loss scale, or 1 if there is none. Reading it makes the host wait for the device.

        To change the scale, assign a positive number, on every rank. The previous step is completed first: the
        schedulers advance or, if the step was skipped, its gradients are dropped. If there is no loss scale, assigning
        a number other than 1 starts loss scaling.
        """
        return 1.0 if self._scale is None else float(self._scale)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        _expect_positive("loss_scale", scale)
        self._end_last_step()
        self._clean_steps.zero_()
        if self._scale is not None:
            self._scale.fill_(scale)
        elif scale != 1:
            self._scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
            for optimizer in self.optimizers:
                if isinstance(optimizer, AdamOptimizer):
                    optimizer.loss_scale = self._scale

    @property
    def steps_since_last_scale(self) -> int:
        """The number of consecutive steps without overflow since the loss scale last changed.

        Reading it makes the host wait for the device.
        """
        return int(self._clean_steps)

    @property
    def loss_scale_enabled(self) -> bool:
        """Whether losses are multiplied by a loss scale.

        If so, `step` lowers it after an overflow, and raises it after `loss_scale_steps` steps without one.
        """
        return self._scale is not None

    @property
    def lr_schedulers(self) -> list[Any]:
        """The same as `schedulers`: for each optimizer, its scheduler or None. BMTrain uses this name."""
        return self.schedulers

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Add an optimizer, which `step` will step, and its scheduler.

        All ranks must add the same optimizers in the same order.

        Args:
            optimizer: an optimizer over parameters of the sharded model.
            lr_scheduler: an object with a method `step()`, which the manager calls after every step that was not
                skipped; or None. Do not call it yourself.

        Raises:
            TypeError: `optimizer` has no `step()` or no `param_groups`.
            TypeError: `lr_scheduler` has no `step()`, or its `step` needs arguments, as in torch's ReduceLROnPlateau.
            ValueError: the optimizer was added before.
            ValueError: the optimizer was created before its model was sharded, so its steps would have no effect.
        """
        if isinstance(optimizer, type) or not all(hasattr(optimizer, name) for name in ("param_groups", "step")):
            given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {given}")
        if any(optimizer is each for each in self.optimizers):
            raise ValueError(
                f"optimizer: this {type(optimizer).__name__} was added before, and would step twice. Call "
                "add_optimizer once for each optimizer."
            )
        if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
            raise TypeError(f"lr_scheduler must have a step(), or be None, got type {type(lr_scheduler).__name__}")
        if lr_scheduler is not None and _needs_arguments(lr_scheduler.step):
            name = type(lr_scheduler).__name__
            raise TypeError(
                f"lr_scheduler must have a step() without arguments, but {name}.step needs arguments, which the "
                "manager does not have. Add the optimizer without a scheduler, and call the scheduler's step yourself, "
                "after manager.step()."
            )
        stale = sum(getattr(p, "sharded_elsewhere", False) for group in optimizer.param_groups for p in group["params"])
        if stale:
            raise ValueError(
                f"{stale} parameters of this {type(optimizer).__name__} were replaced when the model was "
                "sharded. Create the optimizer after auto_wrap or CheckpointBlock, from model.parameters()."
            )
        self.optimizers.append(optimizer)
        self.schedulers.append(lr_scheduler)
        if isinstance(optimizer, AdamOptimizer):
            optimizer.loss_scale = self._scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all optimizers' parameters to None, or to zero. Not collective.

        Call it after each step, before the next backward, which would otherwise add its gradients to the old ones.

        Args:
            set_to_none: True sets `.grad` to None. False fills it with zeros.
        """
        if not isinstance(set_to_none, bool):
            expect_flag("set_to_none", set_to_none)
        if self._skipped is not None and self._skipped.arrived and self._skipped.read():
            self._skips.look(self._steps, self._last_gradients())
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)
        self._forget_norms()  # the clip factors and the skip flag belong to the old gradients
        self._used = {}

    def backward(self, loss: torch.Tensor | None = None) -> None:
        """Multiply this rank's loss by the loss scale and run its backward, which averages gradients over the ranks.

        Collective: every rank must call it. Afterwards, `.grad` of a sharded parameter has this rank's elements of the
        mean, still multiplied by the loss scale. If OptimManager was created with `grad_scale`, the sum over the ranks
        divided by `grad_scale` takes the place of the mean. Several backwards accumulate in `.grad`, as in torch.

        Args:
            loss: a tensor of one element. It is required, in spite of the default: None raises a ValueError.

        Raises:
            TypeError: `loss` is not a tensor.
            ValueError: `loss` is None, does not have one element, or does not require a gradient.
            RuntimeError: the previous step was skipped because a gradient was inf or nan, and the skipped steps have
                reached the limit `max_skipped_steps`. (Only on a GPU. On the CPU, `step` itself raises this error.)
            RuntimeError: a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had already
                updated weights with it, because the backward ran inside its context `update_in_backward()`. (Only on a
                GPU. On the CPU, `step` itself raises this error.)
        """
        if loss is None:
            raise ValueError("backward() needs the loss. Call manager.backward(loss).")
        if not isinstance(loss, torch.Tensor):
            expect_tensor("loss", loss)
        if loss.numel() != 1:
            raise ValueError(f"loss must be one number, but has shape {tuple(loss.shape)}. Take its .mean() or .sum().")
        if not loss.requires_grad:
            raise ValueError(
                "loss must require a gradient. Compute it from the model's output, not under torch.no_grad(), without "
                ".detach() or .item(), and with parameters that are not all frozen."
            )
        loss = self.scale_loss(loss)
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            current_world().schedule.explain_shortage(error)
            raise

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, for code that calls `backward()` itself.

        `OptimManager.backward(loss)` first checks the loss, and then does the same as
        `OptimManager.scale_loss(loss).backward()`. Collective: every rank must call it. On a GPU, this call completes
        the previous step: the host reads whether the step was skipped. If it was skipped, the ranks exchange messages
        to find which gradient was inf or nan.

        If OptimManager was created with a `grad_scale` (its default is the number of ranks), the loss is also
        multiplied by (number of ranks) / `grad_scale`. Backward averages the gradients over the ranks. With this
        factor, the mean equals the sum of the ranks' gradients divided by `grad_scale`. `step` divides the gradients by
        the loss scale, but not by this factor.

        Args:
            loss: this rank's loss.

        Returns:
            A float32 tensor of the shape of `loss`; or `loss` itself, if there is no loss scale and `grad_scale` is
            the number of ranks.

        Raises:
            TypeError: `loss` is not a tensor.
            RuntimeError: the previous step was skipped because a gradient was inf or nan, and the skipped steps have
                reached the limit `max_skipped_steps`. (Only on a GPU. On the CPU, `step` itself raises this error.)
            RuntimeError: a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had already
                updated weights with it, because the backward ran inside its context `update_in_backward()`. (Only on a
                GPU. On the CPU, `step` itself raises this error.)
        """
        if not isinstance(loss, torch.Tensor):
            expect_tensor("loss", loss)
        self._end_last_step()
        if self._clips:  # `clip_grad_norm` left these factors to `step`: apply them before backward adds new gradients
            with torch.no_grad():
                for optimizer in list(self._clips):
                    self._clip_now(optimizer)
        self._forget_norms()
        if self._mean_scale != 1:
            loss = loss.float() * self._mean_scale
        return loss if self._scale is None else loss.float() * self._scale

    @torch.no_grad()
    def clip_grad_norm(
        self, param_groups: Iterable[dict], max_norm: float, norm_type: float = 2, scale: Any = None, eps: float = 1e-6
    ) -> torch.Tensor:
        """Clip the gradients in `param_groups` by their common norm over all ranks, between backward and `step`.

        Collective: every rank must call it. As with torch.nn.utils.clip_grad_norm_, gradients are multiplied by the
        factor max_norm / (norm + eps) if it is below 1. The norm is that of the full gradients, divided by the loss
        scale. If it is inf or nan, the gradients do not change.

        Usually `.grad` does not change in this call, because `step` applies the factor:

        * The factor is left to `step` for each added optimizer whose gradients all belong to `param_groups`: the
          optimizer's next update uses its gradients times the factor. If `backward`, `scale_loss` or another
          `clip_grad_norm` for some of these gradients is called before `step`, that call first multiplies them by the
          factor. A `.grad` that is set or replaced after this call is not multiplied. Values that are written or added
          to a `.grad` in place after this call are multiplied too. Therefore, before the `loss.backward()` of another
          loss, call `scale_loss`, which applies the factor to the gradients so far.
        * All other gradients in `param_groups` are multiplied in place in this call. If `max_norm` is 0 or a tensor,
          so are all gradients in `param_groups`.

        Args:
            param_groups: `optimizer.param_groups`, or a list of dicts with "params".
            max_norm: the maximum norm, a number or a tensor of one element.
            norm_type: the order of the norm, positive or inf.
            scale: accepted for compatibility with BMTrain, and ignored.
            eps: a small number that is added to the norm in the factor.

        Returns:
            The norm before clipping, a float32 scalar on the device. Reading its value makes the host wait for the
            device. If the norm is inf or nan, the next `step` is skipped, unless the gradient that is inf or nan is
            dropped, replaced or overwritten before.

        Raises:
            RuntimeError: the AdamOffloadOptimizer of some of these parameters has already used gradients for updates,
                because the backward ran inside its context `update_in_backward()`.
            TypeError, ValueError: an argument has the wrong type or is out of range.
        """
        param_groups = list(param_groups) if isinstance(param_groups, Iterable) else param_groups
        _check_clipping(param_groups, max_norm, norm_type, eps)
        parameters = with_gradients(p for group in param_groups for p in group["params"])
        chosen = set(parameters)
        own = {optimizer: _with_gradient(optimizer) for optimizer in self.optimizers}
        if any(_updated_in_backward(optimizer) and not chosen.isdisjoint(own[optimizer]) for optimizer in own):
            raise RuntimeError(
                "clip_grad_norm cannot be combined with update_in_backward(), because the optimizer used these "
                "gradients during the backward, before they could be clipped. Remove one of the two calls. To get the "
                "norm without clipping, pass the gradients to torch.nn.utils.get_total_norm."
            )
        self._forget_changed()
        # If an earlier call of this method has left a clip factor for some of these gradients, apply it now: the norm
        # that is computed next must be that of the clipped gradients.
        for optimizer in list(self._clips):
            if not chosen.isdisjoint(own[optimizer]):
                self._clip_now(optimizer)
        for kind, value in ("clipping by the norm of order", norm_type), ("clipping to the norm", max_norm):
            # The ranks compare these numbers. A tensor is not logged, because the host might have to wait to read it.
            if isinstance(value, (int, float)):
                self._reduce.collective_log.note(value_code(kind, value))
        norm = self._check(parameters, float(norm_type))
        if self._scale is not None:
            norm = norm / self._scale
        # If the norm is inf or nan, the step is skipped. The factor is then 1: max_norm / (norm + eps) would be 0 or
        # nan, and would overwrite finite gradients too.
        factor = torch.where(norm.isfinite(), (max_norm / (norm + eps)).clamp_(max=1.0), 1.0)
        in_updates: set[torch.nn.Parameter] = set()
        # Leave the factor to `step` only if `max_norm` is a number above 0. `step` divides by the factor's reciprocal,
        # which is inf if `max_norm` is 0. The host could not test a tensor for 0 without waiting for the device.
        deferred = not isinstance(max_norm, torch.Tensor) and max_norm > 0
        for optimizer, members in own.items():
            if deferred and members and chosen.issuperset(members):
                self._clips[optimizer] = factor, {parameter: self._checked[parameter] for parameter in members}
                in_updates.update(members)
        self._multiply([p for p in parameters if p not in in_updates], factor)
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Make one step with every optimizer and its scheduler, or with none if a gradient is inf or nan.

        Collective: every rank must call it, after `backward` and, to clip the gradients, after `clip_grad_norm`. The
        optimizers use the clipped gradients, divided by the loss scale. Then the loss scale is adapted. On a GPU, the
        schedulers step later, usually in the next `backward`, because only then does the host read whether the step was
        skipped.

        Call `zero_grad` after each step. Otherwise the next `backward` adds its gradients to those of this step. (Only
        a skipped step drops its gradients itself.)

        If the same optimizer or scheduler raises an error on every rank, the program can call `step` again, before the
        next backward. The optimizers and schedulers that have already made this step do not make it twice.

        Raises:
            RuntimeError: there is no optimizer.
            ValueError: optimizers share a parameter that has a gradient, and gradients are clipped or scaled.
            RuntimeError: the ranks' managers differ in `grad_scale`, `max_skipped_steps`, the settings of the loss
                scale, or the classes of optimizers and schedulers.
            RuntimeError: a step was skipped because a gradient was inf or nan, and the skipped steps have reached the
                limit `max_skipped_steps`. On the CPU, this step raises the error. On a GPU, the call that completes the
                step raises it: usually the next `backward`, at the latest the next `step`.
            RuntimeError: a gradient was inf or nan, and an AdamOffloadOptimizer had already updated weights with it,
                because the backward ran inside its context `update_in_backward()`. Raised by the same calls as the
                error above.
        """
        if not self.optimizers:
            raise RuntimeError("OptimManager has no optimizer. Call add_optimizer first.")
        # 1. Complete the last step: advance its schedulers or, if it was skipped, drop its gradients.
        self._end_last_step()
        if self._due:
            used, present = self._used, [p for optimizer in self.optimizers for p in _with_gradient(optimizer)]
            if all(p in used and _still(p, used[p]) is not None for p in present):
                # There is no new gradient, so this call repeats the step in which a scheduler raised an error.
                self._advance_schedulers()
                return
            self._due = []  # some gradient is new, so the program does not repeat that step
        if self._compared != len(self.optimizers):
            self._compare()
        # 2. Search all gradients for inf and nan, except those that `clip_grad_norm` has searched already.
        own = {optimizer: _with_gradient(optimizer) for optimizer in self.optimizers}
        if len(own) > 1 and (self._scale is not None or self._clips):
            _refuse_sharing(own)
        for optimizer in list(self._clips):
            if len(_unreplaced(own[optimizer], self._clips[optimizer][1])) < len(own[optimizer]):
                # Some gradients were set or replaced after `clip_grad_norm`, and must not be multiplied by its factor.
                self._clip_now(optimizer)
        self._forget_changed()
        unchecked = [p for members in own.values() for p in members if p not in self._checked]
        self._updated_in_backward |= any(_updated_in_backward(o) for o in self.optimizers)
        if unchecked:
            self._check(unchecked, 2.0)
        # 3. Update the weights. The skip flag is on the device, where AdamOptimizer reads it.
        try:
            for optimizer, members in own.items():
                done = self._updated.get(optimizer)
                if done is None or len(_unreplaced(members, done)) < len(members):
                    self._update(optimizer)
                    self._updated[optimizer] = _see(_with_gradient(optimizer))
        except BaseException as error:
            # Record the present versions of the gradients, because `_update` may have divided them in place. Otherwise
            # a repeated `step` would search them for inf and nan again, and ranks on which different optimizers failed
            # would issue different collectives.
            self._checked = _see([p for p in self._checked if p.grad is not None])
            if isinstance(error, torch.OutOfMemoryError):
                current_world().schedule.explain_shortage(error)
            raise
        # 4. Adapt the loss scale.
        if self._scale is not None:
            amp_update_scale_(
                self._scale,
                self._clean_steps,
                self._found_inf,
                self.loss_scale_factor,
                1 / self.loss_scale_factor,
                self.loss_scale_steps,
            )
            self._scale.clamp_(*self._bounds)
        # 5. Start to copy the skip flag to the host. It is read when the step is completed: usually in the next
        # `backward`, but below if the flag is on the CPU.
        self._skipped = HostFlag(self._found_inf)
        self._parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        updated = list(self._updated.values())
        self._used = updated[0] if len(updated) == 1 else dict(chain.from_iterable(map(dict.items, updated)))
        self._steps += 1
        for observer in current_world().schedule.observers.end_step:
            observer.end_step(self)
        self._forget_norms()
        if self._skipped.immediate:
            self._end_last_step()

    def _compare(self) -> None:
        """Raise RuntimeError unless the OptimManagers of all ranks have the same settings and optimizers.

        Collective: every rank must call it.
        """
        facts: dict[str, Any] = {"loss_scale": self.loss_scale_enabled and self.loss_scale}
        facts |= {"loss_scale_factor": self.loss_scale_factor, "loss_scale_steps": self.loss_scale_steps}
        facts |= {"bounds": self._bounds, "grad_scale": self.grad_scale, "max_skipped_steps": self._skips.limit}
        for number, (optimizer, scheduler) in enumerate(zip(self.optimizers, self.schedulers)):
            facts[f"optimizer {number}"] = type(optimizer).__qualname__
            facts[f"scheduler {number}"] = type(scheduler).__qualname__
        current_world().check_same_on_all_ranks("OptimManager.step", facts)
        self._compared = len(self.optimizers)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        # divisor: the number by which the gradients of this optimizer are divided; None for 1.
        clip, divisor = self._clips.get(optimizer), self._scale
        if clip is not None:
            divisor = clip[0].reciprocal() if divisor is None else divisor / clip[0]
        if isinstance(optimizer, AdamOptimizer):
            optimizer.grad_scale, optimizer.found_inf = divisor, self._found_inf
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not self._found_inf.item():
            gradients = [p.grad for p in _with_gradient(optimizer)]
            if not gradients or divisor is None:
                optimizer.step()
                return
            # Divide by a number, not by a tensor: torch would convert a tensor on a GPU to the dtype of the gradients,
            # and 65536, a usual loss scale, is inf in float16. The host has just waited for the device anyway.
            number = divisor.item()
            foreach_div_(gradients, number)
            try:
                optimizer.step()
            except BaseException:
                foreach_mul_(gradients, number)  # undo the division, because a repeated step divides them again
                raise

    def _check(self, parameters: list, order: float) -> torch.Tensor:
        """Return the norm of the parameters' gradients over all ranks. If it is inf or nan, set the skip flag.

        The flag is on the device. If it is set, `step` updates nothing. The gradients are not divided by the loss scale
        before the norm is computed. Collective: every rank must call it.

        order: the order p of the p-norm; inf for the largest absolute value.
        """
        norm = global_norm(parameters, order, self._reduce, self._device)
        torch.maximum(self._found_inf, norm.isfinite().logical_not().float(), out=self._found_inf)
        self._checked.update(_see(parameters))
        return norm.float()

    def _clip_now(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the gradients of an optimizer by the clip factor that its next step would have applied.

        Gradients that were set or replaced after the factor was computed are not multiplied.
        """
        factor, clipped = self._clips.pop(optimizer)
        self._multiply(_unreplaced(_with_gradient(optimizer), clipped), factor)

    def _multiply(self, parameters: list, factor: torch.Tensor) -> None:
        """Multiply the parameters' `.grad` by `factor` in place.

        If gradients were searched for inf and nan before, this write does not make `step` search them again.
        """
        if parameters:
            checked = _unwritten(self._checked)
            foreach_mul_([p.grad for p in parameters], factor)
            self._checked.update(_see(checked))

    def _forget_changed(self) -> None:
        """Make `step` search all gradients for inf and nan again, if any has changed since it was searched."""
        if len(_unwritten(self._checked)) < len(self._checked):
            self._checked.clear()
            self._found_inf.zero_()

    def _forget_norms(self) -> None:
        self._clips.clear()
        self._checked.clear()
        self._found_inf.zero_()
        self._updated.clear()
        self._due = []

    # -- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """Return the state of optimizers, schedulers and loss scale, in host memory, for torch.save.

        Collective: every rank must call it.

        Args:
            gather_opt: True returns the full state of the optimizers on rank 0, and no tensors on other ranks. Save
                only rank 0's result; any number of ranks can load it. False returns each rank's own state. Save each
                rank's result in its own file. Only the same rank can load it, in a job with the same number of ranks on
                each host, and the same `gather`, `shard_over` and `tp_size` of `init_distributed`.

        Returns:
            A dict for `load_state_dict`: "optimizers", the list of the optimizers' states; "checksums", with which
            `load_state_dict` verifies the values; and "lr_schedulers", "loss_scale" and "clean_steps", the result of
            `own_state`.

        Raises:
            RuntimeError: the `state` of an optimizer has strings instead of parameters as keys.
            RuntimeError: `gather_opt` is True, and the ranks have state for different parameters.
            RuntimeError: `gather_opt` is True, there are several ranks, and the state dict of an optimizer has sharded
                tensors in an entry other than "state".
            RuntimeError: on a GPU, the previous step was skipped because a gradient was inf or nan, and the skipped
                steps have reached the limit `max_skipped_steps`.
            RuntimeError: on a GPU, a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had
                already updated weights with it during the backward.
        """
        world = current_world()
        expect_flag("gather_opt", gather_opt)
        world.barrier("OptimManager.state_dict")
        own = self.own_state()
        optimizers = [save_state(optimizer, world, gather_opt) for optimizer in self.optimizers]
        for saved in optimizers:  # a tensor among the settings, such as a learning rate, may change later
            saved["param_groups"] = copy.deepcopy(saved["param_groups"])
        state = {"optimizers": optimizers, **copy.deepcopy(own)}
        return {**state, _CHECKSUMS: checksums(_by_entry(state))}

    def own_state(self) -> dict[str, Any]:
        """Return the state of the schedulers and the loss scale, without that of the optimizers.

        `bmt.save_state` and `state_dict` call it. Call it only in code that saves the optimizers' states itself, and
        load the result with `load_own_state`. Collective: every rank must call it. On a GPU, this call completes
        the previous step. If that step was skipped, the ranks exchange messages to find which gradient was inf or nan.

        Returns:
            A dict, the same on every rank. "lr_schedulers": for each optimizer, the `state_dict()` of its scheduler, or
            None. "loss_scale": the loss scale, or None. "clean_steps": the number of consecutive steps without overflow
            since the loss scale last changed.

        Raises:
            RuntimeError: the previous step was skipped because a gradient was inf or nan, and the skipped steps have
                reached the limit `max_skipped_steps`. (Only on a GPU. On the CPU, `step` itself raises this error.)
            RuntimeError: a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had already
                updated weights with it, because the backward ran inside its context `update_in_backward()`. (Only on a
                GPU. On the CPU, `step` itself raises this error.)
        """
        self._end_last_step()
        return {
            "lr_schedulers": [None if s is None else s.state_dict() for s in self.schedulers],
            "loss_scale": None if self._scale is None else self.loss_scale,
            "clean_steps": self.steps_since_last_scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any], gather_opt: bool | None = None) -> None:
        """Load a state that `state_dict` returned. First add the same optimizers and schedulers in the same order.

        Collective: every rank must call it. The checksums, the number of optimizers and the presence of schedulers and
        a loss scale are checked before anything is loaded. Next, the optimizers are loaded one after another, then the
        schedulers and the loss scale. If one of them raises an error, those before it have already been loaded. In that
        case, load a state that fits before you continue training.

        Args:
            state_dict: with gather_opt=False, the result of `state_dict` on this rank; with gather_opt=True, the result
                on rank 0, which every rank must pass. Remove the entry "checksums" if you have changed other values.
            gather_opt: the value with which the state was saved; None accepts both.

        Raises:
            TypeError: `state_dict` is not a dict, or `gather_opt` is not a bool or None.
            ValueError: the state is incomplete, or does not fit this manager, an optimizer, a scheduler or this rank.
            ValueError: the state was saved with the other value of `gather_opt`.
            RuntimeError: the ranks pass different schedulers' states, loss scales or settings of optimizers, or
                different full states.
            RuntimeError: a value does not match its checksum, because the file is damaged.
            RuntimeError: on a GPU, the previous step was skipped because a gradient was inf or nan, and the skipped
                steps have reached the limit `max_skipped_steps`.
            RuntimeError: on a GPU, a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had
                already updated weights with it during the backward.
        """
        expect_kind("state_dict", state_dict, dict, "the result of OptimManager.state_dict()")
        lacking = [key for key in ("optimizers", "lr_schedulers", "loss_scale", "clean_steps") if key not in state_dict]
        if lacking:
            raise ValueError(
                f"state_dict must be the result of OptimManager.state_dict(), but it lacks {', '.join(lacking)}."
            )
        expect_flag("gather_opt", gather_opt)
        _verify(state_dict)
        own = {name: value for name, value in state_dict.items() if name not in ("optimizers", _CHECKSUMS)}
        current_world().check_same_on_all_ranks("OptimManager.load_state_dict", contents(own))
        self.check_own_state(state_dict)
        self._end_last_step()
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"]):
            gathered = "sliced" in state
            if gather_opt is not None and gathered != gather_opt:
                raise ValueError(
                    f"the state was saved with gather_opt={gathered}, but is loaded with gather_opt={gather_opt}. Pass "
                    "the same value, or leave gather_opt out."
                )
            load_state(optimizer, state, current_world())
        self.load_own_state(state_dict)

    def check_own_state(self, state: dict[str, Any]) -> None:
        """Check that a state of schedulers and loss scale fits this manager, without loading it. Not collective.

        `bmt.load_state`, `load_state_dict` and `load_own_state` call this method before they load anything, so other
        code need not call it.

        Args:
            state: the result of `own_state` or `state_dict` of the manager that was saved.

        Raises:
            ValueError: the two managers differ in the number of optimizers, in which optimizers have a scheduler, or in
                whether there is a loss scale.
        """
        schedulers = state["lr_schedulers"]
        theirs, mine = ([scheduler is not None for scheduler in each] for each in (schedulers, self.schedulers))
        if theirs != mine:
            raise ValueError(
                f"the saved manager had {len(theirs)} optimizers (whether each had a scheduler: {theirs}), but this "
                f"one has {len(mine)} (whether each has a scheduler: {mine}). Before loading, call add_optimizer for "
                "the same optimizers and schedulers, in the same order."
            )
        scale = None if self._scale is None else self.loss_scale
        if (state["loss_scale"] is None) != (scale is None):
            raise ValueError(
                f"the state was saved with loss_scale {state['loss_scale']}, but this manager has loss_scale {scale}. "
                "Create this OptimManager with loss_scale=None if the saved one had None, otherwise with a loss_scale."
            )

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Load the state of the schedulers and the loss scale, but not that of the optimizers.

        `bmt.load_state` and `load_state_dict` call it. Call it only in code that loads the optimizers' states itself.
        Collective: every rank must call it. On a GPU, this call completes the previous step. If that step was
        skipped, the ranks exchange messages to find which gradient was inf or nan.

        Args:
            state: the result of `own_state`.

        Raises:
            ValueError: this manager and the saved one differ in the number of optimizers, in which optimizers have a
                scheduler, or in whether there is a loss scale. Nothing is loaded then.
            ValueError: a scheduler rejects its state. The schedulers before it have already been loaded.
            RuntimeError: the previous step was skipped because a gradient was inf or nan, and the skipped steps have
                reached the limit `max_skipped_steps`. (Only on a GPU. On the CPU, `step` itself raises this error.)
            RuntimeError: a gradient of the previous step was inf or nan, and an AdamOffloadOptimizer had already
                updated weights with it, because the backward ran inside its context `update_in_backward()`. (Only on a
                GPU. On the CPU, `step` itself raises this error.)
        """
        self.check_own_state(state)
        self._end_last_step()
        for scheduler, saved in zip(self.schedulers, state["lr_schedulers"]):
            if scheduler is not None:
                scheduler.load_state_dict(saved)
        if self._scale is not None:
            self._scale.fill_(state["loss_scale"])
        self._clean_steps.fill_(state["clean_steps"])
        self._skips.start_anew()  # steps that were skipped before the loading do not count from here on
        self._updated.clear()  # a step that failed before the loading is not continued after it
        self._due = []

    # -- the end of the last step -------------------------------------------------------------------------------

    def _end_last_step(self) -> None:
        """Advance the schedulers or, if the last step was skipped, drop its gradients and log why it was skipped.

        A step is skipped if a gradient is inf or nan. The host may have to wait here until the device has checked the
        gradients. Only the first call after a step has an effect. Collective if the step was skipped. Raises
        RuntimeError if the limit of skipped steps has been reached, or if an optimizer has already updated weights with
        the inf or nan during the backward.
        """
        if self._skipped is None:
            return
        skipped, self._skipped = self._skipped.read(), None
        if skipped:
            self._skips.look(self._steps, self._last_gradients())
        used, self._used = self._used, {}
        updated_in_backward, self._updated_in_backward = self._updated_in_backward, False
        if skipped and updated_in_backward:
            raise RuntimeError(
                "a gradient was inf or nan, and update_in_backward() had used it before this step could be skipped. "
                "The weights are wrong now. Continue from a checkpoint, without update_in_backward()."
            )
        if skipped:
            for parameter, seen in used.items():
                if _still(parameter, seen) is not None:  # keep a `.grad` that a later backward has set or written
                    parameter.grad = None
            scale = None if self._scale is None else self.loss_scale
            self._skips.report(self._steps, self, self._parameters, scale, self._bounds[0])
            return
        # If a scheduler raises an error and the program repeats `step`, the repeated `step` compares the gradients with
        # `_used`, to find out that they are not new.
        self._used = used
        self._due = [scheduler for scheduler in self.schedulers if scheduler is not None]
        self._advance_schedulers()

    def _advance_schedulers(self) -> None:
        due = self._due
        while due:
            due[0].step()
            del due[0]
        self._used = {}

    def _last_gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient that the last step used of each parameter, in the order of the parameters in that step.

        An entry is None if the parameter had no gradient, or if its `.grad` was replaced or written since.
        """
        used = self._used
        return [_still(p, used[p]) if p in used else None for p in self._parameters]


def _see(parameters: Iterable[torch.nn.Parameter]) -> _Seen:
    """Return {parameter: (weak reference to its `.grad`, version counter of this `.grad`)}, to find later changes.

    All parameters must have a `.grad`.
    """
    versions = gradient_versions(parameters)
    return {parameter: (weakref.ref(gradient), version) for parameter, (gradient, version) in versions.items()}


def _unreplaced(parameters: list[torch.nn.Parameter], seen: _Seen) -> list[torch.nn.Parameter]:
    """Return those of `parameters` whose `.grad` is still the tensor in `seen`. All must have a `.grad`."""
    with WithoutTorchFunction():
        return [p for p in parameters if (each := seen.get(p)) is not None and p.grad is each[0]()]


def _unwritten(seen: _Seen) -> list[torch.nn.Parameter]:
    """Return the parameters in `seen` whose `.grad` was neither replaced nor written since `seen` was made."""
    with WithoutTorchFunction():
        return [
            p for p, (gradient, version) in seen.items() if p.grad is not None and p.grad is gradient()
            and p.grad._version == version
        ]  # fmt: skip


def _still(parameter: torch.nn.Parameter, seen: tuple[weakref.ref[torch.Tensor], int]) -> torch.Tensor | None:
    """Return the parameter's `.grad`, or None if it was dropped, replaced or written since the step that has used it.

    seen: a weak reference to the `.grad` that the step has used, and its version counter.
    """
    gradient = parameter.grad  # this strong reference keeps the tensor alive while the weak reference in `seen` is read
    if gradient is None or seen[0]() is not gradient or not is_unchanged(parameter, (gradient, seen[1])):
        return None
    return gradient


def _expect_positive(name: str, value: Any, more: str = "") -> None:
    expect_number(name, value, f"finite and positive{more}", lambda number: 0 < number < float("inf"))


def _needs_arguments(function: Any) -> bool:
    """Return whether a function cannot be called without arguments. False if its signature is unknown."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return False
    return any(
        p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    )


def _check_clipping(param_groups: Any, max_norm: Any, norm_type: Any, eps: Any) -> None:
    """Raise TypeError or ValueError if an argument of `clip_grad_norm` is invalid."""
    plain = {type(max_norm), type(norm_type), type(eps)} <= {int, float} and isinstance(param_groups, list)
    if plain and 0 <= max_norm and 0 < norm_type and 0 <= eps < float("inf"):
        if all(isinstance(group, dict) for group in param_groups):
            return  # the slower checks below are unnecessary; this function runs in every step
    wanted = 'optimizer.param_groups, a list of dicts with "params"'
    expect_kind("param_groups", param_groups, (list, tuple), wanted)
    for group in param_groups:
        expect_kind("param_groups", group, dict, wanted)
    # The value of a tensor is not checked, because the host would have to wait for the device to read it.
    if not isinstance(max_norm, torch.Tensor) or max_norm.numel() != 1:
        expect_number("max_norm", max_norm, "at least 0", lambda norm: norm >= 0)
    if norm_type != "inf":  # torch's clip_grad_norm_ accepts this string
        expect_number("norm_type", norm_type, "positive or inf", lambda order: order > 0)
    expect_number("eps", eps, "finite and at least 0", lambda number: 0 <= number < float("inf"))


def _by_entry(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Divide a manager's state dict into parts, each of which gets its own checksum, and return {name: part}.

    The parts are the state of each parameter, the rest of each optimizer's state, and every other entry.
    """
    entries = {name: value for name, value in state_dict.items() if name not in ("optimizers", _CHECKSUMS)}
    for number, optimizer in enumerate(state_dict["optimizers"]):
        what = f"optimizer {number}"
        parameters = optimizer.get("state")
        entries[f"{what}, settings"] = {name: value for name, value in optimizer.items() if name != "state"}
        for key, values in parameters.items() if isinstance(parameters, dict) else ():
            entries[f"{what}, parameter {key}"] = values
    return entries


def _verify(state_dict: dict[str, Any]) -> None:
    """Raise RuntimeError on every rank if a value in any rank's `state_dict` does not match its checksum.

    Collective: every rank must call it. A state without checksums is accepted.
    """
    problem = None
    try:
        if _CHECKSUMS in state_dict:
            problem = find_differences(state_dict[_CHECKSUMS], _by_entry(state_dict))
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"it cannot be read ({type(error).__name__}: {error})"
    current_world().raise_everywhere(
        f'OptimManager.load_state_dict: the state is damaged. If you have changed it, remove its entry "{_CHECKSUMS}"',
        problem,
    )


def _with_gradient(optimizer: torch.optim.Optimizer) -> list:
    return with_gradients(p for group in optimizer.param_groups for p in group["params"])


def _refuse_sharing(members: dict[torch.optim.Optimizer, list[torch.nn.Parameter]]) -> None:
    """Raise ValueError if two optimizers share a parameter. Its gradient would be unscaled and clipped twice.

    Each step checks this, because groups may be added to an optimizer, and parameters unfrozen, between steps.

    members: {optimizer: its parameters that have a gradient}.
    """
    seen: dict[torch.nn.Parameter, torch.optim.Optimizer] = {}
    for optimizer, parameters in members.items():
        shared = [p for p in parameters if p in seen]
        if shared:
            origin, other = getattr(shared[0], "origin", None), seen[shared[0]]
            name = f"a parameter of shape {tuple(shared[0].shape)}" if origin is None else origin.path
            raise ValueError(
                f"OptimManager.step: two optimizers, {type(other).__name__} and {type(optimizer).__name__}, share "
                f"{name}{f' and {len(shared) - 1} more' if len(shared) > 1 else ''}. Each of them would divide "
                "the gradient by the loss scale and clip it, which must be done only once. Give each parameter to one "
                "optimizer."
            )
        seen.update(dict.fromkeys(parameters, optimizer))


def _updated_in_backward(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "updated_in_backward", False)  # only AdamOffloadOptimizer has this attribute


class HostFlag:
    """A copy of the skip flag in host memory. The skip flag is a tensor (1,) that is not 0 if a step must be skipped.

    `OptimManager.step` creates this object. A flag on a GPU is copied asynchronously, on the current stream, so that
    the host need not wait in `step`. The host reads the copy later, usually in the next `backward`.

    Attributes:
        immediate: True if the flag itself was already in host memory, so that `read` never waits.
    """

    def __init__(self, flag: torch.Tensor) -> None:
        self.immediate = not flag.is_cuda
        self._event: torch.cuda.Event | None = None
        if self.immediate:
            self._value = flag.clone()
            return
        self._value = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True)
        self._value.copy_(flag, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    @property
    def arrived(self) -> bool:
        """True if the skip flag has been copied to host memory, so that `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> float:
        """Return the value of the flag: not 0 if the step must be skipped. The host waits for the copy if needed."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


# -- the norm of gradients over all ranks ---------------------------------------------------------------------------


def global_norm(parameters: list, order: float, communicator: Communicator, device: torch.device) -> torch.Tensor:
    """Return the norm of the parameters' `.grad` over all ranks, a scalar on `device`.

    Collective: every rank must call it. There is only one all-reduce, of at most two numbers. If an element of a
    gradient is inf or NaN, the result is inf or NaN. Parameters that are not sharded, which all ranks have, count once.

    The 2-norm is returned in float64. Norms of other orders are computed in float32, or in float64 for float64
    parameters. Each gradient is read once, and gradients that are adjacent in memory are read as one tensor. For the
    2-norm, a gradient is not read at all if its sum of squares was already computed while it was averaged over the
    ranks.

    Args:
        parameters: the parameters, all with a `.grad`.
        order: the order of the norm, above 0, or inf.
        communicator: the communicator for the all-reduce. It connects the ranks that store different shards.
        device: the device of the result.
    """
    add = _squares if order == 2 else _powers
    sharded = add([p for p in parameters if isinstance(p, DistributedParameter)], order, device)
    own = add([p for p in parameters if not isinstance(p, DistributedParameter)], order, device)
    if order == float("inf"):
        all_reduce_largest(communicator, sharded)
        return torch.maximum(sharded, own)[0]
    communicator.all_reduce(sharded).wait()
    return (sharded + own)[0].pow(1.0 / order)  # the sum is float64 if either of them is


def _squares(parameters: list, order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of squares of this rank's gradients, in element 0 of a tensor (2,) float64.

    Element 1 belongs to the kernel that adds the squares, and has no meaning for the caller.

    order: always 2, and not used. `_powers`, which is called for other orders, takes the same arguments.
    device: the device of the result.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    measured = []
    for members in neighbours(parameters):
        first, squares = members[0], None
        if isinstance(first, DistributedParameter):
            squares = first.buffer.gradient.squares(range(first.index, first.index + len(members)))
        if squares is not None:
            measured.append(squares)
            continue
        for flat in map(as_real, _flat(members)):
            if flat.dtype == torch.float64:
                total[0] += torch.dot(flat, flat)
            else:
                accumulate_squared_norm(flat, total)
    if measured:
        total[0] += torch.cat(measured).sum()
    return total


def _powers(parameters: list, order: float, device: torch.device) -> torch.Tensor:
    """Return the sum of |g|^order over this rank's elements g of all gradients, from which a norm is computed.

    If `order` is inf, return the maximum of |g|. The result has shape (1,). It is float64 if any of `parameters` is,
    otherwise float32. This dtype is the same on every rank, also on ranks that store no element of a float64 parameter.
    """
    wide = torch.float64 if any(p.dtype.to_real() == torch.float64 for p in parameters) else torch.float32
    filled = [flat for members in neighbours(parameters) for flat in _flat(members) if flat.numel()]
    filled = [flat.abs() if flat.is_complex() else flat for flat in filled]
    if not filled:
        return torch.zeros(1, dtype=wide, device=device)
    norms = torch.stack(foreach_norm(filled, order, dtype=wide))
    return norms.max().reshape(1) if order == float("inf") else norms.pow(order).sum().reshape(1)


def _flat(members: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of adjacent parameters as 1-D tensors, which together contain each gradient element once.

    If possible, this is one tensor: a view of the flat gradient, which also contains padding of zeros. Otherwise, it is
    one tensor for each parameter that has a `.grad`.

    members: parameters that are adjacent in one flat buffer, or one parameter that is not sharded.
    """
    flat = Run.over(members).flat_gradient() if isinstance(members[0], DistributedParameter) else None
    if flat is not None:
        return [flat]
    return [p.grad.as_subclass(torch.Tensor).reshape(-1) for p in members if p.grad is not None]
