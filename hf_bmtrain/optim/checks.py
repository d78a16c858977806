"""What is checked when an optimizer steps over slices, whichever optimizer it is.

Hooks of torch's own around every optimizer's step. What is checked once is checked in the first step, and again
after parameter groups have changed or something was sharded; a step between costs as little as it takes to see
that neither has happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..runtime.world import buffers_made
from ..sharding.parameter import DistributedParameter
from .claim import Claim
from .probe import probe
from .whole_state import WholeState


def check(optimizer: torch.optim.Optimizer) -> WholeState | None:
    """Refuse what would train wrongly: RuntimeError for parameters from before wrapping, TypeError for a rule that
    depends on shapes. Returns what gathers its state; None where it holds no slice."""
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


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not buffers_made():
        return
    claim = getattr(optimizer, "claim", None)
    if claim is None:
        claim = optimizer.claim = Claim(optimizer)
    if not claim.is_current(optimizer):
        check(optimizer)
        claim.take(optimizer)
    whole_state = getattr(optimizer, "whole_state", None)
    if whole_state is not None:
        whole_state.slice_loaded(optimizer)
        claim.check()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    claim = getattr(optimizer, "claim", None)
    if claim is not None:
        claim.settle()


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
