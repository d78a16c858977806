"""AdamW over the flat shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from ..ops.adam_step import Elements, Hyper, KernelSteps, TorchSteps, adam_steps, master_dtype
from ..sharding.buffer import ShardedBuffer
from .in_backward import UpdatesInBackward
from .parameter_state import adopt, shown
from .runs import Run, index_bases, neighbours
from .state import RunState, by_owner, new_state
from .update_stream import UpdateStream

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class AdamOptimizer(UpdatesInBackward):
    """AdamW: eps outside the square root, decoupled weight decay, bias-corrected (Loshchilov & Hutter, 2019).

        m ← β₁m + (1−β₁)g    v ← β₂v + (1−β₂)g²    w ← w − lr·wd·w − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)

    All state is float32: m, v and, for half-precision parameters, a master copy of w that is rounded to nearest
    even into them. Neighbouring slices of one parameter group are updated in one launch. Parameters without a
    gradient (`.grad is None`) are left as they are. Ordinary parameters are accepted beside slices.

    On CUDA the master of a bfloat16 weight is held as the 16 bits by which it differs from the weight; a 17th, for
    ties, is the sign of v, which has none. That restores every float32 master exactly (ops/residual.py), in 2 bytes
    less: 10 of state an element, 12 for float16 weights, 8 for float32, which are their own masters. Then
    `optimizer.state[p]` has "residual" in the place of "master": read masters and v through `state_dict()`, which shows
    them in float32, the same on every device and in AdamOffloadOptimizer. It makes them whole one parameter after
    another in host memory, so that the device needs no room for them.

    Half-precision weights that someone else writes between steps (a load, an average, a mask) take their masters along:
    a bfloat16 weight's stays as far from it as it was from its rounding, at most half a unit in the last place, and
    so rounds to it; a float16 weight's becomes the weight. Masters of weights that keep their value do not move.

    hold_steps: the first so many steps that a parameter takes update m, v and t, and leave w as it is: the moments
    settle before they move anything. t counts them, since m and v hold their gradients, so that the first step after
    them has the bias correction of a step after `hold_steps` others; BMTrain does the same. Skipped steps are not
    among them. A setting of the parameter group like lr: it is saved and loaded with the state, which holds t.

    exp_avg_dtype: torch.bfloat16 keeps m in 2 bytes, rounded stochastically by bits that depend on the element
    and the step alone, not on the number of ranks.

    overlap_forward: `step` returns while the device still updates, on a stream of its own, in the order of the
    buffers: the next forward begins when the first ones are done. A buffer waits for its own update when it is
    gathered (see PendingUpdate), hence forward, backward, `parameter.gather()` and `state_dict` need no care, and
    neither do loading, `.data` and the next `step`. Before anything else that reads or writes slices, or writes their
    gradients in place, after a `step` (an average over `model.parameters()`, say) call `wait()`; the same goes for
    `optimizer.state`, unless it is read through `state_dict()`.

    `with optimizer.update_in_backward():` updates already while a backward runs.

    `grad_scale` and `found_inf` (device scalars, set by OptimManager or torch.amp.GradScaler before `step`)
    divide the gradient and skip the update. Gradients are only read. No step waits for the device. lr and its
    companions may be tensors; on CUDA a step can be captured in a graph (after one eager step, without
    overlap_forward), where tensors on the device are read at each replay and numbers are sent by
    `send_hyper_parameters`.
    """

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None  # not there at rest: GradScaler multiplies by what it finds
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
        exp_avg_dtype: torch.dtype = torch.float32,
        overlap_forward: bool = False,
    ) -> None:
        if lr < 0 or min(eps, weight_decay, hold_steps) < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"AdamOptimizer needs lr, eps, weight_decay, hold_steps ≥ 0 and betas in [0, 1), got lr={lr}, "
                f"eps={eps}, weight_decay={weight_decay}, hold_steps={hold_steps}, betas={betas}"
            )
        if exp_avg_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"exp_avg_dtype must be torch.float32 or torch.bfloat16, not {exp_avg_dtype}")
        self._exp_avg_dtype = exp_avg_dtype
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "hold_steps": hold_steps}
        super().__init__(params, settings, overlap_forward)
        self._loaded: set[torch.nn.Parameter] = set()  # those whose state is a file's and in no run yet
        self._steps: KernelSteps | TorchSteps = TorchSteps([], torch.device("cpu"))
        self._stream: UpdateStream | None = None

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in _DTYPES:
                self.param_groups.pop()
                raise ValueError(
                    f"AdamOptimizer keeps float32 masters, which cannot stand for a {parameter.dtype} parameter of "
                    f"shape {tuple(parameter.shape)}: give it to torch.optim.AdamW"
                )

    @property
    def scale(self) -> float:
        """The current loss scale, 1 without one. Reading it waits for the device."""
        return 1.0 if self.loss_scale is None else float(self.loss_scale)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        early = self._early
        early.check_used_as_they_are(self._hyper(), getattr(self, "grad_scale", None))
        done = early.parameters
        active = [[p for p in group["params"] if p.grad is not None or p in done] for group in self.param_groups]
        rearranged = not _same(active, self._active)
        if rearranged:
            self._arrange(active)
        left = [number for number, state in enumerate(self._states) if state not in early]
        if left:
            self._step_runs(left, self._overlap_forward)
            if self._overlap_forward:
                self._announce(left)
        if rearranged and early:
            self._active = []  # cut so that these fit beside the others for once
        early.end()
        return loss

    def wait(self) -> None:
        """The current stream waits until the last step has written the weights; the host does not."""
        for state in self._states:
            if state.run.buffer is not None:
                state.run.buffer.update.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.wait()  # the gradients may still be read
        super().zero_grad(set_to_none)

    _finish = wait  # before state is read or moved

    def send_hyper_parameters(self) -> None:
        """Send settings of the groups that have changed to the device, before a captured step is replayed.

        `step` does it by itself.
        """
        self._steps.send(self._hyper())

    def _hyper(self) -> list[Hyper]:
        one = ("eps", "weight_decay", "hold_steps")
        return [(group["lr"], *group["betas"], *(group[name] for name in one)) for group in self.param_groups]

    def _step_runs(self, numbers: Sequence[int], beside: bool) -> None:
        """One step of these runs, whose gradients are there; on another stream if they may lag behind."""
        states = [self._states[number] for number in numbers]
        for state in states:
            if state.run.buffer is not None:
                state.run.buffer.update.wait()  # the last one may still read the numbers that are written now
            if state.stale:
                self._finish()
                state.heed_writes()
        self._steps.begin(self._hyper(), getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        self._steps.advance(numbers)
        (self._update_beside if beside else self._update)(numbers)
        # Also where this rank holds none of a run: all ranks must see that the weights changed, or only some meet.
        torch.autograd.graph.increment_version([state.run.weights for state in states])
        for state in states:
            state.version = state.run.weights._version

    def _update(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._update_elements(number, self._states[number].elements())

    def _update_beside(self, numbers: Sequence[int]) -> None:
        if self._stream is None:
            self._stream = UpdateStream(self._states[numbers[0]].run.weights.device)
        self._stream.carry(by_owner(self._states, numbers), self._update_elements)

    def _announce(self, numbers: Sequence[int]) -> None:
        """Tell the gather lane what is under way, on all ranks alike."""
        for owner in by_owner(self._states, numbers):
            if isinstance(owner, ShardedBuffer) and owner.update.ticket is not None:
                owner.update.announce(owner.shard)

    def _update_elements(self, run: int, elements: Elements) -> None:
        self._steps.update(run, elements)

    # -- runs and state -----------------------------------------------------------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> None:
        """Cut the parameters that have gradients into runs. Runs that stay keep their state where it is."""
        self._finish()
        groups = [[Run.over(members) for members in neighbours(group, self._kind)] for group in active]
        runs = [run for group in groups for run in group]
        device = self._steps_device(runs)
        steps = adam_steps([len(group) for group in groups], device, self._exp_avg_dtype)
        earlier = {tuple(map(id, state.run.parameters)): state for state in self._states}
        kept = [earlier.get(tuple(map(id, run.parameters))) for run in runs]
        fresh = iter(self._allocate([run for run, state in zip(runs, kept) if state is None]))
        bases = index_bases(self.param_groups)
        self._states = []
        for number, (run, state) in enumerate(zip(runs, kept)):
            if state is None:
                offset = 0 if run.buffer is None else run.buffer.rank * run.buffer.layout.shard_numel + run.start
                state = RunState(run, *next(fresh), steps.counts[number], bases[run.owner] + offset)
                for parameter in run.parameters:
                    views, earlier = state.views(parameter), self.state.get(parameter, {})
                    adopt(parameter, views, earlier, parameter in self._loaded)
                    self._loaded.discard(parameter)
                    self.state[parameter] = views
            else:
                state.step = steps.counts[number].copy_(state.step)
                for parameter in run.parameters:
                    self.state[parameter]["step"] = state.step
            self._states.append(state)
        self._steps, self._active = steps, active

    def _kind(self, parameter: torch.nn.Parameter) -> tuple[float, bool]:
        """What is alike in a run: the steps taken, and whether this one is among them."""
        return self._steps_of(parameter), parameter in self._early.parameters

    def _steps_of(self, parameter: torch.nn.Parameter) -> float:
        state = self.state.get(parameter)
        return float(state["step"]) if state else 0.0

    def _steps_device(self, runs: Sequence[Run]) -> torch.device:
        """Where the arithmetic is done: where the parameters are."""
        devices = list(dict.fromkeys(run.weights.device for run in runs))
        if len(devices) > 1:
            raise ValueError(f"AdamOptimizer updates the parameters of one device, got {devices}: use one for each")
        return devices[0] if devices else torch.device("cpu")

    def _allocate(self, runs: Sequence[Run]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(master, exp_avg, exp_avg_sq) of each run, before its first step."""
        masters = [master_dtype(run.weights.dtype, run.weights.device) for run in runs]
        return [new_state(run, master, self._exp_avg_dtype) for run, master in zip(runs, masters)]

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # the state of another AdamW has none
            group.setdefault("hold_steps", self.defaults["hold_steps"])

    def state_dict(self) -> dict:
        """The state of torch's AdamW, and float32 "master" for half-precision weights. See the class for where it lies.

        What is on the device or in the optimizer's host memory is the optimizer's own, which the next step changes.
        """
        self._finish()
        kept = self.state
        self.state = defaultdict(dict, {p: shown(p, held, p in self._loaded) for p, held in kept.items()})
        try:
            return super().state_dict()
        finally:
            self.state = kept

    def load_state_dict(self, state_dict: dict) -> None:
        """State keeps its own dtype: torch would cast the float32 masters and moments to the parameters'.

        It is copied into host memory, whence the next step takes it, so that no device holds it twice.
        """
        self._finish()
        groups = state_dict["param_groups"]
        ids = [key for group in groups for key in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._loaded.clear()
        for key, parameter in zip(ids, mine):
            if key in state_dict["state"]:
                loaded = state_dict["state"][key]
                self._loaded.add(parameter)
                self.state[parameter] = {
                    name: value.detach().to("cpu", torch.float32, copy=True) for name, value in loaded.items()
                }
        self._states, self._active = [], []
        self._early.end()


def _same(a: list[list], b: list[list]) -> bool:
    """Whether two lists of lists hold the same objects."""
    return [[id(x) for x in inner] for inner in a] == [[id(x) for x in inner] for inner in b]
