"""Finds out which gradients are inf or nan, in which block, and which rank computed them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.blocks.observer import Observer, ObserverHandle
from ..engine.runtime.world import World
from ..engine.sharding.gradient import GradientBuffer
from ..engine.sharding.parameter import DistributedParameter

WATCHED_STEPS = 16
"""Steps after a skipped one in which each rank's own gradients are looked at."""
_SHOWN = 4
_UNKNOWN = -1
_LOST = (
    "a gradient was inf or nan; which one is unknown, because the gradients were freed before this was known (the next "
    f"{WATCHED_STEPS} steps are watched)"
)

Seen = list[tuple[int, int, torch.Tensor]]
"""Gradients of this rank in the order of backward: the buffer's number, the index in it, and whether it is finite."""


class OwnGradients(Observer):
    """Looks at this rank's gradients of `parameters` before they are averaged, in WATCHED_STEPS steps of `owner`.

    steps: that are still to be watched. handle: removes this observer.
    """

    handle: ObserverHandle

    def __init__(self, owner: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._owner = weakref.ref(owner)
        self._numbers = {p.buffer.number for p in parameters if isinstance(p, DistributedParameter)}
        self._arriving: Seen = []
        self._last: Seen = []
        self.steps = WATCHED_STEPS

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        if gradient.number in self._numbers:
            self._arriving.append((gradient.number, index, values.detach().isfinite().all()))

    def end_step(self, manager: Any) -> None:
        if manager is self._owner():
            self.end()

    def end(self) -> None:
        """End a step: what has arrived is that step's."""
        self._last, self._arriving = self._arriving, []
        self.steps -= 1
        if self.steps < 0:  # a skip in one of the watched steps would have begun another watch
            self._last = []
            self.handle.remove()

    def found(self) -> dict[tuple[int, int], int]:
        """Return the place in backward's order of each gradient of the last step that was not finite."""
        if not self._last:
            return {}
        finite = torch.stack([flag for _, _, flag in self._last]).tolist()
        places: dict[tuple[int, int], int] = {}
        for place, ((number, index, _), good) in enumerate(zip(self._last, finite)):
            if not good:
                places.setdefault((number, index), place)
        return places

    @property
    def has_seen(self) -> bool:
        """True if it has watched the last step."""
        return bool(self._last)


class GradientWatcher(Observer):
    """Says why steps are skipped, and watches the gradients of each rank for some steps after one.

    Every owner of optimizers (an OptimManager, or what follows Trainer) has a watch of its own.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._watches = weakref.WeakKeyDictionary[Any, OwnGradients]()

    def watch(self, owner: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Watch the gradients of `parameters` in the next WATCHED_STEPS steps of `owner`."""
        self.stop(owner)
        own = self._watches[owner] = OwnGradients(owner, parameters)
        own.handle = self._world.schedule.observe(own, owner)

    def watch_of(self, owner: Any) -> OwnGradients | None:
        """Return what has watched for `owner` last, None if nothing has."""
        return self._watches.get(owner)

    def stop(self, owner: Any) -> None:
        """End the watch of `owner`, if it has one."""
        own = self._watches.pop(owner, None)
        if own is not None:
            own.handle.remove()

    def explain_skip(self, manager: Any, parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor) -> str:
        cause = explain(parameters, counts, self.watch_of(manager), self._world)
        self.watch(manager, parameters)
        return cause or _LOST


# -- all ranks together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bad:
    """A gradient that is not finite. place: where its parameter is in the models, in the order of their forwards.

    nan, inf: elements; 0 if only the ranks' own gradients are known. partly: not all ranks know theirs, since some have
    freed the gradient. ranks: those that computed it so.
    """

    place: tuple[int, int, int]
    block: str
    name: str
    numel: int
    nan: int
    inf: int
    partly: bool
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        counts = [f"{count} of {self.numel} elements {kind}" for count, kind in ((self.nan, "nan"), (self.inf, "inf"))]
        known = [text for text, count in zip(counts, (self.nan, self.inf)) if count]
        least = "at least " if self.partly else ""
        return f"{self.name} ({least}{', '.join(known)})" if known else self.name


def explain(
    parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor, own: OwnGradients | None, world: World
) -> str | None:
    """Return in words which gradients were not finite, where backward met the first, and who computed it. Collective.

    None if that is not known, because the gradients were freed and not watched.

    counts: as in `Observer.explain_skip`. own: this rank's, if they were watched.
    """
    watched = own is not None and own.has_seen
    found = {} if own is None else own.found()
    mine = torch.zeros(len(parameters), 4, dtype=torch.int64, device="cpu")
    mine[:, :2], mine[:, 2:] = counts.cpu(), _UNKNOWN
    for row, parameter in zip(mine, parameters):
        if watched and isinstance(parameter, DistributedParameter):
            row[2] = found.get((parameter.buffer.number, parameter.index), _UNKNOWN)
            row[3] = 1
    mine = mine.to(world.device)
    every = mine.new_empty(world.size, *mine.shape)
    world.reduce.all_gather(every.view(-1), mine.view(-1)).wait()
    ranks = every.cpu()
    bad = [found for found in map(_judge, parameters, ranks.unbind(1), range(len(parameters))) if found is not None]
    if not bad:
        return None
    present = int((ranks[:, :, 0] != _UNKNOWN).any(0).sum()) or len(parameters)
    return _describe(bad, present, bool((ranks[:, :, 3] > 0).any()), world.size)


def _judge(parameter: torch.nn.Parameter, rows: torch.Tensor, number: int) -> _Bad | None:
    """Return what is wrong with one parameter's gradient. rows: (ranks, 4)."""
    sharded = isinstance(parameter, DistributedParameter)
    known, missing = rows[:, :2].clamp_min(0), rows[:, 0] == _UNKNOWN
    partly = bool(missing.any() and not missing.all())
    nan, inf = (known.sum(0) if sharded else known.amax(0)).tolist()
    ranks = tuple((rows[:, 2] != _UNKNOWN).nonzero().flatten().tolist())
    if not nan and not inf and not ranks:
        return None
    origin = parameter.origin if isinstance(parameter, DistributedParameter) else None
    if origin is None:
        owner = parameter.buffer.number if isinstance(parameter, DistributedParameter) else 0
        label = f"parameter {number}, of shape {tuple(parameter.shape)}"
        return _Bad((owner, 0, number), "", label, parameter.numel(), nan, inf, partly, ranks)
    place = (origin.model, origin.number, number)
    return _Bad(place, origin.block, origin.name, parameter.numel(), nan, inf, partly, ranks)


def _describe(bad: Sequence[_Bad], present: int, watched: bool, size: int) -> str:
    """Backward goes from the last parameter to the first, and what is not finite spreads that way."""
    first = max(bad, key=lambda each: each.place)
    inside = [each for each in bad if (each.block, each.place[0]) == (first.block, first.place[0])]
    if not first.block:
        inside = [first]
    shown = ", ".join(map(str, inside[:_SHOWN])) + (f", {len(inside) - _SHOWN} more" if len(inside) > _SHOWN else "")
    where = f"in block {first.block}: {shown}" if first.block else f"outside the blocks: {shown}"
    text = f"a gradient was inf or nan, first {where}"
    others = len(bad) - len(inside)
    if others:
        text += f"; and {others} more on the way to the inputs"
    if len(bad) == present > 1:
        text += "; that is every gradient, so look at the loss and the forward"
    if size == 1:
        return text
    if not watched:
        return f"{text}; which rank computed it is lost in the mean (the next {WATCHED_STEPS} steps are watched)"
    ranks = sorted({rank for each in inside for rank in each.ranks})
    if not ranks:
        return f"{text}; finite on every rank before the mean, which overflowed"
    return f"{text}; computed by rank {', '.join(map(str, ranks))}" + (" (all)" if len(ranks) == size else "")
