"""What is checked when an optimizer steps over slices, whichever optimizer it is.

A hook of torch's own, called before every optimizer's step; it returns at once where there are no slices.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..sharding import DistributedParameter
from .probe import probe
from .whole_state import WholeState


def check(optimizer: torch.optim.Optimizer) -> WholeState | None:
    """Refuse what would train wrongly: RuntimeError for parameters from before wrapping, TypeError for a rule that
    depends on shapes. Returns what gathers its state; None where it holds no slice."""
    known = getattr(optimizer, "whole_state", None)
    if known is not None:
        return known
    parameters = _parameters(optimizer)
    stale = [p for p in parameters if getattr(p, "sharded_elsewhere", False)]
    if stale:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds {len(stale)} of {len(parameters)} parameters from before the model was "
            "sharded; they belong to it no more, and nothing would be trained. Make the optimizer after auto_wrap, "
            "from model.parameters()."
        )
    slices = [p for p in parameters if isinstance(p, DistributedParameter)]
    if slices:
        if type(optimizer).__module__.split(".")[0] != __name__.split(".")[0]:  # ours are element-wise
            probe(optimizer, slices[0].device)
        known = optimizer.whole_state = WholeState(optimizer)  # pyright: ignore[reportAttributeAccessIssue]
    return known


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    whole_state = check(optimizer)
    if whole_state is None:
        return
    whole_state.slice_loaded(optimizer)
    for parameter in _parameters(optimizer):
        used = getattr(parameter, "used_gradient", None)
        if used is None or parameter.grad is None:
            continue
        other, gradient, version = used[0](), used[1](), used[2]
        if other not in (None, optimizer) and gradient is parameter.grad and parameter.grad._version == version:
            raise RuntimeError(
                f"{type(optimizer).__name__} and {type(other).__name__} both update the same slice (full shape "
                f"{tuple(parameter.full_shape)}) with the same gradient. Give each parameter to one optimizer, or "
                "call zero_grad() between them."
            )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "whole_state", None) is None:
        return
    me = weakref.ref(optimizer)
    for parameter in _parameters(optimizer):
        if parameter.grad is not None and isinstance(parameter, DistributedParameter):
            note: Any = parameter
            note.used_gradient = me, weakref.ref(parameter.grad), parameter.grad._version


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
