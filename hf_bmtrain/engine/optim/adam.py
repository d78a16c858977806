"""AdamOptimizer: AdamW for sharded parameters."""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from ..base.arguments import expect_callable, expect_flag, expect_kind, expect_number
from ..base.torch_internals import WithoutTorchFunction, load_hooks
from ..ops.adam_step import Elements, Hyper, KernelSteps, TorchSteps, adam_steps, master_dtype
from ..ops.eight_bits import Moments
from ..ops.residual import Master
from ..runtime.world import current_world
from ..tensors.tensor import ShardBase
from .runs import (
    ParameterState,
    Run,
    RunState,
    StateTensors,
    adopt,
    has_codes,
    index_bases,
    is_own,
    neighbours,
    own_entries,
    same_members,
    shown,
    with_gradients,
    without_codes,
)
from .state import check_state, copy_full_state, full_facts, full_state_of, load_state, own_part, save_state

START_ANEW = (
    "To start with new optimizer state, do not load this one: bmt.load_state(folder, model) loads only the weights."
)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class AdamOptimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, 2019) over this rank's shards of parameters, and over unsharded parameters.

        m ← β₁m + (1−β₁)g    v ← β₂v + (1−β₂)g²    w ← w − lr·wd·w − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)

    Here w is a weight, g its gradient, and m and v its moments. t is the number of steps that its parameter has taken,
    including the present one.

    All parameters must be on one device. Parameters of one parameter group that are adjacent in a flat buffer, and have
    taken the same number of steps, are updated in one kernel launch. Parameters without a gradient (`.grad is None`)
    are not updated. Gradients are read, never written. In `step`, the host does not wait for the device, except in the
    few steps that compare the ranks' optimizers, or that update a different set of parameters than the step before.

    The state consists of m, v and, for half-precision weights, a master copy of w, all in float32 by default. A
    half-precision weight is its master, rounded to nearest even. The state takes 8 bytes per element of a float32
    weight, which needs no master, and 12 per element of a half-precision weight. For a bfloat16 weight on CUDA it takes
    only 10: the master is stored without loss as its 16-bit difference from the weight, and `optimizer.state[p]` has
    this "residual" instead of "master". `state_dict()` always has float32 masters.

    If half-precision weights are written between steps (by loading, averaging or masking), the masters of the changed
    weights are set to values that round to the new weights.

    Before `step`, OptimManager or torch.amp.GradScaler may set two attributes to float32 tensors of one element on the
    device: `grad_scale`, by which the gradients are divided, and `found_inf`. If `found_inf` is not 0, the update is
    skipped.

    Args:
        params: parameters, or parameter groups as for torch's optimizers. Their dtype must be float32, float16 or
            bfloat16.
        lr: the learning rate, at least 0: a number or a tensor of one element. If the tensor is on the weights' device,
            the kernel reads it, and the host does not wait. `betas`, `eps` and `weight_decay` may also be such tensors.
        betas: β₁ and β₂, at least 0 and below 1.
        eps: a number that is added to the denominator, outside the square root, as in the formula; at least 0.
        weight_decay: the weight decay wd, at least 0.
        hold_steps: a parameter's first `hold_steps` steps update m, v and t but not w, so that the moments warm up
            first. Skipped steps do not count. Parameter groups may have different values.
        decoupled: whether weight decay is decoupled from the gradient, as in the formula. False adds weight_decay·w to
            g instead, as torch.optim.Adam does, for weights of every dtype. (BMTrain does this only for float32
            weights.) Parameter groups may have different values.
        exp_avg_dtype: the dtype of m, torch.float32 or torch.bfloat16. bfloat16 values are rounded stochastically. The
            random bits depend on the index of the element and on the step, not on the number of ranks. There is one
            exception: with some options, such as all-gathers in a dtype other than that of the parameters, several
            ranks divide the parameters into flat buffers differently than a single rank. The elements then have other
            indices.
        state_bits: 32, or 8 to store m and v in 8 bits, rounded stochastically, with an exponent for every 32 elements.
            With 8, the masters of bfloat16 weights on CUDA may be off by their last bit, and the state takes 2.06 bytes
            per element of a float32 weight, 4.06 of a bfloat16 weight on CUDA, and 6.06 of other half-precision
            weights. Checkpoints have float32 moments, so `state_bits` may change between saving and loading. With 8,
            an `eps` below 2⁻⁶³ counts as 2⁻⁶³.

    Raises:
        TypeError: `params` is a single tensor or not iterable.
        TypeError: `lr`, `eps`, `weight_decay`, `hold_steps` or one of the betas is neither a number nor a tensor of
            one element, or `decoupled` is not a bool.
        ValueError: a number is out of range, `betas` is not a pair, or `exp_avg_dtype` or `state_bits` does not have
            one of the values above.
        ValueError: `state_bits=8` is combined with a bfloat16 `exp_avg_dtype`.
        ValueError: there are no parameters, or a parameter has an unsupported dtype.
    """

    adamw_state = True
    """Whether `state_dict` contains AdamW's two moments for every parameter. Subclasses may set this to False."""
    _step_supports_amp_scaling = True
    # OptimManager or GradScaler sets these two attributes before a step and deletes them after it. Between steps they
    # must not exist: GradScaler multiplies its own scale by an existing `grad_scale`, so a value that is left over from
    # the last step would be applied again.
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        hold_steps: int = 0,
        *,
        decoupled: bool = True,
        exp_avg_dtype: torch.dtype = torch.float32,
        state_bits: int = 32,
    ) -> None:
        expect_kind("params", params, Iterable, "model.parameters() or a list of parameter groups")
        if isinstance(params, torch.Tensor):
            raise TypeError("params must be a list of parameters, but is a single tensor. Pass it in a list.")
        params = list(params)
        if not params:
            raise ValueError(
                "params must contain parameters, but is empty. model.parameters() can be iterated only once, so call "
                "it again for each use."
            )
        if not isinstance(exp_avg_dtype, torch.dtype) or exp_avg_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"exp_avg_dtype must be torch.float32 or torch.bfloat16, not {exp_avg_dtype!r:.80}")
        if not isinstance(state_bits, int) or state_bits not in (8, 32):
            raise ValueError(f"state_bits must be 32 or 8, got {state_bits!r:.80}")
        if state_bits == 8 and exp_avg_dtype != torch.float32:
            raise ValueError(f"state_bits=8 stores both moments in 8 bits. Leave out exp_avg_dtype={exp_avg_dtype}.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "hold_steps": hold_steps}
        super().__init__(params, {**defaults, "decoupled": decoupled})
        self.loss_scale: torch.Tensor | None = None  # the loss scale of the OptimManager, which sets this attribute
        self._exp_avg_dtype = torch.uint8 if state_bits == 8 else exp_avg_dtype
        self._loaded: set[torch.nn.Parameter] = set()  # parameters with a loaded state that no step has used yet
        # Hashes of the full tensors in the state that was loaded last. The next step compares these hashes across ranks
        # and then sets this attribute to None.
        self.loaded_facts: dict[str, str] | None = None
        self._active: list[list[torch.nn.Parameter]] = []  # for each group, the parameters that the last step updated
        self._states: list[RunState] = []
        # What `self.state` contained after the last call of `_arrange`: the optimizer's own entries in `_held`, and all
        # values, including those that other code has added, in `_values`. Each step compares `self.state` with them, to
        # notice that the caller has replaced or removed entries.
        self._held: dict[torch.Tensor, ParameterState] = {}
        self._values: list[Any] = []
        self._steps: KernelSteps | TorchSteps = TorchSteps([], torch.device("cpu"))

    def add_param_group(self, param_group: dict) -> None:
        """Add a parameter group.

        Args:
            param_group: a dict with "params" and the settings that differ from the optimizer's: "lr", "betas", "eps",
                "weight_decay", "hold_steps", "decoupled".

        Raises:
            TypeError: `param_group` is not a dict, or a setting has the wrong type.
            ValueError: a setting is out of range, "betas" is not a pair, "params" is missing, a parameter is not
                float32, float16 or bfloat16, or the group sets `maximize` or `amsgrad`.
        """
        expect_kind("param_group", param_group, dict, 'a dict with "params"')
        if "params" not in param_group:
            raise ValueError(f'param_group must have the key "params", but its keys are {[*map(str, param_group)]}')
        _refuse_unsupported([param_group])
        _check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in _DTYPES:
                self.param_groups.pop()
                _check_dtype(parameter)

    @property
    def scale(self) -> float:
        """The current loss scale of the optimizer's OptimManager. Reading it makes the host wait for the device.

        1 if the optimizer is in no OptimManager, or in one without a loss scale. The attribute is named as in BMTrain,
        and is unrelated to the argument `scale` of `step`.
        """
        return 1.0 if self.loss_scale is None else float(self.loss_scale)

    @torch.no_grad()
    def step(self, closure=None, scale: float = 1.0):
        """Update every parameter that has a gradient.

        Collective: every rank must call it, because some steps compare the ranks' optimizers:

        * The first step checks that the optimizers of all ranks have the same parameters and settings. So does the
          first step after the parameters of the groups have changed, or more parameters were sharded.
        * The first step after a state was loaded checks that full tensors in it are the same on all ranks.

        Args:
            closure: a function without arguments that computes the loss, and is called before the update; None for no
                function.
            scale: the number by which the gradients are divided, above 0, such as the loss scale. It may be a tensor of
                one element. If OptimManager or GradScaler has set `grad_scale`, the gradients are divided by both.

        Returns:
            The return value of `closure`; None if `closure` is None.

        Raises:
            TypeError: `closure` is not callable, or `scale` is neither a number nor a tensor of one element.
            ValueError: `scale` is not finite or not above 0.
            ValueError: the parameters are on several devices, or an unsharded parameter is not contiguous.
            RuntimeError: the ranks have different optimizers, or have loaded different full states.
            RuntimeError: the optimizer was created before the model was sharded.
            RuntimeError: the gradients of an unsharded parameter differ between the ranks.
        """
        loss = None
        if closure is not None:
            expect_callable("closure", closure, "a function that computes the loss, or None")
            with torch.enable_grad():
                loss = closure()
        if type(scale) is not float:
            scale = as_number("scale", scale)
        # Subclasses override `_step`, not `step`. If a subclass overrode `step` and called `super().step()`, torch
        # would run the hooks before and after the step twice.
        if scale == 1.0:
            self._step()
            return loss
        expect_number("scale", scale, "finite and above 0", lambda number: 0 < number < math.inf)
        given = self.__dict__.get("grad_scale")
        # Use the device of the first parameter found, in any group, because the first group may have no parameters.
        devices = (parameter.device for group in self.param_groups for parameter in group["params"])
        divisor = torch.tensor(float(scale), dtype=torch.float32, device=next(devices, None))
        self.grad_scale = divisor if given is None else divisor * given
        try:
            self._step()
        finally:
            del self.grad_scale
            if given is not None:
                self.grad_scale = given
        return loss

    def _step(self) -> None:
        # Divide the parameters with gradients into runs: adjacent parameters that have taken the same number of steps,
        # so that one kernel launch can update them.
        self._arrange([with_gradients(group["params"]) for group in self.param_groups])
        self._step_runs(range(len(self._states)))

    def _step_runs(self, numbers: Sequence[int]) -> None:
        """Update some of the runs (lists of adjacent parameters). The gradients of their parameters must be complete.

        numbers: the indices of these runs in `self._states`, in ascending order.
        """
        states = [self._states[number] for number in numbers]
        # 1. Wait for earlier updates. If other code has written weights since the last step, update their float32
        # masters.
        for state in states:
            if state.run.buffer is not None and state.run.buffer.update.ticket is not None:
                state.run.buffer.update.wait()
            if state.is_stale:
                self._finish()
                state.master.follow_weight()
        # 2. Prepare the scalars of this step: settings, gradient scale, skip flag, step counts, bias corrections.
        self._steps.begin(self._settings(), getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        self._steps.advance(numbers)
        # 3. Update the weights and the state.
        self._update(numbers)
        # 4. Increment torch's version counters of the weights, by which the next forward decides whether to all-gather
        # the weights again. Include runs without elements on this rank, because all ranks must make the same decision.
        torch.autograd.graph.increment_version([state.run.weights for state in states])
        for state in states:
            state.version = state.run.weights._version

    def _update(self, numbers: Sequence[int]) -> None:
        """Update the weights and the state of some runs (lists of adjacent parameters), in one kernel launch per run.

        Subclasses may return before the updates are complete.

        numbers: the indices of these runs in `self._states`.
        """
        for number in numbers:
            state = self._states[number]
            self._steps.update(number, Elements(state.run.gradient(), state.master, state.exp_avg, state.index_base))

    def _settings(self) -> list[Hyper]:
        """Return a tuple of settings for each parameter group, as the kernels expect them.

        Each tuple is (lr, β₁, β₂, eps, decoupled weight decay, hold_steps, weight decay that is added to the gradient).
        One of the two weight decays is always 0. A parameter's first `hold_steps` steps update only its moments.
        """
        return [
            (g["lr"], *g["betas"], g["eps"], decay if g["decoupled"] else 0.0, g["hold_steps"],
             0.0 if g["decoupled"] else decay)
            for g in self.param_groups for decay in (g["weight_decay"],)
        ]  # fmt: skip

    def wait(self) -> None:
        """Make the current stream, but not the host, wait for updates of the weights that run on other streams.

        The `step` of this class updates the weights on the current stream, so there is usually nothing to wait for. The
        method exists so that the same code can call it on an AdamOffloadOptimizer, which updates the weights on
        separate streams. Here, it waits only if an AdamOffloadOptimizer is still updating the same parameters.
        """
        for state in self._states:
            if state.run.buffer is not None:
                state.run.buffer.update.wait()

    _finish = wait  # called before the state is read or moved; subclasses may override it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zero.

        Args:
            set_to_none: True sets `.grad` to None. False fills it with zeros.
        """
        if not set_to_none:
            self.wait()  # an update on another stream may still read the gradients
        with WithoutTorchFunction():  # otherwise every access to an attribute would call the slow __torch_function__
            super().zero_grad(set_to_none)

    # -- runs and state -----------------------------------------------------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> bool:
        """Divide the parameters that this step updates into runs, lists of adjacent parameters with flat state tensors.

        Does nothing and returns False if the last step updated the same parameters, in the same memory, and the caller
        has not changed `self.state`; otherwise returns True.

        A run of the same parameters as an earlier run keeps the state tensors of that run, with two exceptions: the
        memory of its unsharded parameter was replaced, or the caller has replaced or removed tensors of its parameters
        in `self.state`. In these two cases, and for all other runs, new state tensors are allocated, and what
        `self.state` contains for the parameters is copied into them.

        Raises ValueError if the parameters are on several devices, if an unsharded one is not contiguous, or if its
        memory was replaced by memory of an unsupported dtype.

        active: the parameters that this step updates, a list for each parameter group.
        """
        replaced = {state for state in self._states if state.run.buffer is None and state.run.is_replaced}
        if not replaced and same_members(active, self._active) and self._is_held():
            return False
        for state in replaced:
            _check_dtype(state.run.parameters[0])
        replaced.update(state for state in self._states if not self._holds(state.run.parameters))
        self._finish()
        groups = [[Run.over(members) for members in neighbours(group, self._kind)] for group in active]
        runs = [run for group in groups for run in group]
        devices = [*dict.fromkeys(run.weights.device for run in runs)] or [torch.device("cpu")]
        if len(devices) > 1:
            raise ValueError(
                f"AdamOptimizer needs all parameters on one device, got {devices}. Use one optimizer for each device."
            )
        steps = adam_steps([len(group) for group in groups], devices[0], self._exp_avg_dtype)
        earlier = {tuple(state.run.parameters): state for state in self._states if state not in replaced}
        kept = [earlier.get(tuple(run.parameters)) for run in runs]
        bases = index_bases(self.param_groups)
        new = [run for run, state in zip(runs, kept) if state is None]
        # Sort the runs (ranges of parameters that are updated together) by the position of their first element, because
        # a subclass's `_allocate` may place their states in memory in this order.
        new.sort(key=lambda run: (bases[run.owner], run.start))
        tensors = dict(zip(new, self._allocate(new)))
        self._states = []
        for number, (run, state) in enumerate(zip(runs, kept)):
            if state is None:
                master = Master(run.weights, tensors[run].master, tensors[run].exp_avg_sq)
                master.reset()
                offset = 0 if run.buffer is None else run.buffer.rank * run.buffer.layout.shard_numel + run.start
                state = RunState(run, master, tensors[run].exp_avg, steps.counts[number], bases[run.owner] + offset)
                for parameter in run.parameters:
                    views, held = state.views(parameter), self.state.get(parameter, {})
                    others = {name: value for name, value in held.items() if not is_own(name)}
                    adopt(parameter, views, held, parameter in self._loaded)
                    if run.buffer is None and "master" in views and parameter in self._loaded:
                        # Each step compares unsharded weights with their masters, and changes every master that does
                        # not round to its weight. Loaded masters must not change, so set the weights to the rounded
                        # masters now.
                        run.weights.copy_(views["master"])
                    self._loaded.discard(parameter)
                    self.state[parameter] = {**views, **others}
                state.version, state.uncounted = run.weights._version, run.buffer is None
            else:
                state.step = steps.counts[number].copy_(state.step)
                for parameter in run.parameters:
                    self.state[parameter]["step"] = state.step
            self._states.append(state)
        self._steps, self._active = steps, active
        self._held = {parameter: own_entries(held) for parameter, held in self.state.items()}
        self._values = [*chain.from_iterable(map(dict.values, self.state.values()))]
        return True

    def _is_held(self) -> bool:
        """Return whether `self.state` still has all tensors that the optimizer has put there."""
        # This runs in every step, so first compare all values in one list, which takes a fifth of the time of `_holds`.
        present = [*chain.from_iterable(map(dict.values, self.state.values()))]
        same = len(present) == len(self._values) and all(map(is_, present, self._values))
        return same or self._holds(self._held)

    def _holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether `self.state` still has the tensors that the optimizer has put there for some parameters.

        False if the caller has replaced or removed some of them, for example to restart the moments. Entries that other
        code has added do not matter.
        """
        for parameter in parameters:
            present = self.state.get(parameter, {})
            if any(present.get(name) is not value for name, value in self._held.get(parameter, {}).items()):
                return False
        return True

    def _kind(self, parameter: torch.nn.Parameter) -> object:
        """Return the number of steps that `parameter` has taken.

        Adjacent parameters are updated together, as one run, only if this number is the same, because a run has a
        single step count.
        """
        state = self.state.get(parameter)
        return float(state["step"]) if state else 0.0

    def _allocate(self, runs: Sequence[Run]) -> list[StateTensors]:
        """Allocate state tensors for new runs (lists of adjacent parameters). Return one StateTensors for each run.

        The moments are zero. The masters, full-precision copies of half-precision weights, are not initialized; the
        caller must fill them.
        """
        tensors: list[StateTensors] = []
        for weights in (run.weights for run in runs):
            dtype = master_dtype(weights.dtype, weights.device)
            stored = None if dtype is None else torch.empty_like(weights, dtype=dtype)
            if self._exp_avg_dtype == torch.uint8:
                tensors.append(StateTensors(stored, Moments.zeros(weights.numel(), weights.device), None))
                continue
            exp_avg = torch.zeros_like(weights, dtype=self._exp_avg_dtype)
            tensors.append(StateTensors(stored, exp_avg, torch.zeros_like(weights, dtype=torch.float32)))
        return tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> AdamOptimizer:
        """Return an optimizer over deep copies of the parameters. The copies and their state are full, not sharded.

        Collective: every rank must call it.
        """
        full = copy_full_state(self, current_world())
        copied = self._of([copy.deepcopy(group, memo) for group in self.param_groups])
        memo[id(self)] = copied
        copied.defaults = copy.deepcopy(self.defaults, memo)
        copied.load_state_dict(full)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Refuse `pickle`, `torch.save` of the optimizer itself, and `copy.copy`.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, because its state is part of flat tensors, which several "
            "parameters share. Save optimizer.state_dict() and load it into a new optimizer, or call bmt.save_state. "
            "To copy the optimizer, call copy.deepcopy."
        )

    def _of(self, groups: list[dict[str, Any]]) -> AdamOptimizer:
        """Create an optimizer of the same class, with moments of the same dtype, for other parameter groups.

        groups: parameter groups that contain all other settings, such as lr.
        """
        if self._exp_avg_dtype == torch.uint8:
            return type(self)(groups, state_bits=8)
        return type(self)(groups, exp_avg_dtype=self._exp_avg_dtype)

    def _facts(self) -> dict[str, Any]:
        """Return {name: value} of the settings outside parameter groups, which must be equal on all ranks."""
        return {"exp_avg_dtype": self._exp_avg_dtype}

    def state_dict(self, gather: bool = False) -> dict:
        """Return the state in the form of torch's AdamW, with a float32 "master" for half-precision weights.

        There are three cases:

        * `gather=False`, in most programs: this rank's state. Not collective. Most tensors are the optimizer's own, so
          the next step changes them. But 8-bit moments, and the masters and second moments of bfloat16 weights on CUDA,
          are stored in another form, and are converted to new float32 tensors in host memory.
        * `gather=False`, in a program that uses an `accelerate.Accelerator`: the full state, in host memory on every
          rank. Collective: every rank must call it.
        * `gather=True`, in any program: the full state, copied to host memory, on rank 0. Other ranks get no state
          tensors. Collective: every rank must call it. To load this state, with any number of ranks, pass rank 0's
          result to `load_state_dict` on every rank.

        Args:
            gather: True to gather the full state on rank 0; False for the first or second case.

        Returns:
            {"state": {index of a parameter: {"step", "exp_avg", "exp_avg_sq" and, if any, "master"}}, "param_groups":
            as in torch}. Indices count the parameters of all groups, from 0. "step" is a scalar, and always a copy. The
            other tensors are (n,), where n is the number of the parameter's elements on this rank (all elements, if the
            parameter is not sharded). In a full state, the tensors of a sharded parameter have its full shape instead.
            With `gather=True` there is also "sliced", the names of the state tensors that were sharded. Entries that
            other code has added to the state of a parameter, as Lookahead wrappers do, are returned as well.
        """
        expect_flag("gather", gather)
        if gather:
            return save_state(self, current_world(), gather=True)
        self._finish()
        kept = self.state
        self.state = defaultdict(dict)
        for parameter, held in kept.items():
            state = dict(shown(parameter, held, parameter in self._loaded))
            # Copy the step count, because adjacent parameters share one tensor for it. torch's optimizers, which may
            # load the result, add 1 to the tensor of each parameter, so they would count each step several times.
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
            self.state[parameter] = state
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def stored_state(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Return this rank's state in the form in which the optimizer stores it. Not collective.

        `bmt.save_state` calls this to save a checkpoint without a second copy of the state. In your own code, use
        `state_dict`, whose form does not depend on the device. If weights were written since the last step, their
        float32 masters are first set to values that round to the new weights.

        Returns:
            {parameter: {name: tensor}} for the parameters that have a state. The tensors are the optimizer's own, which
            the next step changes; 8-bit moments are returned as new float32 tensors in host memory instead. "step" is a
            scalar. All others are (n,) for the n elements of the parameter on this rank: "exp_avg", "exp_avg_sq" and,
            for half-precision weights, "master", the float32 copy that the optimizer updates. bfloat16 weights on CUDA
            have "residual" instead, the 16-bit differences between masters and weights.
        """
        self._finish()
        if self._active:
            self._arrange(self._active)  # in case the memory of an unsharded parameter was replaced since the last step
        for state in self._states:
            if state.is_stale or state.run.buffer is None:
                state.master.follow_weight()
                state.version = state.run.weights._version
        return {parameter: without_codes(held) for parameter, held in self.state.items()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state of any AdamW optimizer, hf_bmtrain's or torch's.

        Moments and masters are loaded in float32, whereas torch's optimizers cast them to the dtype of the parameters.
        The state is first copied to host memory. The next `step` copies it into the optimizer's tensors on the device,
        so the device never has two copies of it. Entries that other code has added to the state, as Lookahead wrappers
        do, are loaded without conversion: full tensors are replaced by this rank's elements of them.

        Collective: every rank must call it. The ranks check that they load the same full state: in this call if it is
        the result of `state_dict(gather=True)`, otherwise in the next `step`.

        If this call raises ValueError, this optimizer has not changed. Other ranks may have loaded their states, so
        load a fitting state on every rank before the next `step`.

        Args:
            state_dict: this rank's state, from its own `state_dict()`; or, on every rank, the same full state, from
                `state_dict(gather=True)` or from torch's AdamW. Each rank takes its elements of a full state. If the
                parameter groups in `state_dict` lack a setting that torch's AdamW does not have ("hold_steps" or
                "decoupled"), this optimizer keeps its present value.

        Raises:
            TypeError: `state_dict` is not a dict.
            ValueError: `state_dict` lacks "state" or "param_groups", or does not fit the parameters.
            ValueError: the state was saved with `maximize` or `amsgrad`.
            ValueError: the state was saved by an optimizer that is not AdamW. (MuonOptimizer, a subclass, raises this
                if a group that Muon updates was saved as a group of AdamW, or the other way round.)
            RuntimeError: the ranks pass different results of `state_dict(gather=True)`.
        """
        check_state(state_dict)
        if "sliced" in state_dict:  # the state is a full one, from state_dict(gather=True)
            # `load_state` calls `load` with this rank's elements. Pass the method of AdamOptimizer: if this call comes
            # from the override of a subclass, `self.load_state_dict` would run that override a second time.
            load = functools.partial(AdamOptimizer.load_state_dict, self)
            return load_state(self, state_dict, current_world(), load)
        with load_hooks(self, state_dict) as complete:
            self._load(self._checked(complete), copied=True)

    def take_state_dict(self, state_dict: dict, load: Callable[[dict], None] | None = None) -> None:
        """Load this rank's state like `load_state_dict`, but without copying float32 tensors that are in host memory.

        `bmt.load_state` calls this with tensors that it has just read. The optimizer uses them until its next step, so
        the caller must not write to them. Every rank must call it, because the next `step` compares what the ranks have
        loaded.

        The weights may be loaded before or after this call, and take precedence over the loaded masters: if a master
        does not round to its weight, the next step first replaces the master by a value that does. (After
        `load_state_dict`, the masters take precedence.)

        Args:
            state_dict: {"state": {index of a parameter, counted through all groups: {name: value}}, "param_groups": as
                in torch}, and any entries that a subclass, a hook or a wrapper has added to the result of `state_dict`.
            load: the `load_state_dict` of a wrapper of this optimizer, which calls the optimizer's `load_state_dict`.
                None if there is no wrapper.
        """
        # Additional entries can be loaded only by the `load_state_dict` of a wrapper or subclass, or by a hook.
        if load or len(state_dict) > 2:
            (load or self.load_state_dict)(state_dict)
        else:
            with load_hooks(self, state_dict) as complete:
                self._load(self._checked(complete), copied=False)
        # In the next step, the loaded masters of parameters in `_loaded` would take precedence over the weights. Here
        # the weights must take precedence: they are loaded separately, or must not change.
        self._loaded.clear()

    def allocate_state(self, state_dict: dict) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Load only the step counts and parameter groups of a saved state, and allocate tensors for the rest of it.

        `bmt.load_state` calls this method and then reads the checkpoint into the returned tensors, so that loading
        needs no second copy of the state. The optimizer's earlier state is discarded. Every rank must call this method,
        because the next `step` compares what the ranks have loaded.

        Call `expect_state` first, to check that this optimizer can continue from the saved state. `allocate_state`
        cannot check this itself, because `state_dict` lacks the moments.

        Args:
            state_dict: {"state": {index of a parameter, counted through all groups: {"step": count, and entries of
                other code}}, "param_groups": as in torch}.

        Returns:
            {parameter: {name: tensor}} for the parameters that have a step count. The tensors are the optimizer's own.
            "step" and the entries of other code have been loaded. The caller fills the others in place. For a parameter
            with n elements on this rank, they are:

            * The moments: "exp_avg", (n,) in `exp_avg_dtype`, and "exp_avg_sq", (n,) float32. With `state_bits=8`,
              there are four uint8 tensors instead: "8bit exp_avg" and "8bit exp_avg_sq", both (n,), and
              "8bit exp_avg_exponents" and "8bit exp_avg_sq_exponents", both (⌈n/32⌉,).
            * For half-precision weights, "master", (n,) float32. For bfloat16 weights on CUDA, "residual" instead,
              (n,) int16: the differences between masters and weights.
        """
        self._load({**state_dict, "param_groups": self._completed(state_dict["param_groups"])}, copied=True)
        # `_arrange` sets unsharded weights to their loaded masters. Undo this, because loading a state must not change
        # the weights. If the caller loads weights too, it does so separately.
        weights = {p: p.detach().clone() for p in self._loaded if not isinstance(p, ShardBase)}
        self._arrange([[p for p in group["params"] if p in self._loaded] for group in self.param_groups])
        for parameter, values in weights.items():
            parameter.detach().copy_(values)
        for state in self._states:
            # -1 makes the next step compare masters and weights, because it is not known whether the caller writes to
            # the masters, the weights, both or neither.
            state.version = -1
        return dict(self.state)

    def _checked(self, state_dict: dict) -> dict:
        """Check that this optimizer can continue from `state_dict`, and return it with complete parameter groups.

        A saved group may lack "hold_steps" and "decoupled", which torch's AdamW does not have. These settings then
        get the values of this optimizer's group. Raises ValueError if the state was saved by another class of
        optimizer.
        """
        groups = state_dict["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        names = {p: {*state_dict["state"].get(key, {})} - {"step"} for key, p in zip(keys, mine)}
        return {**state_dict, "param_groups": self.expect_state(groups, names)}

    def _load(self, state_dict: dict, copied: bool) -> None:
        groups = state_dict["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        mine = [parameter for group in self.param_groups for parameter in group["params"]]
        _refuse_unsupported(groups)
        given = [(each, *item) for key, each in zip(keys, mine) for item in state_dict["state"].get(key, {}).items()]
        parts = []
        # If the groups differ in number or size from this optimizer's, `super().load_state_dict` below raises an error.
        if [len(group["params"]) for group in groups] == [len(group["params"]) for group in self.param_groups]:
            for parameter, name, value in given:  # before anything changes, because `own_part` raises for wrong shapes
                if not is_own(name):  # other code has added this entry, and only that code knows its form
                    own = own_part(parameter, name, value)
                    if isinstance(own, torch.Tensor):
                        own = own.detach().to(parameter.device, copy=copied)
                    parts.append((parameter, name, own))
                    continue
                if not isinstance(value, torch.Tensor):  # "step" may be a number
                    value = torch.tensor(value, dtype=torch.float32, device="cpu")
                dtype, own = value.dtype if name == "residual" else torch.float32, own_part(parameter, name, value)
                own = own.part if isinstance(own, ShardBase) else own
                parts.append((parameter, name, own.detach().to("cpu", dtype, copy=copied)))
        self._finish()
        full_state_of(self)  # register its hook, so that `state_dict` gathers this state even before the first step
        super().load_state_dict({"state": {}, "param_groups": groups})
        self.loaded_facts = full_facts(given)
        for parameter, name, part in parts:
            self.state[parameter][name] = part
        self._loaded = {parameter for parameter in mine if parameter in self.state}
        self._states, self._active, self._held, self._values = [], [], {}, []

    def expect_state(
        self, groups: list[dict[str, Any]], names: dict[torch.nn.Parameter, set[str]]
    ) -> list[dict[str, Any]]:
        """Check that this optimizer can continue from a saved state, before the state is loaded.

        Args:
            groups: the saved parameter groups.
            names: {parameter: the names of its saved state tensors, such as "exp_avg"}. Parameters with an empty set
                have no saved state, which is no error.

        Returns:
            Copies of the saved groups. If they lack "hold_steps" or "decoupled", which torch's AdamW does not have, the
            copies get the values of this optimizer's groups. If this optimizer has another number of groups, `groups`
            itself is returned; loading it then raises ValueError.

        Raises:
            ValueError: a saved group lacks "lr", "betas", "eps" or "weight_decay", or the saved state of a parameter
                lacks a moment. The state was then saved by another class of optimizer.
        """
        groups = self._completed(groups)
        for number, group in enumerate(self.param_groups):
            needed = self._moment_names(group)
            for saved in filter(None, map(names.get, group["params"])):
                lacking = [name for name in needed if name not in saved]
                if lacking and not has_codes(saved):
                    raise ValueError(
                        f"The state of a parameter in group {number} (counted from 0) lacks {' and '.join(lacking)}, "
                        f"and has only {', '.join(sorted(saved))}. It was saved by another class of optimizer. "
                        f"{START_ANEW}"
                    )
        return groups

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments in the state of each parameter of `group`."""
        return ("exp_avg", "exp_avg_sq")

    def _completed(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups of a state to load, as copies that have all settings of this optimizer's groups.

        The groups of torch's AdamW lack "hold_steps" and "decoupled". The copies get the values of this optimizer's
        groups. Raises ValueError if a group lacks other settings. If this optimizer has another number of groups,
        `groups` itself is returned; torch then raises ValueError.
        """
        if len(groups) != len(self.param_groups):
            return groups
        for number, group in enumerate(groups):
            lacking = [name for name in ("lr", "betas", "eps", "weight_decay") if name not in group]
            if lacking:
                raise ValueError(
                    f"Parameter group {number} (counted from 0) of the saved state lacks {' and '.join(lacking)}, so "
                    f"it was saved by another class of optimizer. {START_ANEW}"
                )
        names = ("hold_steps", "decoupled")
        return [{**{name: own[name] for name in names}, **group} for own, group in zip(self.param_groups, groups)]


def _refuse_unsupported(groups: Iterable[dict]) -> None:
    """Raise ValueError if a parameter group sets `maximize` or `amsgrad`, which this optimizer does not support."""
    for name in ("maximize", "amsgrad"):
        if any(group.get(name) for group in groups):
            raise ValueError(
                f"A parameter group has {name}=True, which AdamOptimizer does not support and would ignore. "
                f'Use torch.optim.AdamW, or set group["{name}"] = False first to train without this setting.'
            )


def _check_dtype(parameter: torch.nn.Parameter) -> None:
    """Raise ValueError unless `parameter` is float32, float16 or bfloat16."""
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"AdamOptimizer supports float32, float16 and bfloat16 parameters, got {parameter.dtype} of shape "
            f"{tuple(parameter.shape)}. Use torch.optim.AdamW for it."
        )


def _check_settings(group: dict) -> None:
    """Raise TypeError or ValueError if a setting of a parameter group is invalid."""
    numbers = {name: as_number(name, group[name]) for name in ("lr", "eps", "weight_decay", "hold_steps")}
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers in [0, 1), got {betas!r:.80}")
    betas = tuple(as_number("betas", beta) for beta in betas)
    if not all(0 <= value < math.inf for value in numbers.values()) or not all(0 <= beta < 1 for beta in betas):
        given = ", ".join(f"{name}={value}" for name, value in {**numbers, "betas": betas}.items())
        raise ValueError(
            "lr, eps, weight_decay and hold_steps must be finite and at least 0, and betas at least 0 and below 1, "
            f"got {given}"
        )
    expect_flag("decoupled", group["decoupled"])


def as_number(name: str, value: Any) -> float:
    """Return a setting of an optimizer, which may be a number or a tensor of one element, as a float.

    Called when the settings, or the argument `scale` of `step`, are checked. If `value` is a tensor on a GPU, the host
    waits for the device.

    Args:
        name: the name of the setting, such as "lr", for the error message.
        value: the value of the setting.

    Raises:
        TypeError: `value` is neither a number nor a tensor of one element, or is on the meta device, without a value.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    expect_number(name, value, "or a tensor of one element")
    return float(value)
