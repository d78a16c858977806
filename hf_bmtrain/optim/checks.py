"""Checks of every optimizer that steps over slices, whichever class it is.

A user may make any torch optimizer over slices, or have made it before the model was sharded; only torch knows of all
of them. So its process-wide hook before a step is the one place where none escapes. It is registered when the process
makes its first sharded buffer: a program that only imports this package is left as it is. What has been checked is
noted on each optimizer. The checks are made in its first step, and again after its parameter groups have changed or
something was sharded; any other step only pays for finding that neither has happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..runtime.world import buffers_made
from ..sharding.buffer import DistributedParameter, ShardedBuffer
from .checkpoint import WholeState
from .probe import probe


def check(optimizer: torch.optim.Optimizer) -> WholeState | None:
    """Refuse an optimizer that would train wrongly. Return what gathers its state, None if it holds no slice.

    RuntimeError for parameters from before wrapping, TypeError for an update rule that depends on shapes.
    """
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [p for p in parameters if getattr(p, "sharded_elsewhere", False)]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(parameters)} parameters from before the model was "
            "sharded; they belong to it no more, and nothing would be trained. Make the optimizer after auto_wrap, "
            "from model.parameters()."
        )
    known = getattr(optimizer, "whole_state", None)
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    if known is None and slices:
        if type(optimizer).__module__.split(".")[0] != __name__.split(".")[0]:  # ours are element-wise
            probe(optimizer, slices[0].device)
        known = optimizer.whole_state = WholeState(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    return known


class _Checked:
    """The parameter groups that `check` has seen, and how many buffers there were then."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._buffers_made = buffers_made()
        self._groups = [(group["params"], len(group["params"])) for group in optimizer.param_groups]

    def is_current(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the groups are still these, and nothing has been sharded since."""
        groups = optimizer.param_groups
        return (
            self._buffers_made == buffers_made()
            and len(groups) == len(self._groups)
            and all(group["params"] is seen and len(seen) == n for group, (seen, n) in zip(groups, self._groups))
        )


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    checked = getattr(optimizer, "checked", None)
    if checked is None or not checked.is_current(optimizer):
        check(optimizer)
        optimizer.checked = _Checked(optimizer)
    whole_state = getattr(optimizer, "whole_state", None)
    if whole_state is not None:
        whole_state.slice_loaded(optimizer)


ShardedBuffer.before_first.append(lambda: register_optimizer_step_pre_hook(_before_step))
