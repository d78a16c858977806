"""After a skipped step, report which gradients were inf or nan, in which layer, and which ranks computed them."""

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
"""The number of steps after a skipped step in which each rank checks its own gradients before they are averaged."""
_SHOWN = 4
_UNKNOWN = -1
_LOST = (
    "a gradient was inf or nan; which one is unknown, because the gradients were freed before the skip was noticed "
    f"(in the next {WATCHED_STEPS} steps, each rank checks its own gradients; if another step is skipped, the message "
    "will name the parameter)"
)

Seen = list[tuple[int, int, torch.Tensor]]
"""One entry for each gradient that this rank has computed, in the order of backward: (number of the flat buffer that
contains the parameter, index of the parameter in that buffer, a bool tensor of shape () that is True if all elements of
the gradient are finite)."""


class OwnGradients(Observer):
    """For 16 steps, checks this rank's gradients for inf and nan before they are averaged over the ranks.

    `GradientWatcher.watch` creates this object after a skipped step or, for Hugging Face's Trainer, after a bad
    gradient norm or loss scale. The results show which rank computed an inf or nan. The averaged gradient does not show
    this.

    Args:
        owner: the object whose steps are counted: an OptimManager or, for Hugging Face's Trainer, a `BadNumbers` (which
            checks the gradient norm and loss scale that Trainer logs).
        parameters: the parameters whose gradients are checked, if they are sharded. Gradients of other parameters in
            the same flat buffers are checked too.

    Attributes:
        steps: the number of steps that are still to be checked; -1 after the checks have ended.
        handle: the handle of this observer, which `GradientWatcher.watch` sets. `handle.remove()` ends the checks.
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
        """Record that the owner (the object whose steps are counted) has made a step. Called at the end of each step.

        Until the next call, `found` returns the results of the step that this call records. The 17th call ends the
        checks and drops the results. The 16th call does neither, because an OptimManager may notice only during step 17
        that step 16 was skipped. The OptimManager then reads the results of step 16.
        """
        self._last, self._arriving = self._arriving, []
        self.steps -= 1
        if self.steps < 0:
            # None of the 16 steps was skipped: after a skipped step, `GradientWatcher.watch` removes this object and
            # creates another one, which checks 16 more steps.
            self._last = []
            self.handle.remove()

    def found(self) -> dict[tuple[int, int], int]:
        """Return which of this rank's gradients had inf or nan elements in the last step.

        Returns:
            {(number of the flat buffer, index of the parameter in this buffer): position}. A flat buffer is a 1-D
            tensor that contains parameters, such as those of a layer, one after another. The position counts, from 0,
            the gradients that were checked in this step, in the order in which backward computed them. If the
            parameter had several gradients, for example from several backwards, the position is that of the first
            gradient with inf or nan.
        """
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
        """Whether this rank checked any of its gradients in the last step.

        If False, `found` returns {}, which then does not mean that the gradients were finite. The value is False until
        the first step after the creation of this object has ended. It becomes False again with the 17th call of `end`,
        which ends the checks because none of the 16 steps was skipped.
        """
        return bool(self._last)


class GradientWatcher(Observer):
    """Explains why a step was skipped, by naming the gradients that were inf or nan.

    In the 16 steps after a skip, each rank also checks its own gradients before they are averaged, so that another skip
    can be traced to a rank. The 16 steps are counted separately for each object that notices skipped steps: each
    OptimManager and, for Hugging Face's Trainer, its `BadNumbers`, which checks the gradient norm and the loss scale
    that Trainer logs.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._watches = weakref.WeakKeyDictionary[Any, OwnGradients]()

    def watch(self, owner: Any, parameters: Sequence[torch.nn.Parameter]) -> None:
        """In the next 16 steps of `owner`, check this rank's gradients of `parameters` for inf and nan.

        Called after `owner` has skipped a step or, for Hugging Face's Trainer, has found a bad gradient norm or loss
        scale in Trainer's log. If an inf or nan occurs again, the results of the checks name the rank and the
        parameter.

        Each gradient is checked when this rank has computed it, before it is averaged over the ranks. The results of
        the checks stay on the device, and only those of the last step are kept. An OptimManager reads them only if that
        step was skipped (`explain_skip`). A `BadNumbers` reads them after each step (`BadNumbers.end_step`).

        Args:
            owner: the object whose steps are counted: an OptimManager or, for Hugging Face's Trainer, a `BadNumbers`.
                Only a weak reference to this object is kept. An earlier check for the same owner is ended.
            parameters: the parameters of the owner's optimizers. Only gradients of sharded parameters are checked.
        """
        self.stop(owner)
        own = self._watches[owner] = OwnGradients(owner, parameters)
        own.handle = self._world.schedule.observe(own, owner)

    def watch_of(self, owner: Any) -> OwnGradients | None:
        """Return the `OwnGradients` that checks this rank's gradients for `owner`, or None if there is none.

        From this object, the caller reads the results of the owner's last step. There is no such object before `watch`
        is called for `owner`, nor after `stop`. If the checks have ended by themselves, after 16 steps without a skip,
        the object is still returned, but has no results.

        owner: the object that was passed to `watch`: an OptimManager or, for Hugging Face's Trainer, a `BadNumbers`.
        """
        return self._watches.get(owner)

    def stop(self, owner: Any) -> None:
        """End the checks that `watch` started for `owner`, if there are any.

        owner: the object that was passed to `watch`: an OptimManager or, for Hugging Face's Trainer, a `BadNumbers`.
        """
        own = self._watches.pop(owner, None)
        if own is not None:
            own.handle.remove()

    def explain_skip(self, manager: Any, parameters: Sequence[torch.nn.Parameter], counts: torch.Tensor) -> str:
        cause = explain(parameters, counts, self.watch_of(manager), self._world)
        self.watch(manager, parameters)
        return cause or _LOST


# -- the report, which combines the counts of all ranks ---------------------------------------------------------------


@dataclass(frozen=True)
class _Bad:
    """A gradient that has inf or nan elements.

    Attributes:
        place: three indices by which the gradients are sorted: (index of the model, index of the parameter in the
            model, index of the parameter among the parameters of all optimizers). Backward reaches parameters with a
            higher place first. If the parameter's model is unknown, the first number is instead the number of the
            parameter's flat buffer (0 if the parameter is not sharded), and the second is 0.
        block: the name of the parameter's block (transformer layer), or "" for a parameter outside the blocks.
        name: the parameter's name.
        numel: the number of elements of the full parameter or, if `tp_size` splits it over ranks, of the whole tensor.
        nan: the number of nan elements of the averaged gradient, or 0 if every rank has already freed it.
        inf: the number of inf elements of the averaged gradient, or 0 if every rank has already freed it.
        partly: whether `nan` and `inf` are incomplete, because some ranks had already freed their part of the gradient.
        ranks: the ranks whose own gradient had inf or nan before averaging. () if there are none, or if the ranks did
            not check their own gradients.
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
    """Explain which gradients of a skipped step were inf or nan, and which ranks computed them.

    Collective: every rank must call it, because the ranks exchange their counts and the results of their checks. The
    message names only bad gradients of one block (transformer layer): of all blocks with bad gradients, the block that
    backward reached first. From there, inf and nan spread to the blocks that backward reaches later. If the first bad
    gradient is that of a parameter outside the blocks, the message names only this gradient.

    Args:
        parameters: the parameters of all optimizers.
        counts: (len(parameters), 2) int64, the numbers of nan and of inf in this rank's elements of each averaged
            gradient; -1 if there is no gradient, or if it was already freed.
        own: the results of the checks of this rank's own gradients before averaging, or None if there were no checks.
        world: the ranks that train together, with this process's rank, device and communicators.

    Returns:
        The message, which is the same on every rank. None if no inf or nan was found, neither in the averaged gradients
        that still exist nor in the checks of the ranks' own gradients.
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
    shards = _by_shard(ranks[:, :, :2], world.gather_objects(world.shard_group.rank))
    judged = map(_judge, parameters, shards.unbind(1), ranks[:, :, 2].unbind(1), range(len(parameters)))
    bad = [found for found in judged if found is not None]
    if not bad:
        return None
    present = int((shards[:, :, 0] != _UNKNOWN).any(0).sum()) or len(parameters)
    return _describe(bad, present, bool((ranks[:, :, 3] > 0).any()), world.size)


def _by_shard(counts: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
    """Combine the ranks' counts, for example of nan elements, into one row for each shard.

    A shard is the part of the parameters that one rank stores. Ranks of different hosts may store the same shard. Their
    counts are not added: each is either the count for the shard or -1 (unknown), so the largest is taken. Returns the
    counts, of shape (shards, ...); -1 where no rank knows the count.

    counts: the counts from each rank, (ranks, ...); -1 where unknown.
    numbers: for each rank, the index of the shard that it stores.
    """
    ranks: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        ranks.setdefault(number, []).append(rank)
    return torch.stack([counts[each].amax(0) for each in ranks.values()])


def _judge(parameter: torch.nn.Parameter, counts: torch.Tensor, places: torch.Tensor, number: int) -> _Bad | None:
    """Combine the results of all ranks for the gradient of `parameter`. Return None if no rank found an inf or nan.

    counts: (shards, 2) int64. Row i contains the number of nan and the number of inf among the elements of the averaged
        gradient in shard i (the elements that one rank stores). Both are -1 if these elements were already freed. If
        `parameter` is not sharded, each row counts all elements.
    places: (ranks,) int64. For each rank whose gradient had inf or nan before averaging, the position of this gradient,
        as `OwnGradients.found` returns it; -1 for the other ranks.
    number: the parameter's position among the parameters of all optimizers. The message contains this number if the
        name is unknown.
    """
    known, missing = counts.clamp_min(0), counts[:, 0] == _UNKNOWN
    partly = bool(missing.any() and not missing.all())
    ranks = tuple((places != _UNKNOWN).nonzero().flatten().tolist())
    numel, (nan, inf) = parameter.numel(), known.amax(0).tolist()
    if isinstance(parameter, DistributedParameter):
        numel, (nan, inf) = parameter.buffer.storage.whole_shape(parameter.index).numel(), known.sum(0).tolist()
    if not nan and not inf and not ranks:
        return None
    origin = parameter.origin if isinstance(parameter, DistributedParameter) else None
    if origin is None:
        owner = parameter.buffer.number if isinstance(parameter, DistributedParameter) else 0
        label = f"parameter {number}, of shape {tuple(parameter.shape)}"
        return _Bad((owner, 0, number), "", label, numel, nan, inf, partly, ranks)
    place = (origin.model, origin.number, number)
    return _Bad(place, origin.block, origin.name, numel, nan, inf, partly, ranks)


def _describe(bad: Sequence[_Bad], present: int, watched: bool, size: int) -> str:
    """Return a message about the gradients `bad`, which names those of the block where inf and nan probably began.

    Backward goes from the last block (transformer layer) to the first, and inf and nan spread in this direction. So of
    all blocks with bad gradients, the block that backward reached first is the likely origin. At most 4 of its
    gradients are named. If the first bad gradient is that of a parameter outside the blocks, only this one is named.

    bad: the gradients that had inf or nan elements; at least one.
    present: how many gradients were checked for inf and nan, or the number of all parameters if none could be checked.
    watched: whether any rank checked its own gradients.
    size: the number of ranks.
    """
    first = max(bad, key=lambda each: each.place)
    inside = [each for each in bad if (each.block, each.place[0]) == (first.block, first.place[0])]
    if not first.block:
        inside = [first]
    shown = ", ".join(map(str, inside[:_SHOWN])) + (f", {len(inside) - _SHOWN} more" if len(inside) > _SHOWN else "")
    where = f"in block {first.block}: {shown}" if first.block else f"outside the blocks: {shown}"
    text = f"a gradient was inf or nan, first {where}"
    others = len(bad) - len(inside)
    if others:
        text += f"; so were {others} more gradients, nearer to the model's inputs"
    if len(bad) == present > 1:
        text += "; no gradient is finite, so look at the loss and the forward pass"
    if size == 1:
        return text
    if not watched:
        return (
            f"{text}; which rank computed it cannot be told from the mean over the ranks (in the next {WATCHED_STEPS} "
            "steps, each rank checks its own gradients; if another step is skipped, the message will name the rank)"
        )
    ranks = sorted({rank for each in inside for rank in each.ranks})
    if not ranks:
        return f"{text}; every rank's own gradient was finite, but their mean overflowed"
    return f"{text}; computed by rank {', '.join(map(str, ranks))}" + (" (all ranks)" if len(ranks) == size else "")
