"""Autocast inside sharded layers."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..ops.torch_internals import pytree
from ..runtime.launcher import mixed_precision

_log = logging.getLogger("hf_bmtrain")
_UNCHANGED = nullcontext()
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


def uncached_autocast() -> AbstractContextManager:
    """The caller's autocast without its cache of casts.

    The cache is keyed by the whole parameter, which is the same object every step: a refilled block would compute
    with the casts of old weights, and the casts of all blocks would stay alive.
    """
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.autocast(device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
    return _UNCHANGED


def follow_accelerator(model: torch.nn.Module, device: torch.device) -> None:
    """Run `model`'s forward under the mixed precision that an Accelerator or Trainer was made with.

    Accelerate does this itself for the models it prepares, but takes a sharded one as prepared. As there, what
    the forward returns in half precision becomes float32. Without an Accelerator nothing changes. fp16 on the CPU,
    where Accelerate has no loss scale, is float32, as there; a warning says so.
    """
    forward = model.forward
    weights = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}

    @functools.wraps(forward)
    def forward_in_mixed_precision(*args: Any, **kwargs: Any) -> Any:
        precision = mixed_precision()
        if precision == "fp16" and device.type == "cpu":
            _warn_of_float32()
            precision = "no"
        if precision == "no":
            return forward(*args, **kwargs)
        if precision not in _HALF:
            raise RuntimeError(
                f"mixed_precision='{precision}' is not supported by a sharded model: use 'bf16', 'fp16' or 'no'."
            )
        if weights == {_HALF[precision]}:
            _tell_of_casts(precision)
        with torch.autocast(device.type, dtype=_HALF[precision], cache_enabled=False):
            outputs = forward(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, _widen, outputs)

    model.forward = forward_in_mixed_precision


@functools.cache
def _tell_of_casts(precision: str) -> None:
    _log.info(
        "mixed_precision='%s' around weights that are %s already: autocast computes norms and losses in float32, which "
        "takes time and memory. Leave it out (bf16=False in TrainingArguments) for what FSDP2 does; our optimizers "
        "keep float32 masters either way.", precision, precision,
    )  # fmt: skip


@functools.cache
def _warn_of_float32() -> None:
    _log.warning("mixed_precision='fp16' is left out on the CPU, as Accelerate does: computing in float32. Use 'bf16'.")


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
