"""Runs: adjacent slices, updated in one launch and measured in one pass, and their AdamW state."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from ..base.torch_internals import WithoutTorchFunction
from ..ops.residual import Master
from ..sharding.buffer import ShardedBuffer
from ..sharding.parameter import DistributedParameter


@dataclass(eq=False)
class Run:
    """Adjacent slices of one shard, or one ordinary parameter. The padding between slices is zero.

    parameters: in the order of the buffer. weights: (n,) the range of storage that they cover. buffer: None for
    an ordinary parameter. start: the first element of the range in the buffer's shard.
    """

    parameters: list[torch.nn.Parameter]
    weights: torch.Tensor
    buffer: ShardedBuffer | None
    start: int

    @classmethod
    def over(cls, parameters: list[torch.nn.Parameter]) -> Run:
        """Return the run of adjacent `parameters`. Raises ValueError for an ordinary one that is not contiguous."""
        first, last = parameters[0], parameters[-1]
        if isinstance(first, DistributedParameter) and isinstance(last, DistributedParameter):
            start = first.buffer.local_ranges[first.index].shard_start
            stop = first.buffer.local_ranges[last.index].shard_stop
            return cls(parameters, first.buffer.shard[start:stop], first.buffer, start)
        if not first.is_contiguous():
            raise ValueError(f"AdamOptimizer needs contiguous parameters, got shape {tuple(first.shape)}")
        return cls(parameters, first.detach().view(-1), None, 0)

    @property
    def owner(self) -> ShardedBuffer | torch.nn.Parameter:
        """The buffer, or the ordinary parameter."""
        return self.parameters[0] if self.buffer is None else self.buffer

    def begin(self, parameter: torch.nn.Parameter) -> int:
        """Return the index of the first element of `parameter` in the range."""
        if not isinstance(parameter, DistributedParameter):
            return 0
        return parameter.buffer.local_ranges[parameter.index].shard_start - self.start

    def flat_gradient(self) -> torch.Tensor | None:
        """Return the `.grad`s as one view, (n,), or None if the user has replaced one by another tensor."""
        if self.buffer is None:
            gradient = self.parameters[0].grad
            assert gradient is not None
            return gradient.reshape(-1)
        if not self.buffer.gradient.intact:
            return None
        assert self.buffer.gradient.shard is not None
        return self.buffer.gradient.shard[self.start : self.start + self.weights.numel()]

    def gradient(self) -> torch.Tensor:
        """Return the float32 running sum of an accumulation, or the `.grad`s without one; (n,), not to be written."""
        flat = self.flat_gradient()
        if flat is not None:
            stop = self.start + self.weights.numel()
            wide = None if self.buffer is None else self.buffer.gradient.wide(self.start, stop)
            return flat if wide is None else wide
        # The user has replaced some of them.
        flat = torch.zeros(self.weights.numel(), dtype=torch.float32, device=self.weights.device)
        for parameter in self.parameters:
            assert parameter.grad is not None
            start, values = self.begin(parameter), _values(parameter.grad)
            flat[start : start + len(values)] = values
        return flat


def with_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Return the parameters that have a `.grad`."""
    with WithoutTorchFunction():  # each attribute of a slice looks for overrides otherwise
        return [parameter for parameter in parameters if parameter.grad is not None]


def neighbours(
    parameters: Sequence[torch.nn.Parameter], kind: Callable[[torch.nn.Parameter], object] = lambda parameter: None
) -> list[list[torch.nn.Parameter]]:
    """Divide `parameters` into maximal lists that are adjacent in one buffer and of one `kind`.

    Each ordinary parameter is a list of its own.
    """
    runs: list[list[torch.nn.Parameter]] = [[p] for p in parameters if not isinstance(p, DistributedParameter)]
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    buffers = {buffer: number for number, buffer in enumerate(dict.fromkeys(p.buffer for p in slices))}
    slices.sort(key=lambda sharded: (buffers[sharded.buffer], sharded.index))

    def shared(numbered: tuple[int, DistributedParameter]) -> tuple:
        position, sharded = numbered
        return sharded.buffer, sharded.index - position, kind(sharded)  # from neighbour to neighbour both grow by one

    return [*runs, *([sharded for _, sharded in members] for _, members in groupby(enumerate(slices), shared))]


def same_members(a: Sequence[Sequence], b: Sequence[Sequence]) -> bool:
    """Return whether two lists of lists hold the same objects."""
    return [*map(len, a)] == [*map(len, b)] and all(map(operator.is_, chain(*a), chain(*b)))


def gradient_versions(parameters: Iterable[Any]) -> dict[torch.nn.Parameter, tuple[torch.Tensor, int]]:
    """Return the `.grad` of each parameter, which must have one, and its version, for `is_unchanged`."""
    with WithoutTorchFunction():  # read a slice's version like that of any tensor
        return {parameter: (parameter.grad, parameter.grad._version) for parameter in parameters}


def is_unchanged(parameter: torch.nn.Parameter, seen: tuple[torch.Tensor, int]) -> bool:
    """Return whether the parameter has the `.grad` of `gradient_versions`, and nothing has been written to it since."""
    gradient, version = seen
    with WithoutTorchFunction():
        return parameter.grad is gradient and gradient._version == version


def index_bases(groups: Sequence[dict]) -> dict[Any, int]:
    """Number all elements of `groups` in order. Return the first number of every buffer or ordinary parameter."""
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
    """The state of n elements, (n,) each.

    master: as it is stored (see Master), None where the weights are their own masters. exp_avg: float32 or bfloat16.
    exp_avg_sq: float32, with the tie flags of residuals.
    """

    master: torch.Tensor | None
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def part(self, start: int, stop: int) -> StateTensors:
        """Return views of elements start:stop."""
        master = None if self.master is None else self.master[start:stop]
        return StateTensors(master, self.exp_avg[start:stop], self.exp_avg_sq[start:stop])


ParameterState = dict[str, torch.Tensor]
"""step; exp_avg and exp_avg_sq, (n,); for half-precision weights the float32 "master", (n,), or for bfloat16 ones the
int16 "residual" in its place, and then exp_avg_sq carries tie flags (engine/ops/residual.py)."""


@dataclass(eq=False)
class RunState:
    """What AdamW keeps of one run of n elements.

    master: the float32 masters as they are stored, with exp_avg_sq, (n,) float32. exp_avg: (n,) float32 or bfloat16.
    step: float32 (), the steps taken. index_base: the number of element 0 among all of the optimizer's, the same for
    any number of ranks, but for float8 blocks on one. version: that of the weights when the optimizer last wrote them,
    -1 before.
    """

    run: Run
    master: Master
    exp_avg: torch.Tensor
    step: torch.Tensor
    index_base: int
    version: int = -1

    @property
    def is_stale(self) -> bool:
        """True if weights with float32 masters were written since the last step (a load, an average).

        Residuals follow the weights by themselves.
        """
        apart = self.master.stored is not None and not self.master.is_residual
        return apart and self.version not in (-1, self.run.weights._version)

    def views(self, parameter: torch.nn.Parameter) -> ParameterState:
        """Return the views of one parameter's part, under the names of torch's AdamW."""
        begin = self.run.begin(parameter)
        part, stored = slice(begin, begin + stored_numel(parameter)), self.master.stored
        views = {"step": self.step, "exp_avg": self.exp_avg[part], "exp_avg_sq": self.master.exp_avg_sq[part]}
        if stored is not None:
            views["residual" if self.master.is_residual else "master"] = stored[part]
        return views


def shown(parameter: torch.Tensor, held: ParameterState, loaded: bool) -> ParameterState:
    """Return the state `held` as in a state dict: float32 masters of the present weights, and no tie flags.

    loaded: the state was loaded and is in no run yet, so its master has precedence over the weights.
    A master and exp_avg_sq assembled from residuals are new and in host memory: on the device they would take 8 bytes
    more per element. All other tensors are the optimizer's own.
    """
    weights = _values(parameter)
    if "residual" in held:
        master, exp_avg_sq = Master(weights, held["residual"], held["exp_avg_sq"]).read(torch.device("cpu"))
        return {"step": held["step"], "exp_avg": held["exp_avg"], "exp_avg_sq": exp_avg_sq, "master": master}
    if "master" in held and not loaded:
        Master(weights, held["master"], held["exp_avg_sq"]).follow_weight()
    return held


def adopt(parameter: torch.Tensor, views: ParameterState, earlier: ParameterState, loaded: bool) -> None:
    """Move the state that a parameter had `earlier` into `views`, its place in the flat tensors of a run.

    loaded: `earlier` was loaded; otherwise it is of another run, and writes to the weights since then count. If a
    float32 master becomes a residual, the weights are written: with their own bits, unless the loaded state is of other
    weights.
    """
    earlier = {name: value if name == "step" else _values(value) for name, value in earlier.items()}
    if not ("residual" in earlier and "residual" in views):
        earlier = shown(parameter, earlier, loaded)
    for name, view in views.items():
        if name in earlier and name != "master":
            view.copy_(earlier[name].reshape(view.shape))
    stored = views.get("residual", views.get("master"))
    if stored is not None and "master" in earlier:
        Master(_values(parameter), stored, views["exp_avg_sq"]).write(earlier["master"])


def stored_numel(parameter: torch.Tensor) -> int:
    """Return how many elements of `parameter` this rank stores."""
    return parameter.placement.range.length if isinstance(parameter, DistributedParameter) else parameter.numel()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a slice or of an ordinary tensor, an ordinary 1-D view."""
    return tensor.detach().as_subclass(torch.Tensor).reshape(-1)
