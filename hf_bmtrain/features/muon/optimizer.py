"""MuonOptimizer: Muon for the matrices of hidden layers, AdamW for all other parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from ...engine.base.arguments import expect_flag, expect_kind, expect_number, expect_tensor
from ...engine.optim.adam import START_ANEW, AdamOptimizer, as_number
from ...engine.optim.runs import Run, StateTensors
from ...engine.runtime.world import current_world
from ...engine.sharding.parameter import DistributedParameter
from .exchange import Round
from .matrices import Matrix, assign, divide, is_matrix, matrices_of, refuse_parts, rounds_of
from .orthogonalize import ADJUST_LR, orthogonalize, rate_factor


class MuonOptimizer(AdamOptimizer):
    """Muon for the matrices of hidden layers (Jordan, 2024; Liu et al., 2025), and AdamW for all other parameters.

        m ← μm + (1−μ)g    u ← μm + (1−μ)g with Nesterov, otherwise m    w ← w − lr·wd·w − lr · f · orthogonalized(u)

    Here w is a matrix, g its gradient and m its momentum. The arguments `momentum`, `weight_decay` and `adjust_lr_fn`
    below explain μ, wd and f.

    Muon updates the 2-D and 3-D parameters inside blocks (transformer layers). A 2-D parameter is updated as by
    torch.optim.Muon. A 3-D parameter (count, rows, columns), such as the experts of a layer, is a stack of matrices,
    each of which is orthogonalized by itself. AdamW updates everything else: embeddings, the head, norms, biases,
    convolutions, parameters with one row or column, and parameters that are also used outside the blocks. `step()` is
    collective: every rank must call it.

    Each sharded matrix is orthogonalized on one rank, its owner. The owners are chosen so that all ranks have about the
    same work. In a step, every rank updates the momentum of its own elements, computes u for them, and sends these
    elements of u to the owner, as bfloat16. The owner orthogonalizes u in bfloat16, as torch.optim.Muon does, and sends
    each rank its elements of the result, also as bfloat16. Each rank then updates its own elements of w. This
    communication overlaps with computation. If a parameter is not sharded, every rank orthogonalizes it.

    The momentum is float32 and sharded like the weights, so it takes 4 bytes for each of this rank's elements. For
    half-precision weights, there are also float32 master weights, which take another 4 bytes. The state of the
    parameters that AdamW updates is that of AdamOptimizer. A saved state can be loaded on a different number of ranks.
    OptimManager and torch.amp.GradScaler work as with AdamOptimizer.

    Args:
        params: the sharded model, whose parameters are then divided as described above; or a list of parameter groups.
            A group is a dict with "params", "muon" (True if Muon updates these parameters, False if AdamW does), and
            the settings that differ from the arguments below. `add_param_group` lists the settings of a group.
        lr: the learning rate of matrices: a number, or a tensor of one element. A tensor on a GPU makes the host wait
            in each step.
        weight_decay: wd, the weight decay of matrices.
        momentum: μ, the factor by which the momentum is multiplied in each step.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: the three coefficients of the Newton–Schulz iteration, which orthogonalizes matrices.
        eps: the lower bound of the norm by which an update is divided before the iteration.
        ns_steps: the number of iterations, from 0 to 99.
        adjust_lr_fn: f, the factor of the learning rate for a matrix with A rows and B columns. "original", or None:
            √max(1, A/B). "match_rms_adamw": 0.2·√max(A, B), so that AdamW's learning rate and weight decay can be
            used. "spectral_unclamped": √(A/B).
        adam_lr: the learning rate of the other parameters; None uses `lr`. A scheduler scales both.
        betas: AdamW's β₁ and β₂.
        adam_eps: AdamW's eps.
        adam_weight_decay: the weight decay of the other parameters; None uses `weight_decay`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: in these cases:

            * A setting is out of range.
            * A parameter's dtype is not supported.
            * `params` is a model without a matrix in a block, or a model with a parameter that `tp_size` has split.
            * `params` is an empty list, or one of its groups lacks "muon".
            * A group with "muon": True has a parameter that is not a matrix or a stack of matrices, or that `tp_size`
              has split.

    Example::

        model = bmt.auto_wrap(model)
        optimizer = bmt.optim.MuonOptimizer(model, lr=3e-4, adjust_lr_fn="match_rms_adamw")
        trainer = Trainer(model, args, train_dataset=rows, optimizers=(optimizer, None))
    """

    adamw_state = False

    def __init__(
        self,
        params: torch.nn.Module | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adam_lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
    ) -> None:
        expect_kind("params", params, (torch.nn.Module, Iterable), "a sharded model, or a list of parameter groups")
        self._muon_defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        _check_settings(self._muon_defaults)
        given = {"adam_lr": adam_lr, "adam_eps": adam_eps, "adam_weight_decay": adam_weight_decay}
        for name, value in given.items():
            if value is not None or name == "adam_eps":
                _expect_amount(name, value)
        self._rounds: list[Round] = []
        self._own: list[Matrix] = []
        self._group_of: dict[torch.nn.Parameter, dict[str, Any]] = {}
        super().__init__(
            _groups_of(params) if isinstance(params, torch.nn.Module) else _checked(params),
            lr if adam_lr is None else adam_lr,
            betas,
            adam_eps,
            weight_decay if adam_weight_decay is None else adam_weight_decay,
        )

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters that the optimizer updates from the next step on, with their own settings.

        Args:
            param_group: a dict. "params" (parameters) and "muon" (True if Muon updates them, False if AdamW does) are
                required. The other keys are settings, which default to the values that MuonOptimizer was created with:

                * With "muon": True, "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"
                  and "adjust_lr_fn", as the arguments of MuonOptimizer.
                * With "muon": False, "lr", "betas", "eps" and "weight_decay", which default to MuonOptimizer's
                  arguments `adam_lr`, `betas`, `adam_eps` and `adam_weight_decay`; and AdamOptimizer's "hold_steps" and
                  "decoupled", which default to 0 and True.

        Raises:
            TypeError: `param_group` is not a dict, or a setting has the wrong type.
            ValueError: in these cases:

                * "muon" is missing, or is not True or False.
                * A setting is out of range, or the group sets `maximize` or `amsgrad`.
                * A parameter is not float32, float16 or bfloat16, or is already in another group.
                * With "muon": False, "params" is missing.
                * With "muon": True, a parameter is not a matrix or a stack of matrices, or was split by tensor
                  parallelism (`tp_size`).
                * With "muon": True, "hold_steps" is above 0, or "decoupled" is False.

        Example::

            optimizer.add_param_group({"params": norms, "muon": False, "lr": 1e-4, "weight_decay": 0.0})
        """
        expect_kind("param_group", param_group, dict, 'a dict with "params" and "muon"')
        if not isinstance(param_group.get("muon"), bool):
            raise ValueError(
                'param_group needs the key "muon", with the value True if Muon updates its parameters, or False if '
                "AdamW does. Or pass the model itself: MuonOptimizer(model) divides its parameters automatically."
            )
        if param_group["muon"]:
            param_group = {**self._muon_defaults, **param_group}
            _check_settings(param_group)
            parameters = param_group.get("params", ())
            param_group["params"] = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            # As in torch's optimizers, an entry of "params" may be a pair (name, parameter).
            parameters = [each[1] if isinstance(each, tuple) else each for each in param_group["params"]]
            for parameter in parameters:
                expect_tensor("An entry of a parameter group", parameter)
            unfit = [tuple(p.shape) for p in parameters if not is_matrix(p.shape)]
            if unfit:
                raise ValueError(
                    'A parameter group with "muon": True may contain only matrices and stacks of matrices with at '
                    f"least two rows and two columns, but this group has {len(unfit)} other parameters, such as one of "
                    f'shape {unfit[0]}. Put them into a group with "muon": False.'
                )
            refuse_parts(parameters)
        super().add_param_group(param_group)

    def _of(self, groups: list[dict[str, Any]]) -> MuonOptimizer:
        copied = type(self)(groups)
        copied._muon_defaults = copy.deepcopy(self._muon_defaults)
        return copied

    def _moment_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["muon"] else super()._moment_names(group)

    def _completed(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        groups = super()._completed(groups)
        for number, (own, group) in enumerate(zip(self.param_groups, groups)):
            saved = group.setdefault("muon", False)  # a state that an AdamW optimizer has saved lacks this key
            if saved != own["muon"]:
                names = {True: "Muon", False: "AdamW"}
                raise ValueError(
                    f"Parameter group {number} (counted from 0) is updated by {names[own['muon']]}, but was updated by "
                    f"{names[saved]} in the saved state. Create the optimizer with the same parameter groups. "
                    f"{START_ANEW}"
                )
        return groups

    # -- runs (adjacent parameters that are updated together) and their state ------------------------------------

    def _arrange(self, active: list[list[torch.nn.Parameter]]) -> bool:
        # Rebuild this in every step, because the caller may have replaced the dict of a group to change its settings.
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        if not super()._arrange(active):
            return False
        communicator = current_world().shard_group
        matrices = [
            matrix
            for number, state in enumerate(self._states)
            for parameter in state.run.parameters
            if self._group_of[parameter]["muon"]
            for matrix in matrices_of(number, parameter, communicator.size)
        ]
        shared = [m for m in matrices if isinstance(m.parameter, DistributedParameter) and communicator.size > 1]
        assign(shared, communicator.size)
        self._rounds = [Round(each, communicator) for each in rounds_of(shared, communicator.size)]
        exchanged = set(shared)
        self._own = [matrix for matrix in matrices if matrix not in exchanged]
        return True

    def _allocate(self, runs: Sequence[Run]) -> list[StateTensors]:
        """Allocate the optimizer's state for each of `runs`, which are contiguous ranges of parameters.

        Runs of matrices get a momentum and, for half-precision weights, float32 masters. Other runs get AdamW's state.
        """
        muon = {p for group in self.param_groups if group["muon"] for p in group["params"]}
        others = iter(super()._allocate([run for run in runs if run.parameters[0] not in muon]))
        return [_momentum(run) if run.parameters[0] in muon else next(others) for run in runs]

    # -- a step -------------------------------------------------------------------------------------------------

    def _update(self, numbers: Sequence[int]) -> None:
        """Update all parameters that have gradients. Collective: every rank must call it.

        Matrices that are sharded over several ranks are updated in rounds: the elements of all matrices of a round are
        exchanged together. While the matrices of one round are orthogonalized, those of the next round are sent to
        their owners (the ranks that orthogonalize them), and the results of the previous round are sent back.

        numbers: the indices of all runs (contiguous ranges of parameters). AdamW updates the runs without matrices.
        """
        for first in self._rounds[:1]:
            self._send(first)
        super()._update([n for n in numbers if not self._group_of[self._states[n].run.parameters[0]]["muon"]])
        for matrix in self._own:
            result = self._orthogonalize(matrix, self._momentum_step(matrix).view(matrix.shape))
            self._apply(matrix, result.reshape(-1))
        returning: Round | None = None
        for current, following in pairwise([*self._rounds, None]):
            if following is not None:
                self._send(following)
            assert current is not None
            current.orthogonalize(self._orthogonalize)
            if returning is not None:
                self._receive(returning)
            returning = current
        if returning is not None:
            self._receive(returning)

    def _send(self, current: Round) -> None:
        current.send([self._momentum_step(matrix) for matrix in current.matrices])

    def _receive(self, current: Round) -> None:
        for matrix, result in zip(current.matrices, current.receive()):
            self._apply(matrix, result)

    def _momentum_step(self, matrix: Matrix) -> torch.Tensor:
        """Update the momentum of this rank's elements of a matrix. Return their update u, 1-D bfloat16.

        u is the momentum or, with Nesterov, a weighted mean of momentum and gradient. It is orthogonalized later, on
        the owner of the matrix, which then has u for all elements of the matrix.
        """
        state, part = self._states[matrix.run], self._part(matrix)
        assert isinstance(state.exp_avg, torch.Tensor)
        group, momentum = self._group_of[matrix.parameter], state.exp_avg[part]
        gradient = state.run.gradient()[part].float()
        divisor, skip = getattr(self, "grad_scale", None), self._skip
        if divisor is not None:
            gradient = gradient / divisor
        if skip is not None:
            gradient = torch.where(skip, momentum, gradient)  # if the step is skipped, the momentum does not change
        momentum.lerp_(gradient, 1 - group["momentum"])
        return (gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum).bfloat16()

    def _orthogonalize(self, matrix: Matrix, update: torch.Tensor) -> torch.Tensor:
        group = self._group_of[matrix.parameter]
        return orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def _apply(self, matrix: Matrix, result: torch.Tensor) -> None:
        """Apply the orthogonalized update, and the weight decay, to this rank's elements of a matrix of weights.

        result: the orthogonalized update of these elements, bfloat16. May be overwritten.
        """
        state, part, group = self._states[matrix.run], self._part(matrix), self._group_of[matrix.parameter]
        weight, stored, skip = state.run.weights[part], state.master.stored, self._skip
        lr = float(group["lr"])
        decay: float | torch.Tensor = 1 - lr * group["weight_decay"]
        if skip is not None:
            one = torch.ones((), dtype=torch.float32, device=weight.device)
            decay, result = torch.where(skip, one, decay), result.masked_fill_(skip, 0)
        master = weight if stored is None else stored[part]
        master.mul_(decay).add_(result, alpha=-lr * rate_factor(group["adjust_lr_fn"], matrix.shape))
        if stored is not None:
            weight.copy_(master)

    @property
    def _skip(self) -> torch.Tensor | None:
        """Whether to skip this step because a gradient is inf or nan, as a boolean scalar tensor on the device.

        It is None if gradients are not checked, that is, if neither OptimManager nor GradScaler has set `found_inf`.
        """
        found_inf = getattr(self, "found_inf", None)
        return None if found_inf is None else found_inf.reshape(()) != 0

    def _part(self, matrix: Matrix) -> slice:
        """Return the slice of this rank's elements of a matrix in the flat tensors of the matrix's run.

        A run is a contiguous range of parameters that are updated together. Its flat tensors are, for example, the
        weights and the momentum.
        """
        run = self._states[matrix.run].run
        rank = 0 if run.buffer is None else run.buffer.rank
        start, stop = matrix.local(rank)
        begin = run.begin(matrix.parameter)
        return slice(begin + start, begin + stop)


def _groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return a model's parameter groups: one for the matrices of hidden layers, one for all other parameters."""
    matrices, others = divide(model)
    if not matrices:
        raise ValueError(
            f"params: none of the {len(others)} parameters of {type(model).__name__} is a matrix in a block (a "
            "transformer layer that auto_wrap has sharded). Call auto_wrap first, or pass parameter groups with "
            '"muon": True or False.'
        )
    groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
    return groups if others else groups[:1]


def _checked(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the parameter groups as a list. Raise TypeError if one of them is not a dict."""
    groups = list(groups)
    for group in groups:
        expect_kind("params", group, dict, 'a sharded model, or a list of dicts with "params" and "muon"')
    return groups


def _momentum(run: Run) -> StateTensors:
    """Allocate the optimizer state of `run`, a contiguous range of parameters that Muon updates.

    The state is the momentum, and float32 masters of 16-bit weights.
    """
    momentum = torch.zeros_like(run.weights, dtype=torch.float32)
    return StateTensors(None if run.weights.dtype == torch.float32 else torch.empty_like(momentum), momentum, None)


def _expect_amount(name: str, value: Any) -> None:
    """Raise TypeError or ValueError unless `value` is a finite number of at least 0, or a tensor with one such number.

    name: the name of the setting, for the message.
    """
    number = as_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be finite and at least 0, got {number}")


def _check_settings(group: dict[str, Any]) -> None:
    """Raise TypeError or ValueError if a setting of Muon has the wrong type or is out of range.

    group: a parameter group with all settings of Muon, by the names of MuonOptimizer's arguments.
    """
    for name in ("lr", "weight_decay", "momentum", "eps"):
        _expect_amount(name, group[name])
    expect_flag("nesterov", group["nesterov"])
    coefficients = group["ns_coefficients"]
    if not isinstance(coefficients, (tuple, list)) or len(coefficients) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, got {coefficients!r:.80}")
    for number in coefficients:
        expect_number("ns_coefficients", number, "three finite numbers", math.isfinite)
    wanted = "at least 0 and below 100"
    expect_number("ns_steps", group["ns_steps"], wanted, lambda steps: 0 <= steps < 100, integer=True)
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in ADJUST_LR:
        raise ValueError(f"adjust_lr_fn must be None or one of {', '.join(ADJUST_LR)}, got {group['adjust_lr_fn']!r}")
    if group.get("hold_steps") or not group.get("decoupled", True):
        raise ValueError(
            'A parameter group with "muon": True cannot have hold_steps or decoupled=False, which Muon does not use. '
            'Leave them out of this group, or set "muon": False for the update of AdamOptimizer, which has both.'
        )
