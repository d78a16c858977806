"""Whether an optimizer is element-wise: whether it does the same to a matrix and to flat pieces of it."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

_log = logging.getLogger("hf_bmtrain")
_ROWS, _COLUMNS, _CUT, _STEPS, _LR = 6, 8, 19, 3, 0.05


def probe(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """TypeError unless `optimizer` may update slices, which are flat pieces of matrices on different ranks.

    One like it, with the options of each parameter group, makes three steps on a small matrix, others on the same
    values as two flat pieces; they must move them alike. Adafactor, LAMB, Muon, LBFGS and their like do not.
    """
    generator = torch.Generator().manual_seed(0)
    shape = _STEPS + 1, _ROWS, _COLUMNS
    weights, *gradients = torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
    for group in optimizer.param_groups:
        moved = None
        for dtype in (torch.float64, torch.float32):  # the first shows small differences; some kernels lack it
            try:
                values, tries = weights.to(dtype), [gradient.to(dtype) for gradient in gradients]
                moved = _movement(optimizer, group, values, tries).view(-1)
                break
            except Exception as error:
                reason = error
        if moved is None:
            message = "%s could not be tried on a matrix (%s): whether it is element-wise, as slices need, is not known"
            _log.warning(message, type(optimizer).__name__, reason)
            return
        _compare(optimizer, group, moved, values.view(-1), [gradient.view(-1) for gradient in tries])


def _compare(optimizer: Any, group: dict, moved: torch.Tensor, values: torch.Tensor, gradients: list) -> None:
    """TypeError unless flat pieces of `values` are `moved` as the matrix was."""
    try:
        pieces = [
            _movement(optimizer, group, values[cut], [gradient[cut] for gradient in gradients])
            for cut in (slice(None, _CUT), slice(_CUT, None))
        ]
        difference = ((torch.cat(pieces) - moved).abs().max() / moved.abs().max().clamp_min(1e-30)).item()
        reason = f"it moves parts of a matrix by up to {100 * difference:.2g} % of a step differently"
    except Exception as error:
        difference, reason = float("inf"), f"it fails on a flat piece ({error})"
    if not difference <= 1e-3:
        raise TypeError(
            f"{type(optimizer).__name__} depends on the shapes of parameters ({reason}), but after auto_wrap a "
            "parameter is a flat slice on each rank. Use an element-wise optimizer: hf_bmtrain's AdamOptimizer, "
            "torch.optim.SGD, Adam, AdamW, RMSprop, Adagrad, Lion."
        )


def _movement(optimizer: Any, group: dict, start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """How far a new optimizer of the same class, with the options of `group`, moves `start`."""
    parameter = torch.nn.Parameter(start.clone())
    options = {**group, "params": [parameter]}
    if group.get("lr") is not None:  # that of a warm-up may be 0
        options["lr"] = torch.full_like(group["lr"], _LR) if isinstance(group["lr"], torch.Tensor) else _LR
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    given = {name: value for name, value in optimizer.defaults.items() if anything or name in accepted}
    twin = type(optimizer)([options], **given)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
            twin.step(lambda: torch.zeros((), device=start.device))
        else:
            twin.step()
    return parameter.detach() - start
