"""AdamW over the flat shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..sharding import DistributedParameter


@dataclass
class _Run:
    """Neighbouring slices of one parameter group in one shard, updated at once; the padding between stays zero.

    parameters: in the order of the buffer. weights: their range of the shard (n,). master, exp_avg, exp_avg_sq:
    float32 (n,); master is `weights` itself where those are float32. step: float32 (), counted on the device.
    """

    parameters: list[torch.nn.Parameter]
    weights: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    start: int
    version: int = -1

    def heed_writes(self) -> None:
        """Where someone else has written half-precision weights (a load, an average), their master follows."""
        if self.master is self.weights or self.version in (-1, self.weights._version):
            return
        unchanged = self.weights == self.master.to(self.weights.dtype)
        self.master.copy_(torch.where(unchanged, self.master, self.weights.float()))

    def gradient(self) -> torch.Tensor:
        """float32 (n,): the running sum of an accumulation where there is one, otherwise `.grad`."""
        first = self.parameters[0]
        if not isinstance(first, DistributedParameter):
            assert first.grad is not None
            return first.grad.reshape(-1).float()
        start, stop = self.start, self.start + self.weights.numel()
        if not first.buffer.gradient.intact:
            return self._assembled(stop - start)
        wide = first.buffer.gradient.wide(start, stop)
        if wide is not None:
            return wide
        assert first.buffer.gradient.shard is not None
        return first.buffer.gradient.shard[start:stop].float()

    def _assembled(self, length: int) -> torch.Tensor:
        """From `.grad`s that someone replaced by tensors of their own."""
        flat = torch.zeros(length, dtype=torch.float32, device=self.weights.device)
        for parameter in self.parameters:
            assert isinstance(parameter, DistributedParameter) and parameter.grad is not None
            place = parameter.buffer.piece(parameter.index)
            flat[place.shard_start - self.start : place.shard_stop - self.start] = parameter.grad
        return flat


class AdamOptimizer(torch.optim.Optimizer):
    """AdamW: eps outside the square root, decoupled weight decay, bias-corrected (Loshchilov & Hutter, 2019).

        m ← β₁m + (1−β₁)g    v ← β₂v + (1−β₂)g²    w ← w − lr·wd·w − lr · (m/(1−β₁ᵗ)) / (√(v/(1−β₂ᵗ)) + eps)

    All state is float32: m, v and, for half-precision parameters, a master copy of w that is rounded to nearest
    even into them. Neighbouring slices of one parameter group are updated in one launch. Parameters without a
    gradient (`.grad is None`) are left as they are. Ordinary parameters are accepted beside slices.

    `grad_scale` and `found_inf` (device scalars, set by OptimManager or torch.amp.GradScaler before `step`)
    divide the gradient and skip the update without a host synchronisation.
    """

    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"AdamOptimizer needs lr, eps, weight_decay ≥ 0 and betas in [0, 1), got lr={lr}, eps={eps}, "
                f"weight_decay={weight_decay}, betas={betas}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.loss_scale: torch.Tensor | None = None
        self._runs: dict[int, tuple[list[torch.nn.Parameter], list[_Run]]] = {}

    @property
    def scale(self) -> float:
        """The current loss scale, 1 without one. Reading it waits for the device."""
        return 1.0 if self.loss_scale is None else float(self.loss_scale)

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. Gradients may be left unscaled in place (as in torch)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [
            (run, group)
            for number, group in enumerate(self.param_groups)
            for run in self._runs_of(number, [p for p in group["params"] if p.grad is not None])
        ]
        for run, _ in updates:
            run.heed_writes()
        for run, group in updates:
            self._update(run, group)
        for run, _ in updates:
            run.version = run.weights._version
        return loss

    def _update(self, run: _Run, group: dict) -> None:
        if run.weights.numel() == 0:
            return
        beta1, beta2 = group["betas"]
        run.step += 1
        torch._fused_adamw_(
            [run.master], [run.gradient()], [run.exp_avg], [run.exp_avg_sq], [], [run.step],
            lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"],
            amsgrad=False, maximize=False, grad_scale=self.grad_scale, found_inf=self.found_inf,
        )  # fmt: skip
        if self.found_inf is not None:
            run.step -= self.found_inf.reshape(())
        if run.master is not run.weights:
            run.weights.copy_(run.master)

    # -- runs and state -----------------------------------------------------------------------------------------

    def _runs_of(self, number: int, active: list[torch.nn.Parameter]) -> list[_Run]:
        """The runs of group `number`, made anew when other parameters than in the last step have gradients."""
        known, runs = self._runs.get(number, ([], []))
        if len(known) != len(active) or any(a is not b for a, b in zip(known, active)):
            runs = [self._make_run(parameters) for parameters in _neighbours(active, self._steps_of)]
            self._runs[number] = active, runs
        return runs

    def _steps_of(self, parameter: torch.nn.Parameter) -> float:
        state = self.state.get(parameter)
        return float(state["step"]) if state else 0.0

    def _make_run(self, parameters: list[torch.nn.Parameter]) -> _Run:
        weights, start = _range(parameters)
        like = {"dtype": torch.float32, "device": weights.device}
        run = _Run(
            parameters,
            weights,
            weights if weights.dtype == torch.float32 else weights.float(),
            torch.zeros(weights.numel(), **like),
            torch.zeros(weights.numel(), **like),
            torch.zeros((), **like),
            start,
        )
        for parameter in parameters:
            begin = _begin(parameter) - start
            views = {
                "exp_avg": run.exp_avg[begin : begin + parameter.numel()],
                "exp_avg_sq": run.exp_avg_sq[begin : begin + parameter.numel()],
                "step": run.step,
            }
            if run.master is not run.weights:
                views["master"] = run.master[begin : begin + parameter.numel()]
            self._adopt_state(parameter, views)
        return run

    def _adopt_state(self, parameter: torch.nn.Parameter, views: dict[str, torch.Tensor]) -> None:
        """State that was loaded, or belongs to an earlier run, moves into the run's flat tensors."""
        earlier = self.state.get(parameter, {})
        for name, view in views.items():
            if name in earlier:
                view.copy_(earlier[name].reshape(view.shape))
        self.state[parameter] = views

    def load_state_dict(self, state_dict: dict) -> None:
        """State keeps its own dtype: torch would cast the float32 masters and moments to the parameters'."""
        groups = state_dict["param_groups"]
        ids = [key for group in groups for key in group["params"]]
        mine = [p for group in self.param_groups for p in group["params"]]
        super().load_state_dict({"state": {}, "param_groups": groups})
        for key, parameter in zip(ids, mine):
            if key in state_dict["state"]:
                loaded = state_dict["state"][key]
                self.state[parameter] = {
                    name: value.detach().to(parameter.device, torch.float32, copy=True)
                    for name, value in loaded.items()
                }
        self._runs.clear()


def _begin(parameter: torch.nn.Parameter) -> int:
    return parameter.buffer.piece(parameter.index).shard_start if isinstance(parameter, DistributedParameter) else 0


def _range(parameters: list[torch.nn.Parameter]) -> tuple[torch.Tensor, int]:
    """The 1-D range of storage that `parameters` cover, and where it starts in their shard."""
    first, last = parameters[0], parameters[-1]
    if isinstance(first, DistributedParameter) and isinstance(last, DistributedParameter):
        start = _begin(first)
        return first.buffer.shard[start : _begin(last) + last.numel()], start
    if not first.is_contiguous():
        raise ValueError(f"AdamOptimizer needs contiguous parameters, got shape {tuple(first.shape)}")
    return first.detach().view(-1), 0


def _neighbours(parameters: list[torch.nn.Parameter], steps_of: Callable) -> list[list[torch.nn.Parameter]]:
    """`parameters` in maximal lists that follow one another in one buffer and have made as many steps."""
    runs: list[list[torch.nn.Parameter]] = [[p] for p in parameters if not isinstance(p, DistributedParameter)]
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    buffers = {buffer: number for number, buffer in enumerate(dict.fromkeys(p.buffer for p in slices))}
    slices.sort(key=lambda piece: (buffers[piece.buffer], piece.index))
    for earlier, later in zip([None, *slices], slices):
        follows = (
            earlier is not None
            and later.buffer is earlier.buffer
            and later.index == earlier.index + 1
            and steps_of(later) == steps_of(earlier)
        )
        if follows:
            runs[-1].append(later)
        else:
            runs.append([later])
    return runs
