"""Group adjacent parameters into a Run, which one kernel launch updates, and keep the AdamW state of the Run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..base.torch_internals import WithoutTorchFunction
from ..ops.eight_bits import Moments
from ..ops.residual import Master, join
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter


@dataclass(eq=False)
class Run:
    """Parameters that one kernel launch updates: sharded ones that are adjacent in memory, or one unsharded parameter.

    Attributes:
        parameters: the parameters, in the order of their flat buffer.
        weights: (n,) a view of this rank's elements of the parameters, and of the padding between them, which is zero.
        buffer: the flat buffer that contains the parameters; None for an unsharded parameter.
        start: the index of the first element of `weights` in this rank's shard of the flat buffer; 0 for an unsharded
            parameter.
    """

    parameters: list[torch.nn.Parameter]
    weights: torch.Tensor
    buffer: ShardedBuffer | None
    start: int

    @classmethod
    def over(cls, parameters: list[torch.nn.Parameter]) -> Run:
        """Create a Run of these parameters, which one kernel launch updates. Its `weights` is a view of their memory.

        Raises ValueError for an unsharded parameter that is not contiguous.

        parameters: sharded parameters that are adjacent in one flat buffer, in the order of the buffer; or one
            unsharded parameter.
        """
        first, last = parameters[0], parameters[-1]
        if isinstance(first, DistributedParameter) and isinstance(last, DistributedParameter):
            start = first.buffer.local_ranges[first.index].shard_start
            stop = first.buffer.local_ranges[last.index].shard_stop
            return cls(parameters, first.buffer.shard[start:stop], first.buffer, start)
        if not first.is_contiguous():
            raise ValueError(
                f"AdamOptimizer needs contiguous parameters, but one of shape {tuple(first.shape)} is not contiguous. "
                "Create the parameter from tensor.contiguous()."
            )
        return cls(parameters, first.detach().view(-1), None, 0)

    @property
    def owner(self) -> ShardedBuffer | torch.nn.Parameter:
        """The flat buffer that contains the run's parameters; or the run's only parameter, if it is unsharded.

        Use the owner as the key of a dict that has one entry for all runs of a flat buffer, such as the result of
        `index_bases`.
        """
        return self.parameters[0] if self.buffer is None else self.buffer

    @property
    def is_replaced(self) -> bool:
        """True if the run's parameter is unsharded and its memory was replaced, by `.data = ...` or `module.half()`.

        `weights` is then a view of the old memory, and updating it would not change the parameter. So AdamOptimizer
        creates a new Run for the parameter.
        """
        own, weights = self.parameters[0], self.weights
        if self.buffer is not None:
            return False
        return own.data_ptr() != weights.data_ptr() or own.dtype != weights.dtype or not own.is_contiguous()

    def begin(self, parameter: torch.nn.Parameter) -> int:
        """Return the index in `self.weights` at which this rank's elements of `parameter` begin.

        `weights` is the flat tensor of all parameters that are updated together in this Run.
        """
        if not isinstance(parameter, DistributedParameter):
            return 0
        return parameter.buffer.local_ranges[parameter.index].shard_start - self.start

    def flat_gradient(self) -> torch.Tensor | None:
        """Return the `.grad` of this run's parameters as one tensor (n,) in the order of `weights`, or None.

        The result is a view of the gradients, except that a non-contiguous gradient of an unsharded parameter is
        copied. Returns None if the user has replaced a `.grad` in this run's flat buffer by another tensor, because the
        gradients are then not adjacent in memory.

        Used to compute gradient norms. Optimizers use `gradient`, which always returns a tensor.
        """
        if self.buffer is None:
            gradient = self.parameters[0].grad
            assert gradient is not None
            return gradient.reshape(-1)
        if not self.buffer.gradient.intact:
            return None
        assert self.buffer.gradient.shard is not None
        return self.buffer.gradient.shard[self.start : self.start + self.weights.numel()]

    def gradient(self) -> torch.Tensor:
        """Return the gradient of this run's parameters as one tensor (n,), from which an optimizer computes the update.

        The caller must not write to the result. Usually, the result is that of `flat_gradient`, with two exceptions:

        * The gradients of several backwards were accumulated in float32, and each half-precision `.grad` is this sum,
          rounded. The result is then a view of the more precise float32 sum. (If code has written to a `.grad` since,
          the sum is out of date and is not used.)
        * The user has replaced a `.grad` in this run's flat buffer by another tensor. The result is then a new float32
          tensor with the values of each `.grad` of this run.
        """
        flat = self.flat_gradient()
        if flat is not None:
            stop = self.start + self.weights.numel()
            wide = None if self.buffer is None else self.buffer.gradient.wide(self.start, stop)
            return flat if wide is None else wide
        # The user has replaced a `.grad`, so the gradients are not adjacent in memory. Copy them into one tensor.
        flat = torch.zeros(self.weights.numel(), dtype=torch.float32, device=self.weights.device)
        for parameter in self.parameters:
            assert parameter.grad is not None
            start, values = self.begin(parameter), _values(parameter.grad)
            flat[start : start + len(values)] = values
        return flat


def with_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that have a `.grad`."""
    with WithoutTorchFunction():  # otherwise every access to an attribute would call the slow __torch_function__
        return [parameter for parameter in parameters if parameter.grad is not None]


def neighbours(
    parameters: Sequence[torch.nn.Parameter], kind: Callable[[torch.nn.Parameter], object] = lambda parameter: None
) -> list[list[torch.nn.Parameter]]:
    """Divide parameters into as few lists as possible, so that one kernel launch can update all parameters of a list.

    The members of a list are adjacent in one flat buffer. Each unsharded parameter is in a list of its own.

    Args:
        parameters: the parameters, in any order.
        kind: a function that takes a parameter and returns an object, such as the number of steps that the parameter
            has taken. Parameters are put into one list only if their objects are equal. By default, all are equal.

    Returns:
        The lists. The parameters of each list are in the order of their flat buffer.
    """
    runs: list[list[torch.nn.Parameter]] = []
    by_buffer: dict[ShardedBuffer, list[DistributedParameter]] = {}
    for parameter in parameters:
        if isinstance(parameter, DistributedParameter):
            by_buffer.setdefault(parameter.buffer, []).append(parameter)
        else:
            runs.append([parameter])
    for members in by_buffer.values():
        members.sort(key=operator.attrgetter("index"))
        following, last_kind = -1, None
        for sharded in members:
            own_kind = kind(sharded)
            if sharded.index != following or own_kind != last_kind:
                runs.append([])
            runs[-1].append(sharded)
            following, last_kind = sharded.index + 1, own_kind
    return runs


def same_members(a: Sequence[Sequence], b: Sequence[Sequence]) -> bool:
    """Return whether two lists of lists have the same lengths and the same objects, in the same order.

    Optimizers call this in each step to notice that their parameter groups, or the parameters with gradients, have
    changed since the last step. It does not read the values of tensors.

    Args:
        a: the first list of lists.
        b: the second list of lists. Members are compared by identity (`is`).
    """
    return [*map(len, a)] == [*map(len, b)] and all(map(operator.is_, chain(*a), chain(*b)))


def gradient_versions(parameters: Iterable[Any]) -> dict[torch.nn.Parameter, tuple[torch.Tensor, int]]:
    """Return {parameter: (`.grad`, torch's version counter of `.grad`)}. `is_unchanged` compares these values later.

    OptimManager calls this to find out later which gradients have changed since the manager searched them for inf and
    nan, or since its last step used them. AdamOffloadOptimizer calls this when it updates parameters during a backward.
    Its `step` raises an error if their gradients have changed after this update.

    parameters: parameters that all have a `.grad`.
    """
    with WithoutTorchFunction():  # otherwise reading `_version` would call the slow __torch_function__
        return {parameter: (parameter.grad, parameter.grad._version) for parameter in parameters}


def is_unchanged(parameter: torch.nn.Parameter, seen: tuple[torch.Tensor, int]) -> bool:
    """Return whether a parameter's `.grad` was neither replaced nor written since a call of `gradient_versions`.

    Args:
        parameter: the parameter.
        seen: the value for this parameter in the result of that call, (`.grad`, its version counter).
    """
    gradient, version = seen
    with WithoutTorchFunction():
        return parameter.grad is gradient and gradient._version == version


def index_bases(groups: Sequence[dict]) -> dict[Any, int]:
    """Number the elements of an optimizer's parameters. Stochastic rounding derives its random bits from these numbers.

    All elements of the flat buffers (on all ranks) and of the unsharded parameters are numbered consecutively, in the
    order in which the buffers and parameters first occur in `groups`. Returns {flat buffer or unsharded parameter: the
    number of its first element}.

    groups: the optimizer's `param_groups`.
    """
    bases, end = {}, 0
    for parameter in (p for group in groups for p in group["params"]):
        sharded = isinstance(parameter, DistributedParameter)
        owner = parameter.buffer if sharded else parameter
        if owner not in bases:
            bases[owner] = end
            end += parameter.buffer.layout.extent if sharded else parameter.numel()
    return bases


# -- state ----------------------------------------------------------------------------------------------------------


class StateTensors(NamedTuple):
    """The state tensors that an optimizer keeps for n elements; each is (n,).

    Attributes:
        master: the float32 masters of half-precision weights, or their int16 residuals (the differences between masters
            and weights). None for float32 weights, which are their own masters.
        exp_avg: the first moment (or the momentum of an optimizer without a second moment), float32 or bfloat16. With
            `state_bits=8`, both moments instead (`Moments`), each with 8 bits per element.
        exp_avg_sq: the second moment, float32. None if the optimizer has none, or if both moments are in `exp_avg`.
            The moment itself is never negative. If `master` contains residuals, a negative sign of an element marks
            that its residual is 32768, which int16 cannot represent.
    """

    master: torch.Tensor | None
    exp_avg: torch.Tensor | Moments
    exp_avg_sq: torch.Tensor | None

    def part(self, start: int, stop: int) -> StateTensors:
        """Return the state of the elements `start` to `stop` - 1, as views of these tensors.

        Args:
            start: the index of the first element to include.
            stop: the index after the last element to include.
        """
        master = None if self.master is None else self.master[start:stop]
        exp_avg_sq = None if self.exp_avg_sq is None else self.exp_avg_sq[start:stop]
        if isinstance(self.exp_avg, Moments):
            return StateTensors(master, self.exp_avg.part(start, stop), exp_avg_sq)
        return StateTensors(master, self.exp_avg[start:stop], exp_avg_sq)


_HOST = torch.device("cpu")
ParameterState = dict[str, torch.Tensor]
"""The state of a parameter with n local elements: "step", a scalar; "exp_avg" and "exp_avg_sq", (n,).

Half-precision weights also have the float32 "master", (n,). bfloat16 weights may instead have the int16 "residual",
(n,): the differences between masters and weights. A negative sign in "exp_avg_sq" then marks a residual of 32768, which
int16 cannot represent. A parameter without a second moment has "momentum_buffer", (n,), in place of both moments. 8-bit
moments are named "8bit exp_avg", "8bit exp_avg_exponents" and so on, after the fields of `Moments`.
"""


@dataclass(eq=False)
class RunState:
    """AdamW's state for one run, that is, for adjacent parameters with n elements that are updated together.

    Attributes:
        run: the parameters, and a view of their elements.
        master: an object with the weights, their masters and the second moment, each (n,). The masters are the float32
            copies of half-precision weights that the optimizer updates, or the int16 differences between these copies
            and the weights. The masters are None for float32 weights. The second moment is None if the optimizer has
            none, or if `exp_avg` contains both moments.
        exp_avg: the first moment, (n,) float32 or bfloat16; or both moments in 8 bits.
        step: (), float32, the number of steps taken.
        index_base: the index of the run's first element among all elements of the optimizer (see `index_bases`).
            Stochastic rounding derives its random bits from these indices. They are the same for every number of ranks,
            with one exception: some options, such as all-gathers in a dtype other than the parameters', divide the
            parameters into flat buffers differently with several ranks than with one.
        version: torch's version counter of the weights when it was last known that each master rounds to its weight;
            -1 if the masters may have been loaded, and have not been compared with the weights yet.
        uncounted: True if the weights may be written without a change of their version, as by `.data.fill_()` of an
            unsharded parameter. (Such writes to a sharded parameter do change the version.) The masters are then
            compared with the weights in every step.
    """

    run: Run
    master: Master
    exp_avg: torch.Tensor | Moments
    step: torch.Tensor
    index_base: int
    version: int = -1
    uncounted: bool = False

    @property
    def is_stale(self) -> bool:
        """True if there may be float32 masters that do not round to their weights.

        Masters are the float32 copies of half-precision weights that the optimizer updates. The result is True if other
        code may have written the weights, or filled the masters from a checkpoint, since masters and weights were last
        compared. Then call `master.follow_weight()` before the masters are updated or saved. It changes the masters
        that do not round to their weights.

        False for masters that are stored as differences from the weights (residuals), which always fit, and for float32
        weights, which have no separate masters.
        """
        apart = self.master.stored is not None and not self.master.is_residual
        return apart and (self.uncounted or self.version != self.run.weights._version)

    def views(self, parameter: torch.nn.Parameter) -> ParameterState:
        """Return the state of one parameter, as views of the run's flat state tensors.

        The result is {name: view}, with names such as "exp_avg" (see `ParameterState`). Writes to the views change this
        state.
        """
        begin = self.run.begin(parameter)
        part, stored = slice(begin, begin + stored_numel(parameter)), self.master.stored
        if isinstance(self.exp_avg, Moments):
            views = {"step": self.step, **_by_name(self.exp_avg.part(part.start, part.stop))}
        elif self.master.exp_avg_sq is None:
            views = {"step": self.step, "momentum_buffer": self.exp_avg[part]}
        else:
            views = {"step": self.step, "exp_avg": self.exp_avg[part], "exp_avg_sq": self.master.exp_avg_sq[part]}
        if stored is not None:
            views["residual" if self.master.is_residual else "master"] = stored[part]
        return views


_EIGHT_BITS = "8bit "
_OWN = {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "master", "residual"}


def _by_name(moments: Moments) -> ParameterState:
    return {_EIGHT_BITS + name: tensor for name, tensor in moments._asdict().items()}


def without_codes(held: ParameterState) -> ParameterState:
    """Return a parameter's optimizer state in which no moment is in 8 bits, for code outside the optimizer.

    Moments that are stored in 8 bits (as codes) are decoded to new float32 tensors. These are in host memory, to save
    device memory. A state without such moments is returned unchanged.
    """
    if not has_codes(held):
        return held
    exp_avg, exp_avg_sq = Moments(*(held[_EIGHT_BITS + name] for name in Moments._fields)).read(_HOST)
    others = {name: value for name, value in held.items() if not name.startswith(_EIGHT_BITS)}
    return {"step": others.pop("step"), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, **others}


def own_entries(held: dict[str, Any]) -> ParameterState:
    """Return the entries of a parameter's state that belong to the optimizer, without those that other code has added.

    For example, Lookahead wrappers store slow weights in the state of the optimizer that they wrap.
    """
    return {name: value for name, value in held.items() if is_own(name)}


def is_own(name: str) -> bool:
    """Return whether `name` is the name of an entry that the optimizer itself stores in a parameter's state.

    Such a name is, for example, "exp_avg". Entries with other names belong to other code, such as Lookahead wrappers.
    """
    return name in _OWN or name.startswith(_EIGHT_BITS)


def has_codes(held: Container[str]) -> bool:
    """Return whether the moments in a parameter's optimizer state are stored in 8 bits (as codes).

    Such moments must be decoded before they are either read as numbers or copied into float32 moments.

    held: the state, {name: tensor} with the names of `ParameterState`, or only the names.
    """
    return _EIGHT_BITS + Moments._fields[0] in held


def shown(parameter: torch.Tensor, held: ParameterState, loaded: bool) -> ParameterState:
    """Return a parameter's optimizer state in the form for `state_dict()`: without residuals and 8-bit moments.

    Residuals are the 16-bit differences between masters and weights. If the optimizer stores residuals or 8-bit
    moments, they are replaced by float32 masters or moments, which are computed in host memory to save device memory.

    All other tensors are those of `held`, with one exception: if residuals are stored together with a float32 second
    moment, this moment is copied to host memory, and its negative signs are removed. (The moment itself is never
    negative. A negative sign marks an element whose residual is 32768, which int16 cannot represent. float32 masters do
    not need this mark.)

    Args:
        parameter: the parameter.
        held: its state, as the optimizer stores it.
        loaded: whether `held` was loaded and no step has used it yet. Its master is then returned unchanged. If False,
            a float32 master is first updated to follow weights that were written since the last step.
    """
    weights = _values(parameter)
    if "residual" in held:
        squares = None if has_codes(held) else held["exp_avg_sq"]
        # Convert the weights to bfloat16, because residuals are the differences from bfloat16 weights. The weights may
        # have another dtype if the residuals were saved by another model.
        rounded = weights.to(held["residual"].device, torch.bfloat16)
        master, exp_avg_sq = join(rounded, held["residual"], squares, _HOST)
        rest = {name: value for name, value in without_codes(held).items() if name != "residual"}
        return {**rest, **({} if exp_avg_sq is None else {"exp_avg_sq": exp_avg_sq}), "master": master}
    if "master" in held and not loaded:
        Master(weights, held["master"], held.get("exp_avg_sq")).follow_weight()
    return without_codes(held)


def adopt(parameter: torch.Tensor, views: ParameterState, earlier: ParameterState, loaded: bool) -> None:
    """Copy a parameter's optimizer state into newly allocated tensors, converting it to the format of these tensors.

    AdamOptimizer calls this when it has allocated the state of a new Run (parameters that one kernel launch updates).
    It allocates state in its first step, after a state was loaded, and when the set of parameters with gradients has
    changed since the last step.

    The formats may differ. For example, `earlier` may have float32 moments and masters (the copies of the weights that
    the optimizer updates), while `views` may store the moments in 8 bits, or the masters as residuals (their 16-bit
    differences from the weights).

    Args:
        parameter: the parameter. It is set to the rounded master if masters are converted to residuals. Otherwise it
            does not change.
        views: the tensors to fill, which are views of flat state tensors that several parameters share.
        earlier: the state to copy. It is empty if the parameter had no state; `views` are not changed then.
        loaded: whether `earlier` comes from a state dict. If not, and other code has written the weights since the last
            step, the master is first updated to follow the weights.
    """
    earlier = {
        name: torch.as_tensor(value, dtype=torch.float32, device=parameter.device) if name == "step" else _values(value)
        for name, value in own_entries(earlier).items()
    }
    if not ("residual" in earlier and "residual" in views and has_codes(earlier) == has_codes(views)):
        earlier = shown(parameter, earlier, loaded)
    for name, view in views.items():
        if name in earlier and name != "master":
            view.copy_(earlier[name].reshape(view.shape))
    if has_codes(views) and "exp_avg" in earlier:
        moments = Moments(*(views[_EIGHT_BITS + name] for name in Moments._fields))
        moments.write(*(earlier[name].reshape(-1) for name in ("exp_avg", "exp_avg_sq")))
    stored = views.get("residual", views.get("master"))
    if stored is not None and "master" in earlier:
        Master(_values(parameter), stored, views.get("exp_avg_sq")).write(earlier["master"])


def stored_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of `parameter` that this rank stores: all of them, if it is not sharded."""
    return parameter.placement.range.length if isinstance(parameter, DistributedParameter) else parameter.numel()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor, sharded or not, as a plain 1-D tensor.

    The result is a view if `tensor` is contiguous.
    """
    return tensor.detach().as_subclass(torch.Tensor).reshape(-1)
