"""Find parameters with a wrong `tp_mode`, whose gradient would be tp_size times too large or too small.

With `tp_mode=True`, the user declares that the ranks of a tensor-parallel group use a parameter for the same rows of
the batch. The ranks' gradients of this parameter are then averaged. Otherwise the ranks must use different rows, and
their gradients are summed. The check compares the norms of the ranks' gradients. The norms are equal if the ranks used
the same rows, and usually differ if they used different rows.
"""

from __future__ import annotations

import logging

import torch

from ...engine.blocks.observer import Observer
from ...engine.runtime.world import World
from ...engine.sharding.gradient import GradientBuffer
from .groups import Part, SameRows

_log = logging.getLogger("hf_bmtrain")
_EQUAL, _SIMILAR = 1e-6, 0.05
"""Limits of the relative difference between the norms of the ranks' gradients of one parameter.

Below `_EQUAL`, the gradients count as equal, and above `_SIMILAR` as different. Between the limits, nothing is
reported."""
_QUIET = 100
"""The check ends after more than this many consecutive backwards in which no parameter had its first gradient."""


class SameRowsCheck(Observer):
    """Finds parameters with a wrong `tp_mode`, by comparing gradient norms on the ranks of a tensor-parallel group.

    `tp_mode` is an argument of DistributedParameter. With it, the user declares how the ranks of a group use a
    parameter:

    * True: all ranks use it for the same rows of the batch. The ranks' gradients should then be equal, and are
      averaged. If in fact the rows differ, the mean is tp_size times too small.
    * False: each rank uses it for different rows. The ranks' gradients are summed. If in fact the rows are the same,
      the sum is tp_size times too large.

    Each parameter is checked once, at the end of the first backward in which it has a gradient (`end_backward`). Parts
    of split weights are not checked. Gradients count as equal if their norms are equal up to rounding, and as different
    if the norms differ by more than 5 %. All parameters that are checked after the same backward are judged together:

    * Parameters with `tp_mode=True`: if the ranks of a group have different gradients of any of these parameters, every
      rank raises RuntimeError.
    * Parameters with `tp_mode=False`: those whose gradient is 0 on all ranks are ignored. If at least two parameters
      remain, and the ranks of each group have equal gradients of all of them, every rank raises RuntimeError. If the
      gradients of only some of them are equal, or if only one parameter remains and its gradients are equal, rank 0
      logs a warning with the names. In this case, `tp_mode` may be right. For example, if the loss is the sum of the
      outputs, the gradients of a bias are equal even for different rows.

    Args:
        world: the world of this process. The check registers itself as an observer of the world's schedule.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._squares: dict[tuple[bool, str], torch.Tensor] = {}
        self._seen: set[tuple[bool, str]] = set()
        self._quiet = 0  # number of consecutive backwards in which no parameter had its first gradient
        self.handle = world.schedule.observe(self)

    def before_reduce(self, gradient: GradientBuffer, index: int, values: torch.Tensor) -> None:
        local = gradient.slices[index]()
        if local is None or isinstance(local.buffer.storage.kind, Part):
            return
        same = isinstance(local.buffer.storage.kind, SameRows)
        name = local.origin.path if local.origin else f"an unnamed parameter ({gradient.number}.{index + 1})"
        if (key := (same, f"{name}, of shape {tuple(local.full_shape)}")) in self._seen:
            return
        wide = torch.promote_types(values.dtype, torch.float32)
        # With dtype=, each element is converted when it is read. `values.to(wide)` would need memory for a copy.
        squares = torch.linalg.vector_norm(values.detach(), dtype=wide).double().square()
        self._squares[key] = self._squares[key] + squares if key in self._squares else squares

    def end_backward(self) -> None:
        grid = self._world.grid
        assert grid is not None
        self._quiet += 1
        if not self._world.control.any(bool(self._squares), "gradients of new parameters"):
            if self._quiet > _QUIET:
                self.handle.remove()
            return
        everyone = self._world.gather_objects({key: float(value) ** 0.5 for key, value in self._squares.items()})
        self._seen.update(self._squares)
        self._squares.clear()
        self._quiet = 0
        groups = [everyone[first : first + grid.size] for first in range(0, len(everyone), grid.size)]
        equal, unlike, undeclared = [], [], 0
        for declared, name in dict.fromkeys(key for norms in everyone for key in norms):
            norms = [[rank.get((declared, name), 0.0) for rank in group] for group in groups]
            spread = max((max(each) - min(each)) / max(max(each), 1e-300) for each in norms)
            undeclared += not declared and max(map(max, norms)) > 0
            if not declared and spread < _EQUAL and max(map(max, norms)) > 0:
                equal.append(name)
            elif declared and spread > _SIMILAR:
                unlike.append(name)
        if equal:
            told = (
                f"The {grid.size} ranks of a tensor-parallel group have the same gradient of {_listing(equal)}. These "
                "gradients are summed, because each rank is expected to use different rows. If all ranks use the same "
                f"rows, the sum is {grid.size} times too large. In that case, create the "
                "parameter with bmt.DistributedParameter(..., tp_mode=True), or give each rank its part of the rows."
            )
            if len(equal) == undeclared > 1:
                raise RuntimeError(told)
            # Only warn, because omitting tp_mode may be correct: with a loss such as y.sum(), the gradients of a
            # bias are equal even if the ranks use different rows.
            if self._world.rank == 0:
                _log.warning("%s", told)
        if unlike:
            raise RuntimeError(
                f"The {grid.size} ranks of a tensor-parallel group have different gradients of {_listing(unlike)}, but "
                "tp_mode=True means that these ranks use the parameter for the same rows of the batch. If each rank "
                "uses different rows, leave tp_mode out. If the rows are the same, dropout may differ: give these "
                "ranks the same random seed."
            )


def _listing(names: list[str]) -> str:
    return "; ".join(names[:3]) + (f"; and {len(names) - 3} others" if len(names) > 3 else "")
