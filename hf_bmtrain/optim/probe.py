"""Whether an optimizer is element-wise: whether it does the same to a matrix and to flat pieces of it."""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict, defaultdict
from typing import Any

import torch

_log = logging.getLogger("hf_bmtrain")
_ROWS, _COLUMNS, _CUT, _STEPS, _LR = 6, 8, 19, 3, 0.05


def probe(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """TypeError unless `optimizer` may update slices, which are flat pieces of matrices on different ranks.

    A copy of it, with its own options, makes three steps on a small float32 matrix, others on the same values as
    two flat pieces; the results must agree. Adafactor, LAMB, Muon, LBFGS and their like do not.
    """
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (torch.randn(_ROWS, _COLUMNS, generator=generator).to(device) for _ in range(_STEPS + 1))
    cut = slice(None, _CUT), slice(_CUT, None)
    for number in range(len(optimizer.param_groups)):
        try:
            whole = _run(optimizer, number, weights, gradients).reshape(-1)
        except Exception as error:
            _log.warning(
                "%s could not be tried on a matrix (%s): whether it is element-wise, as sharded training needs, is "
                "not known",
                type(optimizer).__name__, error,
            )  # fmt: skip
            return
        try:
            pieces = [_run(optimizer, number, weights.view(-1)[c], [g.view(-1)[c] for g in gradients]) for c in cut]
            different = not torch.allclose(whole, torch.cat(pieces), rtol=1e-4, atol=1e-6)
            reason = f"it moves a matrix by up to {(whole - torch.cat(pieces)).abs().max():.2g} differently"
        except Exception as error:
            different, reason = True, f"it fails on a flat piece ({error})"
        if different:
            raise TypeError(
                f"{type(optimizer).__name__} depends on the shapes of parameters ({reason}), but after auto_wrap a "
                "parameter is a flat slice on each rank. Use an element-wise optimizer: hf_bmtrain's AdamOptimizer, "
                "torch.optim.SGD, Adam, AdamW, RMSprop, Adagrad, Lion."
            )


def _run(optimizer: Any, number: int, start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """What a copy of `optimizer`, with the options of one parameter group, makes of `start`."""
    parameter = torch.nn.Parameter(start.clone())
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a wrapper that a scheduler or Accelerate put there is bound to the original
    group = {**optimizer.param_groups[number], "params": [parameter]}
    if group.get("lr") is not None:
        group["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], torch.Tensor) else _LR
    twin.state, twin.param_groups = defaultdict(dict), [group]
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for gradient in gradients:
        parameter.grad = gradient.clone()
        if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
            twin.step(lambda: torch.zeros((), device=start.device))
        else:
            twin.step()
    return parameter.detach()
